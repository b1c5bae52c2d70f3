"""The result of a sweep: what `--json` writes."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from bench.result import Result, write_json


class Point(BaseModel):
    """One load. Without `--slo` the last four say nothing.

    Attributes:
        load: The rate in sessions a second, or the number of streams.
        overloaded: The run was ended early: requests in flight and latency kept growing.
        kept: Whether enough of the requests were good.
        share: Share of good requests, over all runs at this load.
        share_ci: Its 95 % confidence interval.
        result: The last run at this load, whole.
    """

    load: float
    overloaded: bool
    kept: bool | None
    share: float | None
    share_ci: tuple[float, float] | None
    result: Result


class Sweep(BaseModel):
    """Several loads, ascending.

    Attributes:
        interrupted: It was ended early, by Ctrl-C or an error: points are missing.
        max_rate: The highest rate that kept the target, of a search; None if none did, or there was no search.
        too_much: The lowest rate that didn't.
    """

    schema_: Literal["cpd-bench-sweep/1"] = Field("cpd-bench-sweep/1", alias="schema")
    command: list[str]
    settings: dict[str, Any]
    interrupted: bool
    points: list[Point]
    max_rate: float | None
    too_much: float | None

    def save(self, path: Path) -> None:
        """Writes it as JSON.

        Raises:
            BenchError: The file cannot be written.
        """
        write_json(self, path)
