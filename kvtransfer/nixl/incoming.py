"""The receiver's end of a connection.

greeting ── Hello ──▶ preparing ── agent made ──▶ open ──▶ failed ── nothing can be written ──▶ gone
    └── wrong Hello ──────────────────────────────────────────▲

`failed` lasts until nothing that was granted is being written: every batch is done, or the sender has said Bye, or its
process has ended. Only a sender on another machine needs not be waited for. Then this side's NIXL agent is destroyed.
"""

import functools
import hmac
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from dataclasses import dataclass

from cpd.errors import StaleTransferError, TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.landings import BookedLanding, LandingBook, LandingState
from kvtransfer.nixl import wire
from kvtransfer.nixl.agent import Agent, options
from kvtransfer.nixl.link import GRACE_S, GREETING_S, STALL_S, Link
from kvtransfer.nixl.outgoing import WINDOW
from kvtransfer.nixl.process import ProcessIdentity, gone
from kvtransfer.nixl.writer import Writer


@dataclass(frozen=True, slots=True)
class _Batch:
    landing: BookedLanding
    num_pages: int


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
        self._key = key
        self._sender: ProcessIdentity | None = None  # once it may be writing, and if it is one of this machine
        self._agent: Agent | None = None
        self._thread: Writer | None = None
        self._open = False
        self._batches: dict[int, _Batch] = {}
        super().__init__(reader, writer, on_gone)

    def _handle(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Bye():
                self._through()
                raise TransferError("the connection was closed by the sender")
            case wire.Written() if frame.batch in self._batches:
                batch = self._batches.pop(frame.batch)
                self._book.finish(batch.landing, batch.num_pages)
                self._send(wire.Done(frame.batch))
                if self.failed and not self._batches:
                    self._through()
            case _ if self.failed:
                pass  # only what tells that pages are through matters any more
            case wire.Hello() if self._thread is None:
                self._greet(frame)
            case wire.Offer() if self._open and len(self._batches) < WINDOW and frame.batch not in self._batches:
                self._admit(frame)
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def _through(self) -> None:
        self._batches.clear()
        self._ended.set()

    def _greet(self, hello: wire.Hello) -> None:
        if not hmac.compare_digest(hello.key, self._key):
            self._reject(StaleTransferError("another transport has this address now"))
        elif hello.page_bytes != self._memory.page_bytes:
            sizes = f"the sender's pages have {hello.page_bytes} bytes, the receiver's {self._memory.page_bytes}"
            self._reject(TransferError(f"{sizes}: both must serve the same model and dtype"))
        else:
            local = ProcessIdentity.own().shares_memory_with(hello.process)
            self._sender = hello.process if local else None
            self._thread = Writer("kvtransfer-nixl-receive")
            self._thread.open(functools.partial(self._make_agent, local), functools.partial(self._prepared, local))

    def _reject(self, error: TransferError) -> None:
        self._send(wire.Reject(isinstance(error, StaleTransferError), str(error)))
        raise error

    def _make_agent(self, local: bool) -> Agent:
        self._agent = Agent(self._memory, options(self._host, local=local), progress=True)
        return self._agent

    def _prepared(self, local: bool, error: TransferError | None) -> None:
        if error is not None:
            self._send(wire.Reject(False, str(error)))
            self.fail(str(error))
        elif not self.failed:
            assert self._agent is not None
            self._open = True
            memory = self._memory
            self._send(wire.Welcome(local, self._agent.metadata(), memory.pointer, memory.num_pages))

    def _admit(self, offer: wire.Offer) -> None:
        try:
            landing = self._book.begin(self, offer.epoch, offer.reservation, offer.generation, offer.runs)
        except TransferError as error:
            self._send(wire.Refuse(offer.batch, isinstance(error, StaleTransferError), str(error)))
            return
        self._batches[offer.batch] = _Batch(landing, sum(count for _, count in offer.runs))
        self._send(wire.Grant(offer.batch, tuple(landing.pages[index] for index, _ in offer.runs)))

    def _patience(self) -> float | None:
        if not self._open:
            return GREETING_S
        if not self._batches:
            return None
        given_up = any(batch.landing.state is not LandingState.OPEN for batch in self._batches.values())
        return GRACE_S if given_up else STALL_S

    def _failing(self, reason: str) -> None:
        self._send(wire.Stop(reason))
        self._book.give_up(self, reason)

    async def _settle(self, reason: str) -> None:
        if self._sender is not None and self._batches:
            await self._ended.wait()
            if self._batches:
                await gone(self._sender)
        if self._thread is not None:
            await self._thread.close()
        self._batches.clear()
        self._book.lost(self, reason)
