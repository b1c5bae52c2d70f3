"""Counts of a sequence's tokens, for penalties. Updated as it grows, so that no step counts a long sequence again."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_MAX_SINGLY = 16
"""Maximum number of new tokens that are counted one by one. With more, all tokens are counted at once."""


_NO_IDS, _NO_COUNTS = np.empty(0, np.int64), np.empty(0, np.float32)


class TokenCounts:
    """Counts the distinct tokens of a growing sequence."""

    __slots__ = ("_counts", "_end", "_ids", "_places")

    def __init__(self) -> None:
        self._end = 0
        self._places: dict[int, int] = {}
        self._ids, self._counts = _NO_IDS, _NO_COUNTS

    def of(
        self, tokens: npt.NDArray[np.int32], begin: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns the distinct tokens from position `begin` on, in any order, and their counts.

        The arrays are views, valid until the next call.

        Args:
            tokens: The tokens of the last call, followed by new ones. [n]
            begin: The same in every call.
        """
        known = max(self._end, begin)
        if 0 <= len(tokens) - known <= _MAX_SINGLY:
            for token in tokens[known:].tolist():
                self._count(token)
        else:
            self._count_all(tokens[begin:])
        self._end = len(tokens)
        size = len(self._places)
        return self._ids[:size], self._counts[:size]

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            more = np.zeros(place + _MAX_SINGLY, np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place], self._counts[place] = token, 1

    def _count_all(self, tokens: npt.NDArray[np.int32]) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        self._ids, self._counts = ids.astype(np.int64), counts.astype(np.float32)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))


@dataclass(frozen=True, slots=True)
class PenaltyCounts:
    """Token counts for the penalties of one sequence.

    Attributes:
        tokens: Counts of prompt and output.
        outputs: Counts of the output alone.
    """

    tokens: TokenCounts = field(default_factory=TokenCounts)
    outputs: TokenCounts = field(default_factory=TokenCounts)
