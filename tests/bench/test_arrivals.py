import numpy as np
import pytest

from bench.arrivals import ClosedLoop, OpenLoop, plan_arrivals
from bench.settings import RunSettings
from cpd.common.errors import ConfigError


def settings(**values: object) -> RunSettings:
    return RunSettings.load(values)


def open_loop(size: int | None = None, seed: int = 1, **values: object) -> OpenLoop:
    arrivals = plan_arrivals(settings(**values), size, None, seed)
    assert isinstance(arrivals, OpenLoop)
    return arrivals


def test_constant_arrivals_are_evenly_spaced() -> None:
    due_s = open_loop(rate=10, num_requests=50, arrival="constant").due_s
    assert np.allclose(due_s, np.arange(50) / 10)


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    gaps = np.diff(open_loop(rate=20, num_requests=20_000).due_s)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(open_loop(rate=20, num_requests=20_000, arrival="gamma", burstiness=burstiness).due_s)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20 / burstiness**0.5, rel=0.05)


@pytest.mark.parametrize(("rate", "rate_end"), [(10.0, 40.0), (40.0, 10.0)])
def test_a_ramp_begins_at_one_rate_and_ends_at_the_other(rate: float, rate_end: float) -> None:
    due_s = open_loop(rate=rate, rate_end=rate_end, duration=100, arrival="constant").due_s
    first, last = np.sum(due_s < 10), np.sum(due_s >= 90)
    assert first == pytest.approx(10 * (rate + (rate_end - rate) * 0.05), rel=0.05)
    assert last == pytest.approx(10 * (rate + (rate_end - rate) * 0.95), rel=0.05)
    assert len(due_s) == pytest.approx(2500, rel=0.01)


@pytest.mark.parametrize(("rate", "rate_end"), [(10.0, 40.0), (40.0, 10.0)])
def test_a_ramp_sends_exactly_the_requests_that_were_asked_for(rate: float, rate_end: float) -> None:
    due_s = open_loop(rate=rate, rate_end=rate_end, num_requests=500).due_s
    assert len(due_s) == 500
    assert np.all(np.diff(due_s) >= 0)
    assert np.all(np.isfinite(due_s))


def test_a_duration_ends_the_schedule() -> None:
    due_s = open_loop(rate=50, duration=10).due_s
    assert due_s[-1] < 10
    assert len(due_s) == pytest.approx(500, rel=0.2)


def test_an_infinite_rate_sends_everything_at_once_and_needs_a_number_of_requests() -> None:
    assert open_loop(rate=float("inf"), num_requests=5).due_s.tolist() == [0.0] * 5
    with pytest.raises(ConfigError, match="--num-requests"):
        open_loop(rate=float("inf"), duration=5)


def test_a_seed_repeats_the_schedule_and_another_one_does_not() -> None:
    first, again, other = (open_loop(rate=5, num_requests=100, seed=seed).due_s for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_offered_rate_is_that_of_the_schedule() -> None:
    assert open_loop(rate=8, num_requests=100, arrival="constant").offered_per_s == pytest.approx(8)
    assert open_loop(rate=8, num_requests=1).offered_per_s is None


def test_a_workload_with_times_of_its_own_keeps_them() -> None:
    arrivals = plan_arrivals(settings(), 4, [0.0, 0.5, 0.5, 7.0], 0)
    assert isinstance(arrivals, OpenLoop)
    assert arrivals.due_s.tolist() == [0.0, 0.5, 0.5, 7.0]
    shorter = plan_arrivals(settings(duration=5), 4, [0.0, 0.5, 0.5, 7.0], 0)
    assert isinstance(shorter, OpenLoop)
    assert shorter.due_s.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "size", "sessions"),
    [
        ({"concurrency": 4}, None, 200),
        ({"concurrency": 4}, 17, 17),
        ({"concurrency": 4, "num_requests": 5}, 17, 5),
        ({"concurrency": 4, "num_requests": 50}, 17, 17),
        ({"concurrency": 4, "duration": 3}, None, None),
        ({"concurrency": 4, "duration": 3}, 17, 17),
    ],
)
def test_a_closed_loop_ends_with_its_requests_its_file_or_its_time(
    values: dict[str, object], size: int | None, sessions: int | None
) -> None:
    arrivals = plan_arrivals(settings(**values), size, None, 0)
    duration_s = 3 if "duration" in values else None
    assert arrivals == ClosedLoop(streams=4, sessions=sessions, duration_s=duration_s, pause=None, seed=0)


def test_users_pause_and_a_seed_repeats_their_pauses() -> None:
    first, again, other = (
        plan_arrivals(settings(users=3, think_s="uniform:1,2"), None, None, seed) for seed in (5, 5, 6)
    )
    assert isinstance(first, ClosedLoop)
    assert isinstance(again, ClosedLoop)
    assert isinstance(other, ClosedLoop)
    pauses = [first.pause_s(session) for session in range(50)]
    assert all(1 <= pause_s <= 2 for pause_s in pauses)
    assert pauses == [again.pause_s(session) for session in range(50)]
    assert pauses != [other.pause_s(session) for session in range(50)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--concurrency"),
        ({"concurrency": 1, "rate": 1}, "one of --concurrency and --rate"),
        ({"rate": 1, "users": 1}, "one of --rate and --users"),
        ({"concurrency": 1, "rate_end": 3}, "give --rate"),
        ({"concurrency": 1, "arrival": "constant"}, "give --rate"),
        ({"rate": 1, "burstiness": 2}, "--arrival gamma"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_arrivals(settings(**values), None, None, 0)
