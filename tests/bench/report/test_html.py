import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import plotly.graph_objects as go
import pytest

from bench.report.html import report, write_html
from bench.report.page import Page
from bench.result import Result
from tests.bench.report.synthetic import Server, synthetic_result


class _Texts(HTMLParser):
    """The texts that a reader sees, and the figures' JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._open.append("figures" if ("id", "figures") in attrs else tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open == ["figures"]:
            self.figures = orjson.loads(data)
        elif not self._open and data.strip():
            self.texts.append(data.strip())


def _read(page: Page) -> _Texts:
    parser = _Texts()
    parser.feed(page.html())
    return parser


def _coloured(part: Any) -> Any:
    """Replaces the page's colour names with colours that plotly knows."""
    if isinstance(part, str) and re.fullmatch(r"\$[a-z0-9]+", part):
        return "Viridis" if part == "$heat" else "#123456"
    if isinstance(part, list):
        return [_coloured(inner) for inner in part]
    return {key: _coloured(inner) for key, inner in part.items()} if isinstance(part, dict) else part


_ALWAYS = {"TTFT: CDF", "ITL: CDF", "E2E: CDF", "ITL: histogram", "Over time", "TTFT of each request over time"}
_ALWAYS |= {"TTFT against prompt length", "Phases of a request"}
_SOMETIMES = {"TTFT against uncached prompt tokens", "TTFT of each turn", "Routes", "Turns", "Errors"}
_SOMETIMES |= {"How late the client sent", "Requests of each worker over time"}


def _titles(page: _Texts) -> set[str]:
    return {title for title in _ALWAYS | _SOMETIMES if any(text.startswith(title) for text in page.texts)}


@pytest.fixture(scope="module")
def run() -> Result:
    return synthetic_result(requests=200, server=Server(stall_s=10.0))


def test_a_run_has_every_part(run: Result) -> None:
    page = _read(report([run]))
    assert _titles(page) == _ALWAYS | {
        "TTFT against uncached prompt tokens", "Routes", "Errors", "Requests of each worker over time"
    }  # fmt: skip
    assert any(text.startswith("197 requests completed in") for text in page.texts)
    assert " ".join(run.command) in page.texts


@pytest.mark.parametrize(
    "runs",
    [
        [{}],
        [{"turns": 3}],
        [{"label": "a"}, {"label": "b", "seed": 1, "turns": 2}],
        [{"server": Server(tells_usage=False, names_routes=False)}],
        [{"requests": 5, "server": Server(failures=5)}],
        [{"requests": 1, "server": Server(failures=0)}],
        [{"limited": True}],
    ],
    ids=["one", "turns", "two", "silent server", "all failed", "one request", "limited"],
)
def test_plotly_knows_every_attribute(runs: list[dict[str, Any]]) -> None:
    results = [synthetic_result(**({"requests": 30} | run)) for run in runs]
    for figure in _read(report(results)).figures:
        go.Figure(_coloured(figure))  # raises for an unknown attribute or a value out of range


def test_the_figures_that_the_client_limited_are_left_out() -> None:
    page = _read(report([synthetic_result(requests=50, limited=True)]))
    assert "The client could not keep up" in page.texts
    assert _titles(page) == {"How late the client sent"}
    assert not any(text.startswith(("TTFT", "ITL", "Output tokens")) for text in page.texts)


def test_a_limited_run_is_left_out_of_a_comparison() -> None:
    page = _read(report([synthetic_result("good", requests=50), synthetic_result("bad", requests=50, limited=True)]))
    assert "bad: the client could not keep up" in page.texts
    assert "ratio" not in page.texts
    traces = [trace for figure in page.figures[1:] for trace in figure["data"]]
    assert "bad" not in {trace["name"] for trace in traces if "name" in trace}


def test_two_runs_are_compared(run: Result) -> None:
    faster = synthetic_result("faster", Server(speed=2.0, stall_s=None), requests=200, seed=1)
    page = _read(report([run, faster]))
    assert "mock-7b vs faster" in page.texts
    assert "ratio" in page.texts
    names = {trace.get("name") for figure in page.figures for trace in figure["data"]}
    assert {"mock-7b", "faster"} <= names


def test_an_interrupted_run_says_so() -> None:
    page = _read(report([synthetic_result(requests=20, interrupted=True)]))
    assert any(text.startswith("Interrupted") for text in page.texts)


def test_warnings_about_the_figures_are_shown() -> None:
    result = synthetic_result(requests=20)
    result.client.warnings = ["the highest percentiles may be the client's"]
    assert "Warning: the highest percentiles may be the client's." in _read(report([result])).texts
    assert any("percentiles may be" in text for text in _read(report([result, result])).texts)


def test_a_run_without_trouble_has_no_errors_section() -> None:
    assert "Errors" not in _titles(_read(report([synthetic_result(requests=20, server=Server(failures=0))])))


def test_the_page_does_not_grow_with_the_requests(run: Result, tmp_path: Path) -> None:
    sizes = []
    for copies in (10, 40):
        path = tmp_path / f"{copies}.html"
        write_html([run.model_copy(update={"requests": run.requests * copies})], path)
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0] + 50_000
    assert sizes[1] < 6_000_000


def test_texts_of_a_hostile_server_stay_texts() -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    result = synthetic_result(hostile, requests=20)
    for request in result.requests:
        request.detail = request.error and hostile
        request.route = request.route and hostile
    html = report([result]).html()
    assert "<img" not in html
