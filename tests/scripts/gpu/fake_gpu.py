"""A fake GPU: each stream has its own clock, and work takes the time it declares.

All timings use this virtual time; computations run on the CPU immediately.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from scripts.gpu.probes import Policy
from tests.engine.execution.cuda.fakes import FakeDriver

RECORD_MS = 1e-3
"""Time to record an event. On a real device it is negligible, but no two events coincide."""


class FakeStream:
    """See `torch.cuda.Stream`."""

    def __init__(self, gpu: "FakeGpu", handle: int) -> None:
        self.gpu = gpu
        self.cuda_stream = handle
        self.clock = gpu.now

    def wait_event(self, event: "FakeEvent") -> None:
        self.clock = max(self.clock, event.time)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.clock = max(self.clock, stream.clock)

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.clock)


class FakeEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu = gpu
        self.time = 0.0

    def record(self) -> None:
        self._gpu.current.clock += RECORD_MS
        self.time = self._gpu.current.clock

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.time - self.time


class FakeGraph:
    """See `torch.cuda.CUDAGraph`. Captured work keeps its stream."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []

    def replay(self) -> None:
        for node in self.nodes:
            node()


class FakeGpu:
    """A device whose SMs a `FakeDriver` hands out.

    Attributes:
        now: Time at which the host last waited for the whole device, ms.
        current: torch's current stream.
    """

    def __init__(self, driver: FakeDriver, sms: int) -> None:
        self.driver = driver
        self.sms = sms
        self.now = 0.0
        self.capture_modes: list[str] = []
        self._plain = itertools.count(1)
        self._streams: dict[int, FakeStream] = {}
        self._capturing: FakeGraph | None = None
        self.current = self.stream_of(0)

    def stream_of(self, handle: int) -> FakeStream:
        """The stream with this handle."""
        if handle not in self._streams:
            self._streams[handle] = FakeStream(self, handle)
        return self._streams[handle]

    def sms_of_current(self) -> list[int]:
        """The SMs on which work on the current stream runs."""
        handle = self.current.cuda_stream
        return sorted(self.driver.sms_of(handle)) if handle in self.driver.streams else list(range(self.sms))

    def launch(self, work: Callable[[list[int]], None], ms: Callable[[int], float]) -> None:
        """Launches work on the current stream, or captures it.

        Args:
            work: Called with the SMs that it runs on.
            ms: Maps a number of SMs to the duration, ms.
        """
        sms = self.sms_of_current()

        def node() -> None:
            work(sms)
            self.current.clock += ms(len(sms))

        if self._capturing is not None:
            self._capturing.nodes.append(node)
        else:
            node()

    def synchronize(self) -> None:
        """See `torch.cuda.synchronize`."""
        self.now = max(stream.clock for stream in self._streams.values())
        for stream in self._streams.values():
            stream.clock = self.now

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """See `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, graph: FakeGraph, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        """See `torch.cuda.graph`."""
        self.capture_modes.append(capture_error_mode)
        with self.on(stream):
            self._capturing = graph
            try:
                yield
            finally:
                self._capturing = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces `torch.cuda`."""
        for name, value in {
            "Stream": lambda: self.stream_of(next(self._plain)),
            "ExternalStream": lambda handle, device: self.stream_of(handle),
            "Event": lambda enable_timing: FakeEvent(self),
            "CUDAGraph": FakeGraph,
            "graph": self.capture,
            "stream": self.on,
            "current_stream": lambda: self.current,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


class FakeProbes:
    """See `scripts.gpu.probes.Probes`. Arithmetic scales with SMs; a third of them saturates the memory."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.policies: list[Policy] = []

    def record_sms(self, out: torch.Tensor, cycles: int) -> None:
        def work(sms: list[int]) -> None:
            out.copy_(torch.tensor(list(itertools.islice(itertools.cycle(sms), len(out)))))

        self._gpu.launch(work, lambda _: cycles / 1e6)

    def compute(self, source: torch.Tensor, out: torch.Tensor, iterations: int) -> None:
        self._gpu.launch(lambda sms: None, lambda sms: iterations / 1000 * self._gpu.sms / sms)

    def read_pages(self, pool: torch.Tensor, table: torch.Tensor, out: torch.Tensor, policy: Policy) -> None:
        self.policies.append(policy)

        def work(sms: list[int]) -> None:
            out.copy_(pool[table.long()].sum(1, dtype=torch.int64).to(torch.int32))

        self._gpu.launch(work, lambda sms: max(1.0, self._gpu.sms / 3 / sms))


def take_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, workload: type[Callable[[], object]]) -> None:
    """Makes a piece of the workload take 1 ms on all SMs in virtual time, also when captured."""
    real = workload.__call__

    def call(self: Any) -> None:
        def work(sms: list[int]) -> None:
            real(self)

        gpu.launch(work, lambda sms: gpu.sms / sms)

    monkeypatch.setattr(workload, "__call__", call)
