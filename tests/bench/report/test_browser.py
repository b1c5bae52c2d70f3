"""The report in a real browser."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from bench.report.html import write_html
from tests.bench.report.synthetic import synthetic_result
from tests.e2e.browser import chromium, window
from tests.programs import needs_chromium


@needs_chromium
@pytest.mark.parametrize("width", [390, 1400])
def test_every_chart_is_drawn_without_an_error(tmp_path: Path, width: int) -> None:
    file = tmp_path / "report.html"
    runs = [synthetic_result("a", requests=100, turns=2), synthetic_result("b", requests=100, seed=1)]
    write_html(runs, file)
    assert file.stat().st_size < 1_000_000
    with chromium() as browser, window(browser, "file://", (width, 900)) as (context, watch):
        page = context.new_page()
        page.goto(file.as_uri())
        page.wait_for_function("typeof Plotly === 'object'")  # it is unpacked
        page.evaluate("dispatchEvent(new Event('beforeprint'))")  # for printing, all charts are drawn at once
        charts = page.locator(".plot").count()
        assert charts >= 9
        expect(page.locator(".plot.js-plotly-plot")).to_have_count(charts)
        assert watch.console == []
