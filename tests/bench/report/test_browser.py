"""The report in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.report.html import write_html
from tests.bench.report.synthetic import synthetic_result

_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_every_chart_is_drawn_without_an_error(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    runs = [synthetic_result("a", requests=100, turns=2), synthetic_result("b", requests=100, seed=1)]
    write_html(runs, page)
    with page.open("a") as html:  # for printing, all charts are drawn at once
        html.write('<script>dispatchEvent(new Event("beforeprint"));</script>')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    command = [str(_BROWSER), *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    charts = len(re.findall(r'<div class="plot[ "]', done.stdout))
    assert charts >= 9
    assert len(re.findall(r'<div class="plot js-plotly-plot"', done.stdout)) == charts
