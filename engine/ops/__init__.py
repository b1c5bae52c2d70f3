"""Device-specific pieces of the forward pass, and which of them to use."""

import importlib
import logging
import os
import subprocess
import sysconfig

import torch

from engine.ops.base import Heads, Ops
from engine.ops.cpu_ops import CpuOps
from engine.ops.flashinfer_ops import HEAD_DIMS, FlashInferOps
from engine.ops.kernels import KernelsUnavailableError
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps

log = logging.getLogger(__name__)

_CANNOT_BUILD = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)
"""What Triton and FlashInfer raise where a compiler, a driver or one of their parts is missing."""

_NOT_INSTALLED = "install CPD with its extra `gpu`"
_NOT_COMPILED = (
    "its kernels are compiled by the nvcc of a CUDA toolkit (CUDA_HOME, or in /usr/local/cuda), and kept under the "
    "home directory (or FLASHINFER_WORKSPACE_BASE)"
)

_GPU_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors, too, but no other back end helps against them."""


def make_ops(device: torch.device, dtype: torch.dtype, heads: Heads, most_decodes: int = 1) -> Ops:
    """The fastest back end that works here.

    Args:
        most_decodes: Of one step.
    """
    if device.type == "cuda":
        return make_cuda_ops(device, dtype, heads, most_decodes)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        try:
            return CpuOps()
        except KernelsUnavailableError as error:
            log.warning("the compiled CPU kernels are not available, running on slower ones: %s", error)
    return TorchOps()


def make_cuda_ops(device: torch.device, dtype: torch.dtype, heads: Heads, most_decodes: int) -> Ops:
    """The fastest back end that works on a GPU. The log says what is missing for a faster one."""
    try:
        ops = TritonOps()
        ops.compile(heads, dtype, device)
    except _GPU_ERRORS:
        raise
    except _CANNOT_BUILD as error:
        log.warning("Triton does not work here, running on torch's own slower operations: %s", error)
        return TorchOps()
    if reason := _without_flashinfer(device, dtype, heads):
        log.warning("attention by torch, without CUDA graphs: %s", reason)
        return ops
    log.info("attention by FlashInfer; its kernels are compiled the first time, which takes minutes")
    _find_own_programs()
    try:
        library = importlib.import_module("flashinfer")
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        fastest = FlashInferOps(library, heads, dtype, device, sms, most_decodes)
        fastest.compile_attention()
    except _GPU_ERRORS:
        raise
    except _CANNOT_BUILD as error:
        advice = _NOT_INSTALLED if isinstance(error, ImportError) else _NOT_COMPILED
        log.warning(
            "FlashInfer does not work here, attention by torch, without CUDA graphs, many times slower: %s; %s",
            error,
            advice,
        )
        return ops
    return fastest


def _find_own_programs() -> None:
    """FlashInfer starts `ninja` by its name. pip puts it beside python, which is not in the PATH of whoever starts
    `.venv/bin/cpd`."""
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def _without_flashinfer(device: torch.device, dtype: torch.dtype, heads: Heads) -> str | None:
    """Why FlashInfer has no kernels for this; None: it has."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"FlashInfer needs compute capability 8.0, and this GPU has {major}.{minor}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer has no kernels for {dtype}; use --dtype bfloat16"
    if heads.dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for a head size of {heads.dim}"
    return None
