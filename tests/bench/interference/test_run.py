import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.errors import BenchError
from bench.interference.result import InterferenceResult
from bench.interference.run import interference
from bench.interference.settings import InterferenceSettings
from bench.interference.table import show
from bench.interference.verdicts import shape, verdicts
from bench.result import Client
from cpd.common.errors import ConfigError
from tests.bench.interference.cells import grid
from tests.bench.interference.engine_server import Engine, engine_server


def run(url: str, **settings: Any) -> int:
    quick = {
        "url": url, "decodes": 4, "decode_len": 20, "prefills": "1,2", "prefill_len": "100,500", "repeats": 1,
        "window_s": 0.2, "settle_s": 1.0, "selftest": False,
    }  # fmt: skip
    return interference(InterferenceSettings.load(quick | settings))


def test_a_study_is_shown_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with engine_server(Engine(ms_per_1000=100)) as url:
        code = run(url, json_file=tmp_path / "study.json", html_file=tmp_path / "study.html")
    result = json.loads((tmp_path / "study.json").read_bytes())
    assert code == (3 if result["client"]["limited"] else 0)
    assert result["schema"] == "cpd-bench-interference/1"
    assert [(cell["prefills"], cell["prefill_len"]) for cell in result["cells"]] == [
        (1, 100),
        (2, 100),
        (1, 500),
        (2, 500),
    ]
    assert all(cell["increase_percent"]["median"] for cell in result["cells"])
    page = (tmp_path / "study.html").read_text()
    assert "Interference of prefill with decode" in page
    assert "2 x 500: +" in capsys.readouterr().err


def test_ctrl_c_keeps_the_bursts_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = io.StringIO()
    monkeypatch.setattr(sys, "stderr", messages)

    def press() -> None:
        deadline_s = time.monotonic() + 60
        while "1 x 100: " not in messages.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with engine_server(Engine(ms_per_1000=100)) as url:
        thread = threading.Thread(target=press)
        thread.start()
        code = run(url, prefills="1,2,4,8,16,32", json_file=tmp_path / "study.json")
        thread.join()
    result = json.loads((tmp_path / "study.json").read_bytes())
    assert code == 130
    assert result["interrupted"]
    assert result["cells"][0]["bursts"]
    assert len(result["cells"]) < 12


def test_a_server_that_is_not_there_is_an_error_before_anything() -> None:
    with pytest.raises(BenchError, match="--url"):
        run("http://127.0.0.1:9")


def test_nothing_is_sent_with_a_malformed_grid() -> None:
    with pytest.raises(ConfigError, match="prefills"):
        run("http://127.0.0.1:9", prefills="x")


def test_a_study_without_a_burst_fails_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_server(Engine(answer=2)) as url:
        assert run(url, settle_s=0.2) == 1
    assert "--decode-output-len" in capsys.readouterr().out


def shown(*, limited: bool) -> str:
    cells = grid(lambda tokens: min(tokens, 2048) * 0.1)
    client = Client(
        limited=limited, reasons=["it was too slow"] if limited else [], processes=1, cpu_share=0.5,
        loop_lag_ms_p50=0.1, loop_lag_ms_p99=1.0, machine_share=0.2, machine_idle=0.3, selftest=None,
    )  # fmt: skip
    result = InterferenceResult(
        label="M", command=["cpd"], started_at="", versions={}, settings={}, seed=1, interrupted=False, error="",
        client=client, cells=cells, shape=shape(cells), verdicts=verdicts(cells, shape(cells)),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    show(result, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_fits_into_80_columns_and_has_every_kind() -> None:
    text = shown(limited=False)
    assert "\u2026" not in text  # nothing was cut off
    assert "16 x 4,096" in text
    assert "+205 %" in text
    assert "recovers" in text


def test_a_limited_client_shows_reasons_and_no_figures() -> None:
    text = shown(limited=True)
    assert "it was too slow" in text
    assert "+205 %" not in text
