import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu import common
from scripts.gpu.common import Ceilings, Environment, Exit, Figure, MissingError, Report, Target, Timing

ENVIRONMENT = Environment(
    "a device", "9.0", 132, 139.8, "580.1", "13.0", "3.12.3", {"torch": "2.11.0"}, "0123456789ab", "2026-01-01T00:00Z"
)
CEILINGS = Ceilings(copy_gb_s=4000, matmul_tflop_s=800)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("layout", "Does it run?", ENVIRONMENT, CEILINGS, tmp_path / "out")


def test_floors_follow_from_the_ceilings() -> None:
    assert CEILINGS.bytes_ms(4e9) == pytest.approx(1.0)
    assert CEILINGS.flop_ms(8e11) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("target", "reached", "missed"), [(Target(at_least=0.8), 0.8, 0.79), (Target(at_most=1.15), 1.15, 1.16)]
)
def test_a_target_is_a_bound_that_may_be_touched(target: Target, reached: float, missed: float) -> None:
    assert Figure("x", reached, "ratio", target=target).met is True
    assert Figure("x", missed, "ratio", target=target).met is False


def test_nan_meets_no_target() -> None:
    assert not Figure("x", float("nan"), "ratio", target=Target(at_most=1)).met
    assert not Figure("x", float("nan"), "ratio", target=Target(at_least=1)).met


def test_what_could_not_be_measured_misses_its_target() -> None:
    assert Figure("x", None, "ms", target=Target(at_most=1)).met is False


def test_without_a_target_nothing_is_met_or_missed() -> None:
    assert Figure("x", 1.0, "ms").met is None


def test_a_timing_is_the_median_and_the_middle() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.5
    assert 1.0 <= timing.low <= 2.0
    assert 5.0 <= timing.high <= 100.0
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


def test_every_figure_is_on_disk_at_once(report: Report) -> None:
    report.add("first", 1.5, "ms", floor=1.0, target=Target(at_most=2))
    assert report.out is not None
    content = json.loads((report.out / "layout.json").read_text())
    assert content["schema"] == 1
    assert content["environment"]["packages"] == {"torch": "2.11.0"}
    assert content["ceilings"] == {"copy_gb_s": 4000, "matmul_tflop_s": 800}
    assert content["figures"] == [
        {
            "name": "first",
            "value": 1.5,
            "unit": "ms",
            "floor": 1.0,
            "target": {"at_least": None, "at_most": 2},
            "note": "",
            "met": True,
        }
    ]
    report.add("second", None, "ms", note="no memory")
    assert [figure["name"] for figure in json.loads((report.out / "layout.json").read_text())["figures"]] == [
        "first",
        "second",
    ]
    assert [path.name for path in report.out.iterdir()] == ["layout.json"]


@pytest.fixture
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(common, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(common, "measure_ceilings", lambda: CEILINGS)


@pytest.mark.usefixtures("pretend_device")
def test_a_failure_keeps_the_figures_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report, args: argparse.Namespace) -> None:
        report.add("before", 1.0, "ms")
        raise RuntimeError("misaligned address")

    assert common.run_experiment("layout", "?", run, argv=["--out", str(tmp_path)]) == Exit.FAILED
    content = json.loads((tmp_path / "layout.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == ["before"]
    assert content["error"] == "RuntimeError: misaligned address"
    assert "before" in capsys.readouterr().out


@pytest.mark.usefixtures("pretend_device")
def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(report: Report, args: argparse.Namespace) -> None:
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


def test_a_table_lines_its_columns_up() -> None:
    text = common.table([Figure("a long name", 12345.6, "ms"), Figure("b", 0.51234, "ratio", target=Target(at_most=1))])
    lines = text.splitlines()
    assert lines[2].split() == ["a", "long", "name", "12,346", "ms"]
    assert lines[3].split() == ["b", "0.5123", "ratio", "≤", "1", "yes"]
    assert lines[2].index("ms") == lines[3].index("ratio")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_device_an_experiment_says_so_and_exits_with_its_own_status() -> None:
    code = (
        "import sys; from scripts.gpu.common import run_experiment; sys.exit(run_experiment('x', '?', print, argv=[]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == Exit.NO_DEVICE
    assert "x: no CUDA device" in ran.stderr
    assert "Traceback" not in ran.stderr
