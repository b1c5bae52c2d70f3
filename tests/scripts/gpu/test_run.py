import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu.common import require
from scripts.gpu.results import Exit, Report
from scripts.gpu.run import run_experiment


@pytest.mark.usefixtures("pretend_device")
def test_a_failure_keeps_the_figures_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report) -> None:
        report.add("before", 1.0, "ms")
        raise RuntimeError("misaligned address")

    assert run_experiment("layout", "?", run, tmp_path) == Exit.FAILED
    content = json.loads((tmp_path / "layout.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == ["before"]
    assert content["error"] == "RuntimeError: misaligned address"
    assert "before" in capsys.readouterr().out


@pytest.mark.usefixtures("pretend_device")
def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report) -> None:
        require("flashinfer_that_is_not_here", "flashinfer-python")

    assert run_experiment("layout", "?", run) == Exit.MISSING
    assert "carry the wheel of flashinfer-python" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_device_an_experiment_says_so_and_exits_with_its_own_status() -> None:
    command = [sys.executable, "-m", "scripts.gpu.run", "decode_floor"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == Exit.NO_DEVICE
    assert "decode_floor: no CUDA device" in ran.stderr
    assert "Traceback" not in ran.stderr
