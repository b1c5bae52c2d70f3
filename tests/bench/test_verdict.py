from dataclasses import replace

import pytest

from bench.load.plan import Health
from bench.metrics import summarise
from bench.record import Record
from bench.result import Accuracy, Summary
from bench.verdict import doubts, why_limited

HEALTHY = Health(
    processes=1, cpu_share=0.4, loop_lag_ms_p50=0.05, loop_lag_ms_p99=0.4, machine_share=0.2, machine_idle=0.5
)
ACCURATE = Accuracy(streams=16, chunks_per_s=3000, ttft_error=0.01, itl_error=0.0, delay_ms_p50=0.05, delay_ms_p99=0.5)


def summary(lag_s: float = 0.0, offered_per_s: float | None = None) -> Summary:
    """Twenty requests, one every 100 ms, TTFT 100 ms after they were sent, ITL 10 ms."""
    records = []
    for index in range(20):
        due_s = index * 0.1
        sent_s = due_s + lag_s
        first_s = sent_s + 0.1
        content_s = [first_s + 0.01 * number for number in range(5)]
        records.append(Record(index, 0, 8, 5, due_s, sent_s, content_s, first_s, content_s[-1], 200, output_tokens=5))
    return summarise(records, start_s=0.0, slo=None, offered_per_s=offered_per_s)[0]


def test_a_healthy_client_has_no_reasons() -> None:
    assert why_limited(summary(), HEALTHY, ACCURATE) == []
    assert why_limited(summary(offered_per_s=10), HEALTHY, None) == []


@pytest.mark.parametrize(
    ("health", "accuracy", "run", "reason"),
    [
        (replace(HEALTHY, cpu_share=0.97), ACCURATE, summary(), "97%"),
        (replace(HEALTHY, loop_lag_ms_p50=2.1, loop_lag_ms_p99=9.0), ACCURATE, summary(), "median ITL"),
        (replace(HEALTHY, machine_share=0.2, machine_idle=0.08), ACCURATE, summary(), "were idle for 8%"),
        (HEALTHY, ACCURATE.model_copy(update={"itl_error": 0.2}), summary(), "20%"),
        (HEALTHY, ACCURATE.model_copy(update={"ttft_error": 0.07}), summary(), "7%"),
        (HEALTHY, ACCURATE, summary(lag_s=0.2), "after they were due"),
        (HEALTHY, ACCURATE, summary(offered_per_s=20), "were due"),
    ],
)
def test_a_client_that_falls_behind_says_in_what(health: Health, accuracy: Accuracy, run: Summary, reason: str) -> None:
    reasons = why_limited(run, health, accuracy)
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_light_client_on_a_full_machine_is_no_reason() -> None:
    assert why_limited(summary(), replace(HEALTHY, machine_share=0.04, machine_idle=0.0), ACCURATE) == []


def test_a_late_loop_makes_the_tail_doubtful_without_a_refusal() -> None:
    late = replace(HEALTHY, loop_lag_ms_p50=0.1, loop_lag_ms_p99=6.0)
    assert why_limited(summary(), late, ACCURATE) == []
    assert len(doubts(summary(), late)) == 1
    assert doubts(summary(), HEALTHY) == []
