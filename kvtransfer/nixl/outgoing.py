"""The sender's end of a connection.

greeting ── Welcome, door made ──▶ open ──▶ failed ── nothing is being written ──▶ gone

Whether a receiver on this machine knows that it is gone, it can't say: see `unheard`.
"""

import asyncio
import functools
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

import numpy as np

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.details import Address, ReceiversPool, Sender
from kvtransfer.nixl.link import Link
from kvtransfer.nixl.neighbour import Neighbour
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.nixl.writer import Door, Writer
from kvtransfer.pushes import PushedTransfer
from kvtransfer.session import frames, limits
from kvtransfer.session.frames import CONNECTION_BYTES
from kvtransfer.session.sending import Sending

_BATCH_BYTES = 8 << 20
_BATCH_RUNS = 256


class Outgoing(Link):
    """Writes pages of one pool into the pool at the other end.

    Attributes:
        greeted: Set when it is open, or has failed.
        error: Why it failed.
        where: The receiver listens.
        receiver: Its process, if this one writes into the memory of that one, on this machine.
        connection: Names this one, see `kvtransfer.session.frames.Over`.
        unheard: Whether it is gone, and the receiver may keep pages back until it knows.
        batch_pages: Most pages of a batch, and so of a run.

    Args:
        host: IPv4 address of this side.
        memory: The pool.
        where: The receiver's address.
        neighbours: Whether the kernel may write into the receiver's memory if it is a process of this machine.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        on_gone: Callable[[Link], None],
        host: str,
        memory: PoolMemory,
        where: Address,
        *,
        neighbours: bool,
    ) -> None:
        self.greeted = asyncio.Event()
        self.error: TransferError | None = None
        self.where = where
        self.receiver: ProcessIdentity | None = None
        self.connection = secrets.token_bytes(CONNECTION_BYTES)
        self.unheard = False
        self.batch_pages = max(1, _BATCH_BYTES // memory.page_bytes)
        self._host = host
        self._memory = memory
        self._open = False
        self._writer: Writer | None = None
        self._sending = Sending(max_runs=_BATCH_RUNS, max_pages=self.batch_pages)
        super().__init__(reader, writer, on_gone)
        sender = Sender(self.connection, ProcessIdentity.own(), memory.device is not None, neighbours)
        self._send(frames.Hello(where.key, memory.page_bytes, sender.encode()))

    def submit(self, transfer: PushedTransfer) -> None:
        """Sends a transfer after those before it."""
        if self.failed:
            transfer.lost(self.error or TransferError("the connection is closed"))
            return
        self._sending.submit(transfer)
        self._moved()
        self._offer()

    def _offer(self) -> None:
        for offer in self._sending.offers():
            self._send(offer)

    def _handle(self, frame: frames.Frame) -> None:
        if self.failed:
            return
        match frame:
            case frames.Welcome() if self._writer is None:
                self._prepare(ReceiversPool.decode(frame.details))
            case frames.Reject() if not self._open:
                self.error = frames.refusal(frame)
                raise self.error
            case frames.Grant():
                self._grant(frame)
            case frames.Refuse():
                self._sending.refused(frame)
                self._offer()
            case frames.Done():
                self._sending.done(frame)
                self._offer()
            case frames.Stop():
                raise TransferError(f"the receiver gave the connection up: {frame.reason}")
            case _:
                raise TransferError(f"the receiver sent {type(frame).__name__} out of turn")

    def _prepare(self, pool: ReceiversPool) -> None:
        theirs = PoolMemory(pool.pointer, pool.num_pages, self._memory.page_bytes, pool.device)

        def make() -> Door:
            if pool.process is not None and not pool.agent:
                return Neighbour(self._memory, pool.process, theirs)
            agent = Agent(self._memory, options(self._host), progress=False)
            agent.connect(pool.agent, theirs)
            return agent

        self.receiver = pool.process
        self._num_theirs = pool.num_pages
        self._writer = Writer("kvtransfer-nixl-send")
        self._writer.open(make, self._prepared)

    def _prepared(self, error: TransferError | None) -> None:
        if error is not None:
            self.error = self.error or error
            self.fail(str(error))
        elif not self.failed:
            self._open = True
            self.greeted.set()

    def _grant(self, grant: frames.Grant) -> None:
        runs = self._sending.granted(grant)
        counts = np.array([run.count for run in runs], np.int64)
        theirs = np.array(grant.places, np.uint64)
        if (theirs >= self._num_theirs).any():
            raise TransferError(f"the peer granted page {theirs.max()}, its pool has {self._num_theirs}")
        assert self._writer is not None
        own = np.array([run.page for run in runs], np.int64)
        self._writer.write(own, theirs.astype(np.int64), counts, functools.partial(self._written, grant.batch))

    def _written(self, batch: int, error: TransferError | None) -> None:
        self._moved()
        if error is not None:
            self.fail(str(error))  # the batch is over when the writer is
            return
        if not self.failed:
            self._sending.sent(batch)
        self._send(frames.Sent(batch))

    def _patience(self) -> float | None:
        return self._sending.patience(is_open=True) if self._open else limits.AGENT_S

    def _failing(self, reason: str) -> None:
        self.error = self.error or TransferError(reason)

    async def _settle(self, reason: str) -> None:
        assert self.error is not None
        self._sending.stop(self.error)
        if self._writer is not None:
            await self._writer.close()
        self.unheard = self.receiver is not None and self._sending.busy
        self._sending.lost(self.error)
        self.greeted.set()
