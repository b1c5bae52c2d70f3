"""One prefix fetch, as the worker that has the blocks cached sees it.

States, and what is held in each:

    CONNECTING  connects to the caller's pool; loads blocks from host       nothing
                memory
    READY       PrefillReady is sent, with the number of blocks here        pins of all their pages
    SENDING     pages are in flight                                         pins of pages in flight
    ENDED       PrefillReleased or PrefillRefused is sent                   nothing

The caller answers PrefillReady at once (it never waits for pages), so pins last only as long as the transfer.
"""

from enum import Enum, auto

from cpd.common.blocks import HASH_BYTES, split_hashes
from cpd.common.errors import TransferError
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.base import Peer
from worker.page_sender import SourcePool
from worker.pool_connections import PoolConnections
from worker.prefill_server import PrefillStoppedError, Send, ServedPrefill
from worker.wire_format import InvalidRequestError


class PrefixJobState(Enum):
    """See the module's table."""

    CONNECTING = auto()
    READY = auto()
    SENDING = auto()
    ENDED = auto()


class PrefixJob(ServedPrefill):
    """See the module's table. Arguments are those of `ServedPrefill`, and the connections to other pools.

    Raises:
        InvalidRequestError: The message is invalid.
    """

    def __init__(
        self, name: str, start: pb.PrefillStart, send: Send, *, source: SourcePool, pools: PoolConnections
    ) -> None:
        super().__init__(name, start, send, source)
        if not start.block_hashes or len(start.block_hashes) % HASH_BYTES:
            raise InvalidRequestError(f"block_hashes must hold {HASH_BYTES} bytes a block")
        self.state = PrefixJobState.CONNECTING
        self._hashes = split_hashes(start.block_hashes)
        self._pools = pools
        self._pinned: list[int] = []

    async def _run(self) -> pb.PrefillEvent:
        self._send_progress()
        try:
            async with self._pools.use(self._address) as connecting:
                peer = await self._unless_stopped(connecting)
                engine = self._source.engine
                await engine.call(lambda engine: engine.load(self._hashes))
                await engine.poll(lambda engine: None if engine.loading(self._hashes) else True)
                self._pinned = await engine.call(lambda engine: engine.pin_cached(self._hashes))
                if not self._pinned:
                    return self._refuse("this cache can provide none of the blocks")
                return await self._serve(peer)
        except (PrefillStoppedError, TransferError) as error:
            return self._release(0, str(error))

    async def _serve(self, peer: Peer) -> pb.PrefillEvent:
        self.state = PrefixJobState.READY
        self._send(pb.PrefillEvent(ready=pb.PrefillReady(blocks=len(self._pinned))))
        try:
            sender = self._sender(peer, await self._unless_stopped(self.landing), len(self._pinned))
        except (PrefillStoppedError, InvalidRequestError) as stopped:
            self._clear_up()
            return self._release(0, str(stopped))
        self.state = PrefixJobState.SENDING
        pages, self._pinned = self._pinned, []
        sender.send(0, pages)
        return await self._finish(sender)

    @property
    def _only_sends(self) -> bool:
        return self.state is PrefixJobState.SENDING

    def _clear_up(self) -> None:
        pages, self._pinned = self._pinned, []
        self._source.unpin(pages)

    def _ended(self) -> None:
        self.state = PrefixJobState.ENDED
