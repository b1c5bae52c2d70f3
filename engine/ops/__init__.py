"""Device-specific pieces of the forward pass, and which of them to use."""

import logging

import torch

from engine.kernels import KernelsUnavailableError
from engine.ops.base import Ops
from engine.ops.cpu_ops import CpuOps
from engine.ops.torch_ops import TorchOps

log = logging.getLogger(__name__)


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest back end that works here."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        try:
            return CpuOps()
        except KernelsUnavailableError as error:
            log.warning("the compiled CPU kernels are not available, running on slower ones: %s", error)
    return TorchOps()
