"""Makes texts of a given number of tokens.

Texts are common English words joined by spaces. With the model's tokenizer their length is exact: they use only words
that are one token after a space. Without it, the server's token counts give the average tokens per word; texts then use
the commonest words, which are one token each in most vocabularies, so that the average holds for every text.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.errors import BenchError

_COMMONEST = 256
_FEWEST = 16  # different words, so that texts differ early


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Makes texts and, with a tokenizer, counts their tokens. Can be pickled.

    Args:
        words: The words of texts: strings [number of words].
        openers: Words that may begin a text.
        tokens_per_word: Average tokens per word.
        overhead: Tokens that the endpoint adds to a prompt of one message (chat template, first token).
        tokenizer: The model's tokenizer, if known.
    """

    words: npt.NDArray[Any] = field(repr=False)
    openers: npt.NDArray[Any] = field(repr=False)
    tokens_per_word: float
    overhead: int
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @classmethod
    def measured(cls, tokens_per_word: float, overhead: int) -> Self:
        """Makes texts of approximate length."""
        words = np.array(_all_words()[:_COMMONEST], object)
        return cls(words, words, tokens_per_word, overhead)

    @classmethod
    def with_tokenizer(cls, directory: Path, overhead: int = 0) -> Self:
        """Makes texts of exact length, with the tokenizer.json in this directory.

        Raises:
            BenchError: It is missing, cannot be read, or does not allow texts of exact length.
        """
        tokenizer = _read_tokenizer(directory)
        count = partial(_tokens_in, tokenizer)
        words = [word for word in _all_words() if count(f"the {word}") - count("the") == 1]
        openers = [word for word in words if count(word) == 1]
        if len(words) < _FEWEST or not openers or count(" ".join((openers[0], *words))) != 1 + len(words):
            raise BenchError(
                f"{directory}/tokenizer.json has too few English words as single tokens for prompts of exact length; "
                "leave out --tokenizer to use the server's own counts"
            )
        return cls(np.array(words, object), np.array(openers, object), 1.0, overhead, tokenizer)

    def text(self, rng: np.random.Generator, tokens: int) -> str:
        """A text of `tokens` tokens, at least one word."""
        opener = self.openers[rng.integers(len(self.openers))]
        return " ".join([opener, *self._draw(rng, self._number(tokens) - 1)])

    def more(self, rng: np.random.Generator, tokens: int) -> str:
        """A text to append to another one: it begins with a space, and their lengths add up. At least one word."""
        return " ".join(["", *self._draw(rng, self._number(tokens))])

    @property
    def count(self) -> Callable[[str], int] | None:
        """A function that counts the tokens of a text, without those of the endpoint; None without a tokenizer."""
        return partial(_tokens_in, self.tokenizer) if self.tokenizer else None

    def _number(self, tokens: int) -> int:
        return max(1, round(tokens / self.tokens_per_word))

    def _draw(self, rng: np.random.Generator, number: int) -> list[str]:
        words: list[str] = self.words[rng.integers(len(self.words), size=number)].tolist()
        return words


async def measure(ask: Callable[[str], Awaitable[int | None]], tokenizer: Path | None = None) -> Texts:
    """Makes texts for a server, with two trial requests.

    Args:
        ask: Sends a prompt of one message with this text. Returns the server's usage.prompt_tokens, if any.
        tokenizer: Directory with the model's tokenizer.json, for texts of exact length.

    Raises:
        BenchError: Without a tokenizer, the server sends no counts or impossible ones; or the tokenizer is not the
            server's; or as in `with_tokenizer`.
    """
    texts = Texts.with_tokenizer(tokenizer) if tokenizer else Texts.measured(1.0, 0)
    words: list[str] = texts.words[:_COMMONEST].tolist()
    short, long = " ".join(words), " ".join(words + words)
    for_short, for_long = await ask(short), await ask(long)
    if for_short is None or for_long is None:
        if tokenizer:
            return texts
        raise BenchError(
            "the server does not report the tokens of a prompt (no usage.prompt_tokens); "
            "give the directory of the model's tokenizer with --tokenizer"
        )
    if texts.count:
        own_short, own_long = texts.count(short), texts.count(long)
        if not 0 <= for_short - own_short == for_long - own_long:
            raise BenchError(
                f"{tokenizer}/tokenizer.json is not the server's tokenizer: for the same two texts the server counts "
                f"{for_short} and {for_long} tokens, this one {own_short} and {own_long}"
            )
        return replace(texts, overhead=for_short - own_short)
    if for_long <= for_short:
        raise BenchError(
            f"the server counts {for_short} tokens for a text and {for_long} for twice that text; "
            "give the directory of the model's tokenizer with --tokenizer"
        )
    return Texts.measured((for_long - for_short) / len(words), max(0, 2 * for_short - for_long))


def _all_words() -> Sequence[str]:
    """Short common English words, the commonest first."""
    return (files("bench") / "words.txt").read_text(encoding="utf-8").split()


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no specific type
        raise BenchError(f"cannot read {path} of --tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokens_in(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
