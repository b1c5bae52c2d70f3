"""What transformers makes of the same prompt: the judge over every answer."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.execution.sampling.sampler import gumbel_noise
from tests.checkpoints import load_oracle

MARGIN = 1e-4
"""Where the two best choices are closer than this, either is right."""


class Oracle:
    """A checkpoint in transformers, in float32.

    Attributes:
        vocab_size: Token ids are below this.
    """

    def __init__(self, directory: Path) -> None:
        self._model = load_oracle(directory)
        self.vocab_size: int = self._model.config.vocab_size

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts of these lengths."""
        rng = random.Random(seed)
        return [[rng.randrange(3, self.vocab_size) for _ in range(length)] for length in lengths]

    @torch.inference_mode()
    def judge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        margin: float = MARGIN,
    ) -> None:
        """Checks every token of `output` against the model's choice after the tokens before it.

        Raises:
            AssertionError: One is not the best choice within `margin`.
        """
        tokens = torch.tensor([[*prompt, *output]])
        logits = self._model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        for index, token in enumerate(output):
            scores, position = logits[index], len(prompt) + index
            if temperature:
                scores = scores / temperature + gumbel_noise(seed, choice, position, self.vocab_size)
            lost = float(scores.max() - scores[token])
            assert lost < margin, (
                f"token {index} of {len(output)} after {len(prompt)}: {token} instead of {int(scores.argmax())},"
                f" which is better by {lost:.4f}"
            )
