"""One output that must follow a grammar: which tokens may come next, and which must.

**Forced tokens.** Where the grammar leaves only one text, such as the rest of a property's name, its tokens are known.
They are those of the tokenizer, up to the last one that could also be the start of a longer token.

**Endings.** An output should end before its limit on tokens cuts it. So the constraint looks from time to time for an
ending (`cpd/grammar/ending.py`). It looks more often when fewer tokens can be spared, and when something begins that
may need many. A sampled token after which no ending is found that fits is replaced by the first token of the ending
before it. Once the ending needs all that is left, its tokens are forced.

What is forced or replaced follows from the tokens of the output so far and its limit, and from nothing else. So the
state is the same whether the tokens were sampled here, or are accepted again where the output goes on.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from cpd.grammar.ending import Endings

Mask = npt.NDArray[np.int32]
"""One bit per token: bit i % 32 of word i // 32."""


_NO_LIMIT = 1 << 62

_PART = 8
"""An ending is looked for again when one in this many of the tokens that the last one left over is used."""

_NEAR = 512
"""With fewer tokens than this left over, an ending is also looked for whenever a list or an object may begin."""


def mask_of(tokens: Iterable[int], vocab_size: int) -> Mask:
    """Returns the mask of these tokens; those outside the vocabulary are dropped. [(vocab_size + 31) // 32]"""
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in tokens:
        if 0 <= token < vocab_size:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """The tokens of the outputs of a grammar.

    Attributes:
        num_words: Number of words of a matcher's masks.
        text: The tokens that can be text, in a model's vocabulary, and end no output. [W]
        ends: The tokens that end an output; at least one. [W]
        end_ids: The same tokens.
        end: The one of them that ends an output which would be cut.
        markers: The grammar's own tokens that are no text.
        endings: Finds endings.
        shortest: Number of tokens of an ending of the empty output; None if none was found.
        least: Number of tokens that an output can hardly have less than. With a lower limit no ending is looked for.
    """

    num_words: int
    text: Mask
    ends: Mask
    end_ids: frozenset[int]
    end: int
    markers: Sequence[int]
    endings: Endings
    shortest: int | None
    least: int


