"""Conversations: every turn's prompt is the whole conversation so far, with the server's answers, plus a new text."""

from dataclasses import dataclass

from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator


@dataclass(frozen=True, slots=True)
class MultiTurn(Workload):
    """Endless sessions of several turns each.

    Args:
        texts: Makes prompts.
        seed: Seed of the sessions.
        turns: Turns of a session.
        input_len: Prompt tokens of the first turn.
        later_len: New prompt tokens of each later turn, without those of the chat template.
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
            # It begins with a space, because the completions endpoint appends it to the answer.
            text = self.texts.more(rng, new_len)
            turns.append(Turn(text, input_len, self.output_len.tokens(rng), self.think_s.draw(rng)))
        return Session(index, turns)
