"""The cost of each way to serve a request, predicted in ms.

An option is a combined worker that decodes, and a way to compute the prompt: the same worker does it (local), perhaps
after fetching the first blocks from another combined worker's cache, or a prefill worker does it (remote). The cost of
an option is the delay to this user plus the delay to all others:

    cost_ms = wake_ms               until the workers serve, if one of them sleeps
            + wait_ms               until the prefill starts: queue, batch slot, loading and fetching cached blocks
            + prefill_ms            computing the uncached tokens
            + handoff_ms            what the way there and back adds; with the three above, this user's TTFT
            + first_gap_ms          what the transfer of pages adds to the gap after the first token
            + decode_ms             choices · horizon · itl_ms: this user's decode steps
            + interference_ms       requests · horizon · (itl_ms - all_decode_ms): longer steps for all other streams
            + stall_ms              decodes · delay_ms: delay of the other streams' tokens when a local prefill ends
            + queued_behind_ms      behind · (prefill_ms + fetch_ms): delay of prompts that arrive meanwhile
            + eviction_ms           evicted_reuse · (missing_pages - free_pages) · page_ms: computing them again
            + imbalance_ms          excess · horizon · lone_step_ms: requests beyond the worker's share
            + slo_violation_ms      of this user's TTFT, and of every stream's gaps; see `_violation`
            + late_ms               (late_weight - 1) · what the TTFT is beyond its target

The four terms from `first_gap_ms` to `stall_ms` are delays of later tokens. They count `gap_weight` times. `requests`
are the sequences that the combined worker has already, `decodes` those of them that decode, `horizon` is the setting
`horizon_tokens` or the request's limit, `evicted_reuse` is learned, and `excess` counts the requests beyond
`balanced_share` of the worker's share. `cpd/common/policy_settings.py` describes the settings.

`behind` is the number of prompts that wait while this one is computed (`policy.QueuedBehind`). A worker is modelled as
a queue with one server, where a customer that waits for w and takes x delays all others together by
x · λ / (1 - ρ) · (w + x / 2) (Haviv and Ritov, Externalities, tangible externalities and queue disciplines, 1998).

A prompt that misses its target is served after all that can meet theirs. So nobody is behind it, and its delay beyond
the target counts only `LATE_WEIGHT` times: it goes where it harms others the least, which is a prefill worker if there
is one, and not where it would take the time and the cached pages of prompts that can be in time.

The terms are the fields of `Cost`; `GET /requests/{id}` shows them.
"""

from bisect import bisect_right
from math import inf
from typing import NamedTuple

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.common.policy_settings import PolicySettings
from router.placement.candidate import Candidate
from router.placement.policy import Cost, Option, Placement, QueuedBehind, Situation

LATE_WEIGHT = 0.05
"""Weight of a first token's delay beyond its target. It decides between equal options: the shorter queue wins."""


class CachedPart(NamedTuple):
    """The part of a prompt that a worker has cached.

    Attributes:
        tokens: Cached tokens; at least one token of the prompt is left to compute.
        host_tokens: The part of `tokens` that is loaded from host memory.
        load_ms: Time to load it.
        missing_pages: Pages of the prompt that the worker must allocate, including those to load.
    """

    tokens: int
    host_tokens: int
    load_ms: float
    missing_pages: int


