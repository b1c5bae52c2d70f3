from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.errors import BenchError
from bench.report.page import Card, Cards, Cell, Chart, Facts, Notice, Page, Table, series


class _Scripts(HTMLParser):
    """The contents of the script elements, and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag == "script"
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if self._open:
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = False


def _scripts(html: str) -> _Scripts:
    parser = _Scripts()
    parser.feed(html)
    return parser


def _figures(html: str) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = orjson.loads(_scripts(html).scripts[0])
    return figures


def test_blocks_appear_under_their_section_in_order() -> None:
    page = Page("Title", "Subtitle")
    page.add(Notice("bad", "Verdict", ["because"]), Cards([Card("Label", "9.1 ms", "note")]))
    page.add(Facts("Command", [("command", "cpd bench run")]))
    page.section("Section", "Lead")
    page.add(Table(["name", "value"], [["row", Cell("1.5", "1.4 … 1.6", "good")]], note="How to read it."))
    html = page.html()
    texts = ["Title", "Subtitle", "Verdict", "because", "Label", "9.1 ms", "cpd bench run", "Section", "Lead"]
    texts += ["row", "1.5", "1.4 … 1.6", "How to read it."]
    body = html[html.index("<body>") :]
    places = [body.index(text) for text in texts]
    assert places == sorted(places)


def test_charts_keep_their_order_and_their_colour_names() -> None:
    page = Page("Title")
    page.add(Chart("One", [{"y": [1], "line": {"color": series(0)}}]))
    page.section("More")
    page.add(Chart("Two", [{"y": [2]}], {"xaxis": {"title": {"text": "ms"}}}))
    figures = _figures(page.html())
    assert figures[0] == {"data": [{"y": [1], "line": {"color": "$1"}}], "layout": {}}
    assert figures[1] == {"data": [{"y": [2]}], "layout": {"xaxis": {"title": {"text": "ms"}}}}


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = Page("Title")
    page.add(Chart("One", [{"y": [1]}]))
    assert _scripts(page.html()).addresses == []


def test_a_page_without_charts_is_small() -> None:
    page = Page("Title")
    page.add(Notice("good", "All is well"))
    assert len(page.html()) < 20_000


def test_hostile_texts_stay_texts() -> None:
    hostile = "</script><script>alert(1)</script>"
    page = Page(hostile, hostile)
    page.add(
        Notice("bad", hostile, [hostile]), Cards([Card(hostile, hostile, hostile)]), Facts(hostile, [("a", hostile)])
    )
    page.section(hostile, hostile)
    page.add(
        Table([hostile], [[hostile]], hostile, hostile), Chart(hostile, [{"y": [1], "name": hostile}], note=hostile)
    )
    html = page.html()
    assert "<script>alert" not in html
    assert _figures(html)[0]["data"][0]["name"] == hostile


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 cells"):
        Table(["a", "b"], [["only one"]])


def test_an_unwritable_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        Page("Title").write(tmp_path / "missing" / "report.html")


def test_a_page_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    Page("Tïtle").write(path)
    assert "Tïtle" in path.read_text(encoding="utf-8")
