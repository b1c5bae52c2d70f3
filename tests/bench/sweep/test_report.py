"""The page and the table of a sweep."""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from bench.sweep.report import show, write_html
from bench.sweep.result import Point, Sweep
from tests.bench.report.synthetic import Server, synthetic_result


def _sweep(limited: float | None = None) -> Sweep:
    points = [
        Point(
            load=load,
            overloaded=False,
            met=load < 8,
            share=0.951,
            share_ci=(0.85, 0.999),
            result=synthetic_result(f"m {load}", Server(speed=1 / load), requests=50, limited=load == limited),
        )
        for load in (0.125, 1.0, 12.5)
    ]
    return Sweep(
        command=["cpd", "bench"],
        settings={"slo": "ttft:200", "slo_share": 0.9, "find_max_rate": True},
        interrupted=False,
        points=points,
        max_rate=1.0,
        too_much=12.5,
    )


def test_the_table_fits_into_80_characters_and_doubts_follow_the_verdict() -> None:
    terminal = StringIO()
    show(_sweep(limited=12.5), Console(file=terminal, width=80))
    text = terminal.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "95.1 %" in text
    assert "85.0-99.9" in text
    assert "…" not in text
    assert text.index("Up to 1.00 sessions/s") < text.index("12.5: the client could not keep up")


def test_the_page_says_what_was_measured_when_and_where(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    write_html(_sweep(), page)
    html = page.read_text()
    result = synthetic_result()
    for part in (result.settings["url"], result.started_at, "TTFT against throughput", "ITL against throughput"):
        assert str(part) in html
    assert len(re.findall(r'"rangemode":"tozero"', html)) >= 6
    assert page.stat().st_size < 1_000_000
