"""An executor without a model: steps take as long as the performance model says, and tokens follow from the prompt.

Two lanes slow each other down while both run: when a step begins or ends on one of them, the end of the other's step
moves accordingly. A step that is queued on a lane begins when the step before it ends.

A lane's `collect` does not wait, but moves the virtual time to the step's end. The owner of the clock decides what that
means: a cluster simulation goes on with the next event, a simulated worker keeps the result back until then.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from cpd.performance.model import PerfModel, Profile, Work
from cpd.performance.split import Device, lane_splits
from engine.batch import Batch, Sampled, SampleRow
from engine.execution.executor import Split, StepResult
from engine.scheduling.plan import Plan
from engine.scheduling.sequence import SequenceTable
from engine.types import TokenLogprobs
from sim.device.fast_forward import Choose
from sim.device.pace import Pace

PAGE_BYTES = 8
"""Size of a page of the pool, in which nothing is stored."""

_DECODE_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""The shares of the decode lanes, rounded to what the device can be cut into."""

_MIX = 0x9E3779B1
"""An odd number near 2^32 / golden ratio: multiples of it spread over 32 bits (Knuth, TAOCP 6.4)."""

_NOTHING = np.zeros(0, dtype=np.int32)


class VirtualTime:
    """A clock that is set, and jumps ahead instead of waiting.

    Attributes:
        time_s: The time now.
    """

    def __init__(self, time_s: float = 0.0) -> None:
        self.time_s = time_s
        self._left_s: Callable[[], float] | None = None

    def wait_until(self, time_s: float) -> None:
        """Sets the time to `time_s`, unless it is later already."""
        self.time_s = max(self.time_s, time_s)

    def alarm(self, left_s: Callable[[], float]) -> None:
        """Asks the owner to stop at the time when `left_s()` reaches 0. It may grow meanwhile."""
        self._left_s = left_s

    @property
    def alarm_s(self) -> float | None:
        """When the last `alarm` is due, as known now; None if there was none or it is due already."""
        left_s = self._left_s() if self._left_s else 0.0
        return self.time_s + left_s if left_s > 0 else None


class SimulatedRunner:
    """A simulated `engine.execution.executor.Executor`.

    Args:
        model: Says how long steps take.
        clock: Shows the device's time.
        vocab_size: Tokens are below it.
        pace: How much longer steps take than the model says.

    Attributes:
        pool: Stands for the KV pool where one must be registered. [num_pages, PAGE_BYTES]
        num_pages, vocab_size, full, splits: See `engine.execution.executor.Executor`.
    """

    def __init__(
        self, num_pages: int, model: PerfModel, clock: VirtualTime, vocab_size: int, pace: Pace | None = None
    ) -> None:
        self.num_pages = num_pages
        self.pool: npt.NDArray[np.uint8] = np.zeros((num_pages, PAGE_BYTES), dtype=np.uint8)
        self.vocab_size = vocab_size
        self._device = device = _Device(model, clock, vocab_size, pace or Pace())
        self.full = SimulatedLane(device, 1.0)
        self.splits: Sequence[Split] = [
            Split(SimulatedLane(device, 1 - share), SimulatedLane(device, share))
            for share in _decode_shares(model.profile)
        ]

    def copy_page(self, source: int, target: int) -> None:
        """Does nothing: the pages are empty."""

    def settle(self) -> None:
        """Returns at once: copies take no time."""

    def decode_ends(self, work: Work, share: float) -> Iterator[tuple[float, float | None]]:
        """Yields when the coming decode steps end, if they follow each other and nothing else begins.

        Args:
            work: The work of the first step.
            share: The share of the lane that runs them.

        Yields:
            For each step its end, and the end of the step on the other lane as known then (None if there is none).
        """
        return self._device.decode_ends(work, share)

    def fast_forwarded(self, other_end_s: float | None) -> None:
        """Takes over the end of the step on the other lane, as `decode_ends` gave it for the last step made."""
        self._device.fast_forwarded(other_end_s)


