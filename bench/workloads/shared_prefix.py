"""Groups of prompts with a common prefix, so that a warm cache holds a given share of every prompt.

A group's prefix has `hit_rate` times the mean prompt length. Each prefix is sent once before the run; then a large
enough cache holds exactly these tokens, rounded down to the server's blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator

# Most tokens that a chat template adds after the text (five are usual). The tokens before the text are common to all
# prompts, like the prefix. Servers cache whole blocks: a prefix a few tokens too long costs nothing, one too short a
# whole block.
_AFTER_TEXT = 12


@dataclass(frozen=True, slots=True)
class SharedPrefix(Workload):
    """Endless sessions of one turn each: a group's prefix, then a random text."""

    texts: Texts
    seed: int
    input_len: Distribution
    output_len: Distribution
    groups: int
    hit_rate: float

    def session(self, index: int) -> Session:
        rng = generator(self.seed, Stream.SESSION, index)
        input_len = self.input_len.tokens(rng)
        own_len = input_len - self.texts.overhead - self._prefix_len
        if self._prefix_len > 0:
            text = self._prefix(int(rng.integers(self.groups))) + self.texts.more(rng, own_len)
        else:
            text = self.texts.text(rng, own_len)
        return Session(index, (Turn(text, input_len, self.output_len.tokens(rng)),))

    def priming(self) -> Sequence[Session]:
        if self._prefix_len <= 0:
            return ()
        input_len = self._prefix_len + self.texts.overhead
        return [Session(group, (Turn(self._prefix(group), input_len, 1),)) for group in range(self.groups)]

    @property
    def _prefix_len(self) -> int:
        """Tokens of a group's prefix; not positive if the chat template alone reaches the share."""
        return round(self.hit_rate * self.input_len.mean) - max(0, self.texts.overhead - _AFTER_TEXT)

    def _prefix(self, group: int) -> str:
        return self.texts.text(generator(self.seed, Stream.GROUP, group), self._prefix_len)
