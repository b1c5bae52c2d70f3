"""A worker as the placement policy sees it, with predictions from its performance model. Pure."""

from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from cpd.performance.colocation import Colocation, PrefillEstimate, PrefillEstimator
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, TransferProfile, Work

NOMINAL = PerfModel(
    Profile(
        schema="cpd-profile/1",
        source="roofline",
        device="nominal",
        model="nominal",
        shares=(
            ShareProfile(
                share=1.0,
                decode=StepCost(tokens=(1, 256, 8192), tokens_ms=(8.0, 12.0, 330.0), context_ms=4e-5),
                prefill=StepCost(tokens=(1, 256, 8192), tokens_ms=(10.0, 14.0, 330.0), context_ms=4e-5, pair_ms=2e-6),
            ),
        ),
        transfer=TransferProfile(),
    )
)
"""Performance model for a worker without a profile, so that token counts have usual relative weights."""

MIN_STEP_MS = 1e-3
"""Lower bound on a step time when speeds are compared: simulated steps may take no time."""

UNKNOWN = PrefillEstimator(Colocation(NOMINAL))

ASSUMED_WAKE_MS = 15_000.0
"""Time that a sleeping worker is assumed to take until it serves, as long as it was not asked to wake and has promised
nothing: that to displace another model, with the default settings."""


@dataclass
class Candidate:
    """A worker that could take a request. What depends on the time has an argument `now`, in seconds.

    Attributes:
        worker_id: The worker's name.
        address: `host:port` of its session port.
        estimator: Its streams, and how they and prompts slow each other down.
        page_bytes: Size of a KV page.
        host_page_ms: Time to load a page from host memory.
        num_pages: Size of its KV pool.
        free_pages: Empty pages.
        cached_pages: Pages with content that could be evicted.
        idle_at: Time at which its prompts will be computed, except overdue ones, on the clock of `now`.
        overdue_ms: Time to compute its overdue prompts. A prompt that can meet its deadline goes before them.
        requests: Number of its sequences, running and waiting.
        max_num_seqs: Number of batch slots; 0 means no limit.
        decode_slowdown: Duration of its recent decode steps, relative to predicted steps without a prefill.
        overhead_ms: What is added to the TTFT of every prompt that it computes: messages, mostly.
        ttft_factor: Factor of its predicted prefills, learned from its first tokens. `idle_at` includes it.
        alone: It has no request, as far as is known; `overhead_ms` and `ttft_factor` were learned from such prompts.
        serving: Its model is on its device, and stays there. Others take requests, too: they wait for the next wake.
        serves_at: For one that is not serving, the time at which it serves at the latest, as it promised, on the clock
            of `now`; infinite: it has promised nothing.
    """

    worker_id: str
    address: str
    estimator: PrefillEstimator = field(default=UNKNOWN)
    page_bytes: int = 0
    host_page_ms: float = 0.0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    idle_at: float = 0.0
    overdue_ms: float = 0.0
    requests: int = 0
    max_num_seqs: int = 0
    decode_slowdown: float = 1.0
    overhead_ms: float = 0.0
    ttft_factor: float = 1.0
    alone: bool = False
    serving: bool = True
    serves_at: float = inf

    @property
    def decodes(self) -> int:
        """Number of streams: sequences that decode."""
        return self.estimator.decodes.seqs

    @property
    def token_budget(self) -> int:
        """Upper bound on the tokens of a step on the whole device."""
        return self.estimator.colocation.max_tokens

    def queue_ms(self, now: float) -> float:
        """Time until its prompts are computed, not counting overdue ones."""
        return max(0.0, (self.idle_at - now) * 1e3)

    def wake_ms(self, now: float) -> float:
        """Time until it serves, as promised or assumed; 0 if it does. Prompts wait that long, and then for others."""
        if self.serving:
            return 0.0
        return ASSUMED_WAKE_MS if self.serves_at == inf else max(0.0, (self.serves_at - now) * 1e3)

    def wait_ms(self, tokens: int, before: int, now: float) -> float:
        """Time until the prefill of `tokens` tokens after `before` cached ones would begin."""
        queue_ms = self.queue_ms(now)
        joins_decodes = queue_ms and self.estimator.joins_decodes(tokens, before)
        return min(queue_ms, self.estimator.gap_ms) if joins_decodes else queue_ms

    def batch_slot_ms(self, streams: int, output: int) -> float:
        """Time until `streams` more sequences have batch slots, if all have `output` tokens and they end evenly."""
        excess = self.requests + streams - self.max_num_seqs
        if excess <= 0 or not self.max_num_seqs:
            return 0.0
        return excess / self.max_num_seqs * output * self.estimator.alone_ms

    def prefill(self, tokens: int, before: int) -> PrefillEstimate:
        """Estimates the prefill of `tokens` tokens after `before` cached ones, while the worker's streams decode."""
        ms, gap_ms, delay_ms = self.estimator.estimate(tokens, before)
        return PrefillEstimate(self.ttft_factor * ms, gap_ms, self.ttft_factor * delay_ms)

    def transfer_ms(self, pages: int) -> float:
        """Time to receive pages."""
        return self.estimator.colocation.model.transfer_ms(pages * self.page_bytes)

    @cached_property
    def all_decode_ms(self) -> float:
        """Duration of a decode step once all requests decode."""
        return self.grown_step_ms(0, 0)

    @cached_property
    def added_stream_ms(self) -> float:
        """Step time of one more stream of average length, plus the time it adds to a step of each other stream."""
        context = self._all_context // max(1, self.requests)
        grown_ms = self.grown_step_ms(context)
        return grown_ms + self.requests * max(0.0, grown_ms - self.all_decode_ms)

    @property
    def token_ms(self) -> float:
        """Time to compute one token of a long prompt."""
        return self.ttft_factor * self.estimator.token_ms

    @property
    def lone_step_ms(self) -> float:
        """Duration of a decode step with one stream."""
        return self.estimator.lone_step_ms

    @cached_property
    def speed(self) -> float:
        """Decode speed, to compare workers."""
        return 1 / max(self.lone_step_ms, MIN_STEP_MS)

    def grown_step_ms(self, context: int, streams: int = 1) -> float:
        """Duration of a decode step once all requests decode, and `streams` more with `context` tokens each."""
        together = self._all_context + context * streams
        return self.decode_slowdown * self.estimator.step_ms(Work.decode(self.requests + streams, together))

    @property
    def _all_context(self) -> int:
        """Tokens of all requests. Requests that do not decode yet count like an average stream."""
        decodes = self.estimator.decodes
        return decodes.context * self.requests // decodes.seqs if decodes.seqs else 0
