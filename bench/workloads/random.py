"""Independent prompts of random words."""

from dataclasses import dataclass

from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator


@dataclass(frozen=True, slots=True)
class RandomPrompts(Workload):
    """Endless sessions of one turn each that have nothing in common."""

    texts: Texts
    seed: int
    input_len: Distribution
    output_len: Distribution

    def session(self, index: int) -> Session:
        rng = generator(self.seed, Stream.SESSION, index)
        input_len = self.input_len.tokens(rng)
        text = self.texts.text(rng, input_len - self.texts.overhead)
        return Session(index, (Turn(text, input_len, self.output_len.tokens(rng)),))
