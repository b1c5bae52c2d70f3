"""Fake GPUs: host memory that is registered as device memory.

NIXL and UCX are real, but treat the memory as the host's. So pages travel over TCP that would go from device to device
between GPUs.
"""

import ctypes
import threading
from typing import Any

import pytest

from kvtransfer import cuda
from kvtransfer.nixl import agent

DEVICES = 4
DEVICE = 2
"""The device of a test's pool."""


class Bindings:
    """NIXL's bindings with fake GPUs. They accept device memory only on threads that use this device.

    Attributes:
        VRAM_SEG: The kind of memory of all devices.
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
    """Memory allocated on the fake devices."""

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
    """Installs the fake GPUs."""
    bindings, memory = Bindings(agent.load()), Memory()
    patch.setattr(agent, "load", lambda: bindings)
    patch.setattr(cuda, "use", bindings.use)
    patch.setattr(cuda, "wait", bindings.use)  # nothing is in flight
    patch.setattr(cuda, "count", lambda: DEVICES)
    for name in ("allocate", "free", "fill", "read"):
        patch.setattr(cuda, name, getattr(memory, name))
