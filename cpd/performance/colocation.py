"""Where prefills go while there are decodes: into one batch with them, or to the prefill lane. Reads no state.

Workers act by this rule, and routers predict with it what workers will do.

    mixed   one batch on the whole device; long prompts are chunked under the token budget
    lanes   prefills go to the prefill lane; the decode lane has the rest of the device
    auto    a prompt joins the decodes' batch if the step then stays within the ITL target, or takes no longer than a
            decode beside a prefill does. A longer one goes to the prefill lane, unless only few streams run and it is
            not worth it, or no split keeps the target and chunks in the decodes' batch make shorter gaps

While nothing decodes, everything runs on the whole device.

The token budget of a batch on the whole device is a setting, or follows from the performance model: with decodes, the
most tokens that keep the step within the ITL target; without, the fewest that prefill at nearly full speed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from cpd.performance.model import PerfModel, Work
from cpd.performance.split import LaneLoad, LaneSplit, lane_split

Mode = Literal["mixed", "lanes", "auto"]

MAX_SLOWDOWN = 2.0
"""Where no split keeps the ITL target, a decode beside a prefill takes at most this many times as long as alone, if a
split allows it."""

CHUNK_STEPS = 16
"""A chunk on the prefill lane takes about as long as this many decode steps beside it. The next one is queued, so that
the lane never idles; but if the decodes end first, the rest of the device idles until both are done."""

_CHUNK_UNIT = 64
MAX_CHUNK = 4096
"""Most tokens of a chunk on the prefill lane: its activations need memory."""

MIN_BUDGET = 128
"""The smallest budget for prefills beside decodes that follows from the model, as far as `max_tokens` allows: prompts
must go on even where the target can't be kept."""

MAX_BUDGET = 8192
"""The largest budget that follows from the model: a step's activations need memory."""

FULL_SPEED = 0.95
"""Nearly full speed of a prefill, as part of the most tokens a second."""

UNTARGETED_SLOWDOWN = 1.1
"""Without an ITL target a prefill may make a step of the decodes this much longer."""

ITL_MARGIN = 0.8
"""Steps are planned within this part of the ITL target: streams join and grow while a chunk runs, and a split can't be
changed before its end, and that of the next one."""

