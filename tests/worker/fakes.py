"""A worker's engine without a model: the fake runner of the engine's tests over memory that transports can reach."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cpd.common.errors import CPDError, TransferError
from cpd.common.settings import WorkerSettings
from cpd.performance.colocation import Colocation
from engine.batch import Batch
from engine.engine import Engine
from kvtransfer.base import Landing, Peer, PoolMemory, Route, Segment, Ticket, Transfer, Transport
from tests.engine.fakes import GARBAGE, MODEL, VOCAB, FakeHostMemory, FakeRunner, FakeStep
from tests.waiting import DEADLINE_S
from worker.context import LoadedEngine
from worker.wire_format import Limits

MAX_MODEL_LEN = 1024
SLOW_STEP_S = 0.02
FINGERPRINT = b"a model that chains numbers"


class _Page:
    """One page of shared memory, read and written like a list."""

    def __init__(self, slots: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
        self._slots = slots

    def __getitem__(self, offset: int) -> int:
        return int(self._slots[offset])

    def __setitem__(self, offset: int, value: int) -> None:
        self._slots[offset] = value

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots.tolist())


class _Pages:
    def __init__(self, memory: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
        self._memory = memory

    def __getitem__(self, page: int) -> _Page:
        return _Page(self._memory[page])

    def __setitem__(self, page: int, values: list[int]) -> None:
        self._memory[page] = values


class SharedRunner(FakeRunner):
    """A FakeRunner whose pages are rows of `memory`. [num_pages, BLOCK_SIZE] int64

    Args:
        before_step: Called before each step on the engine thread; a test can hold the engine there.
        lanes: See FakeRunner.

    Attributes:
        has_memory: False while the memory is released.
    """

    def __init__(self, num_pages: int, before_step: Callable[[], None] | None = None, lanes: bool = False) -> None:
        super().__init__(num_pages, lanes)
        self.memory = np.full((num_pages, 16), GARBAGE, np.int64)
        self.pages = _Pages(self.memory)  # type: ignore[assignment]
        self._before_step = before_step
        self.has_memory = True

    def begin(self, batch: Batch) -> FakeStep:
        assert self.has_memory, "a step runs without memory"
        if self._before_step is not None:
            self._before_step()
        return super().begin(batch)


class FakeModelMemory:
    """The memory of a SharedRunner.

    Attributes:
        error: Raised by the next `restore` or `stage`.
        full: `populate_pool` finds too little memory.
    """

    def __init__(self, runner: SharedRunner) -> None:
        self.error: CPDError | None = None
        self.full = False
        self.num_bytes = runner.memory.nbytes
        self.staged_bytes = 0
        self._runner = runner

    def resident_bytes(self) -> int:
        return self.num_bytes if self._runner.has_memory else 0

    def release(self) -> None:
        self._runner.memory[:] = GARBAGE
        self._runner.has_memory = False

    def restore(self) -> None:
        self._fail()
        self._runner.has_memory = True

    def populate_pool(self) -> None:
        assert self._runner.has_memory
        if self.full:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def stage(self) -> None:
        self._fail()
        self.staged_bytes = 1

    def unstage(self) -> None:
        self.staged_bytes = 0

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def fake_loader(
    num_pages: int = 256,
    *,
    before_step: Callable[[], None] | None = None,
    fingerprint: bytes = FINGERPRINT,
    max_model_len: int = MAX_MODEL_LEN,
    host_pages: int = 0,
    on_host: Callable[[FakeHostMemory], None] = lambda host: None,
    progress: Callable[[], float] = lambda: 0,
    lanes: bool = False,
    on_memory: Callable[[FakeModelMemory], None] = lambda memory: None,
) -> Callable[[WorkerSettings], LoadedEngine]:
    """Makes the `load` argument of `Worker`.

    Args:
        on_host: Called with the host memory, if there is any.
        on_memory: Called with the memory that the model shares with others, if its device is shared.
    """

    def load(settings: WorkerSettings) -> LoadedEngine:
        runner = SharedRunner(num_pages, before_step, lanes)
        host = FakeHostMemory(runner, host_pages) if host_pages else None
        if host is not None:
            on_host(host)
        engine = Engine(
            runner,
            max_model_len=max_model_len,
            colocation=Colocation(
                MODEL,
                token_budget=settings.token_budget,
                mode="lanes",
                splits=[split.shares for split in runner.splits],
            ),
            max_num_seqs=settings.max_num_seqs,
            max_queue_tokens=settings.max_queue_tokens,
            host=host,
        )
        model_memory = None
        if settings.device_memory is not None:
            model_memory = FakeModelMemory(runner)
            on_memory(model_memory)
        return LoadedEngine(
            engine=engine,
            memory=PoolMemory(runner.memory.ctypes.data, num_pages, runner.memory[0].nbytes),
            page_bytes=runner.memory[0].nbytes,
            limits=Limits(VOCAB, engine.max_model_len),
            fingerprint=fingerprint,
            dtype="int64",
            device="none",
            profile=MODEL.profile,
            token_budget=settings.token_budget,
            progress=progress,
            model_memory=model_memory,
        )

    return load


class Gate:
    """Holds an engine in its step while closed. Use as `fake_loader(before_step=gate.wait)`."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._one = threading.Event()
        self._slow = False
        self.held = False

    def close(self) -> None:
        """Holds the next step."""
        self._slow = False
        self._open.clear()

    def open(self) -> None:
        """Lets all steps run."""
        self._slow = False
        self._open.set()

    def slow(self) -> None:
        """Makes each step take SLOW_STEP_S from now on."""
        self._slow = True
        self._open.clear()

    def open_once(self) -> None:
        """Releases the held step; the next one waits."""
        self.held = False
        self._one.set()

    def wait(self) -> None:
        """Called by the engine thread before each step."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._open.is_set():
            if self._slow:
                self._open.wait(SLOW_STEP_S)
                return
            self.held = True
            assert time.monotonic() < deadline, "the gate was never opened"
            if self._one.wait(0.002):
                self._one.clear()
                return
        self.held = False


class GatedTransport:
    """Wraps a transport. Pushes begin only while `gate` is set."""

    def __init__(self, transport: Transport, gate: asyncio.Event) -> None:
        self._transport = transport
        self._gate = gate
        self.name = transport.name
        self.reason = transport.reason
        self.address = transport.address
        self.common_address = transport.common_address
        self.epoch = transport.epoch

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Landing:
        return self._transport.expect(reservation, generation, pages, segments)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> Peer:
        return _GatedPeer(await self._transport.connect(address, page_bytes), self._gate)

    async def close(self) -> None:
        await self._transport.close()


class _GatedPeer:
    def __init__(self, peer: Peer, gate: asyncio.Event) -> None:
        self._peer = peer
        self._gate = gate

    @property
    def route(self) -> Route:
        return self._peer.route

    @property
    def alive(self) -> bool:
        return self._peer.alive

    def push(self, ticket: Ticket, pages: Sequence[tuple[int, int]]) -> Transfer:
        return _GatedTransfer(self._peer, ticket, pages, self._gate)

    async def close(self) -> None:
        await self._peer.close()


class _GatedTransfer:
    def __init__(self, peer: Peer, ticket: Ticket, pages: Sequence[tuple[int, int]], gate: asyncio.Event) -> None:
        self._cancelled = asyncio.Event()
        self._transfer: Transfer | None = None
        self._task = asyncio.create_task(self._run(peer, ticket, pages, gate))

    async def done(self) -> None:
        await asyncio.shield(self._task)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._transfer is not None:
            self._transfer.cancel()

    async def _run(self, peer: Peer, ticket: Ticket, pages: Sequence[tuple[int, int]], gate: asyncio.Event) -> None:
        waits = [asyncio.create_task(gate.wait()), asyncio.create_task(self._cancelled.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._cancelled.is_set():
            raise TransferError("cancelled before it began")
        self._transfer = peer.push(ticket, pages)
        await self._transfer.done()
