"""Conversations: every turn's prompt is all that was said before, the server's answers included, and a new text."""

from dataclasses import dataclass

from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator


@dataclass(frozen=True, slots=True)
class MultiTurn(Workload):
    """Sessions without end, of several turns each.

    Args:
        input_len: Prompt tokens of the first turn.
        later_len: New prompt tokens of each later turn; what the chat template puts around its messages is added.
        output_len: Output tokens of each turn.
        think_s: Pause before each later turn.
    """

    texts: Texts
    seed: int
    turns: int
    input_len: Distribution
    later_len: Distribution
    output_len: Distribution
    think_s: Distribution

    def session(self, index: int) -> Session:
        rng = generator(self.seed, Stream.SESSION, index)
        input_len = self.input_len.tokens(rng)
        text = self.texts.text(rng, input_len - self.texts.overhead)
        turns = [Turn(text, input_len, self.output_len.tokens(rng))]
        while len(turns) < self.turns:
            new_len = self.later_len.tokens(rng)
            input_len = turns[-1].input_len + turns[-1].output_len + new_len
            # It begins with a space: the completions endpoint puts it right behind the answer.
            text = self.texts.more(rng, new_len)
            turns.append(Turn(text, input_len, self.output_len.tokens(rng), self.think_s.draw(rng)))
        return Session(index, turns)