STREAMS_WORTH = 2.0
"""Auto: a prompt that gets 1 + x times slower on the lane must spare at least this times x streams a stall."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """How many prefill tokens may be computed now.

    Attributes:
        mixed: In one batch with the decodes.
        lane_chunk: On the prefill lane; 0: it is busy, or there is none.
        chunked: Whether a prompt that is longer than `mixed` goes there in chunks. Otherwise it goes to the prefill
            lane, or waits.
        mixed_beside_lane: As `mixed`, if the prefill lane gets a chunk as well: the decodes' batch then has only a part
            of the device.
    """

    mixed: int
    lane_chunk: int = 0
    chunked: bool = False
    mixed_beside_lane: int = 0


class Colocation:
    """The rule.

    Args:
        model: Predicts the device.
        token_budget: Tokens that one batch on the whole device computes at most; 0: as the model says.
        mode: See the module.
        splits: Shares of the device that the two lanes may have. Without any, every mode is `mixed`.
        itl_ms: Gap between a stream's tokens that is short enough; 0: there is no target.

    Attributes:
        model, splits: As given.
        max_tokens: Of any batch on the whole device.
        mode: As the splits allow it.
    """

    def __init__(
        self,
        model: PerfModel,
        *,
        token_budget: int = 0,
        mode: Mode = "mixed",
        splits: Sequence[LaneSplit] = (),
        itl_ms: float = 0.0,
    ) -> None:
        self.max_tokens = token_budget or _full_speed_tokens(model)
        self._fixed = token_budget > 0
        self.mode: Mode = mode if splits else "mixed"
        self.model = model
        self.splits = tuple(splits)
        self._itl_ms = ITL_MARGIN * itl_ms

    def prefill_budget(self, decodes: Work, busy: LaneSplit | None) -> tuple[PrefillBudget, LaneSplit | None]:
        """How much may be prefilled now.

        Args:
            decodes: What the step decodes.
            busy: The split whose prefill lane computes something already.

        Returns:
            The budget, and the split to use if anything goes to the prefill lane.
        """
        if self.mode == "mixed" or not (busy or decodes.tokens):
            return self._whole_device(decodes), None
        beside = Work.prefill(self.max_tokens)
        if busy is not None:
            return PrefillBudget(self._mixed_tokens(decodes, busy, beside)), None
        split = self._choose_split(decodes, beside)
        if self.mode == "auto" and not self._worth_it(decodes, split, beside):
            return self._whole_device(decodes), None
        budget = PrefillBudget(
            mixed=self._mixed_tokens(decodes, split, None),
            lane_chunk=self._lane_chunk(decodes, split, beside),
            mixed_beside_lane=self._mixed_tokens(decodes, split, beside),
        )
        return budget, split

    def prefill_ms(self, prompts: Work, decodes: Work) -> float:
        """How long these prompts will take, in chunks as `prefill_budget` allows them, while the decodes go on."""
        if not prompts.tokens:
            return 0.0
        budget, split = self.prefill_budget(decodes, None)
        chunks = max(1.0, prompts.tokens / max(budget.lane_chunk or budget.mixed, 1))
        seqs = max(1, round(prompts.seqs / chunks))
        chunk = Work(
            tokens=round(prompts.tokens / chunks),
            seqs=seqs,
            context=round(seqs * prompts.pairs / prompts.tokens),  # on average over the chunks of a prompt
            pairs=round(prompts.pairs / chunks),
        )
        if budget.lane_chunk and split is not None:
            ends = min(chunks, prompts.seqs)  # each prompt's end is noticed half a step late, on average
            waits_ms = ends * self.model.step_ms(decodes, split.decode, chunk) / 2
            return chunks * self.model.step_ms(chunk, split.prefill, decodes) + waits_ms
        return chunks * self.model.step_ms(decodes + chunk)

    def _whole_device(self, decodes: Work) -> PrefillBudget:
        left = max(0, self.max_tokens - decodes.tokens)
        if self._fixed or not decodes.tokens:
            return PrefillBudget(left, chunked=True)
        within = self._itl_ms or UNTARGETED_SLOWDOWN * self.model.step_ms(decodes)
        return PrefillBudget(min(left, max(MIN_BUDGET, self._fitting(decodes, within))), chunked=True)

    def _choose_split(self, decodes: Work, beside: Work) -> LaneSplit:
        """The one with most for the prefill that leaves the decodes enough."""
        model = self.model

        def within(target_ms: float) -> LaneSplit:
            load = LaneLoad(
                prefill_ms=lambda share: model.step_ms(beside, share, decodes),
                decode_ms=lambda share: model.step_ms(decodes, share, beside),
                target_ms=target_ms,
            )
            return lane_split(load, self.splits)

        split = within(self._itl_ms)
        kept = model.step_ms(decodes, split.decode, beside) <= self._itl_ms
        return split if kept else within(MAX_SLOWDOWN * model.step_ms(decodes))

    def _worth_it(self, decodes: Work, split: LaneSplit, prefill: Work) -> bool:
        model = self.model
        gap_ms = model.step_ms(decodes, split.decode, prefill)
        chunk = Work.prefill(self._whole_device(decodes).mixed)
        if gap_ms > self._itl_ms > 0 and gap_ms > model.step_ms(decodes + chunk):
            return False
        together_ms = model.step_ms(decodes + prefill)
        longer_ms = model.step_ms(prefill, split.prefill, decodes) - together_ms
        return decodes.seqs * together_ms >= STREAMS_WORTH * longer_ms

    def _mixed_tokens(self, decodes: Work, split: LaneSplit, beside: Work | None) -> int:
        """Prefill tokens that may be in the decodes' batch.

        Args:
            beside: What the prefill lane of `split` computes; None: the batch has the whole device.
        """
        most = self.max_tokens - decodes.tokens
        if self.mode == "lanes":
            return min(most, 1)  # no more than one more decode
        share = 1.0 if beside is None else split.decode
        slowed_ms = self.model.step_ms(decodes, split.decode, beside or Work.prefill(self.max_tokens))
        return self._fitting(decodes, max(self._itl_ms, slowed_ms), share, beside)

    def _fitting(self, decodes: Work, within_ms: float, share: float = 1.0, beside: Work | None = None) -> int:
        """Most prefill tokens with which a batch of these decodes takes no longer, and has at most `max_tokens`."""
        return bisect_right(
            range(1, self.max_tokens - decodes.tokens + 1),
            within_ms,
            key=lambda tokens: self.model.step_ms(decodes + Work.prefill(tokens), share, beside),
        )

    def _lane_chunk(self, decodes: Work, split: LaneSplit, beside: Work) -> int:
        """Tokens of the next chunk on the prefill lane."""
        model = self.model
        enough = CHUNK_STEPS * model.step_ms(decodes, split.decode, beside)
        sizes = range(_CHUNK_UNIT, MAX_CHUNK + 1, _CHUNK_UNIT)
        fitting = bisect_right(
            sizes, enough, key=lambda tokens: model.step_ms(Work.prefill(tokens), split.prefill, decodes)
        )
        return sizes[max(0, fitting - 1)]


class PrefillEstimate(NamedTuple):
    """What computing a prompt on a worker costs, from its first chunk on.

    Attributes:
        ms: Until it is computed.
        gap_ms: Between tokens of the streams beside it, meanwhile; 0: there are none.
        late_ms: By how much each of their tokens is late when that is over.
    """

    ms: float
    gap_ms: float = 0.0
    late_ms: float = 0.0


class PrefillEstimator:
    """Estimates prefills beside given decodes. Whatever does not depend on the prompt is computed once.

    Args:
        rule: The worker's.
        decodes: What it decodes.
        slower: How many times as long as its model says its steps take.
        more_ms: What is added to each of them.

    Attributes:
        rule, decodes, slower: As given.
    """

    def __init__(
        self, rule: Colocation, decodes: Work | None = None, slower: float = 1.0, more_ms: float = 0.0
    ) -> None:
        self.rule = rule
        self.decodes = decodes or Work()
        self.slower = slower
        self._more_ms = more_ms

    def step_ms(self, work: Work, share: float = 1.0, beside: Work | None = None) -> float:
        """Of any step on this worker: see `PerfModel.step_ms`."""
        return self.slower * self.rule.model.step_ms(work, share, beside) + self._more_ms

    @cached_property
    def alone_ms(self) -> float:
        """A step of the decodes alone."""
        return self.step_ms(self.decodes)

    @cached_property
    def gap_ms(self) -> float:
        """Of the decodes beside a long prompt."""
        budget, split = self._budget
        if split is None:
            return self.step_ms(self.decodes + Work.prefill(max(1, budget.mixed)))
        return self.step_ms(self.decodes, split.decode, Work.prefill(self.rule.max_tokens))

    @cached_property
    def token_ms(self) -> float:
        """Of computing one token of a long prompt on the whole device."""
        return self.step_ms(Work.prefill(self.rule.max_tokens)) / self.rule.max_tokens

    @cached_property
    def unqueued_tokens(self) -> int:
        """Longest prompt that does not wait for one on the prefill lane, but joins the decodes' batch."""
        split = self._budget[1]
        return self.rule.prefill_budget(self.decodes, split)[0].mixed if split else 0

    def estimate(self, tokens: int, before: int) -> PrefillEstimate:
        """Computing `tokens` tokens of a prompt after `before` cached ones."""
        decodes = self.decodes
        if not decodes.tokens:
            return PrefillEstimate(self._chunks_ms(tokens, before, self.rule.max_tokens))
        budget, split = self._budget
        if split is not None and tokens > budget.mixed:
            ms = self._chunks_ms(tokens, before, budget.lane_chunk, split.prefill, beside=decodes)
            ms += self.gap_ms / 2  # until its end is noticed
            return PrefillEstimate(
                ms, self.gap_ms, ms * max(0.0, 1 - self.alone_ms / self.gap_ms) if self.gap_ms else 0.0
            )
        chunk = max(1, min(tokens, budget.mixed))
        ms = self._chunks_ms(tokens, before, chunk, mixed_with=decodes)
        gap_ms = self.step_ms(decodes + Work.prefill(chunk, before + tokens - chunk))
        return PrefillEstimate(ms, gap_ms, max(0.0, ms - -(-tokens // chunk) * self.alone_ms))

    @cached_property
    def _budget(self) -> tuple[PrefillBudget, LaneSplit | None]:
        return self.rule.prefill_budget(self.decodes, None)

    def _chunks_ms(
        self,
        tokens: int,
        before: int,
        chunk: int,
        share: float = 1.0,
        beside: Work | None = None,
        mixed_with: Work | None = None,
    ) -> float:
        """Time of a prompt's chunks. All parts of the model but the curve over tokens are linear, so that the middle
        one of equal chunks has their mean time."""
        count, rest = divmod(tokens, chunk)
        ms = 0.0
        if count:
            work = Work.prefill(chunk, before + (count - 1) * chunk // 2)
            ms = count * self.step_ms(work + mixed_with if mixed_with else work, share, beside)
        if rest:
            work = Work.prefill(rest, before + count * chunk)
            ms += self.step_ms(work + mixed_with if mixed_with else work, share, beside)
        return ms


def _full_speed_tokens(model: PerfModel) -> int:
    """The smallest chunk that is prefilled at nearly full speed. Attention takes as long in chunks of any size."""
    sizes = range(MIN_BUDGET, MAX_BUDGET + 1, MIN_BUDGET)
    speeds = [size / max(model.step_ms(Work(size, 1)), 1e-6) for size in sizes]
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= FULL_SPEED * max(speeds))
