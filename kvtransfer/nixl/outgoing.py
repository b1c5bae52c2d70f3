"""The sender's end of a connection.

    greeting ── Welcome, agent made ──▶ open ──▶ failed ── nothing is being written ──▶ gone

A batch of a push: offered -> granted (the writer has it) -> written -> done: the receiver knows that it has arrived.
"""

import asyncio
import functools
import itertools
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from cpd.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.nixl import wire
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.link import GRACE_S, GREETING_S, STALL_S, Link
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.nixl.writer import Writer
from kvtransfer.pushes import PushedTransfer, Run

WINDOW = 4  # batches offered and not arrived
_BATCH_BYTES = 8 << 20


class _State(Enum):
    OFFERED = auto()
    GRANTED = auto()
    WRITTEN = auto()


@dataclass(slots=True)
class _Batch:
    transfer: PushedTransfer
    runs: list[Run]
    state: _State = _State.OFFERED


class Outgoing(Link):
    """Writes pages of one pool into the pool at the other end.

    Attributes:
        greeted: Set when it is open, or has failed.
        error: Why it failed.
        batch_pages: Most pages of a batch, and so of a run.

    Args:
        host: IPv4 address of this side.
        memory: The pool.
        key: From the receiver's address.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        on_gone: Callable[[Link], None],
        host: str,
        memory: PoolMemory,
        key: bytes,
    ) -> None:
        self.greeted = asyncio.Event()
        self.error: TransferError | None = None
        self.batch_pages = max(1, _BATCH_BYTES // memory.page_bytes)
        self._host = host
        self._memory = memory
        self._open = False
        self._writer: Writer | None = None
        self._transfers: deque[PushedTransfer] = deque()
        self._batches: dict[int, _Batch] = {}
        self._numbers = itertools.count()
        super().__init__(reader, writer, on_gone)
        self._send(wire.Hello(key, memory.page_bytes, ProcessIdentity.own()))

    def submit(self, transfer: PushedTransfer) -> None:
        """Sends a transfer after those before it."""
        if self.failed:
            transfer.lost(self.error or TransferError("the connection is closed"))
            return
        self._transfers.append(transfer)
        self._moved()
        self._offer()

    def _offer(self) -> None:
        while self._transfers and len(self._batches) < WINDOW:
            transfer = self._transfers[0]
            if not transfer.waiting:
                self._transfers.popleft()
                continue
            number, ticket = next(self._numbers), transfer.ticket
            runs = transfer.take_batch(wire.MAX_RUNS, self.batch_pages)
            self._batches[number] = _Batch(transfer, runs)
            indices = tuple((run.index, run.count) for run in runs)
            self._send(wire.Offer(number, ticket.epoch, ticket.reservation, ticket.generation, indices))

    def _handle(self, frame: wire.Frame) -> None:
        if self.failed:
            return
        match frame:
            case wire.Welcome() if self._writer is None:
                self._prepare(frame)
            case wire.Reject() if not self._open:
                self.error = wire.refusal(frame.stale, frame.reason)
                raise self.error
            case wire.Grant():
                self._grant(frame)
            case wire.Refuse():
                batch = self._batch(frame.batch, _State.OFFERED)
                del self._batches[frame.batch]
                batch.transfer.refused(wire.refusal(frame.stale, frame.reason))
                self._offer()
            case wire.Done():
                self._batch(frame.batch, _State.WRITTEN).transfer.arrived()
                del self._batches[frame.batch]
                self._offer()
            case wire.Stop():
                raise TransferError(f"the receiver gave the connection up: {frame.reason}")
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _prepare(self, welcome: wire.Welcome) -> None:
        def make() -> Agent:
            agent = Agent(self._memory, options(self._host, local=welcome.local), progress=False)
            agent.connect(welcome.metadata, PoolMemory(welcome.pointer, welcome.num_pages, self._memory.page_bytes))
            return agent

        self._writer = Writer("kvtransfer-nixl-send")
        self._writer.open(make, self._prepared)

    def _prepared(self, error: TransferError | None) -> None:
        if error is not None:
            self.error = self.error or error
            self.fail(str(error))
        elif not self.failed:
            self._open = True
            self.greeted.set()

    def _batch(self, number: int, state: _State) -> _Batch:
        batch = self._batches.get(number)
        if batch is None or batch.state is not state:
            raise TransferError("the receiver spoke of a batch that is not at issue")
        return batch

    def _grant(self, grant: wire.Grant) -> None:
        batch = self._batch(grant.batch, _State.OFFERED)
        if len(grant.pages) != len(batch.runs):
            raise TransferError("the receiver granted another number of runs than was offered")
        assert self._writer is not None
        batch.state = _State.GRANTED
        counts = np.array([run.count for run in batch.runs], np.int32)
        own = _spread(np.array([run.page for run in batch.runs], np.int32), counts)
        theirs = _spread(np.array(grant.pages, np.int32), counts)
        self._writer.write(own, theirs, functools.partial(self._written, grant.batch))

    def _written(self, number: int, error: TransferError | None) -> None:
        self._moved()
        if error is not None:
            self.fail(str(error))  # the batch is over when the writer is
            return
        if not self.failed:
            self._batches[number].state = _State.WRITTEN
        self._send(wire.Written(number))

    def _patience(self) -> float | None:
        if not self._open:
            return GREETING_S
        if not self._batches:
            return None
        return GRACE_S if any(batch.transfer.error for batch in self._batches.values()) else STALL_S

    def _failing(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)

    async def _settle(self, reason: str) -> None:
        assert self.error is not None
        for transfer in self._transfers:
            transfer.stop(self.error)
        if self._writer is not None:
            await self._writer.close()
        self._send(wire.Bye())
        for transfer in [*self._transfers, *(batch.transfer for batch in self._batches.values())]:
            transfer.lost(self.error)
        self._transfers.clear()
        self._batches.clear()
        self.greeted.set()


def _spread(first: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """The pages of runs: first[k], first[k] + 1, …, `counts[k]` of them."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1], dtype=np.int32)