class PlacementQuery:
    """A prompt to place, with what all its options share.

    Attributes:
        horizon: Tokens of each choice over which delays of later tokens are counted.
        safe_ttft_ms: Time to first token up to which nothing is late, or close to it.
        safe_itl_ms: The same for the gaps of a stream.
    """

    def __init__(self, seen: Situation, settings: PolicySettings) -> None:
        prompt = seen.prompt
        self.prompt = prompt
        self.targets = seen.targets
        self.settings = settings
        self.now = seen.now
        self.horizon = min(prompt.output_tokens, settings.horizon_tokens)
        # read for each worker
        self.behind_combined, self.behind_prefill = seen.behind_combined, seen.behind_prefill
        self._gap_weight, self._min_balanced = settings.gap_weight, settings.min_balanced
        self._evicted_reuse = seen.evicted_reuse
        self.safe_ttft_ms = settings.safe_share * seen.targets.slo_ttft_ms
        self._ttft_miss_ms = settings.ttft_miss * seen.targets.slo_ttft_ms
        self.safe_itl_ms = settings.safe_share * seen.targets.slo_itl_ms if seen.targets.slo_itl_ms else inf
        self._itl_miss_ms = settings.itl_miss * seen.targets.slo_itl_ms
        requests = prompt.choices + sum([worker.requests for worker in seen.combined])
        self._share_by_speed = settings.balanced_share * requests / sum([worker.speed for worker in seen.combined])
        self._prefixes = seen.cached
        self._output_pages = prompt.choices * blocks_for(min(prompt.output_tokens, prompt.expected_output))
        self._nothing = CachedPart(0, 0, 0.0, blocks_for(prompt.tokens))
        self._parts: dict[str, CachedPart] = {}

    def cached(self, worker: Candidate) -> CachedPart:
        """The part of the prompt that the worker has cached."""
        name = worker.worker_id
        if name not in self._prefixes.cached:
            return self._nothing
        if name not in self._parts:
            self._parts[name] = self._cached_part(worker)
        return self._parts[name]

    def may_be_local(self, worker: Candidate) -> bool:
        """The worker may compute the prompt even if there are prefill workers."""
        threshold = self.targets.long_prefill_tokens
        return threshold == "auto" or self.prompt.tokens - self.cached(worker).tokens <= threshold

    def may_be_remote(self, worker: Candidate) -> bool:
        """A prefill worker may compute the prompt for this worker."""
        return self.targets.long_prefill_tokens == "auto" or not self.may_be_local(worker)

    def guess_prefill_ms(self, worker: Candidate) -> float:
        """Cheap estimate of the cost of a remote prefill on this worker; cost_policy.py shortlists by it."""
        cached = self.cached(worker)
        uncached = self.prompt.tokens - cached.tokens
        queue_ms, prefill_ms = worker.queue_ms(self.now), uncached * worker.token_ms
        delayed = 1 + self.behind_prefill.number(queue_ms, prefill_ms)
        return worker.wake_ms(self.now) + queue_ms + cached.load_ms + delayed * prefill_ms

    def guess_local_ms(self, worker: Candidate) -> float:
        """Cheap estimate of the cost of a local prefill on this worker; cost_policy.py shortlists by it."""
        cached = self.cached(worker)
        return (
            max(worker.queue_ms(self.now), worker.batch_slot_ms(self.prompt.choices, self.prompt.expected_output))
            + cached.load_ms
            + (self.prompt.tokens - cached.tokens) * self._token_cost_ms(worker)
        )

    def guess_decode_ms(self, worker: Candidate) -> float:
        """Cheap estimate of the cost of decoding on this worker; cost_policy.py shortlists by it."""
        decode_ms = self._gap_weight * self.horizon * worker.added_stream_ms
        return worker.wake_ms(self.now) + decode_ms + self.imbalance_ms(worker)

    def imbalance_ms(self, worker: Candidate) -> float:
        """The time of a lone stream's steps for each request that the worker would have beyond its share.

        It stands for what can't be predicted: how long streams and their sessions will be, and how many of them are
        lost if the worker dies.
        """
        share = max(self._min_balanced, self._share_by_speed * worker.speed)
        excess = worker.requests + self.prompt.choices - share
        return excess * self.horizon * worker.lone_step_ms if excess > 0 else 0.0

    def eviction_ms(self, worker: Candidate, missing_pages: int) -> float:
        """The expected time to compute again, or to load back, the pages that these would evict."""
        evicted = missing_pages - worker.free_pages
        if evicted <= 0:
            return 0.0
        page_ms = BLOCK_SIZE * self._token_cost_ms(worker)
        if worker.host_page_ms:
            page_ms = min(page_ms, worker.host_page_ms)
        return self._evicted_reuse * evicted * page_ms

    def late_ms(self, ttft_ms: float) -> float:
        """How far a time to first token is beyond its target."""
        return max(0.0, ttft_ms - self.targets.slo_ttft_ms)

    def ttft_violation_ms(self, ttft_ms: float) -> float:
        """The cost of a first token after this time."""
        return self._ttft_miss_ms * self._violation(ttft_ms, self.targets.slo_ttft_ms)

    def itl_violation_ms(self, gap_ms: float) -> float:
        """The cost of a stream with gaps of this length."""
        return self._itl_miss_ms * self._violation(gap_ms, self.targets.slo_itl_ms)

    def no_room_ms(self, worker: Candidate, missing_pages: int) -> float:
        """The cost of a late first token if the worker has too few pages: the request would wait until others end."""
        if worker.num_pages <= 0 or not worker.serving:  # a pool that sleeps is empty when it wakes
            return 0.0
        pages = missing_pages + self._output_pages
        return 0.0 if pages <= worker.free_pages + worker.cached_pages else self._ttft_miss_ms

    def with_overdue_ms(self, worker: Candidate, wait_ms: float, rest_ms: float) -> float:
        """The wait of a prompt. If it misses its deadline after this wait and `rest_ms`, overdue prompts go first."""
        in_time = wait_ms + rest_ms <= self.targets.slo_ttft_ms
        return wait_ms if in_time else wait_ms + worker.overdue_ms

    def _violation(self, ms: float, limit_ms: float) -> float:
        """How far a delay is from the safe part of a target to the target, from 0 to 1; a target of 0 is none."""
        safe = self.settings.safe_share
        if ms <= safe * limit_ms or not limit_ms:
            return 0.0
        return min(1.0, (ms / limit_ms - safe) / (1 - safe))

    def _token_cost_ms(self, worker: Candidate) -> float:
        """Rough sum of what all users wait for each prompt token that a combined worker computes."""
        delayed = 1 + self.behind_combined.number(worker.queue_ms(self.now), 0.0)
        return (delayed + self._gap_weight * worker.decodes) * worker.token_ms

    def _cached_part(self, worker: Candidate) -> CachedPart:
        name, tokens = worker.worker_id, self.prompt.tokens
        cached, host_tokens = self._tokens_in(self._prefixes.cached[name]), 0
        if name in self._prefixes.in_pages:
            in_pages = self._tokens_in(self._prefixes.in_pages[name])
            # blocks in host memory are loaded only if that is faster than computing them
            saved_ms = worker.prefill(tokens - in_pages, in_pages).ms - worker.prefill(tokens - cached, cached).ms
            if blocks_for(cached - in_pages) * worker.host_page_ms < saved_ms:
                host_tokens = cached - in_pages
            else:
                cached = in_pages
        missing = blocks_for(tokens) - (cached - host_tokens) // BLOCK_SIZE
        return CachedPart(cached, host_tokens, blocks_for(host_tokens) * worker.host_page_ms, missing)

    def _tokens_in(self, blocks: int) -> int:
        return min(blocks * BLOCK_SIZE, self.prompt.tokens - 1)


