"""One output that must follow a grammar: which tokens may come next."""

from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Mask = npt.NDArray[np.int32]
"""One bit per token: bit i % 32 of word i // 32."""


def mask_of(tokens: Iterable[int], vocab_size: int) -> Mask:
    """Returns the mask of these tokens; those outside the vocabulary are dropped. [(vocab_size + 31) // 32]"""
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in tokens:
        if 0 <= token < vocab_size:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


class TokenConstraint:
    """The state of one output within its grammar. One thread may use it at a time.

    The output ends with a token of `ends`, which may come only where the grammar may end.

    Args:
        matcher: Belongs to the constraint.
        num_words: Number of words of the matcher's masks.
        text: The tokens that can be text, in a model's vocabulary. [W]
        ends: The tokens that end the output; at least one. [W]

    Attributes:
        error: Why the output can't go on; empty if it can. An output with an error never goes on.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, text: Mask, ends: Mask) -> None:
        self.error = ""
        self._matcher = matcher
        self._num_words = num_words
        self._text = text & ~ends
        self._ends = ends

    @property
    def may_end(self) -> bool:
        """True if the output is complete. It may go on all the same."""
        return not self.error and bool(self._matcher.is_accepting())

    def mask(self, *, may_end: bool = True) -> Mask:
        """Computes which tokens may come next. Sets `error` if there are none.

        Args:
            may_end: False if the output should not end yet. It may where nothing else is possible.

        Returns:
            [W]. All bits are set if there is an error; then the next token is of no use.
        """
        if not self.error:
            words = np.zeros(self._num_words, np.int32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self.error = f"the grammar can't be followed further{self._reason()}"
            else:
                allowed: Mask = words[: len(self._text)] & self._text
                if self._matcher.is_accepting() and (may_end or not allowed.any()):
                    allowed |= self._ends
                if allowed.any():
                    return allowed
                self.error = "the grammar leaves no token to go on with"
        return np.full_like(self._text, -1)

    def accept(self, token_id: int) -> bool:
        """Goes on to the next token. Returns False, and sets `error`, if the grammar does not allow it here."""
        if self.error:
            return False
        if self._ends[token_id // 32] >> token_id % 32 & 1:
            accepted = bool(self._matcher.is_accepting())
        else:
            accepted = self._matcher.consume_token(token_id)
        if not accepted:
            self.error = f"the grammar does not allow token {token_id} here{self._reason()}"
        return accepted

    def _reason(self) -> str:
        return f": {describe(self._matcher.get_error())}" if self._matcher.is_error() else ""

    def fork(self) -> Self:
        """Returns a copy, which goes its own way."""
        copy = type(self)(self._matcher.deep_copy(), self._num_words, self._text, self._ends)
        copy.error = self.error
        return copy


def describe(message: str) -> str:
    """Returns the first line of an error of llguidance, of limited length."""
    line = message.strip().split("\n", 1)[0]
    return line if len(line) <= 300 else f"{line[:300]}…"
