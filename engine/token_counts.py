"""Which tokens a sequence has had, and how often: kept up as it grows, so that no step of a long one has to search."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_AT_ONCE = 16
"""More new tokens than these are counted together with all others."""


class TokenCounts:
    """The different tokens of a sequence from some place on. Looks at each token once."""

    __slots__ = ("_counts", "_end", "_ids", "_places")

    def __init__(self) -> None:
        self._end = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)

    def of(
        self, tokens: npt.NDArray[np.int32], begin: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The tokens from `begin` on, in no order, and how often each of them came: views, valid until the next call.

        Args:
            tokens: Those of the last call, and what has come since. [n]
            begin: The same in every call.
        """
        known = max(self._end, begin)
        if 0 <= len(tokens) - known <= _AT_ONCE:
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
            more = np.zeros(place + _AT_ONCE, np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place], self._counts[place] = token, 1

    def _count_all(self, tokens: npt.NDArray[np.int32]) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        self._ids, self._counts = ids.astype(np.int64), counts.astype(np.float32)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))


@dataclass(frozen=True, slots=True)
class PenaltyCounts:
    """Token counts that the penalties of one sequence need.

    Attributes:
        tokens: Of prompt and output.
        outputs: Of the output alone.
    """

    tokens: TokenCounts = field(default_factory=TokenCounts)
    outputs: TokenCounts = field(default_factory=TokenCounts)
