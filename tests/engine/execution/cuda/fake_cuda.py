"""A fake of `torch.cuda` on a CPU: streams that are always done, and graphs that record and replay.

A capture records every torch operation, with its very tensors; a replay runs them again and puts the results where they
were. So what a captured step reads from the host, or from a tensor made before it, stays as it was, as on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class FakeEvent:
    """Logs its calls in `log`."""

    log: ClassVar[list[tuple[str, "FakeEvent"]]] = []

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: object = None) -> None:
        self.log.append(("record", self))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self))

    def query(self) -> bool:
        return True


class FakeStream:
    """Records the events that it waits for."""

    def __init__(self, handle: object = None, device: object = None) -> None:
        self.handle = handle
        self.waits: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        pass


class FakeGraph:
    """A captured graph that counts its replays."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.replays = 0
        self.options: Mapping[str, Any] = {}

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            for call in self.calls:
                call()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    current: "ClassVar[_Recording | None]" = None

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **options)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.graph.calls.append(again)
        return result


def recorded(call: Callable[[], None]) -> None:
    """Runs a kernel that is not torch's; during a capture, also records it."""
    recording = _Recording.current
    if recording is None:
        call()
    else:
        with _disable_current_modes():
            call()
        recording.graph.calls.append(call)


@contextmanager
def _capture(graph: FakeGraph, **options: Any) -> Iterator[None]:
    graph.options = options
    _Recording.current = _Recording(graph)
    try:
        with _Recording.current:
            yield
    finally:
        _Recording.current = None


@contextmanager
def _on(stream: FakeStream) -> Iterator[None]:
    yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `torch.cuda` with the fakes."""
    FakeEvent.log.clear()
    fakes = {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "ExternalStream": FakeStream,
        "stream": _on,
        "CUDAGraph": FakeGraph,
        "graph": _capture,
        "graph_pool_handle": object,
        "mem_get_info": lambda device: (1 << 30, 1 << 30),
        "synchronize": lambda device=None: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
