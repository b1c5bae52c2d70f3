"""Where prefills go while there are decodes: into their batch, or aside on the prefill lane. Pure.

    mixed   one batch on the whole device; long prompts go in pieces under the token budget
    lanes   prefills go aside; what they leave of the device goes to the decodes
    auto    a prompt rides along if the step then stays within the ITL target, or takes no longer than a decode beside a
            prefill does; a longer one goes aside, unless so few streams run that it isn't worth it

While nothing decodes, everything runs on the whole device.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from cpd.perfmodel import PerfModel, Work
from engine.batch import Split
from engine.plan import Room

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

STREAMS_WORTH = 2.0
"""Auto: a prompt that gets 1 + x times slower on the lane must spare at least this times x streams a stutter."""


class Colocation:
    """The rule.

    Args:
        token_budget: Tokens that one batch on the whole device computes at most.
        mode: See the module.
        splits: The runner's. Without any, every mode is `mixed`.
        model: Predicts the device; `mixed` needs none.
        itl_ms: Gap between a stream's tokens that is short enough.

    Attributes:
        token_budget: As given.
    """

    def __init__(
        self,
        token_budget: int,
        mode: Mode = "mixed",
        splits: Sequence[Split] = (),
        model: PerfModel | None = None,
        itl_ms: float = 0.0,
    ) -> None:
        self.token_budget = token_budget
        self._mode = mode
        self._splits = splits
        self._model = model
        self._itl_ms = itl_ms

    def room(self, decodes: Work, busy: Split | None) -> tuple[Room, Split | None]:
        """How much may be prefilled now.

        Args:
            decodes: What the step decodes.
            busy: The split whose prefill lane computes something already.

        Returns:
            The room, and the split to use if anything goes aside.
        """
        most = self.token_budget - decodes.tokens
        mixed = Room(most, cut=True)
        if self._model is None or self._mode == "mixed" or not (busy or (decodes.tokens and self._splits)):
            return mixed, None
        beside = Work.prefill(self.token_budget)
        if busy is not None:
            return Room(min(most, self._along(self._model, decodes, busy, beside))), None
        split = self._choose_split(self._model, decodes, beside)
        if self._mode == "auto" and not self._worth_it(self._model, decodes, split, beside):
            return mixed, None
        along = min(most, self._along(self._model, decodes, split, None))
        return Room(along, self._chunk(self._model, decodes, split, beside)), split

    def _choose_split(self, model: PerfModel, decodes: Work, beside: Work) -> Split:
        """The one with most for the prefill that leaves the decodes enough."""
        enough = max(self._itl_ms, MAX_STRETCH * model.step_ms(decodes))
        for split in self._splits:
            if model.step_ms(decodes, split.decode.share, beside) <= enough:
                return split
        return self._splits[-1]

    def _worth_it(self, model: PerfModel, decodes: Work, split: Split, prefill: Work) -> bool:
        slower = model.step_ms(prefill, split.prefill.share, decodes) / model.step_ms(decodes + prefill) - 1
        return decodes.seqs >= STREAMS_WORTH * slower

    def _along(self, model: PerfModel, decodes: Work, split: Split, beside: Work | None) -> int:
        """Prefill tokens that may be in the decodes' batch.

        Args:
            beside: What the prefill lane of `split` computes; None: the batch has the whole device.
        """
        if self._mode == "lanes":
            return 1  # no more than one more decode
        share = 1.0 if beside is None else split.decode.share
        bound = max(self._itl_ms, model.step_ms(decodes, split.decode.share, beside or Work.prefill(self.token_budget)))
        return bisect_right(
            range(1, self.token_budget + 1),
            bound,
            key=lambda tokens: model.step_ms(decodes + Work.prefill(tokens), share, beside),
        )

    def _chunk(self, model: PerfModel, decodes: Work, split: Split, beside: Work) -> int:
        """Tokens of the next chunk aside."""
        enough = CHUNK_STEPS * model.step_ms(decodes, split.decode.share, beside)
        sizes = range(_CHUNK_UNIT, MAX_CHUNK + 1, _CHUNK_UNIT)
        fitting = bisect_right(
            sizes, enough, key=lambda tokens: model.step_ms(Work.prefill(tokens), split.prefill.share, decodes)
        )
        return sizes[max(0, fitting - 1)]
