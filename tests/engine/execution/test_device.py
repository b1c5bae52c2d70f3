"""Which device is taken, and what is said of GPUs that can't be used; torch.cuda's answers are made up."""

import pytest
import torch

from cpd.common.errors import ConfigError
from engine.execution.device import gpu_errors_said, resolve_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No GPU, with a torch that could use one."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return monkeypatch


def broken() -> None:
    raise RuntimeError("Error 802: system not yet initialized.\nMore of it.")


def test_auto_takes_a_gpu_where_there_is_one(gpus: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_are_no_reason_to_compute_on_the_cpu(name: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 8)
    gpus.setattr(torch.cuda, "init", broken)
    with pytest.raises(
        ConfigError, match=r"8 GPUs are here, but torch .* can't use them: Error 802: system not yet init"
    ):
        resolve_device(name)


def test_a_torch_without_cuda_is_said_to_be_one(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"torch .* is built without CUDA; use --device cpu"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. 3 GiB is free."),
            r"lower --gpu-memory .*\(CUDA out of memory\. 3 GiB",
        ),
        (torch.AcceleratorError("CUDA error: busy or unavailable\nCompile with"), "does not work: CUDA error: busy or"),
    ],
)
def test_what_cuda_refuses_is_one_sentence(error: RuntimeError, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught, gpu_errors_said():
        raise error
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_the_gpus() -> None:
    with pytest.raises(RuntimeError, match="else"), gpu_errors_said():
        raise RuntimeError("something else")
