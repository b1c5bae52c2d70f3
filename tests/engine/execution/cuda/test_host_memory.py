"""Pinned memory, with a stand-in for the CUDA runtime."""

import pytest
import torch

from cpd.common.errors import ConfigError
from engine.execution.cuda.host_memory import pin


class FakeRuntime:
    """Registers memory, or refuses to."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered.append((address, size))
        return self.status

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return "out of memory"


def test_exactly_the_memory_that_was_asked_for_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slots = torch.zeros(5, 3, dtype=torch.bfloat16)
    assert pin(slots) is slots
    assert runtime.registered == [(slots.data_ptr(), 30)]


def test_memory_that_cannot_be_pinned_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    with pytest.raises(ConfigError, match=r"0\.0 GiB .* out of memory; lower --host-kv-memory"):
        pin(torch.zeros(4))
