import io
import threading

from rich.console import Console

from bench.record import Failure
from bench.report.progress import LiveProgress
from tests.bench.records import completed, failed


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_every_five_seconds() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.begin(total=100, duration_s=None)
        for tick in range(48):  # every quarter of a second until 11.75 s
            progress.update([completed(ttft_s=0.1, gaps_s=[0.02])] if tick % 4 == 3 else [], 8, tick / 4)
    latencies = "TTFT p50 100.0 p99 100.0 ms · ITL p50 20.0 p99 20.0 ms"
    assert output(plain).splitlines() == [
        f"5 s · 5/100 done · 1.00/s · 8 in flight · {latencies} · 95 s left",
        f"10 s · 10/100 done · 1.00/s · 8 in flight · {latencies} · 90 s left",
    ]


def test_a_run_says_what_failed_and_in_no_latency() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.begin(total=None, duration_s=20.0)
        progress.update([failed("http_500"), failed(Failure.TIMEOUT), failed("http_500")], 0, 5.0)
    assert output(plain) == "5 s · 3 done · 0.60/s · 0 in flight · failed: http_500 2, timeout 1 · 15 s left\n"


def test_of_conversations_it_counts_the_sessions_too() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.begin(total=8, duration_s=None)
        progress.update([completed(turn=turn, gaps_s=[]) for turn in (0, 1, 2, 0)], 2, 5.0)
    assert output(plain).startswith("5 s · 4 done in 2/8 sessions · ")
    assert output(plain).endswith(" · 15 s left\n")


def test_aborted_requests_are_neither_done_nor_failed() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.update([failed(Failure.ABORTED)], 0, 5.0)
    assert output(plain) == "5 s · 0 done · 0.00/s · 0 in flight\n"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.update([completed()] * 50, 1, 5.0)
        for elapsed_s in (10.0, 15.0, 20.0):
            progress.update([], 1, elapsed_s)
    rates = [line.split(" · ")[2] for line in output(plain).splitlines()]
    assert rates == ["10.00/s", "5.00/s", "0.00/s", "0.00/s"]


def test_a_run_with_two_ends_is_over_at_the_first() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.begin(total=1000, duration_s=10.0)
        progress.update([completed()] * 10, 1, 5.0)
        progress.update([], 1, 12.0)  # running requests may finish
    first, second = output(plain).splitlines()
    assert first.endswith("5 s left")
    assert "left" not in second


def test_the_next_run_begins_anew() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.update([completed(), failed("http_500")], 1, 7.0)
        progress.begin(total=5, duration_s=None)
        progress.update([], 2, 5.0)
    assert output(plain).splitlines()[1] == "5 s · 0/5 done · 0.00/s · 2 in flight"


def test_a_terminal_gets_a_display_a_few_times_a_second_that_is_gone_at_the_end() -> None:
    terminal = console(terminal=True)
    threads = threading.active_count()
    with LiveProgress(terminal) as progress:
        progress.begin(total=10, duration_s=None)
        assert threading.active_count() == threads
        for tick in range(100):  # a second
            progress.update([], 3, tick / 100)
        progress.update([completed()], 4, 1.5)
    assert 5 <= output(terminal).count("in flight") <= 6  # the last line is drawn again at the end
    assert "1/10 done" in output(terminal)
    assert output(terminal).endswith("\x1b[2K")  # the display's lines are erased


def test_the_latest_gaps_of_an_endless_stream_are_enough() -> None:
    plain = console()
    with LiveProgress(plain) as progress:
        progress.update([completed(gaps_s=[5.0] * 20_000 + [0.01] * 10_000)], 1, 5.0)
    assert "ITL p50 10.0 p99 10.0 ms" in output(plain)
