"""Device-specific operations of the forward pass, attention among them, and the choice of their back end (`make_ops`).

A back end is a class with the protocol `Ops` of `base.py`.
"""

import importlib
import logging
import os
import subprocess
import sysconfig

import torch

from cpd.common.errors import ConfigError
from engine.ops.base import Heads, Ops
from engine.ops.cpu_ops import CpuOps
from engine.ops.flashinfer_ops import HEAD_DIMS, FlashInferOps
from engine.ops.kernels import KernelsUnavailableError
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps

log = logging.getLogger(__name__)

_CANNOT_BUILD = (ImportError, OSError, RuntimeError, subprocess.SubprocessError)
"""Errors that Triton and FlashInfer raise if a compiler, a driver or one of their parts is missing."""

_NOT_INSTALLED = "install CPD with its extra `gpu`"
_NOT_COMPILED = (
    "its kernels are compiled with nvcc of a CUDA toolkit (CUDA_HOME, or /usr/local/cuda) and cached in the home "
    "directory (or FLASHINFER_WORKSPACE_BASE)"
)

_GPU_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Subclasses of RuntimeError that another back end would not avoid."""


def make_ops(
    device: torch.device, dtype: torch.dtype, heads: Heads, max_decodes: int = 1, needs_kernels: bool = False
) -> Ops:
    """Makes the fastest ops that work on this machine.

    Args:
        max_decodes: Most decodes of one step.
        needs_kernels: True if weights or KV pages are quantised; then the device is a CPU.

    Raises:
        ConfigError: The kernels that are needed are not available.
    """
    if device.type == "cuda":
        return make_cuda_ops(device, dtype, heads, max_decodes)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        try:
            return CpuOps()
        except KernelsUnavailableError as error:
            if needs_kernels:
                raise ConfigError(f"quantised weights and KV pages need the compiled CPU kernels: {error}") from None
            log.warning("the compiled CPU kernels are not available; using slower ones: %s", error)
    return TorchOps()


def make_cuda_ops(device: torch.device, dtype: torch.dtype, heads: Heads, max_decodes: int) -> Ops:
    """Makes the fastest ops that work on this GPU. The log says what a faster back end lacks."""
    try:
        ops = TritonOps()
        ops.compile(heads, dtype, device)
    except _GPU_ERRORS:
        raise
    except _CANNOT_BUILD as error:
        log.warning("Triton does not work here; using torch's slower operations: %s", error)
        return TorchOps()
    if reason := _without_flashinfer(device, dtype, heads):
        log.warning("using torch's attention, without CUDA graphs: %s", reason)
        return ops
    log.info("using FlashInfer's attention; compiling its kernels takes minutes the first time")
    _add_scripts_to_path()
    try:
        library = importlib.import_module("flashinfer")
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        fastest = FlashInferOps(library, heads, dtype, device, sms, max_decodes)
        fastest.compile_attention()
    except _GPU_ERRORS:
        raise
    except _CANNOT_BUILD as error:
        advice = _NOT_INSTALLED if isinstance(error, ImportError) else _NOT_COMPILED
        log.warning(
            "FlashInfer does not work here; using torch's attention, without CUDA graphs, many times slower: %s; %s",
            error,
            advice,
        )
        return ops
    return fastest


def _add_scripts_to_path() -> None:
    """Lets FlashInfer find `ninja`, which pip installs next to python: `.venv/bin/cpd` starts without that in PATH."""
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def _without_flashinfer(device: torch.device, dtype: torch.dtype, heads: Heads) -> str | None:
    """Returns why FlashInfer has no kernels for these arguments; None if it has."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"FlashInfer needs compute capability 8.0, and this GPU has {major}.{minor}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer has no kernels for {dtype}; use --dtype bfloat16"
    if heads.dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for a head size of {heads.dim}"
    if heads.windows:
        return "of FlashInfer's kernels those for sliding windows are not used"
    return None
