"""A worker as the policy sees it, and what its performance model predicts of it. Pure."""

from dataclasses import dataclass, field
from functools import cached_property

from cpd.colocation import Beside, Colocation, Pace
from cpd.perfmodel import PerfModel, Profile, ShareProfile, StepCost, TransferProfile, Work

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
"""Stands in for a worker that does not say what it predicts with. Token counts weigh against each other as usual."""

LATE_MS = 50.0
"""A first token that was predicted for now and comes so much later is twice as late as it should be."""

LEAST_MS = 1e-3
"""Steps take so long at least, where speeds are compared: simulated ones may take no time."""

NOTHING_KNOWN = Beside(Colocation(NOMINAL))


@dataclass(frozen=True)
class Candidate:
    """A worker that could take a request. It changes only when its worker's state does, `now` is told to those who ask.

    Attributes:
        worker_id: Its name.
        address: `host:port` where it takes sessions and fills.
        beside: Its streams, and what they and prompts make of each other.
        page_bytes: Of one KV page.
        host_page_ms: Of copying one back from its host memory.
        num_pages: Of its pool.
        free_pages: Those with nothing in them.
        cached_pages: Those with content that could be evicted.
        idle_at: When the prompts that it has will be computed, in seconds of the clock that `now` is of; not the late
            ones.
        passed_ms: What those take then: a prompt that can be in time passes them.
        requests: Sequences, running and waiting.
        max_num_seqs: Those of them that run at a time, at most; 0: as many as there are.
        stretch: Its decode steps lately took so many times as long as without the prompts beside them.
        late: Its first tokens come so many times later than predicted; its steps are reckoned with as so much longer.
    """

    worker_id: str
    address: str
    beside: Beside = field(default=NOTHING_KNOWN)
    page_bytes: int = 0
    host_page_ms: float = 0.0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    idle_at: float = 0.0
    passed_ms: float = 0.0
    requests: int = 0
    max_num_seqs: int = 0
    stretch: float = 1.0
    late: float = 1.0

    @property
    def decodes(self) -> int:
        """Sequences that decode."""
        return self.beside.decodes.seqs

    @property
    def token_budget(self) -> int:
        """Tokens of a step on the whole device at most."""
        return self.beside.rule.max_tokens

    def queue_ms(self, now: float) -> float:
        """Until the prompts that it has are computed."""
        return max(0.0, (self.idle_at - now) * 1e3) + self._late_ms

    def wait_ms(self, tokens: int, now: float) -> float:
        """Until a prompt of so many uncached tokens that comes now begins to be computed."""
        queue_ms = self.queue_ms(now)
        short = queue_ms and tokens <= self.beside.passing
        return min(queue_ms, self.beside.gap_ms + self._late_ms) if short else queue_ms

    def seats_ms(self, streams: int, output: int) -> float:
        """Until so many more sequences may run, if those there have about so many tokens each, and end one by one."""
        beyond = self.requests + streams - self.max_num_seqs
        if beyond <= 0 or not self.max_num_seqs:
            return 0.0
        return beyond / self.max_num_seqs * output * self.beside.alone_ms

    def prefill(self, tokens: int, before: int) -> Pace:
        """Computing `tokens` tokens of a prompt after `before` cached ones, beside the streams there are."""
        return self.beside.pace(tokens, before)

    def transfer_ms(self, pages: int) -> float:
        """Receiving so many pages."""
        return self.beside.rule.model.transfer_ms(pages * self.page_bytes)

    @cached_property
    def crowded_ms(self) -> float:
        """A decode step when all requests decode."""
        return self.grown_ms(0, 0)

    @cached_property
    def stream_ms(self) -> float:
        """What one more stream like those there makes all of them wait in each step, itself included."""
        context = self._crowded_context // max(1, self.requests)
        grown_ms = self.grown_ms(context)
        return grown_ms + self.requests * max(0.0, grown_ms - self.crowded_ms)

    @property
    def token_ms(self) -> float:
        """Of computing one token of a long prompt."""
        return self.beside.token_ms

    @cached_property
    def lone_ms(self) -> float:
        """A decode step with one stream."""
        return self.beside.step_ms(Work.decode(1, 1))

    @cached_property
    def speed(self) -> float:
        """Of decoding, to be compared with that of others."""
        return 1 / max(self.lone_ms, LEAST_MS)

    def grown_ms(self, context: int, streams: int = 1) -> float:
        """A decode step when all requests decode, and some more streams of so many tokens each."""
        together = self._crowded_context + context * streams
        return self.stretch * self.beside.step_ms(Work.decode(self.requests + streams, together))

    @property
    def _late_ms(self) -> float:
        """Whatever a worker says, it may take no time at all."""
        return (self.late - 1.0) * LATE_MS

    @cached_property
    def _crowded_context(self) -> int:
        """Tokens of all requests, taking those that do not decode for like the others."""
        decodes = self.beside.decodes
        return decodes.context * self.requests // decodes.seqs if decodes.seqs else 0
