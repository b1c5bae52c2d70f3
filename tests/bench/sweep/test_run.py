"""Sweeps against the mock server, through the command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

import bench.run
from bench.errors import BenchError
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.sweep.search import share_interval
from cpd.cli.main import app


@pytest.fixture(scope="module")
def server() -> Iterator[MockServer]:
    with MockServer(Behaviour(ttft_ms=100, itl_ms=50)) as server:
        yield server


def sweep(*arguments: str) -> Result:
    lengths = ["--input-len", "16", "--output-len", "3", "--no-selftest"]
    return CliRunner().invoke(app, ["bench", "sweep", *lengths, *arguments])


def test_a_sweep_has_a_point_for_each_load_and_a_page(server: MockServer, tmp_path: Path) -> None:
    file, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    done = sweep(
        "--url", server.url, "--concurrencies", "1,4", "--num-requests", "12", "--json", str(file), "--html", str(page)
    )
    assert done.exit_code == 0, done.output
    found = orjson.loads(file.read_bytes())
    assert found["schema"] == "cpd-bench-sweep/1"
    assert [point["load"] for point in found["points"]] == [1, 4]
    assert [point["result"]["summary"]["completed"] for point in found["points"]] == [12, 12]
    assert len({point["result"]["seed"] for point in found["points"]}) == 2
    assert "Output tokens/s" in page.read_text()


@pytest.mark.parametrize(("error", "exit_code"), [(BenchError("the server is gone"), 1), (KeyboardInterrupt(), 130)])
def test_what_ends_a_sweep_between_its_points_leaves_those_until_then(
    server: MockServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int
) -> None:
    measured: list[Any] = []

    def measure(*arguments: Any) -> Any:
        if measured:
            raise error
        measured.append(bench.run.measure(*arguments))
        return measured[0]

    monkeypatch.setattr("bench.sweep.run.measure", measure)
    file = tmp_path / "sweep.json"
    done = sweep("--url", server.url, "--concurrencies", "1,2", "--num-requests", "2", "--json", str(file))
    assert done.exit_code == exit_code
    found = orjson.loads(file.read_bytes())
    assert [point["load"] for point in found["points"]] == [1]
    assert found["interrupted"] is True


def test_a_search_ends_below_the_rate_that_the_target_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any) -> Any:
        result = bench.run.measure(*arguments)
        result.client.limited = False  # even if the machine is busy
        return result

    monkeypatch.setattr("bench.sweep.run.measure", measure)
    # A prefill blocks all other requests: 16 words take 160 ms, so the limit is 6.25 requests/s.
    with MockServer(Behaviour(ttft_ms=1, itl_ms=50, prefill_us_per_token=10_000)) as slow:
        file = tmp_path / "sweep.json"
        done = sweep(
            *("--url", slow.url, "--find-max-rate", "--rate", "2", "--slo", "ttft=600", "--slo-share", "0.9"),
            *("--precision", "0.5", "--duration", "4", "--json", str(file)),
        )
    assert done.exit_code == 0, done.output
    found = orjson.loads(file.read_bytes())
    assert 1 <= found["max_rate"] <= 6.25
    assert found["too_much"] <= found["max_rate"] * 1.5


def test_a_search_that_the_client_limited_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(settings: Any, *arguments: Any) -> Any:
        result = bench.run.measure(settings, *arguments)
        result.client.limited = settings.rate > 20
        return result

    monkeypatch.setattr("bench.sweep.run.measure", measure)
    with MockServer(Behaviour(ttft_ms=1, itl_ms=1)) as quick:
        done = sweep(
            *("--url", quick.url, "--find-max-rate", "--rate", "10", "--slo", "ttft=10000", "--slo-share", "0.5"),
            *("--num-requests", "20"),
        )
    assert done.exit_code == 3
    text = " ".join(done.stdout.split())
    assert "Up to 20.0 sessions/s" in text
    assert "The search ended at 40.0: the client could not keep up." in text


def test_the_turns_of_a_session_are_one_fact(server: MockServer, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    sweep(
        *("--url", server.url, "--workload", "multi-turn", "--turns", "5", "--concurrencies", "2"),
        *("--num-requests", "4", "--slo", "ttft=10000", "--json", str(file)),
    )
    (point,) = orjson.loads(file.read_bytes())["points"]
    assert point["result"]["summary"]["completed"] == 20
    assert point["share"] == 1
    assert tuple(point["share_ci"]) == share_interval(1.0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one of"),
        (["--rates", "1,2", "--concurrencies", "1"], "needs one of"),
        (["--rates", "1,x"], "positive numbers"),
        (["--rates", "1,nan"], "positive numbers"),
        (["--rates", "1,inf"], "positive numbers"),
        (["--concurrencies", "0"], "positive numbers"),
        (["--find-max-rate"], "--slo"),
        (["--rates", "1", "--rate", "4"], "a sweep takes --rates"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_sent(arguments: list[str], message: str) -> None:
    done = sweep("--url", "http://127.0.0.1:9", *arguments)
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_rate_under_which_the_queue_grows_is_ended_early_and_is_too_much(tmp_path: Path) -> None:
    # A prefill of 16 words takes 160 ms and blocks all other requests: the server can't keep up with 40 requests/s.
    with MockServer(Behaviour(ttft_ms=1, itl_ms=50, prefill_us_per_token=10_000)) as slow:
        file = tmp_path / "sweep.json"
        sweep("--url", slow.url, "--rates", "40", "--duration", "60", "--slo", "ttft=60000", "--json", str(file))
    (point,) = orjson.loads(file.read_bytes())["points"]
    assert point["overloaded"] is True
    assert point["met"] is False
    assert point["result"]["summary"]["aborted"] > 0
    assert point["result"]["interrupted"] is False
