"""The result of a sweep, as `--json` writes it."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from bench.result import Result


class Point(BaseModel):
    """One load. `met`, `share` and `share_ci` are None without `--slo`.

    Attributes:
        load: The rate in sessions a second, or the number of streams.
        overloaded: The run ended early because requests in flight and latency kept growing.
        met: True if the share of good requests met the target.
        share: Share of good requests over all runs at this load.
        share_ci: Its 95 % confidence interval.
        result: The last run at this load.
    """

    load: float
    overloaded: bool
    met: bool | None
    share: float | None
    share_ci: tuple[float, float] | None
    result: Result


class Sweep(BaseModel):
    """Several loads in ascending order.

    Attributes:
        interrupted: Ended early by Ctrl-C or an error, so that points are missing.
        max_rate: Highest rate that met the target; None without a search, or if no rate did.
        too_much: Lowest rate that missed the target.
    """

    schema_: Literal["cpd-bench-sweep/1"] = Field("cpd-bench-sweep/1", alias="schema")
    command: list[str]
    settings: dict[str, Any]
    interrupted: bool
    points: list[Point]
    max_rate: float | None
    too_much: float | None
