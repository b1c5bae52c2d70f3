"""A worker as the policy sees it, and what its performance model predicts of it. Pure.

How a prompt is computed beside the worker's streams follows the worker's own rules (docs/architecture.md), as far as a
router needs to know them:

    nothing decodes     in steps of at most `token_budget` tokens on the whole device
    mixed               in the decodes' steps, as many tokens a step as keep it within `itl_ms`, MIN_CHUNK at least
    lanes               on a part of the device; the decodes go on, on the rest
    auto                what fits into one step mixed, else lanes, unless too few streams gain by it; a short prompt
                        goes along with the decodes and passes what is on the lane
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from cpd.perfmodel import PerfModel, Profile, ShareProfile, StepCost, TransferProfile, Work

MIN_CHUNK = 128
"""A worker's chunks are no smaller, whatever its streams' target."""

MAX_STRETCH = 2.0
"""Where no split of the device keeps the target, a decode step beside a prefill may take so many times as long."""

STREAMS_WORTH = 2.0
"""Auto: lanes are used where a prompt gets 1 + x times slower there, and at least this times x streams are spared."""

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


@dataclass(frozen=True, slots=True)
class Pace:
    """A prompt on a worker, from its first chunk on.

    Attributes:
        ms: Until it is computed.
        gap_ms: Between tokens of the streams beside it, meanwhile; 0: there are none.
        late_ms: What each of their tokens is late when that is over.
    """

    ms: float
    gap_ms: float = 0.0
    late_ms: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A worker that could take a request. It changes only when its worker's state does, `now` is told to those who ask.

    Attributes:
        worker_id: Its name.
        address: `host:port` of its gRPC server.
        model: Predicts its steps.
        page_bytes: Of one KV page.
        num_pages: Of its pool.
        free_pages: Those with nothing in them.
        cached_pages: Those with content that could be evicted.
        token_budget: Tokens of a step on the whole device at most.
        colocate: `mixed`, `lanes` or `auto`.
        decode_shares: Of the device, that its decode lane may have, ascending; empty: it has no lanes.
        itl_ms: Step that it plans for at most while its streams go on; 0: it has no target.
        idle_at: When the prompts that it has will be computed, in seconds of the clock that `now` is of.
        requests: Sequences, running and waiting.
        decodes: Those of them that decode.
        decode_context: Tokens that these attend to.
    """

    worker_id: str
    address: str
    model: PerfModel = NOMINAL
    page_bytes: int = 0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    token_budget: int = 512
    colocate: Literal["mixed", "lanes", "auto"] = "mixed"
    decode_shares: tuple[float, ...] = ()
    itl_ms: float = 0.0
    idle_at: float = 0.0
    requests: int = 0
    decodes: int = 0
    decode_context: int = 0

    def queue_ms(self, now: float) -> float:
        """Until the prompts that it has are computed."""
        return max(0.0, (self.idle_at - now) * 1e3)

    def wait_ms(self, tokens: int, now: float) -> float:
        """Until a prompt of so many uncached tokens that comes now begins to be computed."""
        queue_ms = self.queue_ms(now)
        return queue_ms if not queue_ms or tokens > self._passing else min(queue_ms, self._gap_ms)

    @cached_property
    def step_ms(self) -> float:
        """A step of the streams alone."""
        return self.model.step_ms(self._streams)

    @cached_property
    def crowded_ms(self) -> float:
        """A decode step when all requests decode."""
        return self.model.step_ms(Work.decode(self.requests, self._crowded_context))

    @cached_property
    def stream_ms(self) -> float:
        """What one more stream like those there makes all of them wait in each step, itself included."""
        context = self._crowded_context // max(1, self.requests)
        grown_ms = self.grown_ms(context)
        return grown_ms + self.requests * max(0.0, grown_ms - self.crowded_ms)

    @cached_property
    def token_ms(self) -> float:
        """Of computing one token of a long prompt."""
        return self.model.step_ms(Work.prefill(self.token_budget)) / self.token_budget

    def grown_ms(self, context: int, streams: int = 1) -> float:
        """A decode step when all requests decode, and some more streams of so many tokens each."""
        together = self._crowded_context + context * streams
        return self.model.step_ms(Work.decode(self.requests + streams, together))

    def prefill(self, tokens: int, before: int) -> Pace:
        """Computing `tokens` tokens of a prompt after `before` cached ones, beside the streams there are."""
        if not self.decodes:
            return Pace(self._chunks_ms(tokens, before, self.token_budget))
        lanes = self._lanes
        if lanes is None or (self.colocate == "auto" and tokens <= self._chunk):
            return self._mixed(tokens, before)
        ms = self._chunks_ms(tokens, before, self.token_budget, lanes[0], self._streams)
        gap_ms = self._gap_ms
        return Pace(ms, gap_ms, ms * max(0.0, 1 - self.step_ms / gap_ms) if gap_ms else 0.0)

    def _mixed(self, tokens: int, before: int) -> Pace:
        chunk = min(tokens, self._chunk)
        ms = self._chunks_ms(tokens, before, chunk, along=self._streams)
        gap_ms = self.model.step_ms(self._streams + Work.prefill(chunk, before + tokens - chunk))
        return Pace(ms, gap_ms, max(0.0, ms - -(-tokens // chunk) * self.step_ms))

    def _chunks_ms(
        self,
        tokens: int,
        before: int,
        chunk: int,
        share: float = 1.0,
        beside: Work | None = None,
        along: Work | None = None,
    ) -> float:
        """Time of a prompt's chunks. All parts of the model but the curve over tokens are linear, so that the middle
        one of equal chunks has their mean time."""
        count, rest = divmod(tokens, chunk)
        ms = 0.0
        if count:
            work = Work.prefill(chunk, before + (count - 1) * chunk // 2)
            ms = count * self.model.step_ms(work + along if along else work, share, beside)
        if rest:
            work = Work.prefill(rest, before + count * chunk)
            ms += self.model.step_ms(work + along if along else work, share, beside)
        return ms

    @cached_property
    def _streams(self) -> Work:
        return Work.decode(self.decodes, self.decode_context)

    @cached_property
    def _crowded_context(self) -> int:
        """Tokens of all requests, taking those that do not decode for like the others."""
        return self.decode_context * self.requests // self.decodes if self.decodes else 0

    @cached_property
    def _chunk(self) -> int:
        """Prefill tokens in one step with the streams."""
        most = max(1, self.token_budget - self.decodes)
        if not self.itl_ms:
            return most
        streams, model = self._streams, self.model
        fitting = bisect_right(
            range(1, most + 1), self.itl_ms, key=lambda tokens: model.step_ms(streams + Work.prefill(tokens))
        )
        return max(fitting, min(most, MIN_CHUNK))

    @cached_property
    def _gap_ms(self) -> float:
        """A decode step beside a long prompt on the lane."""
        share = self._lanes[1] if self._lanes else 1.0
        return self.model.step_ms(self._streams, share, Work.prefill(self.token_budget))

    @cached_property
    def _passing(self) -> int:
        """Tokens of a prompt that need not wait for the lane."""
        if not self.decodes or self._lanes is None or self.colocate == "lanes":
            return 0
        share, model, streams = self._lanes[1], self.model, self._streams
        chunk, enough = Work.prefill(self.token_budget), max(self.itl_ms, self._gap_ms)
        return bisect_right(
            range(1, max(1, self.token_budget - self.decodes) + 1),
            enough,
            key=lambda tokens: model.step_ms(streams + Work.prefill(tokens), share, chunk),
        )

    @cached_property
    def _lanes(self) -> tuple[float, float] | None:
        """Shares of the prefill and the decode lane; None: prompts go into the decodes' steps."""
        shares = self.decode_shares
        if self.colocate == "mixed" or not shares:
            return None
        streams, model, chunk = self._streams, self.model, Work.prefill(self.token_budget)
        enough = max(self.itl_ms, MAX_STRETCH * self.step_ms)
        share = next((one for one in shares if model.step_ms(streams, one, chunk) <= enough), shares[-1])
        if self.colocate == "auto":
            slower = model.step_ms(chunk, 1 - share, streams) / model.step_ms(streams + chunk) - 1
            if self.decodes < STREAMS_WORTH * slower:
                return None
        return 1 - share, share
