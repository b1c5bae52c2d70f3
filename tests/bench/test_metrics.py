import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.metrics import summarise
from bench.record import Failure, Record
from bench.result import Request, Summary
from bench.slo import Slo
from tests.bench.records import completed, failed


def run(
    *records: Record, start_s: float = 0.0, slo: Slo | None = None, offered_per_s: float | None = None
) -> tuple[Summary, list[Request]]:
    return summarise(records, start_s=start_s, slo=slo, offered_per_s=offered_per_s)


def figures(
    *records: Record, start_s: float = 0.0, slo: Slo | None = None, offered_per_s: float | None = None
) -> Summary:
    return run(*records, start_s=start_s, slo=slo, offered_per_s=offered_per_s)[0]


def test_the_latencies_of_a_request_count_from_when_it_was_due() -> None:
    record = completed(
        due_s=100.0, sent_s=100.02, ttft_s=0.05, gaps_s=[0.03, 0.01, 0.02], output_tokens=7, ended_s=100.12
    )
    record.answer_s = record.content_s[2]
    _, (row,) = run(record, start_s=90.0)
    assert (row.due_s, row.sent_s, row.ended_s) == (10.0, 10.02, 10.12)
    assert (row.ttft_ms, row.service_ttft_ms) == (50.0, 30.0)
    assert (row.e2e_ms, row.service_e2e_ms) == (120.0, 100.0)
    assert row.answer_ms == 90.0
    assert row.first_gap_ms == 30.0
    assert row.itl_ms == [30.0, 10.0, 20.0]
    assert row.tpot_ms == 10.0  # 60 ms for the 6 tokens after the first, however they are split into chunks


@pytest.mark.parametrize(
    "record",
    [
        completed(gaps_s=[]),
        completed(gaps_s=[], output_tokens=5),  # all in one chunk: the times of single tokens are unknown
        completed(output_tokens=1),
        completed(output_tokens=None),
    ],
)
def test_tpot_needs_two_tokens_at_two_times(record: Record) -> None:
    summary, (row,) = run(record)
    assert row.tpot_ms is None
    assert summary.tpot_ms.count == 0


def test_gaps_are_pooled_over_requests() -> None:
    summary = figures(
        completed(gaps_s=[0.01] * 3), completed(session=1, gaps_s=[0.05]), completed(session=2, gaps_s=[])
    )
    assert summary.itl_ms.count == 4
    assert summary.itl_ms.mean == pytest.approx(20.0)
    assert summary.first_gap_ms.count == 2
    assert summary.first_gap_ms.mean == pytest.approx(30.0)
    assert summary.ttft_ms.count == 3


def test_a_failed_request_counts_by_its_kind_and_in_no_latency() -> None:
    summary, rows = run(
        completed(),
        failed(Failure.TIMEOUT),
        failed("http_503", status=503),
        failed("http_503", status=503),
        failed(Failure.INCOMPLETE, content_s=[0.5, 0.9]),
    )
    assert (summary.completed, summary.failed, summary.aborted) == (1, 4, 0)
    assert list(summary.errors.items()) == [("http_503", 2), ("timeout", 1), ("incomplete", 1)]
    assert summary.ttft_ms.count == summary.e2e_ms.count == 1
    assert summary.itl_ms.count == 2
    broken = rows[-1]
    assert (broken.ttft_ms, broken.itl_ms, broken.e2e_ms) == (500.0, [400.0], None)


def test_rates_are_of_completed_requests_over_the_time_to_the_end_of_the_last_request() -> None:
    summary = figures(
        completed(due_s=10.0, prompt_tokens=100),
        completed(due_s=11.0, prompt_tokens=50),
        failed(Failure.TIMEOUT, due_s=10.0, ended_s=14.0),
        start_s=10.0,
    )
    assert summary.duration_s == 4.0
    assert summary.requests_per_s == 0.5
    assert (summary.prompt_tokens, summary.output_tokens) == (150, 6)
    assert summary.output_tokens_per_s == 1.5
    assert summary.total_tokens_per_s == 39.0


