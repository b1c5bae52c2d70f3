"""Gaps between the chunks of streams in a window of time.

    mean gap = time that the streams spent decoding in the window / number of gaps in it

A stream is given by the times of its chunks in seconds, ascending. A gap that lies partly in the window counts as a
fraction. So the mean is exact for windows shorter than a gap, such as a small burst, and does not depend on whether the
window begins just before or after a chunk.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Stamps = Sequence[float]


def mean_gap_ms(streams: Sequence[Stamps], start_s: float, end_s: float) -> float | None:
    """Mean gap in the window, in ms; None if nothing was decoded."""
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
    """True if the mean gaps of the window's two halves differ by at most the factor `ratio`."""
    middle_s = (start_s + end_s) / 2
    first, second = mean_gap_ms(streams, start_s, middle_s), mean_gap_ms(streams, middle_s, end_s)
    return first is not None and second is not None and 1 / ratio <= second / first <= ratio


def gaps_ms(streams: Sequence[Stamps], start_s: float, end_s: float) -> npt.NDArray[np.float64]:
    """All gaps that lie in the window or reach into it, in full length, in ms."""
    found = []
    for stamps in streams:
        first = max(bisect_right(stamps, start_s) - 1, 0)
        last = bisect_right(stamps, end_s) + 1
        found.append(np.diff(np.asarray(stamps[first:last])) * 1e3)
    return np.concatenate(found) if found else np.empty(0)


def timeline(
    streams: Sequence[Stamps], start_s: float, end_s: float, origin_s: float, points: int
) -> list[tuple[float, float]]:
    """The mean gap over time, in `points` pieces: (middle of the piece in ms since `origin_s`, mean gap in ms)."""
    edges = np.linspace(start_s, end_s, points + 1).tolist()
    pieces = ((low, high, mean_gap_ms(streams, low, high)) for low, high in pairwise(edges))
    return [
        (round(((low + high) / 2 - origin_s) * 1e3, 3), round(gap, 3)) for low, high, gap in pieces if gap is not None
    ]


def _position(stamps: Stamps, time_s: float) -> float:
    """Number of a stream's gaps, with fractions, before a time between its first and last chunk."""
    after = bisect_right(stamps, time_s)
    if after == len(stamps):
        return after - 1
    begun_s = stamps[after - 1]
    return after - 1 + (time_s - begun_s) / (stamps[after] - begun_s)
