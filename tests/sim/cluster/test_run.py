from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.result import Result
from sim.app import app

COMMON = ["--workers", "2", "--prefill-workers", "1", "--warmup", "0", "--duration", "1"]


def test_a_run_is_a_result_that_bench_reads(tmp_path: Path) -> None:
    path, page = tmp_path / "result.json", tmp_path / "result.html"
    done = CliRunner().invoke(app, ["run", *COMMON, "--rate", "6", "--json", str(path), "--html", str(page)])
    assert done.exit_code == 0, done.output
    result = Result.load(path)
    assert result.simulated
    assert result.summary.completed == len(result.requests) > 0
    assert result.summary.goodput_share is not None
    assert "no evidence for real hardware" in page.read_text()
    assert "kept up" not in page.read_text() + done.output


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    line = '{"timestamp": %d, "input_length": 700, "output_length": 3, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (100 * i, i + 2) for i in range(5)))
    arguments = ["run", *COMMON, "--workload", "trace", "--file", str(trace), "--json", str(path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    result = Result.load(path)
    assert [(row.input_len, row.output_tokens) for row in result.requests] == [(700, 3)] * 5
    assert [row.cached_tokens for row in result.requests] == [0, 512, 512, 512, 512]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "trace"], "needs --file"),
        (["--profile", "/nowhere.json"], "there is no profile"),
        (["--workers", "2", "--prefill-workers", "2"], "leave no combined one"),
    ],
)
def test_contradicting_settings_are_one_clear_sentence(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["run", *COMMON, *arguments])
    assert done.exit_code == 1
    assert message in done.output
