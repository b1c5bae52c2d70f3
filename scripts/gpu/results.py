"""What a GPU experiment hands in: figures beside their floors and targets, as JSON and as a table.

Needs neither torch nor a GPU.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any


class Exit(IntEnum):
    """How an experiment ended, as its exit status. The odd ones are no other program's."""

    OK = 0
    FAILED = 1
    NO_DEVICE = 71
    MISSING = 72


@dataclass(frozen=True, slots=True)
class Environment:
    """What a result was measured on.

    Attributes:
        capability: Compute capability, such as 9.0.
        sms: Streaming multiprocessors.
        commit: Of this repository, with "+" if files differ from it; "unknown" outside of a checkout.
    """

    device: str
    capability: str
    sms: int
    memory_gib: float
    driver: str
    cuda: str
    python: str
    packages: Mapping[str, str]
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at best, measured at the start of each experiment.

    Attributes:
        copy_gb_s: Device-to-device copy, bytes read plus bytes written.
        matmul_tflop_s: An 8192³ product in bfloat16 on random data.
    """

    copy_gb_s: float
    matmul_tflop_s: float

    def bytes_ms(self, size: float) -> float:
        """Least time to move that many bytes through device memory, ms."""
        return size / self.copy_gb_s / 1e6

    def flop_ms(self, flop: float) -> float:
        """Least time for that many bfloat16 operations on the matrix units, ms."""
        return flop / self.matmul_tflop_s / 1e9


TARGETS_FOR = "NVIDIA H200"
"""The device that the project set its targets for."""


def heading(device: str) -> str:
    """What stands above a table of figures: whose they are, and whether the targets were set for that device."""
    if TARGETS_FOR in device:
        return f"on one {device}"
    return f"on one {device}; targets were set for one {TARGETS_FOR}, floors are what this device reaches itself"


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should reach. One of both is given."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return f"≥ {number(self.at_least)}" if self.at_least is not None else f"≤ {number(self.at_most)}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        value: In `unit`; None if it could not be measured, then `note` says why.
        floor: The least value that the ceilings allow, in the same unit.
        note: What a reader must know beside the number.
    """

    name: str
    value: float | None
    unit: str
    floor: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one. What could not be measured does not reach it."""
        if self.target is None:
            return None
        return self.value is not None and self.target.met(self.value)

    def to_json(self) -> dict[str, Any]:
        """As in a result file."""
        return {**asdict(self), "met": self.met}


@dataclass(slots=True)
class Report:
    """The figures of one experiment so far.

    Attributes:
        name: Of the experiment, and of its file.
        question: What it is to answer.
        out: Folder for the result file and others; None: print only.
    """

    name: str
    question: str
    environment: Environment
    ceilings: Ceilings
    out: Path | None = None
    figures: list[Figure] = field(default_factory=list)
    series: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    error: str = ""
    _started: float = field(default_factory=time.monotonic)

    def add(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        floor: float | None = None,
        target: Target | None = None,
        note: str = "",
    ) -> None:
        """Takes a figure, prints it and writes the file again. See `Figure`."""
        figure = Figure(name, value, unit, floor, target, note)
        self.figures.append(figure)
        print(" | ".join(cell for cell in row(figure) if cell), flush=True)
        self.write()

    def add_series(self, name: str, points: Sequence[Mapping[str, float | str]]) -> None:
        """Takes what only the file shows, such as a curve: a mapping of names with units to values for each point."""
        self.series[name] = [dict(point) for point in points]
        self.write()

    def to_json(self) -> dict[str, Any]:
        """The result file's content."""
        return {
            "schema": 1,
            "name": self.name,
            "question": self.question,
            "environment": asdict(self.environment),
            "ceilings": asdict(self.ceilings),
            "seconds": round(time.monotonic() - self._started, 1),
            "figures": [figure.to_json() for figure in self.figures],
            "series": self.series,
            "error": self.error,
        }

    def write(self) -> None:
        """Writes `out/<name>.json`, whole or not at all."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)


def number(value: float | None) -> str:
    """Four significant digits, without an exponent where that can be read."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEADERS = ("figure", "value", "unit", "floor", "target", "met", "note")


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a table's row, as in `HEADERS`."""
    return (
        figure.name,
        number(figure.value),
        figure.unit,
        "" if figure.floor is None else number(figure.floor),
        "" if figure.target is None else str(figure.target),
        {True: "yes", False: "NO", None: ""}[figure.met],
        figure.note,
    )


def table(figures: Sequence[Figure]) -> str:
    """The figures as a table of plain text."""
    return text_table(HEADERS, [row(figure) for figure in figures])


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one is not padded."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