def test_tokens_that_one_answer_does_not_say_are_unknown_in_the_sum() -> None:
    summary = figures(completed(), completed(output_tokens=None))
    assert summary.output_tokens is None
    assert summary.output_tokens_per_s is None
    assert summary.total_tokens_per_s is None
    assert summary.prompt_tokens == 16


def test_aborted_requests_are_in_nothing_but_their_count() -> None:
    aborted = completed(due_s=1.0, error=Failure.ABORTED, ended_s=50.0, sent_s=40.0, turn=3, route="remote")
    counted = [completed(), failed(Failure.EMPTY)]
    with_it, rows = run(*counted, aborted, slo=Slo(ttft=1000))
    without = figures(*counted, slo=Slo(ttft=1000))
    assert with_it == without.model_copy(update={"aborted": 1})
    assert [row.good for row in rows] == [True, False, None]


def test_failed_requests_stay_in_the_denominator_of_goodput() -> None:
    summary = figures(
        completed(ttft_s=0.1),
        completed(ttft_s=0.1),
        completed(ttft_s=0.5),
        failed("http_500", ended_s=2.0),
        slo=Slo(ttft=200),
    )
    assert summary.goodput_share == 0.5
    assert summary.goodput_per_s == 1.0


def test_without_a_target_there_is_no_goodput() -> None:
    summary, (row,) = run(completed())
    assert (summary.goodput_share, summary.goodput_per_s, row.good) == (None, None, None)


def test_a_cache_that_the_server_never_mentions_is_unknown_and_one_it_mentions_sometimes_is_0_elsewhere() -> None:
    assert figures(completed(prompt_tokens=100)).cached_token_rate is None
    assert figures(completed(prompt_tokens=100, cached_tokens=0)).cached_token_rate == 0.0
    some = figures(completed(prompt_tokens=100, cached_tokens=80), completed(prompt_tokens=100))
    assert some.cached_token_rate == 0.4


def test_schedule_lag_is_how_late_requests_were_sent() -> None:
    punctual = [completed(due_s=float(second)) for second in range(50)]
    assert figures(*punctual).schedule_lag_ms == 0.0
    late = [completed(due_s=float(second), sent_s=second + 0.2, ttft_s=0.3) for second in range(50)]
    assert figures(*late).schedule_lag_ms == pytest.approx(200.0)


def test_the_achieved_rate_of_an_open_loop_leaves_out_the_drain_and_later_turns() -> None:
    arrivals = [completed(due_s=index * 0.25, session=index) for index in range(9)]
    slow = completed(due_s=1.0, ttft_s=20.0, session=4, turn=1)
    open_loop = figures(*arrivals, slow, offered_per_s=4.0)
    assert open_loop.offered_per_s == 4.0
    assert open_loop.achieved_per_s == pytest.approx(4.0)
    closed_loop = figures(*arrivals, slow)
    assert closed_loop.offered_per_s is None
    assert closed_loop.achieved_per_s == pytest.approx(9 / 21.02)


def test_the_achieved_rate_counts_sessions_that_were_begun_and_then_aborted() -> None:
    ended = [completed(due_s=index * 0.25, session=index) for index in range(4)]
    given_up = [failed(Failure.ABORTED, due_s=index * 0.25, session=index) for index in range(4, 9)]
    assert figures(*ended, *given_up, offered_per_s=4.0).achieved_per_s == pytest.approx(4.0)


def test_rows_by_turn_and_by_route() -> None:
    summary = figures(
        completed(ttft_s=0.4, route="remote"),
        completed(turn=1, ttft_s=0.1, route="local", prompt_tokens=10, cached_tokens=5),
        completed(turn=1, ttft_s=0.2, route="local"),
        failed(Failure.CONNECT),
    )
    assert [(group.name, group.completed, group.failed) for group in summary.by_turn] == [
        ("turn 1", 1, 1),
        ("turn 2", 2, 0),
    ]
    local, remote = summary.by_route
    assert (local.name, local.completed, remote.name, remote.completed) == ("local", 2, "remote", 1)
    assert local.ttft_ms.mean == pytest.approx(150.0)
    assert remote.ttft_ms.mean == pytest.approx(400.0)
    assert local.cached_token_rate == 5 / 18
    assert remote.cached_token_rate is None


