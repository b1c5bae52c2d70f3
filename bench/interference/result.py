"""The result of an interference study, as `--json` writes it. docs/bench.md explains it."""

from statistics import median
from typing import Literal

from pydantic import BaseModel, Field, computed_field

from bench.result import Client, Measurement

Tone = Literal["good", "warn", "bad"]


class Window(BaseModel):
    """Gaps between the chunks of all decode streams in a window of time."""

    mean_ms: float
    p99_ms: float
    max_ms: float


class Burst(BaseModel):
    """Prompts sent at one moment to a server with decode streams, and to the same server without them.

    Attributes:
        before: Gaps just before the burst.
        during: Gaps from the burst to the last first token of its prompts.
        after_ms: Mean gap in the last window after the burst.
        burst_ms: Time from the burst to the last first token of its prompts.
        recovery_s: Time from that token to the first window of `--window-s` within 5 % of `before`; None if there was
            none within `--settle-s`.
        ttft_ms: Times to first token of the injected prompts.
        idle_ttft_ms: The same for equal prompts without decode streams.
        prompt_tokens: Tokens of the injected prompts, as counted by the server if it tells.
        failed: Number of failed prompts by kind of failure.
        routes: Number of prompts by `x-cpd-route`.
        client_late_ms: Longest time that an event waited for the client during the burst.
        restarts: Decode streams that ended and were started again between the burst and recovery.
        steady: The two halves of the window before the burst differ by less than 10 %.
        drained: The server was as fast as at the start of the study before the decode streams started.
        timeline: Mean gap around the burst: (ms since the burst, gap in ms).
    """

    before: Window
    during: Window
    after_ms: float | None
    burst_ms: float
    recovery_s: float | None
    ttft_ms: list[float]
    idle_ttft_ms: list[float]
    prompt_tokens: int
    failed: dict[str, int]
    routes: dict[str, int]
    client_late_ms: float
    restarts: int
    steady: bool
    drained: bool
    timeline: list[tuple[float, float]]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def increase_percent(self) -> float:
        """Increase of the mean gap during the burst over `before`."""
        return (self.during.mean_ms / self.before.mean_ms - 1) * 100


class Spread(BaseModel):
    """Median and range of a figure over the bursts of one kind."""

    median: float
    low: float
    high: float


class Cell(BaseModel):
    """All bursts of one kind. `error` tells why some are missing."""

    prefills: int
    prefill_len: int
    bursts: list[Burst] = []
    error: str = ""

    @property
    def name(self) -> str:
        """Number and length of the prompts, such as 4 x 2,048."""
        return f"{self.prefills} x {self.prefill_len:,}"

    @property
    def size(self) -> int:
        """Requested prompt tokens of a burst."""
        return self.prefills * self.prefill_len

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        """Measured prompt tokens of a burst."""
        return round(median(burst.prompt_tokens for burst in self.bursts)) if self.bursts else self.size

    @computed_field  # type: ignore[prop-decorator]
    @property
    def before_ms(self) -> Spread | None:
        """Mean gap before a burst."""
        return _spread([burst.before.mean_ms for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def during_ms(self) -> Spread | None:
        """Mean gap during a burst."""
        return _spread([burst.during.mean_ms for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def increase_percent(self) -> Spread | None:
        """Increase of the mean gap during a burst."""
        return _spread([burst.increase_percent for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def longest_gap_ms(self) -> Spread | None:
        """Longest gap of any decode stream during a burst."""
        return _spread([burst.during.max_ms for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ttft_ms(self) -> Spread | None:
        """Median time to first token of the prompts of a burst."""
        return _spread([median(burst.ttft_ms) for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def idle_ttft_ms(self) -> Spread | None:
        """The same without decode streams."""
        return _spread([median(burst.idle_ttft_ms) for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def recovery_s(self) -> Spread | None:
        """Time to recovery; None if decoding didn't recover after every burst."""
        times_s = [burst.recovery_s for burst in self.bursts if burst.recovery_s is not None]
        return _spread(times_s) if len(times_s) == len(self.bursts) else None


class Shape(BaseModel):
    """How the increase depends on the tokens of a burst.

    Attributes:
        kind: none: never above 10 %. linear: proportional to the tokens. step: one level below some size, another
            above. plateau: proportional up to some size, constant above. unclear: too few sizes, or no curve fits.
        below: Largest size in tokens up to which no burst increased the mean gap by more than 10 %; 0 if all did.
        above: Next size of the grid; None if no burst did.
        jump: The two sizes of the grid between which a step lies.
        percent_per_1000_tokens: Slope of a line, or of a plateau before its level.
        level_percent: Level of a plateau, or of a step above its jump.
    """

    kind: Literal["none", "linear", "step", "plateau", "unclear"]
    below: int
    above: int | None
    jump: tuple[int, int] | None = None
    percent_per_1000_tokens: float | None = None
    level_percent: float | None = None


class Verdict(BaseModel):
    """A finding of the study in words."""

    tone: Tone
    text: str


class InterferenceResult(Measurement):
    """One whole study."""

    schema_: Literal["cpd-bench-interference/1"] = Field("cpd-bench-interference/1", alias="schema")
    error: str
    client: Client
    cells: list[Cell]
    shape: Shape
    verdicts: list[Verdict]


def _spread(values: list[float]) -> Spread | None:
    return Spread(median=median(values), low=min(values), high=max(values)) if values else None
