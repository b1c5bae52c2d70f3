"""Decides where prefills run while there are decodes, in the decodes' batch or on the prefill lane, and how large their
chunks may be. Has no state.

Workers follow this policy, and routers use it to predict the workers.

    mixed   prompts share the decodes' batch on the whole device; long ones are chunked under the token budget
    lanes   prefills run on the prefill lane; the decode lane has the rest of the device
    auto    a prompt joins the decodes' batch if the step stays within the ITL target, or takes no longer than a decode
            step while the prefill lane runs. A longer prompt goes to the prefill lane, unless
            - that saves too few streams a stall, or
            - no split is within the target, and chunks in the decodes' batch make shorter gaps, or
            - other prompts wait, and chunks in the decodes' batch, within the target, compute them so much faster that
              this saves the prompts more time than it costs the streams

If nothing decodes, prompts run on the whole device.

The token budget of a batch on the whole device is a setting, or follows from the performance model: the fewest tokens
that prefill at nearly full speed. With decodes, a batch without a fixed budget is also limited by its predicted time.
The tokens of a chunk that keep a step within the ITL target depend on the tokens that the chunk attends to.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import inf
from typing import Literal, NamedTuple

from cpd.performance.model import PerfModel, Work
from cpd.performance.split import LaneLoad, SplitShares, lane_split

Mode = Literal["mixed", "lanes", "auto"]

MAX_DECODE_SLOWDOWN = 2.0
"""Largest slowdown of a decode step while the prefill lane runs, if no split is within the ITL target."""

CHUNK_STEPS = 16
"""Length of a chunk on the prefill lane, in decode steps. The next chunk is queued, so that the lane never idles.
If the decodes end first, the rest of the device idles until both chunks are done."""

_CHUNK_UNIT = 64
MAX_CHUNK = 4096
"""Most tokens of a chunk on the prefill lane, to bound the memory of its activations."""

MIN_BUDGET = 128
"""Prefill tokens that may join decodes whatever time the step takes, if `max_tokens` allows it: prompts must make
progress even if no step is within the target."""

MAX_BUDGET = 8192
"""Largest budget that follows from the model, to bound the memory of a step's activations."""

FULL_SPEED = 0.95
"""Nearly full speed of a prefill, as a fraction of the most tokens per second."""

UNTARGETED_SLOWDOWN = 1.1
"""Largest slowdown of a decode step by a prefill in its batch, if there is no ITL target."""

ITL_MARGIN = 0.8
"""Steps are planned for this fraction of the ITL target: streams join and grow while a chunk runs, and the split can't
change before its end and that of the queued one."""

STALL_WEIGHT = 2.0
"""Auto uses the lane if stalls saved, summed over the streams, are at least this times the prompt's own delay."""


class BatchLimit(NamedTuple):
    """The most work of one batch.

    Attributes:
        tokens: Most tokens, decodes included.
        ms: Longest time.
        any_time_tokens: Number of tokens up to which the batch may take longer.
        step_ms: Predicts the time of a batch. Not called if `ms` is infinite.
    """

    tokens: int
    ms: float = inf
    any_time_tokens: int = 0
    step_ms: Callable[[Work], float] = lambda work: 0.0

    def fits(self, batch: Work, more: Work) -> bool:
        """True if more work may join a batch."""
        return self.allows(batch + more)

    def allows(self, batch: Work) -> bool:
        """True if a batch may have all this work."""
        if batch.tokens > self.tokens:
            return False
        return self.ms == inf or batch.tokens <= self.any_time_tokens or self.step_ms(batch) <= self.ms

    def chunk(self, batch: Work, tokens: int, before: int) -> int:
        """Returns how many of `tokens` tokens of a prompt, after `before` computed ones, may join a batch."""
        high = max(0, min(tokens, self.tokens - batch.tokens))
        low = high if self.ms == inf else min(high, max(0, self.any_time_tokens - batch.tokens))
        if low == high:
            return high
        above_ms = self.step_ms(batch + Work.prefill(high, before)) - self.ms
        if above_ms <= 0:
            return high
        below_ms = self.ms - self.step_ms(batch + Work.prefill(low, before) if low else batch)
        if below_ms < 0:
            return low
        # `low` fits and `high` does not. Times are nearly linear in between, so guesses by them take a third as many
        # steps as a bisection. The weight of an end that stays is halved, or the other one would creep (the Illinois
        # variant of false position).
        last = 0
        while high - low > 1:
            size = low + int((high - low) * below_ms / (below_ms + above_ms))
            size = min(max(size, low + 1), high - 1)
            left_ms = self.ms - self.step_ms(batch + Work.prefill(size, before))
            side = 1 if left_ms >= 0 else -1
            if side > 0:
                low, below_ms = size, left_ms
                above_ms /= 2 if last == side else 1
            else:
                high, above_ms = size, -left_ms
                below_ms /= 2 if last == side else 1
            last = side
        return low