def test_single_turns_without_routes_have_no_such_rows() -> None:
    summary = figures(completed())
    assert (summary.by_turn, summary.by_route) == ([], [])


def test_a_run_without_any_request_has_figures_of_nothing() -> None:
    summary, rows = run(slo=Slo(ttft=1), offered_per_s=3.0)
    assert rows == []
    assert (summary.completed, summary.duration_s, summary.requests_per_s, summary.achieved_per_s) == (0, 0.0, 0.0, 0.0)
    assert (summary.schedule_lag_ms, summary.goodput_share, summary.goodput_per_s, summary.steady) == (None,) * 4


def test_rows_are_in_the_order_in_which_requests_were_due() -> None:
    _, rows = run(completed(due_s=2.0), completed(due_s=1.0), completed(due_s=3.0))
    assert [row.due_s for row in rows] == [1.0, 2.0, 3.0]


# The steady window


def stream(start_s: float, end_s: float, session: int) -> Record:
    """One chunk of one token every 0.5 s from 0.5 s after `start_s` to `end_s`."""
    return completed(due_s=start_s, ttft_s=0.5, gaps_s=[0.5] * round((end_s - start_s) / 0.5 - 1), session=session)


def test_the_steady_window_leaves_out_ramp_and_drain() -> None:
    streams = [stream(float(index), 20.0 + index, index) for index in range(4)]
    steady = figures(*streams).steady
    assert steady is not None
    assert (steady.start_s, steady.end_s) == (3.0, 20.0)
    assert steady.completed == 1
    assert steady.requests_per_s == pytest.approx(1 / 17)
    # A chunk of each stream every half second, both ends included.
    assert steady.output_tokens_per_s == pytest.approx((3 * 35 + 34) / 17)
    assert steady.ttft_ms.count == 1  # the first chunks of the others came earlier
    assert steady.itl_ms.count == 3 * 35 + 33


def test_a_short_pause_of_one_stream_does_not_end_the_steady_window() -> None:
    first = [stream(0.0, 10.0, index) for index in range(3)]
    second = [stream(10.01 + index * 0.01, 20.0, 3 + index) for index in range(3)]
    steady = figures(*first, *second).steady
    assert steady is not None
    assert steady.start_s == 0.0
    assert steady.end_s == pytest.approx(20.0, abs=0.1)


def test_requests_that_seldom_overlap_are_steady_from_the_first_to_the_last() -> None:
    steady = figures(*(stream(10.0 * index, 10.0 * index + 1, index) for index in range(5))).steady
    assert steady is not None
    assert (steady.start_s, steady.end_s) == (0.0, 41.0)
    assert steady.completed == 5


def test_steady_tokens_are_unknown_where_the_server_does_not_count() -> None:
    steady = figures(completed(output_tokens=None)).steady
    assert steady is not None
    assert steady.output_tokens_per_s is None


def test_a_run_of_failures_has_a_steady_window_without_figures() -> None:
    steady = figures(failed(Failure.TIMEOUT)).steady
    assert steady is not None
    assert (steady.completed, steady.ttft_ms.count, steady.itl_ms.count) == (0, 0, 0)
    assert figures(failed(Failure.CONNECT, ended_s=0.0)).steady is None


times = st.floats(0, 100).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(times, times, st.lists(times, max_size=4)), max_size=12))
def test_steady_figures_never_exceed_those_of_the_whole_run(spans: list[tuple[float, float, list[float]]]) -> None:
    records = [completed(due_s=due_s, ttft_s=ttft_s, gaps_s=gaps_s) for due_s, ttft_s, gaps_s in spans]
    summary = figures(*records)
    steady = summary.steady
    if steady is None:
        assert summary.duration_s == 0 or all(record.ended_s == record.sent_s for record in records)
        return
    assert 0 <= steady.start_s < steady.end_s <= summary.duration_s
    assert steady.completed <= summary.completed
    assert steady.itl_ms.count <= summary.itl_ms.count
    assert summary.output_tokens is not None
    assert steady.output_tokens_per_s is not None
    assert steady.output_tokens_per_s * (steady.end_s - steady.start_s) <= summary.output_tokens + 1e-6