class PrefillPrediction:
    """Predictions for the prompt on a prefill worker.

    Attributes:
        wake_ms, wait_ms, prefill_ms, uncached_tokens, host_tokens: See `Cost` and `Option`.
        last_pages: Pages of the prompt's last chunk.
        least_ms: Lower bound on the cost of its options, without `DecodePrediction.shared_ms`.
    """

    def __init__(self, query: PlacementQuery, worker: Candidate) -> None:
        cached = query.cached(worker)
        self.worker = worker
        self.uncached_tokens = query.prompt.tokens - cached.tokens
        self.host_tokens = cached.host_tokens
        self.wake_ms = worker.wake_ms(query.now)
        self.wait_ms = worker.wait_ms(self.uncached_tokens, cached.tokens, query.now) + cached.load_ms
        self.prefill_ms = worker.prefill(self.uncached_tokens, cached.tokens).ms
        self.last_pages = blocks_for(min(self.uncached_tokens, worker.token_budget))
        ttft_ms = self.wait_ms + worker.overhead_ms + self.prefill_ms
        behind = query.behind_prefill.number(self.wait_ms, self.prefill_ms)
        # it may become late only by what the combined worker adds, and then nobody is behind it
        late_ms = max(ttft_ms, query.targets.slo_ttft_ms) - (1 - LATE_WEIGHT) * query.late_ms(ttft_ms)
        self.least_ms = min(ttft_ms + behind * self.prefill_ms, late_ms)


