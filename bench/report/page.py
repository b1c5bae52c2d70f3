"""A report page: one self-contained HTML file, readable offline, on small and large screens, light and dark.

    page = Page("Interference", "model M at http://…")
    page.add(Notice("good", "Decoding recovers after every burst"), Cards([Card("Baseline ITL", "9.1 ms")]))
    page.section("Increase of ITL", "How much slower the decode streams become while prompts are injected.")
    page.add(Chart("ITL increase, %", traces=[{"type": "heatmap", "z": z, "colorscale": "$heat"}], layout=axes))
    page.write(Path("report.html"))

Traces and layouts are plotly.js' JSON; an axis of names needs `"type": "category"`. Colours are names, because the
system's theme may change while the page is open: "$1" to "$6" for series, "$text", "$muted", "$line", "$surface",
"$good", "$warn", "$bad", and "$heat" for a colour scale from low to high.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import ArrayLike

from bench.errors import BenchError

Tone = Literal["", "good", "warn", "bad"]

_PLOTLY = Path(__file__).with_name("plotly-cartesian.min.js.gz")
"""plotly.js 3.7.0 (npm: plotly.js-cartesian-dist-min), packed, so that a page stays below 1 MB."""


@dataclass(frozen=True, slots=True)
class Card:
    """One figure in large type, with a small `note` below."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Cards:
    """Figures side by side."""

    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Notice:
    """A coloured box, such as a verdict or a warning."""

    tone: Tone
    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values to look up, such as a command or versions. Folded until opened."""

    title: str
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, with a small `note` below the text."""

    text: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first column names the rows and stays visible while a narrow screen is scrolled sideways.

    Args:
        columns: Headings of the columns.
        rows: Rows with a cell for each column.
        title: Heading of the table.
        note: Explanation below the table.
        prose: Indices of columns with text, aligned to the left; the others hold numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    note: str = ""
    prose: Sequence[int] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row of the table {self.title!r} needs {len(self.columns)} cells")

    def cells(self) -> list[list[Cell]]:
        """The rows, with text converted to cells."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plotly.js figure.

    Args:
        title: Title, with the unit.
        traces: plotly.js traces.
        layout: plotly.js layout; fonts, colours, margins and the legend's position come from the page.
        note: How to read the chart.
        height: Height in CSS pixels.
        wide: Use the whole width of a large screen instead of half of it.
    """

    title: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 300
    wide: bool = False


Block = Card | Cards | Notice | Facts | Table | Chart


@dataclass(slots=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    lead: str
    blocks: list[Block] = field(default_factory=list)


def series(index: int) -> str:
    """Colour name of a series; colours repeat after the sixth."""
    return f"${index % 6 + 1}"


def error_bars(low: ArrayLike, value: ArrayLike, high: ArrayLike) -> dict[str, Any]:
    """`error_y` of a trace: bars from `low` to `high` around each value."""
    above, below = (np.round(np.subtract(one, other), 3) for one, other in ((high, value), (value, low)))
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 3}


class Page:
    """Collects blocks and writes them as one file.

    Args:
        title: The page's heading.
        subtitle: One line below it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._sections = [Section("", "")]

    def section(self, title: str, lead: str = "") -> None:
        """Begins a section for the blocks added from now on."""
        self._sections.append(Section(title, lead))

    def add(self, *blocks: Block | None) -> None:
        """Adds blocks to the current section, or to the page's head before the first section. Skips None."""
        self._sections[-1].blocks.extend(block for block in blocks if block)

    def html(self) -> str:
        """The whole page."""
        sections = [section for section in self._sections if section.blocks]
        charts = [block for section in sections for block in section.blocks if isinstance(block, Chart)]
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        return environment.get_template("page.jinja").render(
            title=self._title,
            subtitle=self._subtitle,
            sections=sections,
            figures=_script_json([{"data": chart.traces, "layout": chart.layout} for chart in charts]),
            plotly=base64.b64encode(_PLOTLY.read_bytes()).decode() if charts else "",
            kind=lambda block: type(block).__name__,
        )

    def write(self, path: Path) -> None:
        """Writes the page.

        Raises:
            BenchError: The file cannot be written.
        """
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise BenchError(f"cannot write {path}: {error.strerror}") from error


def _script_json(value: Any) -> Markup:
    """JSON for a script element; its texts cannot end the element."""
    text = orjson.dumps(value, default=np.ndarray.tolist, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return Markup(text.replace("<", "\\u003c"))
