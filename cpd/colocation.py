"""Where prefills go while there are decodes: into their batch, or aside on the prefill lane. Pure.

Workers act by it, and routers predict by it what workers will do.

    mixed   one batch on the whole device; long prompts go in pieces under the token budget
    lanes   prefills go aside; what they leave of the device goes to the decodes
    auto    a prompt rides along if the step then stays within the ITL target, or takes no longer than a decode beside a
            prefill does; a longer one goes aside, unless so few streams run that it isn't worth it, or so many that no
            split keeps the target and pieces in their batch make shorter gaps

While nothing decodes, everything runs on the whole device.

The token budget of a batch on the whole device is given, or follows from the performance model: beside decodes as many
tokens as keep the step within the ITL target, and otherwise as many as it takes to prefill at nearly full speed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from cpd.perfmodel import PerfModel, Work
from cpd.split import LaneLoad, LaneSplit, lane_split

Mode = Literal["mixed", "lanes", "auto"]

MAX_STRETCH = 2.0
"""Where the ITL target can't be kept: a decode beside a prefill takes at most so many times as long as alone, if there
is a split that allows it."""

CHUNK_STEPS = 16
"""A chunk aside takes about as long as this many decode steps beside it. The next one is launched ahead, so that the
lane waits for nobody; but if the decodes end first, the rest of the device idles until both are done."""

_CHUNK_UNIT = 64
MAX_CHUNK = 4096
"""Tokens of a chunk aside at most: its activations need memory."""

MIN_BUDGET = 128
"""A budget that follows from the model leaves prompts no less, beside however many decodes: they must get on, too."""

MAX_BUDGET = 8192
"""Nor larger: a step's activations need memory."""

FULL_SPEED = 0.95
"""A prefill is at nearly full speed at this part of the most tokens a second."""

UNTARGETED_STRETCH = 1.1
"""Without an ITL target a prefill may make a step of the decodes this much longer."""

ITL_MARGIN = 0.8
"""Steps are planned within this part of the ITL target: streams join and grow while a chunk runs, and a split can't be
changed before its end, and that of the next one."""

STREAMS_WORTH = 2.0
"""Auto: a prompt that gets 1 + x times slower on the lane must spare at least this times x streams a stutter."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many prefill tokens may be computed now.

    Attributes:
        along: In one batch with the decodes.
        aside: On the prefill lane; 0: it is busy, or there is none.
        cut: Whether a prompt that is longer than `along` goes along in pieces. Otherwise it goes aside, or waits.
        beside: As `along`, if something goes aside as well: the decodes' batch then has a part of the device only.
    """

    along: int
    aside: int = 0
    cut: bool = False
    beside: int = 0


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

    def room(self, decodes: Work, busy: LaneSplit | None) -> tuple[Room, LaneSplit | None]:
        """How much may be prefilled now.

        Args:
            decodes: What the step decodes.
            busy: The split whose prefill lane computes something already.

        Returns:
            The room, and the split to use if anything goes aside.
        """
        if self.mode == "mixed" or not (busy or decodes.tokens):
            return self._mixed(decodes), None
        beside = Work.prefill(self.max_tokens)
        if busy is not None:
            return Room(self._along(decodes, busy, beside)), None
        split = self._choose_split(decodes, beside)
        if self.mode == "auto" and not self._worth_it(decodes, split, beside):
            return self._mixed(decodes), None
        room = Room(
            along=self._along(decodes, split, None),
            aside=self._chunk(decodes, split, beside),
            beside=self._along(decodes, split, beside),
        )
        return room, split

    def prefill_ms(self, prompts: Work, decodes: Work) -> float:
        """How long these prompts will take, in chunks of the size that `room` gives, while the decodes go on."""
        if not prompts.tokens:
            return 0.0
        room, split = self.room(decodes, None)
        chunks = max(1.0, prompts.tokens / max(room.aside or room.along, 1))
        seqs = max(1, round(prompts.seqs / chunks))
        chunk = Work(
            tokens=round(prompts.tokens / chunks),
            seqs=seqs,
            context=round(seqs * prompts.pairs / prompts.tokens),  # on average over the chunks of a prompt
            pairs=round(prompts.pairs / chunks),
        )
        if room.aside and split is not None:
            looks = min(chunks, prompts.seqs)  # half a step after each prompt, until somebody does
            waits_ms = looks * self.model.step_ms(decodes, split.decode, chunk) / 2
            return chunks * self.model.step_ms(chunk, split.prefill, decodes) + waits_ms
        return chunks * self.model.step_ms(decodes + chunk)

    def _mixed(self, decodes: Work) -> Room:
        if self._fixed or not decodes.tokens:
            return Room(self.max_tokens - decodes.tokens, cut=True)
        within = self._itl_ms or UNTARGETED_STRETCH * self.model.step_ms(decodes)
        return Room(max(MIN_BUDGET, self._fitting(decodes, within)), cut=True)

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
        return split if kept else within(MAX_STRETCH * model.step_ms(decodes))

    def _worth_it(self, decodes: Work, split: LaneSplit, prefill: Work) -> bool:
        model = self.model
        gap_ms = model.step_ms(decodes, split.decode, prefill)
        if gap_ms > self._itl_ms > 0 and gap_ms > model.step_ms(decodes + Work.prefill(self._mixed(decodes).along)):
            return False
        together_ms = model.step_ms(decodes + prefill)
        longer_ms = model.step_ms(prefill, split.prefill, decodes) - together_ms
        return decodes.seqs * together_ms >= STREAMS_WORTH * longer_ms

    def _along(self, decodes: Work, split: LaneSplit, beside: Work | None) -> int:
        """Prefill tokens that may be in the decodes' batch.

        Args:
            beside: What the prefill lane of `split` computes; None: the batch has the whole device.
        """
        most = self.max_tokens - decodes.tokens
        if self.mode == "lanes":
            return min(most, 1)  # no more than one more decode
        share = 1.0 if beside is None else split.decode
        stretched = self.model.step_ms(decodes, split.decode, beside or Work.prefill(self.max_tokens))
        return self._fitting(decodes, max(self._itl_ms, stretched), share, beside)

    def _fitting(self, decodes: Work, within_ms: float, share: float = 1.0, beside: Work | None = None) -> int:
        """Most prefill tokens with which a batch of these decodes takes no longer, and has at most `max_tokens`."""
        return bisect_right(
            range(1, self.max_tokens - decodes.tokens + 1),
            within_ms,
            key=lambda tokens: self.model.step_ms(decodes + Work.prefill(tokens), share, beside),
        )

    def _chunk(self, decodes: Work, split: LaneSplit, beside: Work) -> int:
        """Tokens of the next chunk aside."""
        model = self.model
        enough = CHUNK_STEPS * model.step_ms(decodes, split.decode, beside)
        sizes = range(_CHUNK_UNIT, MAX_CHUNK + 1, _CHUNK_UNIT)
        fitting = bisect_right(
            sizes, enough, key=lambda tokens: model.step_ms(Work.prefill(tokens), split.prefill, decodes)
        )
        return sizes[max(0, fitting - 1)]


