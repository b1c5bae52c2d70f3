"""Gaps between the chunks of streams, in stretches of time.

A stream is given by its stamps: when each of its chunks came, ascending, in seconds. Several streams are always taken
together. A gap counts in a stretch with the part of it that lies there; so the mean gap is the time that the streams
spent decoding, divided by the (fractional) number of gaps they got through. That is exact for stretches that are no
longer than a gap, such as a small burst, and doesn't depend on whether a stretch begins just before or after a chunk.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Stamps = Sequence[float]


def mean_gap_ms(streams: Sequence[Stamps], start_s: float, end_s: float) -> float | None:
    """Mean gap in the stretch, in ms; None if nothing was decoded there."""
    covered_s = gaps = 0.0
    for stamps in streams:
        if len(stamps) < 2:
            continue
        start, end = max(start_s, stamps[0]), min(end_s, stamps[-1])
        if start < end:
            covered_s += end - start
            gaps += _position(stamps, end) - _position(stamps, start)
    return covered_s / gaps * 1e3 if gaps else None


def is_steady(streams: Sequence[Stamps], start_s: float, end_s: float, ratio: float) -> bool:
    """Whether the mean gaps of the two halves of a stretch are within `ratio` of one another."""
    middle_s = (start_s + end_s) / 2
    first, second = mean_gap_ms(streams, start_s, middle_s), mean_gap_ms(streams, middle_s, end_s)
    return first is not None and second is not None and 1 / ratio <= second / first <= ratio


def gaps_ms(streams: Sequence[Stamps], start_s: float, end_s: float) -> npt.NDArray[np.float64]:
    """Every gap that lies in the stretch or reaches into it, whole, in ms."""
    found = []
    for stamps in streams:
        first = max(bisect_right(stamps, start_s) - 1, 0)
        last = bisect_right(stamps, end_s) + 1
        found.append(np.diff(np.asarray(stamps[first:last])) * 1e3)
    return np.concatenate(found) if found else np.empty(0)


def timeline(
    streams: Sequence[Stamps], start_s: float, end_s: float, origin_s: float, points: int
) -> list[tuple[float, float]]:
    """The mean gap over time: (middle of a piece in ms since `origin_s`, mean gap in ms) of each of `points` pieces."""
    edges = np.linspace(start_s, end_s, points + 1).tolist()
    pieces = ((low, high, mean_gap_ms(streams, low, high)) for low, high in pairwise(edges))
    return [
        (round(((low + high) / 2 - origin_s) * 1e3, 3), round(gap, 3)) for low, high, gap in pieces if gap is not None
    ]


def _position(stamps: Stamps, time_s: float) -> float:
    """How many gaps of a stream are over at a time between its first and its last chunk, parts of a gap included."""
    after = bisect_right(stamps, time_s)
    if after == len(stamps):
        return after - 1
    begun_s = stamps[after - 1]
    return after - 1 + (time_s - begun_s) / (stamps[after] - begun_s)
