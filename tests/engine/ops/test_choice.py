"""Choice of a GPU's ops, tested on a CPU."""

import logging
import os
import shutil
import sys
import sysconfig

import pytest
import torch

import engine.ops
from engine.ops import make_cuda_ops
from engine.ops.base import Heads, Ops
from engine.ops.flashinfer_ops import FlashInferOps
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps
from tests.engine.execution.cuda.fake_cuda import cuda
from tests.engine.ops import fake_flashinfer, fake_kernels

__all__ = ["cuda"]

HEADS = Heads(8, 2, 64)


class _Properties:
    multi_processor_count = fake_flashinfer.SMS


@pytest.fixture(autouse=True)
def _everything_there(cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored after the test
    monkeypatch.setattr(engine.ops, "triton_kernels", fake_kernels, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties)


def chosen(dtype: torch.dtype = torch.bfloat16, heads: Heads = HEADS) -> Ops:
    return make_cuda_ops(torch.device("cpu"), dtype, heads, 4)


def test_flashinfer_if_it_works(caplog: pytest.LogCaptureFixture) -> None:
    ops = chosen()
    assert isinstance(ops, FlashInferOps)
    assert ops._decode.plans == 1, "its kernels are not compiled yet"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("dtype", "heads", "why"),
    [
        (torch.float32, HEADS, "no kernels for torch.float32"),
        (torch.bfloat16, Heads(8, 2, 40), "no kernels for a head size of 40"),
        (torch.bfloat16, Heads(8, 2, 64, windows=True), "sliding windows"),
    ],
)
def test_torchs_attention_if_flashinfer_has_no_kernels(
    dtype: torch.dtype, heads: Heads, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(chosen(dtype, heads)) is TritonOps
    assert why in caplog.text


def test_torchs_attention_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert type(chosen()) is TritonOps
    assert "this GPU has 7.5" in caplog.text


def test_torchs_attention_if_flashinfer_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert type(chosen()) is TritonOps
    assert "FlashInfer does not work here" in caplog.text
    assert "its extra `gpu`" in caplog.text

    def broken(*_: object) -> None:
        raise RuntimeError("Ninja build failed")

    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(FlashInferOps, "prepare", broken)
    assert type(chosen()) is TritonOps
    assert "Ninja build failed" in caplog.text
    assert "compiled with nvcc" in caplog.text


def test_programs_next_to_python_are_found_without_an_active_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer runs `ninja` by name."""
    monkeypatch.setenv("PATH", "/nowhere")
    found: list[str | None] = []
    monkeypatch.setattr(FlashInferOps, "prepare", lambda *_: found.append(shutil.which("python")))
    chosen()
    assert found == [sysconfig.get_path("scripts") + "/python"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_full_or_broken_gpu_is_not_mistaken_for_a_missing_back_end(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise kind("CUDA")

    monkeypatch.setattr(FlashInferOps, "prepare", refuse)
    with pytest.raises(kind):
        chosen()
    monkeypatch.setattr(TritonOps, "silu_mul", refuse)
    with pytest.raises(kind):
        chosen()


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm", "silu_mul", "rope_store"])
def test_torch_alone_if_triton_cannot_compile_a_kernel(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens, for example, if the GPU is newer than Triton."""

    def refuse(*_: object, **__: object) -> None:
        raise fake_kernels.TritonError("sm_103a is not defined")

    monkeypatch.setattr(fake_kernels, kernel, fake_kernels.Kernel(refuse))
    assert type(chosen()) is TorchOps
    assert "Triton does not work here; using torch's slower operations: TritonError: sm_103a" in caplog.text


def test_torch_alone_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(engine.ops, "triton_kernels")
    monkeypatch.setitem(sys.modules, "engine.ops.triton_kernels", None)
    assert type(chosen()) is TorchOps
    assert "Triton does not work here" in caplog.text
