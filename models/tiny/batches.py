"""Training batches. Batch n of a seed is always the same, so that training can resume."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.tiny.data.dialogue import Message, recall, small_talk
from models.tiny.tokenizer import rendered

OTHER_WEIGHT = 0.05
"""Weight of the loss on tokens outside answers; 1 on answers."""


@dataclass(frozen=True)
class Batch:
    """Token sequences without padding.

    Attributes:
        tokens: [B, T].
        answers: [B, T], number of a token's answer (from 1, over the whole batch); 0 outside answers.
    """

    tokens: Tensor
    answers: Tensor


class Sampler:
    """Makes batches from a seed for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed

    def recall(self, number: int, tokens: int, length: int) -> Batch:
        """Batch `number` of questions about facts: about `tokens` tokens in sequences of `length`."""
        rng = Random(f"{self._seed} recall {number}")
        return self._batch(
            self._repeats(rng, length)
            if rng.random() < 0.1
            else self._dialogue(recall(rng, length, self.length), length)
            for _ in range(max(1, tokens // length))
        )

    def small_talk(self, number: int, tokens: int, length: int, late: bool = False) -> Batch:
        """Batch `number` of simple requests: about `tokens` tokens in sequences of `length`, `late` in training."""
        rng = Random(f"{self._seed} small talk {number}")
        return self._batch(self._dialogue(small_talk(rng, late), length) for _ in range(max(1, tokens // length)))

    def length(self, text: str) -> int:
        """Length of a text in tokens."""
        return len(self._tokenizer.encode(text).ids)

    def _dialogue(self, messages: Iterator[Message], length: int) -> tuple[list[int], list[int]]:
        """The first `length` tokens of an endless dialogue, and the number of each token's answer."""
        ids: list[int] = []
        answers: list[int] = []
        answer = 0
        for message in messages:
            start, rest = (self._tokenizer.encode(part).ids for part in rendered(message))
            ids += start + rest
            is_answer = message["role"] == "assistant"
            answer += is_answer
            # the line break after a turn is never generated
            answers += [0] * len(start) + [answer * is_answer] * (len(rest) - 1) + [0]
            if len(ids) >= length:
                break
        return ids[:length], answers[:length]

    def _repeats(self, rng: Random, length: int) -> tuple[list[int], list[int]]:
        """Pieces of random tokens, each of which occurs twice and is predictable the second time."""
        ids: list[int] = []
        answers: list[int] = []
        pieces: list[list[int]] = []
        while len(ids) < length:
            if pieces and rng.random() < 0.5:
                piece = pieces.pop(rng.randrange(len(pieces)))
                # the first tokens identify the piece
                answers += [0] * 4 + [1] * (len(piece) - 4)
            else:
                piece = [rng.randrange(3, self._tokenizer.get_vocab_size()) for _ in range(rng.randrange(8, 24))]
                pieces.append(piece)
                answers += [0] * len(piece)
            ids += piece
        return ids[:length], answers[:length]

    def _batch(self, sequences: Iterator[tuple[list[int], list[int]]]) -> Batch:
        made = list(sequences)
        answers = torch.tensor([numbers for _, numbers in made])
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), answers.amax(1).cumsum(0)[:-1]])
        return Batch(torch.tensor([ids for ids, _ in made]), torch.where(answers > 0, answers + offsets[:, None], 0))