class Pace(NamedTuple):
    """A prompt on a worker, from its first chunk on.

    Attributes:
        ms: Until it is computed.
        gap_ms: Between tokens of the streams beside it, meanwhile; 0: there are none.
        late_ms: What each of their tokens is late when that is over.
    """

    ms: float
    gap_ms: float = 0.0
    late_ms: float = 0.0


class Beside:
    """What the rule makes of prompts beside certain decodes. Whatever does not depend on the prompt is computed once.

    Args:
        rule: The worker's.
        decodes: What it decodes.
        slower: Its steps take so many times as long as its model says.
        more_ms: And each of them so much longer.

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
        room, split = self._room
        if split is None:
            return self.step_ms(self.decodes + Work.prefill(max(1, room.along)))
        return self.step_ms(self.decodes, split.decode, Work.prefill(self.rule.max_tokens))

    @cached_property
    def token_ms(self) -> float:
        """Of computing one token of a long prompt on the whole device."""
        return self.step_ms(Work.prefill(self.rule.max_tokens)) / self.rule.max_tokens

    @cached_property
    def passing(self) -> int:
        """Tokens of a prompt that need not wait for one on the lane."""
        split = self._room[1]
        return self.rule.room(self.decodes, split)[0].along if split else 0

    def pace(self, tokens: int, before: int) -> Pace:
        """Computing `tokens` tokens of a prompt after `before` cached ones."""
        decodes = self.decodes
        if not decodes.tokens:
            return Pace(self._chunks_ms(tokens, before, self.rule.max_tokens))
        room, split = self._room
        if split is not None and tokens > room.along:
            ms = self._chunks_ms(tokens, before, room.aside, split.prefill, beside=decodes)
            ms += self.gap_ms / 2  # at its end, until somebody looks
            return Pace(ms, self.gap_ms, ms * max(0.0, 1 - self.alone_ms / self.gap_ms) if self.gap_ms else 0.0)
        chunk = max(1, min(tokens, room.along))
        ms = self._chunks_ms(tokens, before, chunk, along=decodes)
        gap_ms = self.step_ms(decodes + Work.prefill(chunk, before + tokens - chunk))
        return Pace(ms, gap_ms, max(0.0, ms - -(-tokens // chunk) * self.alone_ms))

    @cached_property
    def _room(self) -> tuple[Room, LaneSplit | None]:
        return self.rule.room(self.decodes, None)

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
            ms = count * self.step_ms(work + along if along else work, share, beside)
        if rest:
            work = Work.prefill(rest, before + count * chunk)
            ms += self.step_ms(work + along if along else work, share, beside)
        return ms


def _full_speed_tokens(model: PerfModel) -> int:
    """The smallest chunk that is prefilled at nearly full speed. Attention takes as long in chunks of any size."""
    sizes = range(MIN_BUDGET, MAX_BUDGET + 1, MIN_BUDGET)
    speeds = [size / max(model.step_ms(Work(size, 1)), 1e-6) for size in sizes]
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= FULL_SPEED * max(speeds))
