"""Percentiles with confidence intervals for clustered values.

The gaps of one answer are similar, and so are the turns of one conversation. A bootstrap over single values would treat
a million gaps of a hundred sessions as independent, and give far too narrow intervals. So whole sessions are drawn (the
cluster bootstrap: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bench.result import Stat

Floats = NDArray[np.float64]

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
CONFIDENCE = 0.95
_FRACTIONS = np.array(list(PERCENTILES.values())) / 100
_SEED = 0  # equal values have equal intervals
_RESAMPLES = (100, 1000)  # at least, at most
_VALUES_DRAWN = 100_000_000  # in all resamples; less than a second for a million values


def stat(values: ArrayLike, clusters: ArrayLike) -> Stat:
    """The distribution of `values`.

    Percentiles interpolate like numpy's. The intervals tell how much the figures would vary with other sessions of the
    same kind; with a single session there are none.

    Args:
        values: [n], in any unit.
        clusters: [n] integers, the session of each value.
    """
    unordered = np.asarray(values, dtype=np.float64)
    if not unordered.size:
        return Stat(count=0, mean=None, p50=None, p90=None, p95=None, p99=None, p999=None, ci={})
    order = np.argsort(unordered)
    ordered = unordered[order]
    names, owners = np.unique(np.asarray(clusters)[order], return_inverse=True)
    percentiles = _percentiles(ordered, np.arange(1, len(ordered) + 1))
    intervals = _intervals(ordered, owners, len(names)) if len(names) > 1 else {}
    return Stat(
        count=len(ordered),
        mean=float(ordered.mean()),
        **dict(zip(PERCENTILES, percentiles.tolist(), strict=True)),
        ci=intervals,
    )


def _intervals(ordered: Floats, owners: NDArray[np.intp], clusters: int) -> dict[str, tuple[float, float]]:
    """Interval of each figure of the sorted values [n]; value i belongs to cluster `owners[i]`."""
    sums = np.bincount(owners, weights=ordered)
    sizes = np.bincount(owners)
    random = np.random.default_rng(_SEED)
    resamples = int(np.clip(_VALUES_DRAWN // len(ordered), *_RESAMPLES))
    drawn = np.empty((resamples, 1 + len(PERCENTILES)))
    for row in drawn:
        # How often each cluster was drawn. Bytes make the look-up for every value twice as fast.
        times = np.bincount(random.integers(0, clusters, clusters), minlength=clusters)
        copies = np.cumsum(times.astype(np.uint8)[owners], dtype=np.int64)
        row[0] = times @ sums / (times @ sizes)
        row[1:] = _percentiles(ordered, copies)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return {name: (float(low[index]), float(high[index])) for index, name in enumerate(("mean", *PERCENTILES))}


def _percentiles(ordered: Floats, copies: NDArray[np.int64]) -> Floats:
    """Percentiles of a sample with `copies[i]` values up to and including `ordered[i]`."""
    last = copies[-1] - 1
    ranks = _FRACTIONS * last
    below = np.floor(ranks)
    at = np.searchsorted(copies, np.concatenate([below, np.minimum(below + 1, last)]), side="right")
    low, high = ordered[at].reshape(2, -1)
    interpolated: Floats = low + (ranks - below) * (high - low)
    return interpolated
