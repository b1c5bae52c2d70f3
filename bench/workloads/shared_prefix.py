"""Groups of prompts that begin alike, so that a warm cache holds a set share of every prompt.

A group's common beginning is `hit_rate` of the mean prompt length. Each is sent once before the run; from then on
exactly those tokens are in a cache that is large enough, down to the server's block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator

# A chat template puts something behind the text (the end of the message, whose turn it is); the rest of what it adds
# stands before it and is as common to all prompts as the prefix. Five tokens are usual and more than this are rare.
# Servers keep whole blocks, so a prefix that is a few tokens too long costs nothing; one too short costs a block.
_AFTER_TEXT = 12


@dataclass(frozen=True, slots=True)
class SharedPrefix(Workload):
    """Sessions without end, of one turn each: a group's beginning, then a text of its own."""

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
        """Tokens of text that a group has in common; not positive if the chat template alone is share enough."""
        return round(self.hit_rate * self.input_len.mean) - max(0, self.texts.overhead - _AFTER_TEXT)

    def _prefix(self, group: int) -> str:
        return self.texts.text(generator(self.seed, Stream.GROUP, group), self._prefix_len)
