"""`cpd bench run` as a command, against the mock server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner
from typer.testing import Result as Invoked

from bench import prepare as bench_prepare
from bench.client.target import Target
from bench.errors import BenchError
from bench.metrics import summarise
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.prepare import cluster_snapshot
from bench.run import command_line
from bench.settings import RunSettings
from cpd.cli.main import app
from tests.bench.client.scripted import Reader, Writer, always, chunked, request, serving


@pytest.fixture(scope="module")
def server() -> Iterator[MockServer]:
    with MockServer(Behaviour(ttft_ms=100, itl_ms=50, cached_tokens=4, route="local")) as server:
        yield server


def bench(*arguments: str) -> Invoked:
    return CliRunner().invoke(
        app, ["bench", "run", "--no-selftest", "--input-len", "16", "--output-len", "4", *arguments]
    )


def saved(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def test_a_run_prints_and_saves_what_it_measured(server: MockServer, tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    done = bench(
        *("--url", f"{server.url}/v1", "--concurrency", "4", "--num-requests", "8", "--slo", "ttft=1000,itl=1000"),
        *("--api-key", "a-secret", "--json", str(file), "--html", str(page)),
    )
    assert done.exit_code == 0, done.output
    assert "8 completed, 0 failed" in done.stdout
    result = saved(file)
    summary = result["summary"]
    assert result["schema"] == "cpd-bench/1"
    assert summary["completed"] == len(result["requests"]) == 8
    assert summary["errors"] == {}
    assert summary["output_tokens"] == 32
    assert summary["goodput_share"] == 1.0
    assert summary["cached_token_rate"] == pytest.approx(8 * 4 / summary["prompt_tokens"])
    assert [group["name"] for group in summary["by_route"]] == ["local"]
    assert summary["ttft_ms"]["p50"] >= 100
    low, high = summary["ttft_ms"]["ci"]["p50"]
    assert low <= summary["ttft_ms"]["p50"] <= high
    assert result["client"]["limited"] is False
    assert "a-secret" not in file.read_text()
    assert "a-secret" not in page.read_text()


def test_the_self_test_goes_before_the_run(server: MockServer, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    bench("--url", server.url, "--concurrency", "2", "--num-requests", "4", "--selftest", "--json", str(file))
    assert saved(file)["client"]["selftest"]["streams"] == 2


def test_a_seed_repeats_the_lengths_and_without_one_every_run_has_its_own(server: MockServer, tmp_path: Path) -> None:
    runs = []
    for number, seed in enumerate((["--seed", "7"], ["--seed", "7"], [], [])):
        file = tmp_path / f"{number}.json"
        lengths = ["--input-len", "uniform:8,400", "--concurrency", "8", "--num-requests", "8"]
        bench("--url", server.url, *lengths, *seed, "--json", str(file))
        result = saved(file)
        runs.append((result["seed"], sorted((row["session"], row["prompt_tokens"]) for row in result["requests"])))
    assert runs[0] == runs[1]
    assert len({seed for seed, _ in runs}) == 3


def test_a_server_that_always_fails_is_counted_and_is_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with MockServer(Behaviour(fault="status", status=503)) as failing:
        done = bench("--url", failing.url, "--concurrency", "2", "--num-requests", "6", "--json", str(file))
    assert done.exit_code == 1
    assert saved(file)["summary"]["errors"] == {"http_503": 6}


def test_a_server_without_usage_is_measured_without_token_counts(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with MockServer(Behaviour(ttft_ms=50, itl_ms=50, usage="none")) as silent:
        done = bench("--url", silent.url, "--concurrency", "2", "--num-requests", "4", "--json", str(file))
    assert done.exit_code == 0, done.output
    result = saved(file)
    assert result["summary"]["completed"] == 4
    assert result["summary"]["output_tokens"] is None
    assert result["summary"]["itl_ms"]["count"] == 4 * 3
    assert any("no usage" in warning for warning in result["client"]["warnings"])


def test_a_target_that_no_request_meets_is_reported(server: MockServer) -> None:
    done = bench("--url", server.url, "--concurrency", "2", "--num-requests", "4", "--slo", "ttft=1")
    assert done.exit_code == 0
    assert "no request met the target ttft=1" in " ".join(done.stdout.split())


def test_a_client_that_falls_behind_its_schedule_refuses_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with MockServer(Behaviour(ttft_ms=1, itl_ms=1)) as quick:
        done = bench(
            *("--url", quick.url, "--rate", "100000", "--arrival", "constant", "--num-requests", "3000"),
            *("--output-len", "1", "--json", str(file)),
        )
    assert done.exit_code == 3
    assert "could not keep up" in done.stdout
    assert "TTFT" not in done.stdout.split("could not keep up")[0]
    assert saved(file)["client"]["limited"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9", "--concurrency", "1"], "no answer from"),
        (["--model", "other", "--concurrency", "1"], "does not exist"),
        ([], "--concurrency"),
        (["--concurrency", "1", "--json", "/nonexistent/run.json"], "cannot write"),
        (["--concurrency", "1", "--html", "/tmp"], "is a directory"),
        (["--concurrency", "1", "--workload", "trace"], "needs --file"),
        (["--concurrency", "1", "--slo", "fast"], "fast"),
        (["--concurrency", "1", "--tokenizer", "/nonexistent"], "tokenizer.json"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_exit_code_1(
    server: MockServer, arguments: list[str], message: str
) -> None:
    done = bench("--url", server.url, *arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize("model", ["", "m"])
async def test_a_server_that_redirects_is_no_server_to_measure(model: str) -> None:
    moved = b"HTTP/1.1 301 Moved Permanently\r\nLocation: https://else.where/\r\nContent-Length: 0\r\n\r\n"
    async with serving(always(moved)) as url:
        settings = RunSettings.load({"url": url, "model": model})
        with pytest.raises(BenchError, match=r"redirects .* with --url"):
            await asyncio.to_thread(bench_prepare.prepare, settings)


async def test_a_server_that_begins_to_fail_in_the_trial_requests_is_not_said_to_lack_usage() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(chunked())
        while True:
            await request(reader)
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")

    async with serving(script) as url:
        settings = RunSettings.load({"url": url, "model": "m"})
        with pytest.raises(BenchError, match=r"trial requests fail \(http_503: busy\)"):
            await asyncio.to_thread(bench_prepare.prepare, settings)


def test_ctrl_c_prints_and_saves_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with MockServer(Behaviour(ttft_ms=20, itl_ms=20)) as slow:
        cpd = str(Path(sys.executable).with_name("cpd"))
        command = [cpd, "bench", "run", "--no-selftest", "--url", slow.url, "--json", str(file)]
        process = subprocess.Popen(
            [*command, "--concurrency", "2", "--num-requests", "1000", "--input-len", "16", "--output-len", "8"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "120"},
        )
        assert process.stderr is not None
        process.stderr.readline()  # a progress line: the run is under way
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "(interrupted)" in output
    result = saved(file)
    assert result["interrupted"] is True
    assert result["summary"]["completed"] > 0
    assert result["summary"]["aborted"] == 2
    assert result["summary"]["errors"] == {}


def test_ctrl_c_while_figures_are_computed_waits_until_they_are_saved(
    server: MockServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return summarise(*arguments, **more)

    monkeypatch.setattr("bench.run.summarise", pressed)
    file = tmp_path / "run.json"
    done = bench("--url", server.url, "--concurrency", "2", "--num-requests", "4", "--json", str(file))
    assert done.exit_code == 130
    assert saved(file)["summary"]["completed"] == 4


def test_an_open_loop_that_is_ended_early_is_held_against_what_was_due_until_then(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with MockServer(Behaviour(ttft_ms=20, itl_ms=20)) as server:
        cpd = str(Path(sys.executable).with_name("cpd"))
        command = [cpd, "bench", "run", "--no-selftest", "--url", server.url, "--json", str(file)]
        process = subprocess.Popen(
            [*command, *("--rate", "1", "--rate-end", "30", "--num-requests", "300", "--output-len", "8")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    result = saved(file)
    assert not any("requests/s where" in reason for reason in result["client"]["reasons"])
    assert result["summary"]["offered_per_s"] < 10  # the whole ramp would offer 15.5 a second


def test_figures_that_cannot_be_saved_are_shown(server: MockServer) -> None:
    done = bench("--url", server.url, "--concurrency", "2", "--num-requests", "4", "--json", "/dev/full")
    assert done.exit_code == 1
    assert "4 completed" in done.stdout
    assert "No space left" in done.stderr


def test_a_server_that_has_stopped_holds_the_figures_up_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prepare, "_SNAPSHOT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = RunSettings.load({"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "timeout_s": 60})
        began_s = time.monotonic()
        assert cluster_snapshot(Target.of(settings, "any")) is None
    assert time.monotonic() - began_s < 30


def test_the_key_is_left_out_of_the_command_that_is_saved() -> None:
    assert command_line(["/bin/cpd", "bench", "run", "--api-key", "x", "--rate", "1"])[:5] == [
        "cpd", "bench", "run", "--api-key", "***",
    ]  # fmt: skip
    assert command_line(["cpd", "--api-key=x"]) == ["cpd", "--api-key=***"]


def test_help_lists_the_settings() -> None:
    done = CliRunner().invoke(app, ["bench", "run", "--help"])
    assert done.exit_code == 0
    assert "--burstiness" in done.stdout
