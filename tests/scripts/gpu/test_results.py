import json
from pathlib import Path

import pytest

from scripts.gpu import results
from scripts.gpu.results import Ceilings, Environment, Figure, Report, Target

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


def test_a_table_lines_its_columns_up() -> None:
    text = results.table(
        [Figure("a long name", 12345.6, "ms"), Figure("b", 0.51234, "ratio", target=Target(at_most=1))]
    )
    lines = text.splitlines()
    assert lines[2].split() == ["a", "long", "name", "12,346", "ms"]
    assert lines[3].split() == ["b", "0.5123", "ratio", "≤", "1", "yes"]
    assert lines[2].index("ms") == lines[3].index("ratio")


def test_a_curve_is_in_the_file_only(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.add_series("gemm", [{"sms": 8, "ms": 4.0}, {"sms": 16, "ms": 2.0}])
    assert report.out is not None
    content = json.loads((report.out / "layout.json").read_text())
    assert content["series"] == {"gemm": [{"sms": 8, "ms": 4.0}, {"sms": 16, "ms": 2.0}]}
    assert not capsys.readouterr().out
