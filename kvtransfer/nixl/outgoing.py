"""The sender's end of a connection.

greeting ── Welcome, writer's back end created ──▶ open ──▶ failed ── nothing is being written ──▶ gone

A receiver on this machine may not know that it is gone: see `needs_close_notice`.
"""

import asyncio
import functools
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.base import PoolMemory
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.connection import Connection
from kvtransfer.nixl.handshake import Address, ReceiverPool, SenderDetails
from kvtransfer.nixl.page_stream import PageStreamSender
from kvtransfer.nixl.same_host import SameHostBackend
from kvtransfer.nixl.writer import Writer, WriterBackend
from kvtransfer.pushes import PushedTransfer
from kvtransfer.segments import resolve_runs
from kvtransfer.session import frames, limits
from kvtransfer.session.frames import CONNECTION_BYTES
from kvtransfer.session.greeting import SenderGreeting
from kvtransfer.session.sending import Sending

_BATCH_BYTES = 8 << 20
_DEVICE_BATCH_BYTES = 32 << 20  # a GPU writes 8 MiB in a tenth of the time that a batch's messages take
_BATCH_RUNS = 256


class Outgoing(Connection):
    """Writes pages of one pool into the pool at the other end.

    Attributes:
        greeted: Set when the connection is open or has failed.
        error: Why it failed.
        where: The receiver's address.
        receiver: The receiver's process, if this one writes into its memory on the same machine.
        connection_id: Names the connection, see `kvtransfer.session.frames.CloseNotice`.
        needs_close_notice: True if it is gone, and the receiver may keep pages back until it knows.
        batch_pages: Most pages of a batch, and so of a run.

    Args:
        host: IP address of this side.
        memory: The pool.
        page_bytes: Page size of the receiver.
        where: The receiver's address.
        same_host: True if the kernel may write into the receiver's memory if it is a process of this machine.
        loads_nixl: True if this process can use NIXL.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        on_gone: Callable[[Connection], None],
        host: str,
        memory: PoolMemory,
        page_bytes: int,
        where: Address,
        *,
        same_host: bool,
        loads_nixl: bool,
    ) -> None:
        self.greeted = asyncio.Event()
        self.error: TransferError | None = None
        self.where = where
        self.receiver: ProcessIdentity | None = None
        self.connection_id = secrets.token_bytes(CONNECTION_BYTES)
        self.needs_close_notice = False
        batch_bytes = _BATCH_BYTES if memory.device is None else _DEVICE_BATCH_BYTES
        self.batch_pages = max(1, batch_bytes // memory.page_bytes)
        self._host = host
        self._memory = memory
        self._page_bytes = page_bytes
        self._loads_nixl = loads_nixl
        self._open = False
        self._writer: Writer | PageStreamSender | None = None
        self._sending = Sending(max_runs=_BATCH_RUNS, max_pages=self.batch_pages)
        super().__init__(reader, writer, on_gone)
        process, on_device = ProcessIdentity.own(), memory.device is not None
        details = SenderDetails(self.connection_id, process, on_device, same_host, loads_nixl)
        self._greeting = SenderGreeting(where.key, page_bytes, details.encode())
        self._send(self._greeting.hello)

    @property
    def streams(self) -> bool:
        """True if pages go in the connection's stream."""
        return isinstance(self._writer, PageStreamSender)

    def submit(self, transfer: PushedTransfer) -> None:
        """Queues a transfer."""
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
                self._send(self._greeting.answer(frame))
                self._prepare(ReceiverPool.decode(frame.details))
            case frames.Reject() if not self._open:
                self.error = frames.refusal(frame)
                raise self.error
            case frames.Grant():
                self._write(frame)
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

    def _prepare(self, pool: ReceiverPool) -> None:
        self._theirs = PoolMemory(pool.pointer, pool.num_pages, self._page_bytes, pool.device)

        def make() -> WriterBackend:
            if pool.process is not None and not pool.agent:
                return SameHostBackend(pool.process, self._memory.pointer)
            agent = Agent(self._memory, options(self._host), progress=False)
            agent.connect(pool.agent, self._theirs)
            return agent

        self.receiver = pool.process
        if pool.agent and not self._loads_nixl:
            raise TransferError("the receiver wants to use NIXL, which this process does not load")
        if pool.process is None and not pool.agent:
            if self._memory.device is not None:
                raise TransferError("the receiver offers no way for pages in a GPU's memory")
            self._writer = PageStreamSender(self._stream, self._moved)
            self._prepared(None)
        else:
            self._writer = Writer("kvtransfer-nixl-send")
            self._writer.open(make, self._prepared)

    def _prepared(self, error: TransferError | None) -> None:
        if error is not None:
            self.error = self.error or error
            self.fail(str(error))
        elif not self.failed:
            self._open = True
            self.greeted.set()

    def _write(self, grant: frames.Grant) -> None:
        runs, segments = self._sending.granted(grant)
        if (highest := max(grant.places)) >= self._theirs.num_pages:
            raise TransferError(f"the peer granted page {highest}, its pool has {self._theirs.num_pages}")
        assert self._writer is not None
        sources, targets, num_bytes = resolve_runs(self._memory, self._theirs, runs, grant.places, segments)
        written = functools.partial(self._written, grant.batch)
        if isinstance(self._writer, PageStreamSender):
            self._writer.write(grant.batch, sources, num_bytes, written)
        else:
            self._writer.write(sources, targets, num_bytes, written)

    def _written(self, batch: int, error: TransferError | None) -> None:
        self._moved()
        if error is not None:
            self.fail(str(error))  # the batch ends with the writer
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
        self.needs_close_notice = self.receiver is not None and self._sending.busy
        self._sending.lost(self.error)
        self.greeted.set()
