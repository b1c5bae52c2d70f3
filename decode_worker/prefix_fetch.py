"""One try to have a prompt's first blocks from another decode worker's cache.

It goes through the states of `decode_worker.remote_prefill`, with these differences. The other worker says how many
blocks it has (they stay there until the fill ends), and pages are reserved for those of them that are not here. That is
without a wait for pages, because two workers that had their caches read by each other, and waited for pages meanwhile,
could wait for ever; what comes back from host memory before has its pages already. There are no first tokens: COMPLETE
when the pages have arrived, and then they belong to the own cache.

Whatever the outcome, the request goes on with what is in the cache.
"""

from cpd.rpc import cpd_pb2 as pb
from decode_worker.landing_queue import Wanted
from decode_worker.outcome import Failure, Outcome, Status
from decode_worker.remote_prefill import Fill


class PrefixFill(Fill):
    """See the module's text; the arguments are those of `Fill`."""

    @property
    def _answered(self) -> bool:
        return True

    async def _reserve(self, ready: pb.FillReady) -> None:
        if not 0 < ready.blocks <= len(self._request.block_hashes):
            await self._fail(Failure.PROTOCOL, f"it has {ready.blocks} of {len(self._request.block_hashes)} blocks")
            return
        self._wanted = Wanted(self._request)
        self._await_pages(self._reservations.get_now(self._wanted, ready.blocks))

    async def _activate(self) -> None:
        reservation, request = self._reservation, self._request
        assert reservation is not None
        await self._node.engine.call(lambda engine: engine.fill_cache(reservation, request))
        self._reservation = None
        self._decide(Outcome(Status.COMPLETE))

    def _start(self) -> pb.FillStart:
        return pb.FillStart(
            decode_worker_id=self._node.worker_id,
            fingerprint=self._node.fingerprint,
            block_hashes=b"".join(self._request.block_hashes),
            transport=self._node.transport.name,
            transport_address=self._node.transport.address,
            checksums=self._node.settings.kv_checksum,
            cache_only=True,
        )