class TokenConstraint:
    """The state of one output within its grammar. One thread may use it at a time.

    The output ends with a token of `tokens.ends`, which may come only where the grammar may end.

    Args:
        matcher: Belongs to the constraint.
        tokens: The grammar's tokens.

    Attributes:
        error: Why the output can't go on; empty if it can. An output with an error never goes on.
    """

    def __init__(self, matcher: LLMatcher, tokens: OutputTokens) -> None:
        self.error = ""
        self._matcher = matcher
        self._tokens = tokens
        self._left = _NO_LIMIT  # tokens that may still come
        self._check_at = -1  # with fewer left, the next ending is looked for
        self._near = -1  # with fewer left, one is looked for at the start of lists and objects, too; -1: none was found
        self._words = np.empty(tokens.num_words, np.int32)  # for the matcher's masks
        self._address = self._words.ctypes.data  # asking for it takes a tenth of a mask's time
        self._forced = deque(self._only_way())

    @property
    def may_end(self) -> bool:
        """True if the output is complete. It may go on all the same."""
        return not self.error and bool(self._matcher.is_accepting())

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next, as far as they are known."""
        return list(self._forced)

    def mask(self, *, may_end: bool = True) -> Mask:
        """Computes which tokens may come next. Sets `error` if there are none.

        Args:
            may_end: False if the output should not end yet. It may where nothing else is possible.

        Returns:
            [W]. All bits are set if there is an error; then the next token is of no use.
        """
        if self._forced and not self.error:
            return mask_of([self._forced[0]], 32 * len(self._tokens.text))
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
            if self._matcher.is_error():
                self.error = f"the grammar can't be followed further{self._reason()}"
            else:
                allowed: Mask = self._words[: len(self._tokens.text)] & self._tokens.text
                if self._matcher.is_accepting() and (may_end or not allowed.any()):
                    allowed |= self._tokens.ends
                if allowed.any():
                    return allowed
                self.error = "the grammar leaves no token to go on with"
        return np.full_like(self._tokens.text, -1)

    def accept(self, token_id: int) -> bool:
        """Goes on to a token of the output. Returns False, and sets `error`, if the grammar does not allow it here."""
        return self._go_on(token_id, replaceable=False) is not None

    def advance(self, token_id: int, most: int) -> list[int]:
        """Goes on with a sampled token.

        Args:
            most: Most tokens to go on to, at least 1. If it is more, an ending comes as a whole.

        Returns:
            The token, or the one in its place; then tokens that must follow. Empty, with `error` set, if the grammar
            does not allow the token.
        """
        taken = self._go_on(token_id, replaceable=True)
        tokens = [] if taken is None else [taken]
        while self._forced and self._left and (len(tokens) < most or (most > 1 and self._is_end(self._forced[-1]))):
            tokens.append(self._forced[0])
            if not self.accept(tokens[-1]):
                return []
        return tokens

    def replacement(self) -> int | None:
        """Returns the token that would take the place of a sampled one; None if none would."""
        if self.error or self._forced or self._left > max(self._check_at, self._near, 0):
            return None
        ending = self._ending(self._matcher, self._left)
        return ending[0] if ending else None

    def fork(self, left: int | None = None) -> Self:
        """Returns a copy, which goes its own way.

        Args:
            left: Most tokens of the output, if none has come yet.
        """
        other = copy(self)
        other._matcher, other._forced = self._matcher.deep_copy(), self._forced.copy()
        other._words = np.empty_like(self._words)
        other._address = other._words.ctypes.data
        if left is not None:
            other._left = left
            if self._tokens.least <= left:
                other._plan_check(self._tokens.shortest)
        return other

    def _go_on(self, token_id: int, *, replaceable: bool) -> int | None:
        """Goes on to a token, or, if it is replaceable, to the one in its place. Returns it; None with an error."""
        if self.error:
            return None
        is_forced = bool(self._forced) and self._forced[0] == token_id
        self._left -= 1
        is_due = not is_forced and self._is_due(token_id)
        before = self._matcher.deep_copy() if is_due and replaceable and self._near > 0 else None
        if not self._take(self._matcher, token_id):
            self.error = f"the grammar does not allow token {token_id} here{self._reason()}"
            return None
        if is_forced:
            self._forced.popleft()
        else:
            self._forced.clear()
        if is_due and not self._is_end(token_id):
            ending = self._ending(self._matcher, self._left)
            if ending is None and before is not None and (instead := self._ending(before, self._left + 1)):
                token_id, self._matcher = instead[0], before
                self._take(before, token_id)
                is_due = self._is_due(token_id)  # what follows must be the same in a replay
                ending = self._ending(before, self._left) if is_due else None
            if is_due and not self._is_end(token_id):
                if ending and len(ending) == self._left:
                    self._forced.extend(ending)
                self._plan_check(len(ending) if ending else None)
        if not (self._forced or self._is_end(token_id)):
            self._forced.extend(self._only_way())
        return token_id

    def _is_due(self, token_id: int) -> bool:
        """True if an ending is looked for after a token that leaves `_left`."""
        return self._left < self._check_at or (self._left < self._near and self._tokens.endings.opens(token_id))

    def _take(self, matcher: LLMatcher, token_id: int) -> bool:
        """Moves a matcher on. Returns False if its grammar does not allow the token."""
        return bool(matcher.is_accepting() if self._is_end(token_id) else matcher.consume_token(token_id))

    def _plan_check(self, length: int | None) -> None:
        """Decides when to look for an ending next, after one of `length` tokens was found, or none."""
        if length is None or length > self._left:
            self._check_at, self._near = self._left // 2, -1
        else:
            self._check_at = self._left - (self._left - length) // _PART
            self._near = length + _NEAR

    def _ending(self, matcher: LLMatcher, left: int) -> list[int] | None:
        """Returns an ending of at most `left` tokens; None if none was found."""
        tokens = self._tokens
        if left <= 0:
            return None
        text, complete = tokens.endings.find(matcher, tokens.markers, left - 1)
        return [*text, tokens.end] if complete and all(map(self._is_text, text)) else None

    def _only_way(self) -> list[int]:
        """Returns the tokens that must come next, as far as they are known: a part of the text, or the end of it."""
        matcher, tokens = self._matcher, self._matcher.compute_ff_tokens()
        if not tokens:
            return [self._tokens.end] if matcher.is_stopped() and matcher.is_accepting() else []
        return tokens[: next((place for place, token in enumerate(tokens) if not self._is_text(token)), len(tokens))]

    def _is_text(self, token_id: int) -> bool:
        text = self._tokens.text
        return token_id < 32 * len(text) and bool(text[token_id // 32] >> token_id % 32 & 1)

    def _is_end(self, token_id: int) -> bool:
        return token_id in self._tokens.end_ids

    def _reason(self) -> str:
        return f": {describe(self._matcher.get_error())}" if self._matcher.is_error() else ""


def describe(message: str) -> str:
    """Returns the first line of an error of llguidance, of limited length."""
    line = message.strip().split("\n", 1)[0]
    return line if len(line) <= 300 else f"{line[:300]}…"