class DecodePrediction:
    """Predictions for the request on a combined worker, and its options there.

    Attributes:
        cached: The part of the prompt that the worker has cached.
        shared_ms: Sum of the terms that do not depend on where the prompt is computed, and of the worker's own wake.
    """

    def __init__(self, query: PlacementQuery, worker: Candidate) -> None:
        prompt, horizon, settings = query.prompt, query.horizon, query.settings
        self.worker = worker
        self.cached = query.cached(worker)
        self._query = query
        self._wake_ms = worker.wake_ms(query.now)
        self._batch_slot_ms = worker.batch_slot_ms(prompt.choices, prompt.expected_output)
        self._itl_ms = itl_ms = worker.grown_step_ms(prompt.tokens, prompt.choices)
        self._decode_ms = prompt.choices * horizon * itl_ms
        requests = worker.requests
        self._interference_ms = requests * horizon * max(0.0, itl_ms - worker.all_decode_ms) if requests else 0.0
        missing_pages = self.cached.missing_pages
        self._eviction_ms = query.eviction_ms(worker, missing_pages)
        self._imbalance_ms = query.imbalance_ms(worker)
        self._slo_violation_ms = query.no_room_ms(worker, missing_pages)
        if itl_ms > query.safe_itl_ms:
            self._slo_violation_ms += (prompt.choices + requests) * query.itl_violation_ms(itl_ms)
        self.shared_ms = self._wake_ms + settings.gap_weight * (self._decode_ms + self._interference_ms)
        self.shared_ms += self._eviction_ms + self._imbalance_ms + self._slo_violation_ms

    def local(self, source: Candidate | None = None, uncached: int | None = None) -> Option:
        """The option that the worker computes the prompt.

        Args:
            source: Another worker, all of whose cached blocks are fetched first.
            uncached: Tokens to compute; None: those that this worker, or the source, has not cached.
        """
        query, worker, cached = self._query, self.worker, self.cached
        prefix = cached if source is None else query.cached(source)
        tokens, decodes = query.prompt.tokens, worker.decodes
        uncached = tokens - prefix.tokens if uncached is None else uncached
        prefill = worker.prefill(uncached, tokens - uncached)
        wait_ms, fetch_ms = max(worker.wait_ms(uncached, tokens - uncached, query.now), self._batch_slot_ms), 0.0
        if source is None:
            wait_ms += cached.load_ms
        else:
            fetch_ms = worker.transfer_ms(blocks_for(prefix.tokens) - cached.tokens // BLOCK_SIZE)
            wait_ms = max(wait_ms, query.settings.handoff_ms + prefix.load_ms + cached.load_ms + fetch_ms)
        return self._option(
            prefix_source="" if source is None else source.worker_id,
            behind=query.behind_combined,
            uncached_tokens=uncached,
            host_tokens=prefix.host_tokens,
            wake_ms=self._wake_ms,
            wait_ms=query.with_overdue_ms(worker, wait_ms, self._wake_ms + prefill.ms),
            prefill_ms=prefill.ms,
            handoff_ms=worker.overhead_ms,
            fetch_ms=fetch_ms,
            stall_ms=decodes * prefill.delay_ms,
            slo_violation_ms=decodes * query.itl_violation_ms(prefill.gap_ms) if decodes else 0.0,
        )

    def remote(self, prefill: PrefillPrediction) -> Option:
        """The option that a prefill worker computes the prompt."""
        pages = self.cached.missing_pages - blocks_for(self.cached.host_tokens)
        # pages move while later chunks compute: after the first token those of the last chunk are left, at least
        last_ms = self.worker.transfer_ms(min(pages, prefill.last_pages))
        wait_ms = max(prefill.wait_ms, self._batch_slot_ms)
        wake_ms = max(prefill.wake_ms, self._wake_ms)
        return self._option(
            prefill=prefill.worker.worker_id,
            behind=self._query.behind_prefill,
            uncached_tokens=prefill.uncached_tokens,
            host_tokens=prefill.host_tokens,
            wake_ms=wake_ms,
            wait_ms=self._query.with_overdue_ms(prefill.worker, wait_ms, wake_ms + prefill.prefill_ms),
            prefill_ms=prefill.prefill_ms,
            handoff_ms=prefill.worker.overhead_ms,
            first_gap_ms=max(last_ms, self.worker.transfer_ms(pages) - prefill.prefill_ms),
        )

    def break_even(self, chosen: Option) -> int:
        """Uncached tokens up to which a local prefill costs no more than the chosen option.

        The worker gets it as `Submit.long_prefill_tokens`.
        """
        threshold = self._query.targets.long_prefill_tokens
        if threshold != "auto" and not chosen.prefix_source:
            return threshold
        tokens = self._query.prompt.tokens
        if not chosen.prefill and not chosen.prefix_source:
            return tokens
        sizes = range(1, tokens - self.cached.tokens, BLOCK_SIZE)
        fitting = bisect_right(sizes, chosen.cost_ms, key=lambda uncached: self.local(uncached=uncached).cost_ms)
        return sizes[fitting - 1] if fitting else 0

    def _option(
        self,
        *,
        behind: QueuedBehind,
        uncached_tokens: int,
        host_tokens: int,
        wake_ms: float,
        wait_ms: float,
        prefill_ms: float,
        prefill: str = "",
        prefix_source: str = "",
        handoff_ms: float = 0.0,
        first_gap_ms: float = 0.0,
        fetch_ms: float = 0.0,
        stall_ms: float = 0.0,
        slo_violation_ms: float = 0.0,
    ) -> Option:
        query, computing_ms = self._query, prefill_ms + fetch_ms
        ttft_ms = wake_ms + wait_ms + prefill_ms + handoff_ms
        late_ms = 0.0
        if ttft_ms > query.safe_ttft_ms:
            slo_violation_ms += query.ttft_violation_ms(ttft_ms)
            late_ms = query.late_ms(ttft_ms)
        cost = Cost(
            wake_ms,
            wait_ms,
            prefill_ms,
            handoff_ms,
            first_gap_ms,
            decode_ms=self._decode_ms,
            interference_ms=self._interference_ms,
            stall_ms=stall_ms,
            queued_behind_ms=0.0 if late_ms else behind.number(wait_ms, computing_ms) * computing_ms,
            eviction_ms=self._eviction_ms,
            imbalance_ms=self._imbalance_ms,
            slo_violation_ms=self._slo_violation_ms + slo_violation_ms,
            late_ms=(LATE_WEIGHT - 1) * late_ms,
        )
        gaps_ms = first_gap_ms + self._decode_ms + self._interference_ms + stall_ms
        return Option(
            self.worker.worker_id,
            prefill,
            prefix_source,
            uncached_tokens,
            host_tokens,
            ttft_ms,
            self._itl_ms,
            gaps_ms,
            sum(cost) + (query.settings.gap_weight - 1) * gaps_ms,
            cost,
        )


def placement_of(
    seen: Situation, settings: PolicySettings, decode: Candidate, prefill: Candidate | None = None
) -> Placement:
    """Returns the placement on these workers, with predictions. `decode` computes the prompt unless `prefill` does."""
    query = PlacementQuery(seen, settings)
    prediction = DecodePrediction(query, decode)
    option = prediction.remote(PrefillPrediction(query, prefill)) if prefill else prediction.local()
    return Placement(
        decode=decode,
        prefill=(prefill,) if prefill else (),
        prefix_source=None,
        long_prefill_tokens=0 if prefill else seen.prompt.tokens,
        replicates_prefix=seen.cached_blocks(decode) < max(seen.cached.cached.values(), default=0),
        predicted=(option,),
    )