class PrefillBudget(NamedTuple):
    """What may be prefilled now.

    Attributes:
        mixed: Limit of the decodes' batch, prefills included.
        lane_chunk: Tokens on the prefill lane; 0 if it is busy or there is none.
        chunked: True if a prompt that does not fit into the decodes' batch joins it in chunks. Otherwise it goes to the
            prefill lane, or waits.
        mixed_with_lane: Like `mixed`, if the prefill lane gets a chunk too, and the decodes' batch has only its share
            of the device. Used if there is a `lane_chunk`.
    """

    mixed: BatchLimit
    lane_chunk: int = 0
    chunked: bool = False
    mixed_with_lane: BatchLimit = BatchLimit(0)


class Colocation:
    """The policy.

    Args:
        model: Performance model of the device.
        token_budget: Most tokens of one batch on the whole device; 0 derives it from the model.
        mode: See the module.
        splits: Prepared shares of the device. Without splits every mode is `mixed`.
        itl_ms: Target for the gap between a stream's tokens; 0 for no target.

    Attributes:
        max_tokens: Most tokens of any batch on the whole device.
        mode: The given mode; `mixed` without splits.
    """

    def __init__(
        self,
        model: PerfModel,
        *,
        token_budget: int = 0,
        mode: Mode = "mixed",
        splits: Sequence[SplitShares] = (),
        itl_ms: float = 0.0,
    ) -> None:
        self.max_tokens = token_budget or _full_speed_tokens(model)
        self._fixed = token_budget > 0
        self.mode: Mode = mode if splits else "mixed"
        self.model = model
        self.splits = tuple(splits)
        self._itl_ms = ITL_MARGIN * itl_ms

    def prefill_budget(
        self, decodes: Work, busy: SplitShares | None, slowdown: float = 1.0, waiting: int = 0
    ) -> tuple[PrefillBudget, SplitShares | None]:
        """Returns how much may be prefilled now, and the split to use if the prefill lane gets a chunk.

        Args:
            decodes: Decodes of the step.
            busy: The split whose prefill lane is computing.
            slowdown: Factor of the model's step times.
            waiting: Number of other prompts that wait for this one.
        """
        itl_ms = self._itl_ms / slowdown
        if self.mode == "mixed" or not (busy or decodes.tokens):
            return self._whole_device(decodes, itl_ms), None
        prefill = Work.prefill(self.max_tokens)
        if busy is not None:
            return PrefillBudget(self._mixed_limit(decodes, busy, prefill, itl_ms)), None
        split = self._choose_split(decodes, prefill, itl_ms)
        if self.mode == "auto" and not self._lane_pays_off(decodes, split, prefill, itl_ms, waiting):
            return self._whole_device(decodes, itl_ms), None
        budget = PrefillBudget(
            mixed=self._mixed_limit(decodes, split, None, itl_ms),
            lane_chunk=self._lane_chunk(decodes, split, prefill),
            mixed_with_lane=self._mixed_limit(decodes, split, prefill, itl_ms),
        )
        return budget, split

    def prefill_ms(self, prompts: Work, decodes: Work, slowdown: float = 1.0) -> float:
        """Predicts the time of these prompts, in chunks that `prefill_budget` allows, while the decodes continue.

        By the model: `slowdown` is that of `prefill_budget`, and not a factor of the result.
        """
        if not prompts.tokens:
            return 0.0
        largest, split = self.max_tokens, None  # if nothing decodes
        if decodes.tokens:
            budget, split = self.prefill_budget(decodes, None, slowdown, waiting=prompts.seqs - 1)
            before = max(0, prompts.pairs // prompts.tokens - prompts.tokens // (2 * prompts.seqs))  # mean of them
            largest = budget.lane_chunk or budget.mixed.chunk(decodes, prompts.tokens, before)
        chunks = max(1.0, prompts.tokens / max(largest, 1))
        seqs = max(1, round(prompts.seqs / chunks))
        chunk = Work(
            tokens=round(prompts.tokens / chunks),
            seqs=seqs,
            context=round(seqs * prompts.pairs / prompts.tokens),  # mean over the chunks of a prompt
            pairs=round(prompts.pairs / chunks),
        )
        if split is not None:
            ends = min(chunks, prompts.seqs)  # each prompt's end is noticed half a step later, on average
            waits_ms = ends * self.model.step_ms(decodes, split.decode, chunk) / 2
            return chunks * self.model.step_ms(chunk, split.prefill, decodes) + waits_ms
        return chunks * self.model.step_ms(decodes + chunk)

    def _whole_device(self, decodes: Work, itl_ms: float) -> PrefillBudget:
        if self._fixed or not decodes.tokens:
            return PrefillBudget(BatchLimit(self.max_tokens), chunked=True)
        target_ms = itl_ms or UNTARGETED_SLOWDOWN * self.model.step_ms(decodes)
        limit = BatchLimit(self.max_tokens, target_ms, decodes.tokens + MIN_BUDGET, self.model.step_ms)
        return PrefillBudget(limit, chunked=True)

    def _choose_split(self, decodes: Work, prefill: Work, itl_ms: float) -> SplitShares:
        """Returns the split with the fastest prefill that leaves the decodes within their target."""
        model = self.model

        def within(target_ms: float) -> SplitShares:
            load = LaneLoad(
                prefill_ms=lambda share: model.step_ms(prefill, share, decodes),
                decode_ms=lambda share: model.step_ms(decodes, share, prefill),
                target_ms=target_ms,
            )
            return lane_split(load, self.splits)

        split = within(itl_ms)
        on_target = model.step_ms(decodes, split.decode, prefill) <= itl_ms
        return split if on_target else within(MAX_DECODE_SLOWDOWN * model.step_ms(decodes))

    def _lane_pays_off(self, decodes: Work, split: SplitShares, prefill: Work, itl_ms: float, waiting: int) -> bool:
        model = self.model
        gap_ms = model.step_ms(decodes, split.decode, prefill)
        lane_ms = model.step_ms(prefill, split.prefill, decodes)
        chunk = Work.prefill(self._whole_device(decodes, itl_ms).mixed.chunk(decodes, self.max_tokens, 0))
        chunk_gap_ms = model.step_ms(decodes + chunk)
        if gap_ms > itl_ms > 0 and gap_ms > chunk_gap_ms:
            return False
        if waiting and chunk_gap_ms <= itl_ms:
            # For each token of the prompts: its time, and by how much more a chunk's token delays a stream.
            alone_ms, chunk_tokens = model.step_ms(decodes), max(1, chunk.tokens)
            slowed = max(0.0, 1 - alone_ms / gap_ms) if gap_ms else 0.0
            on_lane_ms, in_chunks_ms = lane_ms / prefill.tokens, chunk_gap_ms / chunk_tokens
            delay_ms = (chunk_gap_ms - alone_ms) / chunk_tokens - on_lane_ms * slowed
            if (1 + waiting) * (on_lane_ms - in_chunks_ms) >= decodes.seqs * max(0.0, delay_ms):
                return False
        together_ms = model.step_ms(decodes + prefill)
        return decodes.seqs * together_ms >= STALL_WEIGHT * (lane_ms - together_ms)

    def _mixed_limit(self, decodes: Work, split: SplitShares, on_lane: Work | None, itl_ms: float) -> BatchLimit:
        """Returns the limit of the decodes' batch where long prompts go to the prefill lane.

        Args:
            on_lane: Work of the prefill lane of `split`; None if the batch has the whole device.
        """
        if self.mode == "lanes":
            return BatchLimit(min(self.max_tokens, decodes.tokens + 1))  # no more than one more decode
        share = 1.0 if on_lane is None else split.decode
        slowed_ms = self.model.step_ms(decodes, split.decode, on_lane or Work.prefill(self.max_tokens))
        step_ms = partial(self.model.step_ms, share=share, other_lane=on_lane)
        return BatchLimit(self.max_tokens, max(itl_ms, slowed_ms), step_ms=step_ms)

    def _lane_chunk(self, decodes: Work, split: SplitShares, prefill: Work) -> int:
        """Returns the tokens of the next chunk on the prefill lane."""
        model = self.model
        target_ms = CHUNK_STEPS * model.step_ms(decodes, split.decode, prefill)
        sizes = range(_CHUNK_UNIT, MAX_CHUNK + 1, _CHUNK_UNIT)
        fitting = bisect_right(
            sizes, target_ms, key=lambda tokens: model.step_ms(Work.prefill(tokens), split.prefill, decodes)
        )
        return sizes[max(0, fitting - 1)]


class PrefillEstimate(NamedTuple):
    """The predicted cost of a prompt on a worker, from its first chunk on.

    Attributes:
        ms: Time until it is computed.
        gap_ms: Gap between tokens of the worker's streams meanwhile; 0 if there are none.
        delay_ms: Delay of each of these streams when the prompt is computed.
    """

    ms: float
    gap_ms: float = 0.0
    delay_ms: float = 0.0


class PrefillEstimator:
    """Estimates prefills on a worker with given decodes. Results that do not depend on the prompt are cached.

    Args:
        colocation: Policy of the worker.
        decodes: Decodes of the worker.
        slowdown: Factor of the model's step times.
    """

    def __init__(self, colocation: Colocation, decodes: Work | None = None, slowdown: float = 1.0) -> None:
        self.colocation = colocation
        self.decodes = decodes or Work()
        self.slowdown = slowdown

    def step_ms(self, work: Work, share: float = 1.0, other_lane: Work | None = None) -> float:
        """Predicts the time of any step on this worker: see `PerfModel.step_ms`."""
        return self.slowdown * self.colocation.model.step_ms(work, share, other_lane)

    @cached_property
    def alone_ms(self) -> float:
        """Time of a step of the decodes alone."""
        return self.step_ms(self.decodes)

    @cached_property
    def lone_step_ms(self) -> float:
        """Time of a step with one stream and nothing else."""
        return self.step_ms(Work.decode(1, 1))

    @cached_property
    def gap_ms(self) -> float:
        """Gap between the decodes' tokens during a long prompt."""
        budget, split = self._budget
        if split is None:
            chunk = budget.mixed.chunk(self.decodes, self.colocation.max_tokens, 0)
            return self.step_ms(self.decodes + Work.prefill(max(1, chunk)))
        return self.step_ms(self.decodes, split.decode, Work.prefill(self.colocation.max_tokens))

    @cached_property
    def token_ms(self) -> float:
        """Time per token of a long prompt on the whole device."""
        return self.step_ms(Work.prefill(self.colocation.max_tokens)) / self.colocation.max_tokens

    def joins_decodes(self, tokens: int, before: int) -> bool:
        """True if a prompt of `tokens` tokens after `before` cached ones joins the decodes' batch while the prefill
        lane is busy, instead of waiting for the prompts there."""
        return self._beside_lane is not None and self._beside_lane.fits(self.decodes, Work.prefill(tokens, before))

    def estimate(self, tokens: int, before: int) -> PrefillEstimate:
        """Estimates the prefill of `tokens` tokens of a prompt after `before` cached ones."""
        decodes = self.decodes
        if not decodes.tokens:
            return PrefillEstimate(self._chunks_ms(tokens, before, self.colocation.max_tokens))
        budget, split = self._budget
        together = decodes + Work.prefill(tokens, before)
        if budget.mixed.allows(together):
            ms = self.step_ms(together)
            return PrefillEstimate(ms, ms, max(0.0, ms - self.alone_ms))
        if split is not None:
            ms = self._chunks_ms(tokens, before, budget.lane_chunk, split.prefill, other_lane=decodes)
            ms += self.gap_ms / 2  # mean time until the end is noticed
            return PrefillEstimate(
                ms, self.gap_ms, ms * max(0.0, 1 - self.alone_ms / self.gap_ms) if self.gap_ms else 0.0
            )
        # later chunks attend to more tokens and are shorter: the middle one stands for all
        chunk = max(1, budget.mixed.chunk(decodes, tokens, before + tokens // 2))
        ms = self._chunks_ms(tokens, before, chunk, mixed_with=decodes)
        gap_ms = self.step_ms(decodes + Work.prefill(chunk, before + (tokens - chunk) // 2))
        return PrefillEstimate(ms, gap_ms, max(0.0, ms - -(-tokens // chunk) * self.alone_ms))

    @cached_property
    def _beside_lane(self) -> BatchLimit | None:
        """Limit of the decodes' batch while the prefill lane is busy; None if prompts get no lane."""
        split = self._budget[1]
        return self.colocation.prefill_budget(self.decodes, split, self.slowdown)[0].mixed if split else None

    @cached_property
    def _budget(self) -> tuple[PrefillBudget, SplitShares | None]:
        return self.colocation.prefill_budget(self.decodes, None, self.slowdown)

    def _chunks_ms(
        self,
        tokens: int,
        before: int,
        chunk: int,
        share: float = 1.0,
        other_lane: Work | None = None,
        mixed_with: Work | None = None,
    ) -> float:
        """Predicts the time of a prompt's chunks. The middle one of equal chunks takes their mean time, since all terms
        of the model but the curve over tokens are linear."""
        count, rest = divmod(tokens, chunk)
        ms = 0.0
        if count:
            work = Work.prefill(chunk, before + (count - 1) * chunk // 2)
            ms = count * self.step_ms(work + mixed_with if mixed_with else work, share, other_lane)
        if rest:
            work = Work.prefill(rest, before + count * chunk)
            ms += self.step_ms(work + mixed_with if mixed_with else work, share, other_lane)
        return ms


def _full_speed_tokens(model: PerfModel) -> int:
    """Returns the smallest chunk that prefills at nearly full speed. Attention's time does not depend on chunk size."""
    sizes = range(MIN_BUDGET, MAX_BUDGET + 1, MIN_BUDGET)
    speeds = [size / max(model.step_ms(Work(size, 1)), 1e-6) for size in sizes]
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= FULL_SPEED * max(speeds))
