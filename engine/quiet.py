"""Steps that only choose the next token of each running sequence, made without looking at each of them.

Such steps change nothing but tokens, except where a sequence needs a page or has completed a block: once in 16 steps.
"""

from collections.abc import Callable, Collection

from cpd.blocks import BLOCK_SIZE
from cpd.perfmodel import Work
from engine.live import LiveSequences

Choose = Callable[[int, int, Collection[int], int], list[int]]
"""A sequence's last token, its length, its stop tokens and a number of steps -> its next tokens, no stop tokens."""


class QuietRun:
    """The next steps of these sequences, `Scheduler.quiet_steps` at most.

    Their pages and cached blocks are as of the last step made, they themselves only at the `end`.

    Args:
        steps: So many at most.

    Attributes:
        seqs: Those that decode.
        work: What the first step computes.
        chosen: The tokens of each that are chosen so far.
    """

    def __init__(self, live: LiveSequences, steps: int, choose: Choose) -> None:
        self._live = live
        self._choose = choose
        self.seqs = live.decoding
        self.chosen: list[list[int]] = [[] for _ in self.seqs]
        self._lengths = [seq.num_tokens for seq in self.seqs]
        self.work = Work.decode(len(self.seqs), sum(self._lengths))
        # In the step that begins with so many known tokens a page is needed (False), or a block is complete (True).
        changes: list[tuple[int, bool, int]] = []
        for column, known in enumerate(self._lengths):
            changes += [(step, False, column) for step in range(-(known - 1) % BLOCK_SIZE, steps, BLOCK_SIZE)]
            changes += [(step, True, column) for step in range(-known % BLOCK_SIZE, steps, BLOCK_SIZE)]
        self._changes = sorted(changes, reverse=True)  # those to come

    def next_change(self) -> int | None:
        """After how many steps in all there are other pages or blocks than now; None: after none of them."""
        return self._changes[-1][0] + 1 if self._changes else None

    def make(self, steps: int) -> None:
        """The first so many steps have been made."""
        while self._changes and self._changes[-1][0] < steps:
            step, complete, column = self._changes.pop()
            seq, known = self.seqs[column], self._lengths[column] + step
            if complete:
                self._choose_until(step, column)
                seq.num_computed = known
                self._live.publish(seq)
            else:
                seq.num_tokens = known
                self._live.grow(seq)

    def end(self, steps: int) -> None:
        """So many steps have been made, and no more of them will be in this way."""
        self.make(steps)
        for column, seq in enumerate(self.seqs):
            self._choose_until(steps, column)
            seq.num_tokens = self._lengths[column] + steps
            seq.num_computed = seq.num_tokens - 1

    def _choose_until(self, steps: int, column: int) -> None:
        """Chooses what a sequence gets in the first so many steps."""
        chosen, seq = self.chosen[column], self.seqs[column]
        made = len(chosen)
        if made < steps:
            tokens, length = self._live.table.rows[seq.row], self._lengths[column]
            last = chosen[-1] if chosen else int(tokens[length - 1])
            more = self._choose(last, length + made, seq.request.params.stop_token_ids, steps - made)
            tokens[length + made : length + steps] = more
            chosen += more
