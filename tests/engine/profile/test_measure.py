"""Choice of the steps to measure in a given time."""

from collections import Counter

import pytest

from engine.profile.measure import Limits, decode_series, measure, mixed_series, prefill_series
from engine.profile.steps import Step

ROOMY = Limits(seqs=256, length=100_000, pages=1_000_000)


class Device:
    """Returns a time that follows from a step's tokens and context, and records the steps."""

    def __init__(self, token_ms: float) -> None:
        self.token_ms = token_ms
        self.runs: list[Step] = []
        self.total_ms = 0.0

    def __call__(self, step: Step) -> float:
        self.runs.append(step)
        ms = self.token_ms * (5 + step.work.tokens) + 1e-4 * step.work.context
        self.total_ms += ms
        return ms


def test_series_grow_and_stay_within_the_limits() -> None:
    for limits in (ROOMY, Limits(seqs=20, length=2000, pages=300), Limits(seqs=1, length=64, pages=4)):
        for series in (decode_series(limits), prefill_series(limits), mixed_series(limits)):
            for steps in series:
                assert all(limits.allow(step) for step in steps)
                sizes = [(len(step.chunks), step.work.tokens) for step in steps]
                assert sizes == sorted(sizes)
    assert sum(map(len, decode_series(Limits(seqs=1, length=64, pages=4)))) == 1
    assert mixed_series(Limits(seqs=1, length=64, pages=4)) == []
    assert max(step.work.tokens for steps in prefill_series(ROOMY) for step in steps) == 8192


def test_the_time_to_spend_is_not_exceeded() -> None:
    series = decode_series(ROOMY) + prefill_series(ROOMY)
    for token_ms, seconds in ((0.01, 10.0), (0.5, 30.0), (3.0, 60.0)):
        device = Device(token_ms)
        measured = measure(device, series, seconds, lambda fraction: None)
        assert 1e-3 * device.total_ms < 1.3 * seconds
        assert len(measured) > 20
        assert measured == [(step, Device(token_ms)(step)) for step, _ in measured]


def test_steps_that_are_too_long_are_skipped() -> None:
    device = Device(3.0)
    measure(device, prefill_series(ROOMY), 60, lambda fraction: None)
    assert max(step.work.tokens for step in device.runs) == 512  # the first step that takes more than 1/40 of a minute


def test_short_steps_are_repeated_more_often_and_none_endlessly() -> None:
    device = Device(0.05)
    measure(device, [[Step.prefill(2**k) for k in range(4, 12)]], 1.5, lambda fraction: None)
    counts = list(Counter(device.runs).values())
    assert counts == sorted(counts, reverse=True)
    assert max(counts) <= 1.5 * 16 + 3
    assert min(counts) >= 1


def test_disturbed_runs_do_not_count() -> None:
    runs = iter(range(1_000))

    def run(step: Step) -> float:
        return 10.0 * (1 + 3 * (next(runs) % 3 == 1))

    ((_, ms),) = measure(run, [[Step.decode(1, 16)]], 1, lambda fraction: None)
    assert ms == 10


def test_progress_rises_to_the_end() -> None:
    fractions: list[float] = []
    measure(Device(0.05), prefill_series(ROOMY), 2, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
