"""Text of a wanted number of tokens.

Texts are common English words joined by spaces. With the model's tokenizer their length is exact: only words are used
that are one token after a space. Without one, the server tells what a word costs on average; the commonest words
are used then, which most vocabularies have as one token each, so that the average holds for every text.
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
_FEWEST = 16  # different words that make texts differ soon enough


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Makes texts and, with a tokenizer, counts their tokens. Can be sent to other processes.

    Args:
        words: What texts are made of: strings [number of words].
        openers: Those that may begin one.
        tokens_per_word: Tokens that a word costs, on average.
        overhead: Tokens that the endpoint itself adds to a prompt of one message (chat template, first token).
        tokenizer: The model's, if known.
    """

    words: npt.NDArray[Any] = field(repr=False)
    openers: npt.NDArray[Any] = field(repr=False)
    tokens_per_word: float
    overhead: int
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @classmethod
    def measured(cls, tokens_per_word: float, overhead: int) -> Self:
        """Texts of about the wanted length."""
        words = np.array(_all_words()[:_COMMONEST], object)
        return cls(words, words, tokens_per_word, overhead)

    @classmethod
    def with_tokenizer(cls, directory: Path, overhead: int = 0) -> Self:
        """Texts of exactly the wanted length, for the model whose tokenizer.json is in this directory.

        Raises:
            BenchError: There is none, it cannot be read, or it is of a kind that no exact texts can be made for.
        """
        tokenizer = _read_tokenizer(directory)
        count = partial(_tokens_in, tokenizer)
        words = [word for word in _all_words() if count(f"the {word}") - count("the") == 1]
        openers = [word for word in words if count(word) == 1]
        if len(words) < _FEWEST or not openers or count(" ".join((openers[0], *words))) != 1 + len(words):
            raise BenchError(
                f"{directory}/tokenizer.json has too few English words as single tokens for prompts of exact length; "
                "leave out --tokenizer: then the server's own counts are used"
            )
        return cls(np.array(words, object), np.array(openers, object), 1.0, overhead, tokenizer)

    def text(self, rng: np.random.Generator, tokens: int) -> str:
        """A text of this many tokens, of one word at least."""
        opener = self.openers[rng.integers(len(self.openers))]
        return " ".join([opener, *self._draw(rng, self._number(tokens) - 1)])

    def more(self, rng: np.random.Generator, tokens: int) -> str:
        """A text to put behind another one: it begins with a space, and their lengths add up. One word at least."""
        return " ".join(["", *self._draw(rng, self._number(tokens))])

    @property
    def count(self) -> Callable[[str], int] | None:
        """Counts the tokens of a text, without those that an endpoint adds; None without a tokenizer."""
        return partial(_tokens_in, self.tokenizer) if self.tokenizer else None

    def _number(self, tokens: int) -> int:
        return max(1, round(tokens / self.tokens_per_word))

    def _draw(self, rng: np.random.Generator, number: int) -> list[str]:
        words: list[str] = self.words[rng.integers(len(self.words), size=number)].tolist()
        return words


async def measure(ask: Callable[[str], Awaitable[int | None]], tokenizer: Path | None = None) -> Texts:
    """Texts for a server, from two trial requests.

    Args:
        ask: Sends a prompt of one message with this text and returns the server's usage.prompt_tokens, if it says.
        tokenizer: Directory with the model's tokenizer.json, for texts of exact length.

    Raises:
        BenchError: The server says nothing, or what it says is impossible, and there is no tokenizer; or the
            tokenizer is another one than the server's; or as in `with_tokenizer`.
    """
    texts = Texts.with_tokenizer(tokenizer) if tokenizer else Texts.measured(1.0, 0)
    words: list[str] = texts.words[:_COMMONEST].tolist()
    short, long = " ".join(words), " ".join(words + words)
    for_short, for_long = await ask(short), await ask(long)
    if for_short is None or for_long is None:
        if tokenizer:
            return texts
        raise BenchError(
            "the server does not say how many tokens a prompt has (no usage.prompt_tokens); "
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
    except Exception as error:  # the library raises nothing more specific
        raise BenchError(f"cannot read {path}, which --tokenizer should have: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokens_in(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
