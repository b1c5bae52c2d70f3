"""The receiver's end of a connection.

greeting ── Hello ──▶ preparing ── agent made, if it takes one ──▶ open ──▶ failed ── nothing can be written ──▶ gone
    └── wrong Hello, or Over of another connection ──────────────────────────▲

`failed` lasts until nothing that was granted is being written: every batch is done, or the sender has said that this
connection is over, or its process has ended. Only a sender on another machine needs not be waited for. Then this side's
NIXL agent is destroyed.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import NoReturn

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.landings import LandingBook
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.details import ReceiversPool, Sender
from kvtransfer.nixl.link import Link
from kvtransfer.nixl.process import ProcessIdentity, gone
from kvtransfer.nixl.writer import Writer
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving

_UNLIKE = frames.Reject(
    False, "one worker's pages are in host memory, the other's on a GPU: give both the same --device"
)
_UNSEEN = frames.Reject(
    False,
    "both workers are of one machine, but in different PID namespaces, so that neither can tell when the other has "
    "ended: run their containers with --pid=host (hostPID: true)",
)


class Incoming(Link):
    """Lets the transport at the other end write pages into one pool.

    Attributes:
        sender: If it writes from a process of this machine into this one's memory, once it may.

    Args:
        on_over: Called with the name of another connection over which nothing is being written any more.
        host: IPv4 address of this side.
        book: Of the pool's landings.
        memory: The pool.
        key: Of this transport's address.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        on_gone: Callable[[Link], None],
        on_over: Callable[[bytes], None],
        host: str,
        book: LandingBook,
        memory: PoolMemory,
        key: bytes,
    ) -> None:
        self.sender: Sender | None = None
        self._on_over = on_over
        self._host = host
        self._book = book
        self._memory = memory
        self._receiving = Receiving(book, self, key, memory.page_bytes)
        self._agent: Agent | None = None
        self._thread: Writer | None = None
        self._greeted = self._open = False
        self._quiet = asyncio.Event()  # nothing that was granted is being written, or will be
        super().__init__(reader, writer, on_gone)

    def over(self) -> None:
        """The sender's end is gone: nothing is being written any more."""
        self._receiving.through()
        self._quiet.set()
        self.fail("the connection was closed by the sender")

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Sent():
                self._receiving.arrived(frame.batch)
                self._send(frames.Done(frame.batch))
                if self.failed and not self._receiving.busy:
                    self._quiet.set()
            case _ if self.failed:
                pass  # only what tells that pages have arrived matters any more
            case frames.Over() if not self._greeted:
                self._hear(frame)
            case frames.Hello() if not self._greeted:
                self._greet(frame)
            case frames.Offer() if self._open:
                self._admit(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _hear(self, over: frames.Over) -> None:
        self._check(over)
        self._on_over(over.connection)
        self._send(frames.Heard())
        self.fail("it was made to say that another one is over")

    def _greet(self, hello: frames.Hello) -> None:
        self._greeted = True
        self._check(hello)
        sender, own, on_device = Sender.decode(hello.details), ProcessIdentity.own(), self._memory.device is not None
        if sender.on_device is not on_device:
            self._reject(_UNLIKE)
        if own.sees(sender.process) and (sender.straight or on_device):
            self.sender = sender
        elif own.beside(sender.process) and on_device:
            self._reject(_UNSEEN)
        if self.sender is not None and not on_device:
            self._welcome(b"")
        else:
            self._thread = Writer("kvtransfer-nixl-receive")
            self._thread.open(self._make_agent, self._prepared)

    def _check(self, opening: frames.Hello | frames.Over) -> None:
        if (rejection := self._receiving.rejection(opening)) is not None:
            self._reject(rejection)

    def _reject(self, rejection: frames.Reject) -> NoReturn:
        self._send(rejection)
        raise frames.refusal(rejection)

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
        pool = ReceiversPool(memory.pointer, memory.num_pages, memory.device, process, agent)
        self._send(frames.Welcome(pool.encode()))

    def _admit(self, offer: frames.Offer) -> None:
        landing = self._receiving.admit(offer)
        if isinstance(landing, frames.Refuse):
            self._send(landing)
        else:
            self._send(frames.Grant(offer.batch, tuple(landing.pages[index] for index, _ in offer.runs)))

    def _patience(self) -> float | None:
        if self._greeted and not self._open:
            return None  # it waits for this side
        return self._receiving.patience(is_open=self._open)

    def _failing(self, reason: str) -> None:
        self._send(frames.Stop(reason))
        self._book.give_up(self, reason)

    async def _settle(self, reason: str) -> None:
        if self.sender is not None and self._receiving.busy:
            watch = self._loop.create_task(self._watch_process(self.sender.process), name="nixl-process")
            await self._quiet.wait()
            watch.cancel()
        if self._thread is not None:
            await self._thread.close()
        self._receiving.through()
        self._book.lost(self, reason)

    async def _watch_process(self, sender: ProcessIdentity) -> None:
        await gone(sender)
        self._quiet.set()
