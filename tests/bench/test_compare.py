from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.compare import compare
from bench.errors import BenchError
from bench.result import Result
from tests.bench.report.synthetic import Server, synthetic_result


def _saved(directory: Path, **results: Result) -> list[Path]:
    paths = []
    for name, result in results.items():
        paths.append(directory / f"{name}.json")
        result.save(paths[-1])
    return paths


def _compare(paths: list[Path], html: Path | None = None) -> str:
    console = Console(file=StringIO(), width=140)
    compare(paths, html, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_ratios_and_overlap_are_printed(tmp_path: Path) -> None:
    slow = synthetic_result("slow", Server(stall_s=None), requests=60)
    fast = synthetic_result("fast", Server(speed=2.0, stall_s=None), requests=60)
    text = _compare(_saved(tmp_path, a=slow, b=fast))
    line = next(line for line in text.splitlines() if "ITL p50" in line)
    assert "0.50x" in line
    assert "apart" in text


def test_the_same_run_twice_is_no_difference(tmp_path: Path) -> None:
    run = synthetic_result(requests=60)
    text = _compare(_saved(tmp_path, a=run, b=run))
    assert "overlap" in text
    assert "apart" not in text


def test_runs_of_one_label_are_named_by_their_files(tmp_path: Path) -> None:
    run = synthetic_result("model", requests=20)
    text = _compare(_saved(tmp_path, before=run, after=run))
    assert "before" in text
    assert "after" in text


def test_a_run_that_was_interrupted_is_pointed_out(tmp_path: Path) -> None:
    whole, part = synthetic_result("whole", requests=20), synthetic_result("part", requests=20)
    text = _compare(_saved(tmp_path, a=whole, b=part.model_copy(update={"interrupted": True})))
    assert "part: Interrupted" in text
    assert "whole: Interrupted" not in text


def test_another_load_is_pointed_out(tmp_path: Path) -> None:
    paths = _saved(tmp_path, a=synthetic_result("a", requests=20), b=synthetic_result("b", requests=20, rate=16))
    text = _compare(paths)
    assert "Settings that differ" in text
    assert "different loads" in text


def test_another_model_is_no_other_load(tmp_path: Path) -> None:
    text = _compare(_saved(tmp_path, a=synthetic_result("a", requests=20), b=synthetic_result("b", requests=20)))
    assert "Settings that differ" in text
    assert "different loads" not in text


def test_a_page_is_written(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    _compare(_saved(tmp_path, a=synthetic_result("a", requests=20), b=synthetic_result("b", requests=20)), html)
    assert "a vs b" in html.read_text(encoding="utf-8")


def test_a_limited_run_is_refused(tmp_path: Path) -> None:
    paths = _saved(tmp_path, a=synthetic_result(requests=20), b=synthetic_result(requests=20, limited=True))
    with pytest.raises(BenchError, match=r"b\.json has no figures.*event loop was 41 ms late"):
        _compare(paths)


def test_one_file_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="at least two"):
        _compare(_saved(tmp_path, a=synthetic_result(requests=20)))
