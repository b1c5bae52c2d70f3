"""One attempt to fetch a prompt's first blocks from another decode worker's cache.

It has the states of `decode_worker.remote_prefill`, with these differences:

- The other worker says how many blocks it has, and keeps them until the request ends. Pages are reserved for those that
  this worker lacks.
- The reservation never waits for free pages: two workers that fetch from each other and wait could wait for ever.
  Blocks loaded from host memory before have their pages already.
- There are no first tokens. COMPLETE means that the pages have arrived and belong to this worker's cache.

Whatever the outcome, the request continues with what is in the cache.
"""

from cpd.rpc import cpd_pb2 as pb
from decode_worker.prefill_outcome import Failure, Outcome, Status
from decode_worker.remote_prefill import RemotePrefill


class PrefixFetch(RemotePrefill):
    """See the module's text; the arguments are those of `RemotePrefill`."""

    @property
    def _answered(self) -> bool:
        return True

    async def _reserve(self, ready: pb.PrefillReady) -> None:
        if 0 < ready.blocks <= len(self._request.block_hashes):
            self._await_pages(self._landings.reserve_now(self._request, ready.blocks))
        else:
            await self._fail(Failure.PROTOCOL, f"it has {ready.blocks} of {len(self._request.block_hashes)} blocks")

    async def _activate(self) -> None:
        reservation, request = self._reservation, self._request
        assert reservation is not None
        self._tell_landed(reservation)
        await self._context.engine.call(lambda engine: engine.landings.add_to_cache(reservation, request))
        self._reservation = None
        self._decide(Outcome(Status.COMPLETE))

    def _start(self) -> pb.PrefillStart:
        context = self._context
        return pb.PrefillStart(
            decode_worker_id=context.worker_id,
            fingerprint=context.fingerprint,
            block_hashes=b"".join(self._request.block_hashes),
            transport=context.transport.name,
            transport_address=context.transport.address,
            common_address=context.transport.common_address,
            checksums=context.settings.kv_checksum,
            cache_only=True,
            traceparent=self._traceparent,
        )
