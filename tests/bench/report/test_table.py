import io
from typing import Any

import pytest
from rich.console import Console

from bench.metrics import summarise
from bench.record import Failure, Record
from bench.report.table import show
from bench.result import Client, Result
from bench.slo import Slo
from tests.bench.records import completed, failed


def result(
    *records: Record, reasons: tuple[str, ...] = (), offered_per_s: float | None = None, **fields: Any
) -> Result:
    summary, rows = summarise(records, start_s=0.0, slo=Slo(ttft=200), offered_per_s=offered_per_s)
    known: dict[str, Any] = {
        "label": "random",
        "command": ["cpd", "bench", "run"],
        "started_at": "2030-01-01T00:00:00Z",
        "versions": {},
        "settings": {},
        "seed": 1,
        "interrupted": False,
        "cluster_before": None,
        "cluster_after": None,
        "client": Client(
            limited=bool(reasons),
            reasons=list(reasons),
            processes=2,
            cpu_share=0.31,
            loop_lag_ms_p50=0.1,
            loop_lag_ms_p99=0.4,
            machine_share=0.2,
            machine_idle=0.3,
            selftest=None,
        ),
        "summary": summary,
        "requests": rows,
    }
    return Result(**{**known, **fields})


def shown(result: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def many(**fields: Any) -> list[Record]:
    return [
        completed(due_s=index * 0.5, ttft_s=0.1 + index * 0.01, gaps_s=[0.02] * 9, session=index, **fields)
        for index in range(20)
    ]


def test_figures_stand_above_their_intervals() -> None:
    lines = shown(result(*many())).splitlines()
    at = next(number for number, line in enumerate(lines) if line.lstrip().startswith("TTFT"))
    assert lines[at].split() == ["TTFT,", "ms", "195", "195", "271", "280", "288", "290"]
    assert lines[at + 1].split()[0] == "170-219"
    assert "First gap" in lines[at + 2]


def test_the_counts_and_rates_of_a_run() -> None:
    text = shown(result(*many(cached_tokens=4), failed("http_500", detail="out of memory")))
    assert "random: 20 completed, 1 failed in 10.0 s" in text
    assert "Goodput/s                 1.10 (52.4 % of all requests)" in text
    assert "Prompt tokens from cache  50.0 %" in text
    assert "processes 2, busiest 31.0 % of a core" in text


@pytest.mark.parametrize("offered_per_s", [None, 2.0])
def test_only_an_open_loop_has_an_offered_rate_and_times_from_sending(offered_per_s: float | None) -> None:
    text = shown(result(*many(), offered_per_s=offered_per_s))
    assert ("2.00 sent, 2.00 offered" in text) is (offered_per_s is not None)
    assert ("TTFT sent" in text) is (offered_per_s is not None)


def test_each_kind_of_failure_has_its_first_detail_as_it_came() -> None:
    text = shown(
        result(
            failed("http_500", due_s=1.0, detail="[red]first[/red]"),
            failed("http_500", due_s=2.0, detail="second"),
            failed(Failure.ABORTED, detail="never shown"),
        )
    )
    assert "[red]first[/red]" in text
    assert "second" not in text
    assert "never shown" not in text
    assert "0 completed, 2 failed, 1 aborted" in text


def test_turns_and_routes_have_rows_of_their_own() -> None:
    text = shown(result(*many(route="local"), *many(turn=1, route="remote")))
    for name in ("turn 1", "turn 2", "local", "remote"):
        assert any(line.split("  ")[0].strip() == name for line in text.splitlines())


def test_a_run_without_a_single_answer_is_shown_too() -> None:
    text = shown(result(failed(Failure.CONNECT, ended_s=0.0, detail="connection refused")))
    assert "connection refused" in text
    assert "nan" not in text


def test_an_interrupted_run_says_so() -> None:
    assert "(interrupted)" in shown(result(*many(), interrupted=True))


def test_a_client_that_limited_the_run_gets_the_reasons_and_no_figures() -> None:
    text = shown(result(*many(), reasons=("its event loop ran 12 ms late", "a core was 99 % busy")))
    assert "The client could not keep up" in text
    assert "its event loop ran 12 ms late" in text
    assert "a core was 99 % busy" in text
    assert "--processes" in text
    assert "TTFT" not in text
    assert "completed" not in text


def test_everything_fits_into_eighty_columns() -> None:
    slow = [
        completed(due_s=index * 10.0, ttft_s=1.2 + index, gaps_s=[1.5 + index / 7] * 9, session=index, turn=index % 2)
        for index in range(20)
    ]
    text = shown(result(*slow, failed("http_500", detail="x" * 200), offered_per_s=2.0))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "TTFT, s" in text
    assert "ITL, ms" in text
