"""The result of an interference study: what `--json` holds. docs/bench.md explains it."""

from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, Field, computed_field

from bench.result import Client, write_json

SCHEMA: Literal["cpd-bench-interference/1"] = "cpd-bench-interference/1"


Tone = Literal["good", "warn", "bad"]


class Window(BaseModel):
    """Gaps between the chunks of all decode streams in a stretch of time."""

    mean_ms: float
    p99_ms: float
    max_ms: float


class Burst(BaseModel):
    """One burst: prompts that were sent at one moment to a server that decodes, and to the same server without.

    Attributes:
        before: Decoding just before the burst.
        during: Decoding from the moment of the burst to the last first token of it.
        after_ms: Mean gap in the last stretch that was looked at afterwards.
        burst_ms: From the moment of the burst to its last first token.
        recovery_s: From that token to the first stretch of `--window-s` in which decoding was back to within 5 %;
            None if there was none within `--settle-s`.
        ttft_ms: Times to first token of the injected prompts.
        idle_ttft_ms: The same for as many and as long prompts, without any decoding.
        prompt_tokens: Tokens of the injected prompts; the server's count if it says.
        failed: Injected prompts that failed, by kind.
        routes: Injected prompts by their `x-cpd-route`.
        client_late_ms: The longest that anything waited, during the burst, for the client to look at it.
        restarts: Decode streams that ended and were started again between the burst and recovery.
        steady: Decoding was steady before the burst: the halves of the stretch differ by less than 10 %.
        drained: The server was as quick as at the start of the study before the burst's decode streams were started.
        timeline: Mean gap around the burst: (ms since the burst, ms).
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
        """How much longer the mean gap was during the burst than before."""
        return (self.during.mean_ms / self.before.mean_ms - 1) * 100


class Spread(BaseModel):
    """A figure over the bursts of one kind."""

    median: float
    low: float
    high: float


class Cell(BaseModel):
    """All bursts of one kind. `error`: why there are fewer than asked for."""

    prefills: int
    prefill_len: int
    bursts: list[Burst] = []
    error: str = ""

    @property
    def name(self) -> str:
        """Such as 4 x 2,048."""
        return f"{self.prefills} x {self.prefill_len:,}"

    @property
    def size(self) -> int:
        """Prompt tokens of a burst, as asked for."""
        return self.prefills * self.prefill_len

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        """Prompt tokens of a burst, as measured."""
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
        """How much longer the mean gap was during a burst than before it."""
        return _spread([burst.increase_percent for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def longest_gap_ms(self) -> Spread | None:
        """The longest gap of any decode stream during a burst."""
        return _spread([burst.during.max_ms for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ttft_ms(self) -> Spread | None:
        """Median time to first token of the prompts of a burst."""
        return _spread([median(burst.ttft_ms) for burst in self.bursts])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def idle_ttft_ms(self) -> Spread | None:
        """The same without any decoding."""
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
        kind: none: never above 10 %. linear: in proportion to the tokens. step: one level below some size, another
            above. plateau: in proportion up to some size, level above. unclear: too few sizes to say.
        below: Largest size, in tokens, up to which no burst raised the mean gap by more than 10 %; 0 if all did.
        above: Next size in the grid; None if none raised it.
        jump: Of a step, the two sizes in the grid between which it is.
        percent_per_1000_tokens: Of a line, and of a plateau before it is level.
        level_percent: Of a step above it, and of a plateau.
    """

    kind: Literal["none", "linear", "step", "plateau", "unclear"]
    below: int
    above: int | None
    jump: tuple[int, int] | None = None
    percent_per_1000_tokens: float | None = None
    level_percent: float | None = None


class Verdict(BaseModel):
    """What the study found, in words."""

    tone: Tone
    text: str


class InterferenceResult(BaseModel):
    """One study, whole."""

    schema_: Literal["cpd-bench-interference/1"] = Field(SCHEMA, alias="schema")
    label: str
    command: list[str]
    started_at: str
    versions: dict[str, str]
    settings: dict[str, Any]
    seed: int
    interrupted: bool
    error: str
    client: Client
    cells: list[Cell]
    shape: Shape
    verdicts: list[Verdict]

    def save(self, path: Path) -> None:
        """Writes it as JSON.

        Raises:
            BenchError: The file cannot be written.
        """
        write_json(self, path)


def _spread(values: list[float]) -> Spread | None:
    return Spread(median=median(values), low=min(values), high=max(values)) if values else None
