"""One Fill that another decode worker has from this one's cache.

States, and what is held in each:

    CONNECTING  connects to the caller's pool; has blocks come back from    nothing
                host memory
    READY       FillReady is out, with how many blocks are here             pins of all their pages
    PUSHING     pages are in flight                                         pins of pages in flight
    ENDED       FillReleased or FillRefused is out                          nothing

The caller answers FillReady at once (it never waits for pages), so that pins are held for as long as a transfer takes.
"""

from enum import Enum, auto

from cpd.common.blocks import HASH_BYTES, split_hashes
from cpd.common.errors import TransferError
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer
from worker.convert import InvalidRequestError
from worker.delivery import Outlet
from worker.fills import FillStoppedError, Send, ServedFill
from worker.peers import Peers


class State(Enum):
    """See the table above."""

    CONNECTING = auto()
    READY = auto()
    PUSHING = auto()
    ENDED = auto()


class ServedPrefix(ServedFill):
    """See the module's table.

    Args:
        start: What the caller sent, with `cache_only`.
        send: Sends it an event.
        outlet: By which pages leave.

    Attributes:
        state: Where it is.

    Raises:
        InvalidRequestError: The message makes no sense.
    """

    def __init__(self, name: str, start: pb.FillStart, send: Send, *, outlet: Outlet, peers: Peers) -> None:
        super().__init__(name, start, send, outlet)
        if not start.block_hashes or len(start.block_hashes) % HASH_BYTES:
            raise InvalidRequestError(f"block_hashes must hold {HASH_BYTES} bytes a block")
        self.state = State.CONNECTING
        self._hashes = split_hashes(start.block_hashes)
        self._peers = peers
        self._pinned: list[int] = []

    async def _run(self) -> pb.FillEvent:
        self._send_progress()
        try:
            async with self._peers.use(self._address) as connecting:
                peer = await self._unless_stopped(connecting)
                await self._outlet.engine.call(lambda engine: engine.load(self._hashes))
                await self._outlet.engine.poll(lambda engine: None if engine.loading(self._hashes) else True)
                self._pinned = await self._outlet.engine.call(lambda engine: engine.pin_cached(self._hashes))
                if not self._pinned:
                    return self._refuse("nothing of it can be had from this cache")
                return await self._serve(peer)
        except FillStoppedError as stopped:
            return self._release(0, str(stopped))
        except TransferError as error:
            return self._refuse(str(error))

    async def _serve(self, peer: Peer) -> pb.FillEvent:
        self.state = State.READY
        self._send(pb.FillEvent(ready=pb.FillReady(blocks=len(self._pinned))))
        try:
            delivery = self._deliver_to(peer, await self._unless_stopped(self.landing), len(self._pinned))
        except (FillStoppedError, InvalidRequestError) as stopped:
            self._clear_up()
            return self._release(0, str(stopped))
        self.state = State.PUSHING
        pages, self._pinned = self._pinned, []
        delivery.push(0, pages)
        return await self._finish(delivery)

    @property
    def _only_sends(self) -> bool:
        return self.state is State.PUSHING

    def _clear_up(self) -> None:
        pages, self._pinned = self._pinned, []
        self._outlet.unpin(pages)

    def _ended(self) -> None:
        self.state = State.ENDED
