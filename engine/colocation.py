"""Where prefills go while there are decodes: into their batch, or aside on the prefill lane. Pure.

    mixed   one batch on the whole device; long prompts go in pieces under the token budget
    lanes   prefills go aside; what they leave of the device goes to the decodes
    auto    a prompt rides along if the step then stays within the ITL target, or takes no longer than a decode beside a
            prefill does; a longer one goes aside, unless so few streams run that it isn't worth it

While nothing decodes, everything runs on the whole device.

The token budget of a batch on the whole device is given, or follows from the performance model: beside decodes as many
tokens as keep the step within the ITL target, and otherwise as many as it takes to prefill at nearly full speed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from cpd.perfmodel import PerfModel, Work
from engine.batch import Split
from engine.plan import Room
from engine.split import LaneLoad, LaneSplit, lane_split

Mode = Literal["mixed", "lanes", "auto"]

MAX_STRETCH = 2.0
"""Where the ITL target can't be kept: a decode beside a prefill takes at most so many times as long as alone, if there
is a split that allows it."""

CHUNK_STEPS = 32
"""A chunk aside takes about as long as this many decode steps beside it. At its end the lane is idle for half a step on
average, which costs 1.6 % of its time; and if the decodes end first, the rest of the device idles to its end."""

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
changed before its end."""

STREAMS_WORTH = 2.0
"""Auto: a prompt that gets 1 + x times slower on the lane must spare at least this times x streams a stutter."""


class Colocation:
    """The rule.

    Args:
        model: Predicts the device.
        token_budget: Tokens that one batch on the whole device computes at most; 0: as the model says.
        mode: See the module.
        splits: The runner's. Without any, every mode is `mixed`.
        itl_ms: Gap between a stream's tokens that is short enough; 0: there is no target.

    Attributes:
        max_tokens: Of any batch on the whole device.
        mode: As the splits allow it.
    """

    def __init__(
        self,
        model: PerfModel,
        *,
        token_budget: int = 0,
        mode: Mode = "mixed",
        splits: Sequence[Split] = (),
        itl_ms: float = 0.0,
    ) -> None:
        self.max_tokens = token_budget or _full_speed_tokens(model)
        self._fixed = token_budget > 0
        self.mode: Mode = mode if splits else "mixed"
        self._splits = {LaneSplit(split.prefill.share, split.decode.share): split for split in splits}
        self._model = model
        self._itl_ms = ITL_MARGIN * itl_ms

    def room(self, decodes: Work, busy: Split | None) -> tuple[Room, Split | None]:
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
            return chunks * self._model.step_ms(chunk, split.prefill.share, decodes)
        return chunks * self._model.step_ms(decodes + chunk)

    def _mixed(self, decodes: Work) -> Room:
        if self._fixed or not decodes.tokens:
            return Room(self.max_tokens - decodes.tokens, cut=True)
        within = self._itl_ms or UNTARGETED_STRETCH * self._model.step_ms(decodes)
        return Room(max(MIN_BUDGET, self._fitting(decodes, within)), cut=True)

    def _choose_split(self, decodes: Work, beside: Work) -> Split:
        """The one with most for the prefill that leaves the decodes enough."""
        model = self._model
        load = LaneLoad(
            prefill_ms=lambda share: model.step_ms(beside, share, decodes),
            decode_ms=lambda share: model.step_ms(decodes, share, beside),
            target_ms=max(self._itl_ms, MAX_STRETCH * model.step_ms(decodes)),
        )
        return self._splits[lane_split(load, self._splits)]

    def _worth_it(self, decodes: Work, split: Split, prefill: Work) -> bool:
        model = self._model
        slower = model.step_ms(prefill, split.prefill.share, decodes) / model.step_ms(decodes + prefill) - 1
        return decodes.seqs >= STREAMS_WORTH * slower

    def _along(self, decodes: Work, split: Split, beside: Work | None) -> int:
        """Prefill tokens that may be in the decodes' batch.

        Args:
            beside: What the prefill lane of `split` computes; None: the batch has the whole device.
        """
        most = self.max_tokens - decodes.tokens
        if self.mode == "lanes":
            return min(most, 1)  # no more than one more decode
        share = 1.0 if beside is None else split.decode.share
        stretched = self._model.step_ms(decodes, split.decode.share, beside or Work.prefill(self.max_tokens))
        return self._fitting(decodes, max(self._itl_ms, stretched), share, beside)

    def _fitting(self, decodes: Work, within_ms: float, share: float = 1.0, beside: Work | None = None) -> int:
        """Most prefill tokens with which a batch of these decodes takes no longer, and has at most `max_tokens`."""
        return bisect_right(
            range(1, self.max_tokens - decodes.tokens + 1),
            within_ms,
            key=lambda tokens: self._model.step_ms(decodes + Work.prefill(tokens), share, beside),
        )

    def _chunk(self, decodes: Work, split: Split, beside: Work) -> int:
        """Tokens of the next chunk aside."""
        model = self._model
        enough = CHUNK_STEPS * model.step_ms(decodes, split.decode.share, beside)
        sizes = range(_CHUNK_UNIT, MAX_CHUNK + 1, _CHUNK_UNIT)
        fitting = bisect_right(
            sizes, enough, key=lambda tokens: model.step_ms(Work.prefill(tokens), split.prefill.share, decodes)
        )
        return sizes[max(0, fitting - 1)]


def _full_speed_tokens(model: PerfModel) -> int:
    """The smallest chunk that is prefilled at nearly full speed. Attention takes as long in chunks of any size."""
    sizes = range(MIN_BUDGET, MAX_BUDGET + 1, MIN_BUDGET)
    speeds = [size / max(model.step_ms(Work(size, 1)), 1e-6) for size in sizes]
    return next(size for size, speed in zip(sizes, speeds, strict=True) if speed >= FULL_SPEED * max(speeds))
