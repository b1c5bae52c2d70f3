"""Choice of the device, and messages about unusable GPUs. Results of torch.cuda are faked."""

import pytest
import torch

from cpd.common.errors import ConfigError
from engine.execution.torch_device import explain_gpu_errors, resolve_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Fakes a machine without a GPU and a torch with CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return monkeypatch


def broken() -> None:
    raise RuntimeError("Error 802: system not yet initialized.\nMore of it.")


def test_auto_prefers_a_gpu(gpus: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_auto_does_not_fall_back_to_the_cpu_if_torch_cannot_use_the_gpus(name: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 8)
    gpus.setattr(torch.cuda, "init", broken)
    with pytest.raises(ConfigError, match=r"torch .* can't use the 8 GPUs here: Error 802: system not yet init"):
        resolve_device(name)


def test_a_torch_without_cuda_is_reported(gpus: pytest.MonkeyPatch) -> None:
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
def test_cuda_errors_become_one_sentence(error: RuntimeError, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught, explain_gpu_errors():
        raise error
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_changed() -> None:
    with pytest.raises(RuntimeError, match="else"), explain_gpu_errors():
        raise RuntimeError("something else")
