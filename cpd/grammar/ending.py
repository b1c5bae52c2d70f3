"""Endings: the tokens that an output must still get to be complete, as few as can be found quickly.

A grammar tells which tokens may come next, not which of them lead to an end. This module knows how JSON, and texts like
it, end: strings are closed first, then lists and objects, and values get as few characters as they must have. An ending
that is found is valid. There may be a shorter one, and where none is found there may be one.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

MAX_TRIES = 4096
"""Limit on the tokens that are tried in a search: that many take some ms."""

FREE_TRIES, TRIES_A_TOKEN = 256, 32
"""Limit on the tries that lead to no token: these, and so many for each token that was found. All but 1 in 800 of the
schemas of JSONSchemaBench that have an ending within MAX_TRIES keep it."""

MAX_CPU_S = 0.1
"""A search that takes longer is given up. Only grammars that are made for that take so long."""

_DIGITS, _LETTERS = "0123456789", "nabcdefghijklmopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKS = "@-./+_#=;&?!%*()<>|^'`~$"


class Ending(NamedTuple):
    """What a search for an ending has found.

    Attributes:
        tokens: The tokens of the way to the end.
        complete: They lead there; else the search was given up behind them.
    """

    tokens: list[int]
    complete: bool


class Endings:
    """Finds endings, by tokens of one character. The attributes are such tokens, the likelier ones first.

    Attributes:
        quote: Ends strings.
        any_text: May all come only within text without a pattern.
        closing: May end such a text.
        filling: Make it longer where it can't end yet.
        text: May come only within text.
        in_patterns: May come within text with a pattern.
        separating: One of each kind that may come within such text, and what may lead to its next part.
        kinds: One of each kind of these.
        ending: End something between texts.
        values: Begin or continue something there.
        space: White space.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        def tokens(characters: str) -> list[int]:
            found = (tokenizer.greedy_tokenize(character) for character in characters)
            return [ids[0] for ids in found if len(ids) == 1]

        self._tokenizer = tokenizer
        self.quote = tokens('"')
        self.any_text = tokens("~ ")
        self.closing = tokens('"<\n' + _MARKS)
        self.filling = tokens(". ")
        self.text = tokens("zZ_@")
        self.in_patterns = tokens(",:" + _MARKS + "}])" + _DIGITS + _LETTERS + "({[ \n\\")
        self.separating = tokens("0nA,:" + _MARKS + "}])")
        self.kinds = tokens("@-./_:0nA")
        self.ending = tokens('}]",:')
        self.values = tokens(_DIGITS + _LETTERS + "[{" + _MARKS + "\\")
        self.space = tokens(" \n")

    def find(self, matcher: LLMatcher, markers: Sequence[int], most: int) -> Ending:
        """Looks for the tokens that lead from a matcher's state to the end of its grammar.

        Args:
            matcher: It is not changed.
            markers: Tokens of the grammar that are no text, such as the one that ends reasoning.
            most: Most tokens.
        """
        return _Search(self, matcher.deep_copy(), markers).run(most)

    def opens(self, token_id: int) -> bool:
        """True if a list or an object may begin with a token: much may have to follow it."""
        text = self._tokenizer.decode_bytes([token_id])
        return b"{" in text or b"[" in text


class _Search:
    """A search for an ending: a single way, without turning back."""

    def __init__(self, characters: Endings, matcher: LLMatcher, markers: Sequence[int]) -> None:
        self._characters = characters
        self._matcher = matcher
        self._markers = markers
        self._uses = Counter[int]()  # of characters in this text or number
        self._tries = 0

    def run(self, most: int) -> Ending:
        """Looks for the tokens that lead to the end. Gives up if they are more than `most`, or there is no way."""
        tokens: list[int] = []
        until_s = time.thread_time() + MAX_CPU_S
        while not self._matcher.is_accepting():
            more = self._matcher.compute_ff_tokens() or self._choose()
            tokens += more
            most_tries = min(MAX_TRIES, FREE_TRIES + TRIES_A_TOKEN * len(tokens))
            too_many = len(tokens) > most or self._tries > most_tries or time.thread_time() > until_s
            if not more or too_many or not self._matcher.consume_tokens(more):
                return Ending(tokens, False)
        return Ending(tokens, True)

    def _choose(self) -> list[int]:
        """Returns the token to go on with; none if there is none."""
        known = self._characters
        if known.any_text and all(self._allows(token) for token in known.any_text):
            found = self._closing() or self._first(self._markers) or self._first(known.filling)
        elif any(self._allows(token) for token in known.text):
            found = self._first(known.quote) or self._closing_soon()
            found = found or self._least_used(known.separating) or self._least_used(known.in_patterns)
        elif found := self._first(known.ending):
            self._uses.clear()
        else:
            found = self._least_used(known.separating) or self._least_used(known.values) or self._first(known.space)
        return found or self._first(self._markers) or self._any()

    def _allows(self, *tokens: int) -> int:
        """Returns how many of these tokens may come, one after the other."""
        self._tries += 1
        return self._matcher.validate_tokens(tokens)  # type: ignore[arg-type]

    def _first(self, tokens: Iterable[int]) -> list[int]:
        return next(([token] for token in tokens if self._allows(token)), [])

    def _closing(self) -> list[int]:
        """Returns a token that ends a text without a pattern."""
        other = self._characters.any_text[0]
        return next(([token] for token in self._characters.closing if self._allows(token, other) == 1), [])

    def _closing_soon(self) -> list[int]:
        """Returns a token behind which a string may end, or that has one behind it where it may."""
        known = self._characters
        after = {token: self._allows(token, *known.quote) for token in known.kinds}
        if found := next(([token] for token, count in after.items() if count == 2), []):
            return found
        pairs = ((token, other) for token, count in after.items() if count for other in known.kinds)
        return next(([token] for token, other in pairs if self._allows(token, other, *known.quote) == 3), [])

    def _least_used(self, tokens: Sequence[int]) -> list[int]:
        """Returns a token that was used as little as possible: one that may come again and again leads nowhere."""
        found = self._first(sorted(tokens, key=self._uses.__getitem__))
        self._uses.update(found)
        return found

    def _any(self) -> list[int]:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)[:1]]
