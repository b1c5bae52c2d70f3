"""Results of a GPU experiment: figures with floors and targets, as JSON and as a table. Needs no torch and no GPU."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any


class Exit(IntEnum):
    """Exit status of an experiment. No other program uses the high values."""

    OK = 0
    FAILED = 1
    NO_DEVICE = 71
    MISSING = 72


@dataclass(frozen=True, slots=True)
class Environment:
    """Device and software of a result.

    Attributes:
        capability: Compute capability, such as 9.0.
        sms: Streaming multiprocessors.
        commit: Commit of this repository, with "+" if files differ from it; "unknown" outside a checkout.
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
    """Peak rates of the device, measured at the start of each experiment.

    Attributes:
        copy_gb_s: Device-to-device copy, bytes read plus bytes written.
        matmul_tflop_s: An 8192³ product in bfloat16 on random data.
    """

    copy_gb_s: float
    matmul_tflop_s: float

    def bytes_ms(self, size: float) -> float:
        """Least time to move `size` bytes through device memory, ms."""
        return size / self.copy_gb_s / 1e6

    def flop_ms(self, flop: float) -> float:
        """Least time for `flop` bfloat16 operations on the matrix units, ms."""
        return flop / self.matmul_tflop_s / 1e9


TARGETS_FOR = "NVIDIA H200"
"""The device for which the targets were set."""


def heading(device: str) -> str:
    """Heading of a table: the device, and whether the targets were set for it."""
    if TARGETS_FOR in device:
        return f"on one {device}"
    return f"on one {device}; targets were set for one {TARGETS_FOR}, floors follow from this device's own peak rates"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a figure should meet; one of the two is given."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """True if a value meets the bound."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return f"≥ {number(self.at_least)}" if self.at_least is not None else f"≤ {number(self.at_most)}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        value: Value in `unit`; None if it could not be measured, and `note` says why.
        floor: Least value that the ceilings allow, in the same unit.
        note: Remark for the reader.
    """

    name: str
    value: float | None
    unit: str
    floor: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target. An unmeasured figure does not meet it."""
        if self.target is None:
            return None
        return self.value is not None and self.target.met(self.value)

    def to_json(self) -> dict[str, Any]:
        """The entry in a result file."""
        return {**asdict(self), "met": self.met}


@dataclass(slots=True)
class Report:
    """The figures of one experiment so far.

    Attributes:
        name: Name of the experiment and of its result file.
        question: The question it answers.
        out: Folder for the result file and others; None only prints.
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
        """Adds a figure, prints it and rewrites the file. See `Figure`."""
        figure = Figure(name, value, unit, floor, target, note)
        self.figures.append(figure)
        print(" | ".join(cell for cell in row(figure) if cell), flush=True)
        self.write()

    def add_series(self, name: str, points: Sequence[Mapping[str, float | str]]) -> None:
        """Adds data that only the file shows, such as the points of a curve."""
        self.series[name] = [dict(point) for point in points]
        self.write()

    def to_json(self) -> dict[str, Any]:
        """Content of the result file."""
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
        """Writes `out/<name>.json` atomically."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)


def number(value: float | None) -> str:
    """Formats four significant digits, or a whole number from 1,000 on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEADERS = ("figure", "value", "unit", "floor", "target", "met", "note")


def row(figure: Figure) -> tuple[str, ...]:
    """Cells of a table row, in the order of `HEADERS`."""
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
    """Formats figures as a plain text table."""
    return text_table(HEADERS, [row(figure) for figure in figures])


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a plain text table with aligned columns."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
