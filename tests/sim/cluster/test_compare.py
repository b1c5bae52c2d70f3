from pathlib import Path

import orjson
import pytest

from cpd.common.errors import ConfigError
from sim.cluster.compare import compare
from sim.cluster.settings import CompareSettings


def small(**fields: object) -> CompareSettings:
    known = {
        "workers": 2,
        "prefill_workers": 1,
        "warmup": 0.0,
        "duration": 3.0,
        "precision": 0.9,
        "profile_errors": "0.2",
    }
    return CompareSettings.load({**known, **fields})


def test_the_highest_rates_are_found_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    files = {"json_file": tmp_path / "found.json", "html_file": tmp_path / "found.html"}
    compare(small(policies="sglang, static-pd", long_shares="1", rate_from=2.0, **files))
    found = orjson.loads(files["json_file"].read_bytes())
    assert found["schema"] == "cpd-sim-compare/1"
    assert [(row["policy"], row["long_share"], row["profile_error"]) for row in found["rows"]] == [
        ("sglang", 1.0, 0.2), ("static-pd", 1.0, 0.2)
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["max_rate"] is None or row["max_rate"] < row["too_much"]
    assert "no evidence for real hardware" in found["evidence"]
    assert "no evidence for real hardware" in files["html_file"].read_text()
    printed = capsys.readouterr().out
    assert "x 1.00" in printed
    assert "±20" in printed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": "cost,best"}, "there is no 'best'"),
        ({"long_shares": "0.1,2"}, "--long-shares"),
        ({"workload": "trace"}, "--workload mix"),
        ({"long_shares": "few"}, "--long-shares"),
        ({"profile_errors": "0,1.5"}, "--profile-errors"),
    ],
)
def test_malformed_lists_are_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(small(**fields))
