"""Stands in for GPUs where there are none: host memory that is said to be a device's.

NIXL and UCX are real; what they are told is a device's, they get as the host's. So pages cross over TCP where between
GPUs they would go from device to device.
"""

import ctypes
import threading
from typing import Any

import pytest

from kvtransfer import cuda
from kvtransfer.nixl import agent

DEVICES = 4
DEVICE = 2
"""Of a pool, where one will do."""


class Bindings:
    """NIXL's, for a machine with GPUs. Takes a device's memory only on threads that use this device.

    Attributes:
        VRAM_SEG: Stands for devices' memory.
    """

    VRAM_SEG = "a device's memory"

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        vars(self).update({name: value for name, value in vars(nixl).items() if name.endswith("Error")})
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nixl, name)

    def use(self, device: int) -> None:
        assert device in range(DEVICES)
        self._thread.device = device

    def nixlRegDList(self, segment: Any, descriptors: Any) -> Any:  # noqa: N802
        if segment == self.VRAM_SEG:
            assert {device for _, _, device, _ in descriptors} == {self._thread.device}
        return self._nixl.nixlRegDList(self._segment(segment), descriptors)

    def nixlXferDList(self, segment: Any, descriptors: Any) -> Any:  # noqa: N802
        if segment == self.VRAM_SEG:
            assert set(descriptors[:, 2].tolist()) <= set(range(DEVICES))
        return self._nixl.nixlXferDList(self._segment(segment), descriptors)

    def _segment(self, segment: Any) -> Any:
        return self._nixl.DRAM_SEG if segment == self.VRAM_SEG else segment


class Memory:
    """What has been allocated on the devices."""

    def __init__(self) -> None:
        self._allocations: dict[int, tuple[int, Any]] = {}  # by pointer

    def allocate(self, device: int, num_bytes: int) -> int:
        memory = (ctypes.c_char * num_bytes)()
        pointer = ctypes.addressof(memory)
        self._allocations[pointer] = device, memory
        return pointer

    def free(self, device: int, pointer: int) -> None:
        assert self._allocations.pop(pointer)[0] == device

    def fill(self, device: int, pointer: int, value: int, num_bytes: int) -> None:
        ctypes.memset(pointer, value, num_bytes)

    def read(self, device: int, pointer: int, num_bytes: int) -> bytearray:
        return bytearray(ctypes.string_at(pointer, num_bytes))


def install(patch: pytest.MonkeyPatch) -> None:
    """From here on there are GPUs, whose memory is the host's."""
    bindings, memory = Bindings(agent.load()), Memory()
    patch.setattr(agent, "load", lambda: bindings)
    patch.setattr(cuda, "use", bindings.use)
    patch.setattr(cuda, "wait", bindings.use)  # nothing is under way
    patch.setattr(cuda, "count", lambda: DEVICES)
    for name in ("allocate", "free", "fill", "read"):
        patch.setattr(cuda, name, getattr(memory, name))
