"""Pinned memory, with a fake CUDA runtime."""

import pytest
import torch

from cpd.common.errors import ConfigError
from engine.execution.cuda.host_memory import pin


class FakeRuntime:
    """Registers memory, or refuses with `status`."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered.append((address, size))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return "out of memory"


def test_exactly_the_tensors_memory_is_pinned_until_it_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slots = torch.zeros(5, 3, dtype=torch.bfloat16)
    assert pin(slots) is slots
    address = slots.data_ptr()
    assert runtime.registered == [(address, 30)]
    assert runtime.unregistered == []
    del slots
    assert runtime.unregistered == [address]


def test_memory_that_cannot_be_pinned_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    with pytest.raises(ConfigError, match=r"0\.0 GiB .* out of memory; lower --host-kv-memory"):
        pin(torch.zeros(4))
