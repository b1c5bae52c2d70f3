"""transformers as the oracle: it checks every answer of a cluster."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.checkpoints import load_oracle
from tests.gumbel import gumbel_noise

MARGIN = 1e-4
"""Logits closer than this count as equal: either token is right."""


class Oracle:
    """A checkpoint loaded into transformers in float32.

    Attributes:
        vocab_size: Token ids are below this.
    """

    def __init__(self, directory: Path) -> None:
        self._model = load_oracle(directory)
        self.vocab_size: int = self._model.config.vocab_size

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts with these numbers of tokens."""
        rng = random.Random(seed)
        return [[rng.randrange(3, self.vocab_size) for _ in range(length)] for length in lengths]

    @torch.inference_mode()
    def check(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        margin: float = MARGIN,
    ) -> None:
        """Checks that every token of `output` is the model's choice after the tokens before it.

        Raises:
            AssertionError: A token's score is below the best one by `margin` or more.
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
