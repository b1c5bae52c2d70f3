"""Steps that only choose the next token of each decoding sequence, made without looking at each of them.

Such steps change nothing but tokens, except where a sequence needs a page or has completed a block: once in 16 steps.
"""

from collections.abc import Callable, Collection, Sequence

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Work
from engine.engine import Engine
from engine.types import StepOutput

Choose = Callable[[int, int, Collection[int], int], list[int]]
"""A sequence's last token, its length, its stop tokens and a number of steps -> its next tokens, no stop tokens."""


def next_work(engine: Engine) -> Work:
    """What the next step computes if it is uneventful."""
    return Work.decode(len(engine.decoding), sum(seq.num_tokens for seq in engine.decoding))


class FastForward:
    """The next steps of an engine; nothing else may be done with it before the `end`.

    Pages and cached blocks are as of the last step made.

    Args:
        steps: Most steps that will be made, `Engine.uneventful_steps` or fewer.
        choose: Says which tokens come out.

    Attributes:
        work: What the first step computes.
    """

    def __init__(self, engine: Engine, steps: int, choose: Choose) -> None:
        self._engine = engine
        self._choose = choose
        self._seqs = engine.decoding
        self._lengths = [seq.num_tokens for seq in self._seqs]
        self._chosen: list[list[int]] = [[] for _ in self._seqs]
        self.work = next_work(engine)
        # The steps after which a page is needed (False) or a block is complete (True), those to come.
        changes: list[tuple[int, bool, int]] = []
        for column, known in enumerate(self._lengths):
            changes += [(step, False, column) for step in range(-(known - 1) % BLOCK_SIZE, steps, BLOCK_SIZE)]
            changes += [(step, True, column) for step in range(-known % BLOCK_SIZE, steps, BLOCK_SIZE)]
        self._changes = sorted(changes, reverse=True)

    def next_change(self) -> int | None:
        """After how many steps in all there are other pages or blocks than now; None: after none of them."""
        return self._changes[-1][0] + 1 if self._changes else None

    def make(self, steps: int) -> None:
        """The first `steps` steps have been made."""
        while self._changes and self._changes[-1][0] < steps:
            step, _, column = self._changes.pop()
            self._extend(column, step + 1)

    def end(self, ms: Sequence[float]) -> StepOutput:
        """As many steps have been made as there are times in `ms`, and no more of them will be in this way."""
        self.make(len(ms))
        for column in range(len(self._seqs)):
            self._extend(column, len(ms))
        return self._engine.end_uneventful(self.work, ms, zip(self._seqs, self._chosen, strict=True))

    def _extend(self, column: int, steps: int) -> None:
        """Gives a sequence the tokens of the first `steps` steps."""
        chosen, seq = self._chosen[column], self._seqs[column]
        made = len(chosen)
        if made < steps:
            last = chosen[-1] if chosen else self._engine.last_token(seq)
            length = self._lengths[column] + made
            more = self._choose(last, length, seq.request.params.stop_token_ids, steps - made)
            self._engine.extend(seq, more)
            chosen += more
