from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.curves import (
    CDF_POINTS,
    SCATTER_POINTS,
    TIME_BINS,
    Series,
    bin_width_s,
    cdf,
    gaps_over_time,
    histogram,
    in_flight,
    latencies,
    spread_wide,
    tail,
    thin,
    tokens_per_s,
)
from bench.result import Request
from bench.statistics import Floats

_latencies = st.lists(st.floats(0.0, 1e5), min_size=1, max_size=300).map(np.array)


def request(
    sent_s: float = 0.0,
    ended_s: float = 1.0,
    ttft_ms: float | None = 100.0,
    gaps_ms: tuple[float, ...] = (),
    error: str = "",
) -> Request:
    """A request that was sent when it was due."""
    known: dict[str, Any] = {"due_s": sent_s, "sent_s": sent_s, "ended_s": ended_s, "ttft_ms": ttft_ms, "error": error}
    known |= {"itl_ms": list(gaps_ms), "output_tokens": 1 + len(gaps_ms)}
    return Request.model_construct(**known)


def test_equal_steps_on_the_axis_are_ten_times_rarer() -> None:
    assert tail(np.array([0.0, 0.9, 0.99, 0.999])) == pytest.approx([0, 1, 2, 3])


@given(_latencies)
def test_a_cdf_rises_and_is_short(values: Floats) -> None:
    at, shares = cdf(values)
    assert len(at) == len(shares) <= CDF_POINTS
    assert (np.diff(at) >= 0).all()
    assert (np.diff(shares) > 0).all()
    assert shares[0] == 0
    assert shares[-1] < 1
    assert at[0] == values.min()


def test_a_cdf_has_the_percentiles() -> None:
    values = np.arange(10_001.0)
    at, shares = cdf(values)
    assert at == pytest.approx(shares * 10_000)
    assert shares[-1] == pytest.approx(0.999)


@given(st.lists(_latencies, min_size=1, max_size=3))
def test_a_histogram_counts_every_value(groups: list[Floats]) -> None:
    edges, shares = histogram(groups)
    assert (np.diff(edges) > 0).all()
    assert [share.sum() for share in shares] == pytest.approx([100.0] * len(groups))


def test_only_wide_spreads_are_logarithmic() -> None:
    assert not spread_wide([np.array([8.0, 9.0, 30.0])])
    assert spread_wide([np.array([8.0, 9.0, 30.0]), np.array([1000.0])])
    assert not spread_wide([np.empty(0)])


@given(st.floats(0, 1e6))
def test_time_bins_are_round_and_few(duration_s: float) -> None:
    width_s = bin_width_s(duration_s)
    assert width_s >= 0.1 * (1 - 1e-9)
    assert duration_s / width_s <= TIME_BINS * (1 + 1e-6)
    assert float(f"{width_s:.0e}"[0]) in (1, 2, 5)


def test_only_completed_requests_have_latencies() -> None:
    series = Series("run", "$1", [request(gaps_ms=(5.0, 6.0)), request(ttft_ms=None), request(error="timeout")])
    assert latencies(series, "ttft_ms").tolist() == [100.0]
    assert latencies(series, "itl_ms").tolist() == [5.0, 6.0]


def test_thinning_keeps_the_slowest() -> None:
    requests = [request(sent_s=float(index), ttft_ms=100.0) for index in range(5 * SCATTER_POINTS)]
    requests[7].ttft_ms = 2000.0
    kept = thin(requests, lambda one: one.ttft_ms)
    assert requests[7] in kept
    assert SCATTER_POINTS / 2 < len(kept) < 1.2 * SCATTER_POINTS
    assert [one.due_s for one in kept] == sorted(one.due_s for one in kept)


def test_tokens_are_counted_when_they_came() -> None:
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    requests = [request(ttft_ms=500.0, gaps_ms=(100.0, 1000.0)), request(sent_s=2.0, ttft_ms=100.0)]
    assert tokens_per_s(requests, edges).tolist() == [2.0, 1.0, 0.5]


def test_a_chunk_counts_for_its_share_of_the_tokens() -> None:
    one = request(ttft_ms=500.0, gaps_ms=(100.0,))
    one.output_tokens = 10
    assert tokens_per_s([one], np.array([0.0, 1.0])).tolist() == [10.0]


def test_requests_in_flight_are_averaged_over_a_bin() -> None:
    requests = [request(sent_s=0.0, ended_s=2.0), request(sent_s=0.5, ended_s=1.25)]
    assert in_flight(requests, np.array([0.0, 1.0, 2.0, 3.0])).tolist() == [1.5, 1.25, 0.0]


def test_gaps_belong_to_the_bin_in_which_they_ended() -> None:
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    p50, slowest = gaps_over_time([request(ttft_ms=100.0, gaps_ms=(10.0, 30.0, 2000.0))], edges, [50, 100])
    assert p50.tolist() == pytest.approx([20.0, np.nan, 2000.0], nan_ok=True)
    assert slowest.tolist() == pytest.approx([30.0, np.nan, 2000.0], nan_ok=True)
