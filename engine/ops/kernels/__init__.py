"""CPU kernels in C++: torch operators under `torch.ops.cpd`, compiled for the machine they run on."""

from engine.ops.kernels.build import KernelsUnavailableError, load

__all__ = ["KernelsUnavailableError", "load"]
