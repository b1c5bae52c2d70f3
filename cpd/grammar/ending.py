"""Endings: the tokens that an output must still get to be complete, as few as can be found quickly.

A grammar tells which tokens may come next, not which of them lead to an end. This module knows how JSON and texts like it
end: strings are closed first, then lists and objects, and values get as few characters as they must have. An ending that
is found is valid; there may be a shorter one, or none is found although there is one.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

_FREE = "~"
"""A character that may come within strings of any text, and nowhere else in JSON."""

_IN_TEXT = '".'
"""What comes within such a string: its end, or a character that it lacks."""

_DIGITS, _LETTERS = "0123456789", "nabcdefghijklmopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKS = "-@./+_#=;&?!%*()<>|^'`~$\\"

_ORDERS = ('}]",:' + _DIGITS + _LETTERS + "[{" + _MARKS + " \n", '",:}]' + _MARKS + _LETTERS + _DIGITS + "[{ \n")
"""What comes first elsewhere, in JSON and, if that does not end, within strings that have a pattern."""


class Endings:
    """Finds endings, by tokens of one character."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        def tokens(characters: str) -> list[int]:
            found = (tokenizer.greedy_tokenize(character) for character in characters)
            return [ids[0] for ids in found if len(ids) == 1]

        self._free = tokens(_FREE)
        self._in_text = tokens(_IN_TEXT)
        self._orders = [tokens(order) for order in _ORDERS]

    def find(self, matcher: LLMatcher, markers: Sequence[int], limit: int) -> list[int] | None:
        """Returns the tokens that lead from a matcher's state to the end of its grammar, at most `limit`.

        Args:
            matcher: It is not changed.
            markers: Tokens of the grammar that are no text, such as the one that ends reasoning.
        """
        for order in self._orders:
            tokens = self._walk(matcher.deep_copy(), order, markers, limit)
            if tokens is not None:
                return tokens
        return None

    def _walk(
        self, matcher: LLMatcher, order: Sequence[int], markers: Sequence[int], limit: int
    ) -> list[int] | None:
        tokens: list[int] = []
        while not matcher.is_accepting():
            more = matcher.compute_ff_tokens() or self._next(matcher, order, markers)
            tokens += more
            if not more or len(tokens) > limit or not matcher.consume_tokens(more):
                return None
        return tokens

    def _next(self, matcher: LLMatcher, order: Sequence[int], markers: Sequence[int]) -> list[int]:
        """Returns the token to go on with; none if there is none of one character."""

        def first(tokens: Sequence[int]) -> list[int]:
            return next(([token] for token in tokens if matcher.validate_tokens([token])), [])

        if first(self._free):
            return first(markers) or first(self._in_text) or first(order)
        return first(order) or first(markers)
