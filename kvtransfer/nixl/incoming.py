"""The receiver's end of a connection.

greeting ── Hello ──▶ preparing ── agent created, if needed ──▶ open ──▶ failed ── nothing can be written ──▶ gone
    └── wrong Hello, or CloseNotice of another connection ─────────────────▲

`failed` lasts until nothing that was granted is being written: every batch is done, the sender has given notice that
this connection is closed, or its process has ended. A sender on another machine is not waited for. Then this side's
NIXL agent is destroyed.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import NoReturn

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity, wait_until_ended
from kvtransfer.base import PoolMemory
from kvtransfer.landings import LandingTable
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.connection import Connection
from kvtransfer.nixl.handshake import ReceiverPool, SenderDetails
from kvtransfer.nixl.page_stream import PageStreamReceiver
from kvtransfer.nixl.writer import Writer
from kvtransfer.segments import Run, resolve_runs
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving

_OTHER_MEMORY = frames.Reject(
    False, "one worker's pages are in host memory, the other's on a GPU: such a pair exchanges no pages"
)
_OTHER_NAMESPACE = frames.Reject(
    False,
    "both workers are of one machine, but in different PID namespaces, so that neither can tell when the other has "
    "ended: run their containers with --pid=host (hostPID: true)",
)


class Incoming(Connection):
    """Lets the transport at the other end write pages into one pool.

    Attributes:
        sender: The sender, if it writes from a process of this machine into this one's memory.

    Args:
        on_close_notice: Called with the name of another connection over which nothing is being written any more.
        host: IP address of this side.
        landings: The pool's landings.
        memory: The pool.
        key: Key of this transport's address.
        loads_nixl: True if this process can use NIXL.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        on_gone: Callable[[Connection], None],
        on_close_notice: Callable[[bytes], None],
        host: str,
        landings: LandingTable,
        memory: PoolMemory,
        key: bytes,
        *,
        loads_nixl: bool,
    ) -> None:
        self.sender: SenderDetails | None = None
        self._on_close_notice = on_close_notice
        self._host = host
        self._landings = landings
        self._memory = memory
        self._loads_nixl = loads_nixl
        self._receiving = Receiving(landings, self, key, memory.page_bytes)
        self._agent: Agent | None = None
        self._writer: Writer | None = None
        self._pages: PageStreamReceiver | None = None
        self._hello: frames.Hello | None = None
        self._greeted = self._open = False
        self._writes_ended = asyncio.Event()  # nothing that was granted is being written, or will be
        super().__init__(reader, writer, on_gone)

    def sender_closed(self) -> None:
        """Records that the sender's end is gone: nothing is being written any more."""
        self._receiving.stopped()
        self._writes_ended.set()
        self.fail("the connection was closed by the sender")

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Sent():
                if self._pages is not None:
                    self._pages.finish(frame.batch)
                self._receiving.arrived(frame.batch)
                self._send(frames.Done(frame.batch))
                if self.failed and not self._receiving.busy:
                    self._writes_ended.set()
            case _ if self.failed:
                pass  # only Sent matters now: it tells that pages have arrived
            case frames.CloseNotice() if not self._greeted:
                self._check(frame)
                self._on_close_notice(frame.connection)
                self._send(frames.CloseAck())
                self.fail("it was opened for a close notice")
            case frames.Hello() if not self._greeted:
                self._greet(frame)
            case frames.Proof() if self._open:
                self._receiving.check(frame)
            case frames.Offer() if self._open:
                self._admit(frame)
            case frames.Pages() if self._pages is not None:
                self._pages.put(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _greet(self, hello: frames.Hello) -> None:
        self._greeted, self._hello = True, hello
        self._check(hello)
        sender, own = SenderDetails.decode(hello.details), ProcessIdentity.own()
        on_device = self._memory.device is not None
        if sender.on_device is not on_device:
            self._reject(_OTHER_MEMORY)
        if own.sees(sender.process) and (sender.same_host or on_device):
            self.sender = sender
        elif own.on_same_host(sender.process) and on_device:
            self._reject(_OTHER_NAMESPACE)
        if self.sender is not None and not on_device:
            self._welcome(b"")
        elif not on_device and not (self._loads_nixl and sender.loads_nixl):
            self._pages = PageStreamReceiver()
            self._welcome(b"")
        else:
            self._writer = Writer("kvtransfer-nixl-receive")
            self._writer.open(self._make_agent, self._prepared)

    def _check(self, opening: frames.Hello | frames.CloseNotice) -> None:
        if (rejection := self._receiving.rejection(opening)) is not None:
            self._reject(rejection)

    def _reject(self, rejection: frames.Reject) -> NoReturn:
        self._send(rejection)
        raise frames.refusal(rejection)

    def _admit(self, offer: frames.Offer) -> None:
        answer = self._receiving.admit(offer)
        if self._pages is not None and isinstance(answer, frames.Grant):
            runs = [Run(page=0, index=index, count=count) for index, count in offer.runs]  # from pages unknown here
            segments = self._receiving.segments(offer.batch)
            _, *places = resolve_runs(self._memory, self._memory, runs, answer.places, segments)
            self._pages.expect(offer.batch, *places)
        self._send(answer)

    def _make_agent(self) -> Agent:
        self._agent = Agent(self._memory, options(self._host), progress=True)
        return self._agent

    def _prepared(self, error: TransferError | None) -> None:
        if error is not None:
            self._send(frames.Reject(False, str(error)))
            self.fail(str(error))
        elif not self.failed:
            assert self._agent is not None
            self._welcome(self._agent.metadata())

    def _welcome(self, agent: bytes) -> None:
        self._open = True
        memory, process = self._memory, ProcessIdentity.own() if self.sender else None
        pool = ReceiverPool(memory.pointer, memory.num_pages, memory.device, process, agent)
        assert self._hello is not None
        self._send(self._receiving.welcome(self._hello, pool.encode()))

    def _patience(self) -> float | None:
        if self._greeted and not self._open:
            return None  # the sender waits for this side
        return self._receiving.patience(is_open=self._open)

    def _failing(self, reason: str) -> None:
        self._send(frames.Stop(reason))
        self._landings.fail(self, reason, gone=False)

    async def _settle(self, reason: str) -> None:
        if self.sender is not None and self._receiving.busy:
            watch = self._loop.create_task(self._watch_process(self.sender.process), name="nixl-process")
            await self._writes_ended.wait()
            watch.cancel()
        if self._writer is not None:
            await self._writer.close()
        self._receiving.stopped()
        self._landings.fail(self, reason, gone=True)

    async def _watch_process(self, sender: ProcessIdentity) -> None:
        await wait_until_ended(sender)
        self._writes_ended.set()
