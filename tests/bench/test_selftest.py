import io
from functools import partial

import pytest
from rich.console import Console

from bench.errors import BenchError
from bench.mock.behaviour import Behaviour
from bench.result import Accuracy
from bench.selftest import compare, report, selftest
from tests.bench.records import completed


def test_a_client_that_stamps_everything_equally_late_has_no_error_but_a_delay() -> None:
    records = [completed(session=0, due_s=1.0, ttft_s=0.1), completed(session=1, due_s=2.0, ttft_s=0.1)]
    sends = {0: [0.99, 1.09, 1.1, 1.11], 1: [1.99, 2.09, 2.1, 2.11]}
    accuracy = compare(2, records, sends)
    assert accuracy.streams == 2
    assert accuracy.chunks_per_s == pytest.approx(6 / 1.02)
    assert (accuracy.ttft_error, accuracy.itl_error) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert (accuracy.delay_ms_p50, accuracy.delay_ms_p99) == pytest.approx((10.0, 10.0))


def test_a_request_that_left_late_is_an_error_of_ttft() -> None:
    accuracy = compare(1, [completed(due_s=1.0, ttft_s=0.15)], {0: [1.05, 1.15, 1.16, 1.17]})
    assert accuracy.ttft_error == pytest.approx(0.5)
    assert accuracy.itl_error == pytest.approx(0.0, abs=1e-9)


def test_chunks_that_were_read_late_together_are_an_error_of_itl() -> None:
    records = [completed(due_s=1.0, ttft_s=0.1, gaps_s=[0.0, 0.02, 0.0])]
    accuracy = compare(1, records, {0: [1.0, 1.09, 1.1, 1.11, 1.12]})
    assert accuracy.itl_error == pytest.approx(1.0)


def test_a_mock_server_that_is_late_itself_is_no_error_of_the_client() -> None:
    records = [completed(due_s=1.0, ttft_s=0.5, gaps_s=[0.3, 0.3])]
    accuracy = compare(1, records, {0: [1.0, 1.5, 1.8, 2.1]})
    assert (accuracy.ttft_error, accuracy.itl_error) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_a_chunk_that_the_client_missed_is_refused() -> None:
    with pytest.raises(BenchError, match="each chunk"):
        compare(1, [completed()], {0: [0.0, 0.1, 0.2]})


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest self-test: one request per stream."""
    monkeypatch.setattr("bench.selftest._TEST_S", 0.0)


@pytest.mark.usefixtures("short")
def test_the_real_client_counts_every_chunk_of_the_mock_server() -> None:
    accuracy = selftest(24, 2)
    assert accuracy.streams == 24
    assert accuracy.chunks_per_s > 0
    assert 0 < accuracy.delay_ms_p50 <= accuracy.delay_ms_p99


@pytest.mark.usefixtures("short")
def test_settings_for_the_measured_server_do_not_reach_the_mock_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_BENCH_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CPD_BENCH_WORKLOAD", "trace")
    monkeypatch.setenv("CPD_BENCH_CONCURRENCY", "3")
    monkeypatch.setenv("CPD_BENCH_MOCK_FAULT", "status")
    assert selftest(1, 1).chunks_per_s > 0


@pytest.mark.usefixtures("short")
def test_a_client_whose_requests_fail_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.selftest.Behaviour", partial(Behaviour, fault="status", status=503, fault_share=0.5))
    with pytest.raises(BenchError, match=r"1 of 2 requests .* the first with http_503: the mock server was told"):
        selftest(2, 1)


def test_the_report_names_the_load_and_the_errors() -> None:
    out = io.StringIO()
    accuracy = Accuracy(
        streams=64, chunks_per_s=8889, ttft_error=0.012, itl_error=0.003, delay_ms_p50=0.05, delay_ms_p99=3
    )
    report(accuracy, Console(file=out, width=100))
    for shown in ("64 streams", "8,889", "1.2 %", "0.3 %", "0.050 ms", "3.00 ms"):
        assert shown in out.getvalue()
