import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu import common
from scripts.gpu.common import MissingError, Timing
from scripts.gpu.results import Exit, Report


def test_a_timing_is_the_median_and_the_middle() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.5
    assert 1.0 <= timing.low <= 2.0
    assert 5.0 <= timing.high <= 100.0
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


@pytest.mark.usefixtures("pretend_device")
def test_a_failure_keeps_the_figures_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report) -> None:
        report.add("before", 1.0, "ms")
        raise RuntimeError("misaligned address")

    assert common.run_experiment("layout", "?", run, argv=["--out", str(tmp_path)]) == Exit.FAILED
    content = json.loads((tmp_path / "layout.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == ["before"]
    assert content["error"] == "RuntimeError: misaligned address"
    assert "before" in capsys.readouterr().out


@pytest.mark.usefixtures("pretend_device")
def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report) -> None:
        common.require("flashinfer_that_is_not_here", "flashinfer-python")

    assert common.run_experiment("layout", "?", run, argv=[]) == Exit.MISSING
    assert "carry the wheel of flashinfer-python" in capsys.readouterr().err


def test_require_explains_a_module_that_does_not_load() -> None:
    with pytest.raises(MissingError, match="carry the wheel of nixl"):
        common.require("nixl_that_is_not_here", "nixl")


def test_the_commit_of_a_copy_without_history_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_COMMIT", "0123456789ab")
    assert common.commit() == "0123456789ab"


def test_the_error_is_relative_and_sees_nan() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert common.relative_error(reference.clone(), reference) == 0.0
    assert common.relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert common.relative_error(torch.tensor([3.0, float("nan")]), reference) != 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_device_an_experiment_says_so_and_exits_with_its_own_status() -> None:
    code = (
        "import sys; from scripts.gpu.common import run_experiment; sys.exit(run_experiment('x', '?', print, argv=[]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == Exit.NO_DEVICE
    assert "x: no CUDA device" in ran.stderr
    assert "Traceback" not in ran.stderr