class SimulatedLane:
    """A simulated `engine.execution.executor.Lane`."""

    overlaps = False

    def __init__(self, device: "_Device", share: float) -> None:
        self.share = share
        self._device = device
        self._launched: deque[_Step] = deque()

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        assert len(self._launched) < 2, "two steps were not collected"
        before = self._launched[0] if self._launched else None
        self._launched.append(self._device.start(batch, self.share, before))
        if on_done is not None:  # never called: nothing happens while the clock stands still
            self._device.clock.alarm(self._left_s)

    def done(self) -> bool:
        return bool(self._launched) and self._left_s() == 0

    def collect(self) -> StepResult:
        assert self._launched, "no step was launched"
        return self._device.finish(self._launched.popleft())

    def _left_s(self) -> float:
        return self._device.left_s(self._launched[0]) if self._launched else 0.0


@dataclass(slots=True, eq=False)
class _Step:
    """A step that runs or is queued.

    Attributes:
        start_s: When it began or, while it is queued, was launched.
        end_s: When it ends if nothing else begins before.
    """

    work: Work
    share: float
    sampled: list[Sampled]
    start_s: float
    end_s: float = inf


class _Device:
    """The steps that run now on all lanes."""

    def __init__(self, model: PerfModel, clock: VirtualTime, vocab_size: int, pace: Pace) -> None:
        self.clock = clock
        self._model = model
        self._pace = pace
        self._vocab_size = vocab_size
        self._running: list[_Step] = []
        self._queued: tuple[_Step, _Step] | None = None

    def start(self, batch: Batch, share: float, before: _Step | None = None) -> _Step:
        """Begins a step now, or when the step `before` ends. At most one other lane may run."""
        step = _Step(work_of(batch), share, [self._choose(row) for row in batch.samples], self.clock.time_s)
        if before is not None:
            self._queued = before, step
        else:
            self._begin_queued()
            self._begin(step)
        self._begin_queued()
        return step

    def decode_ends(self, work: Work, share: float) -> Iterator[tuple[float, float | None]]:
        """See `SimulatedRunner`."""
        other = self._running[0] if self._running else None
        now = self.clock.time_s
        other_end_s = other.end_s if other else now
        while True:
            now, other_end_s = self._ends_s(work, share, now, other, other_end_s)
            yield now, other_end_s if other else None
            work = Work.decode(work.seqs, work.context + work.seqs)

    def fast_forwarded(self, other_end_s: float | None) -> None:
        """See `SimulatedRunner`."""
        if other_end_s is not None:
            (other,) = self._running
            other.end_s = other_end_s

    def left_s(self, step: _Step) -> float:
        """Time until a step ends."""
        return max(0.0, step.end_s - self.clock.time_s)

    def finish(self, step: _Step) -> StepResult:
        """Moves the clock to a step's end, and returns the step's result."""
        self.clock.wait_until(step.end_s)
        self._begin_queued()
        self._running.remove(step)
        return StepResult(step.sampled, step.start_s, 1e3 * (step.end_s - step.start_s))

    def _begin(self, step: _Step) -> None:
        now = step.start_s
        other = next((other for other in self._running if other.end_s > now), None)
        step.end_s, other_end_s = self._ends_s(step.work, step.share, now, other, other.end_s if other else now)
        if other is not None:
            other.end_s = other_end_s
        self._running.append(step)

    def _begin_queued(self) -> None:
        """Begins the queued step if the end of the step before it is final: before that, nothing else can begin."""
        if self._queued is None:
            return
        before, step = self._queued
        others = [other.end_s for other in self._running if other is not before]
        if before.end_s <= max([self.clock.time_s, *others]):
            self._queued = None
            step.start_s = max(step.start_s, before.end_s)
            self._begin(step)

    def _ends_s(
        self, work: Work, share: float, now: float, other: _Step | None, other_end_s: float
    ) -> tuple[float, float]:
        """The ends of a step that begins now and of the other one, which would end at `other_end_s` alone.

        Both run side by side until one of them ends.
        """
        model, pace = self._model, self._pace(now)
        alone_s = pace * model.step_ms(work, share) / 1e3
        if other is None or other_end_s <= now or alone_s == 0:
            return now + alone_s, other_end_s
        together_s = pace * model.step_ms(work, share, other.work) / 1e3
        other_pace = self._pace(other.start_s)
        other_alone_s = other_pace * model.step_ms(other.work, other.share) / 1e3
        other_together_s = other_pace * model.step_ms(other.work, other.share, work) / 1e3
        other_left = (other_end_s - now) / other_alone_s
        side_by_side_s = min(together_s, other_left * other_together_s)
        return (
            now + side_by_side_s + (1 - side_by_side_s / together_s) * alone_s,
            now + side_by_side_s + (other_left - side_by_side_s / other_together_s) * other_alone_s,
        )

    def _choose(self, row: SampleRow) -> Sampled:
        """Chooses a token: the first one follows from the prompt and the choice, later ones from the token before."""
        position, params = row.position, row.params
        if position == row.prompt_len:
            state = zlib.crc32(row.tokens[:position].tobytes(), row.choice)
        else:
            state = int(row.tokens[position - 1]) * _MIX + position
        token_id = _next_token(state, params.stop_token_ids, self._vocab_size)
        if (top := params.top_logprobs) is None:
            return Sampled(token_id)
        return Sampled(token_id, TokenLogprobs(0.0, [(token_id, 0.0)][:top]))


