"""The receiver's end of a connection.

greeting ── Hello ──▶ preparing ── agent made, if it takes one ──▶ open ──▶ failed ── nothing can be written ──▶ gone
    └── wrong Hello ─────────────────────────────────────────────────────────▲

`failed` lasts until nothing that was granted is being written: every batch is done, or the sender has said Bye, or its
process has ended. Only a sender on another machine needs not be waited for. Then this side's NIXL agent is destroyed.
"""

from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from cpd.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.landings import LandingBook
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.details import ReceiversPool, decode_process
from kvtransfer.nixl.link import Link
from kvtransfer.nixl.process import ProcessIdentity, gone
from kvtransfer.nixl.writer import Writer
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving


class Incoming(Link):
    """Lets the transport at the other end write pages into one pool.

    Args:
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
        host: str,
        book: LandingBook,
        memory: PoolMemory,
        key: bytes,
    ) -> None:
        self._host = host
        self._book = book
        self._memory = memory
        self._receiving = Receiving(book, self, key, memory.page_bytes)
        self._sender: ProcessIdentity | None = None  # once it may be writing, and if it is one of this machine
        self._agent: Agent | None = None
        self._thread: Writer | None = None
        self._greeted = self._open = False
        super().__init__(reader, writer, on_gone)

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Bye():
                self._through()
                raise TransferError("the connection was closed by the sender")
            case frames.Sent():
                self._receiving.arrived(frame.batch)
                self._send(frames.Done(frame.batch))
                if self.failed and not self._receiving.busy:
                    self._through()
            case _ if self.failed:
                pass  # only what tells that pages are through matters any more
            case frames.Hello() if not self._greeted:
                self._greet(frame)
            case frames.Offer() if self._open:
                self._admit(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _through(self) -> None:
        self._receiving.through()
        self._ended.set()

    def _greet(self, hello: frames.Hello) -> None:
        self._greeted = True
        if (rejection := self._receiving.rejection(hello)) is not None:
            self._send(rejection)
            raise frames.refusal(rejection)
        own, sender = ProcessIdentity.own(), decode_process(hello.details) if hello.details else None
        if sender is not None and own.shares_memory_with(sender):
            self._sender = sender
            self._welcome(own)
        else:
            self._thread = Writer("kvtransfer-nixl-receive")
            self._thread.open(self._make_agent, self._prepared)

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

    def _welcome(self, through: ProcessIdentity | bytes) -> None:
        self._open = True
        pool = ReceiversPool(self._memory.pointer, self._memory.num_pages, through)
        self._send(frames.Welcome(pool.encode()))

    def _admit(self, offer: frames.Offer) -> None:
        landing = self._receiving.admit(offer)
        if isinstance(landing, frames.Refuse):
            self._send(landing)
        else:
            self._send(frames.Grant(offer.batch, tuple(landing.pages[index] for index, _ in offer.runs)))

    def _patience(self) -> float | None:
        return self._receiving.patience(is_open=self._open)

    def _failing(self, reason: str) -> None:
        self._send(frames.Stop(reason))
        self._book.give_up(self, reason)

    async def _settle(self, reason: str) -> None:
        if self._sender is not None and self._receiving.busy:
            await self._ended.wait()
            if self._receiving.busy:
                await gone(self._sender)
        if self._thread is not None:
            await self._thread.close()
        self._receiving.through()
        self._book.lost(self, reason)