def chooser(vocab_size: int) -> Choose:
    """Makes a function that chooses the tokens of decode steps as this executor does, without logprobs."""

    def choose(token_id: int, length: int, stop: Collection[int], steps: int) -> list[int]:
        tokens = []
        for position in range(length, length + steps):
            token_id = _next_token(token_id * _MIX + position, stop, vocab_size)
            tokens.append(token_id)
        return tokens

    return choose


def _next_token(state: int, stop: Collection[int], vocab_size: int) -> int:
    """A token that follows from `state` and is not in `stop`, if there is one."""
    token_id = (state * _MIX & 0xFFFFFFFF) * vocab_size >> 32
    while token_id in stop and len(stop) < vocab_size:
        token_id = (token_id + 1) % vocab_size
    return token_id


def build_outline(plan: Plan, table: SequenceTable) -> Batch:
    """Builds the part of a batch that a simulated runner needs, in half the time of `build_batch`.

    Other arrays are empty. The tokens of a sample are a whole row of the table, not only those before the sample.
    """
    chunks = plan.chunks
    context_lens = np.array([chunk.end for chunk in chunks], dtype=np.int32)
    query_start, size = _NOTHING, len(chunks)
    if plan.prefills:
        ends = list(accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        query_start, size = np.array(ends, dtype=np.int32), ends[-1]
    samples: list[SampleRow] = []
    for chunk in chunks:
        if chunk.num_samples:
            seq = chunk.seq
            request, tokens = seq.request, table.rows[seq.row]
            params = request.params
            for choice in chunk.choices:
                samples.append(SampleRow(0, params, choice, seq.num_tokens, tokens, request.prompt_len, seq.counts))
    return Batch(
        token_ids=np.empty(size, dtype=np.int32),
        positions=_NOTHING,
        slots=_NOTHING,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=_NOTHING,
        num_decodes=len(plan.decodes),
        samples=samples,
    )


def work_of(batch: Batch) -> Work:
    """The work of a batch, from which the performance model predicts its time."""
    contexts = batch.context_lens.tolist()
    context, seqs = sum(contexts), len(contexts)
    if batch.num_decodes == seqs:
        return Work.decode(seqs, context)
    pairs = 0
    for (start, end), length in zip(pairwise(batch.query_start.tolist()), contexts, strict=True):
        pairs += Work.prefill(end - start, length - end + start).pairs
    return Work(len(batch.token_ids), seqs, context, pairs)


def _decode_shares(profile: Profile) -> list[float]:
    splits = lane_splits(Device(profile.units, profile.unit_step, profile.unit_step))
    parts = sorted(split.decode for split in splits)
    nearest = {min(parts, key=lambda part: abs(part / profile.units - share)) for share in _DECODE_SHARES if parts}
    return [part / profile.units for part in sorted(nearest)]
