"""The result of a run: what `--json` writes and what reports are made from.

Definitions of the figures are in docs/metrics.md. A figure that a run has no sample of is None.
"""

from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field, ValidationError

from bench.errors import BenchError

SCHEMA: Literal["cpd-bench/1"] = "cpd-bench/1"


def write_json(result: BaseModel, path: Path) -> None:
    """Writes a result.

    Raises:
        BenchError: The file cannot be written.
    """
    try:
        path.write_bytes(
            orjson.dumps(result.model_dump(mode="json", by_alias=True), option=orjson.OPT_INDENT_2) + b"\n"
        )
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


class Stat(BaseModel):
    """A distribution. `ci` has a 95 % bootstrap confidence interval [low, high] of each figure, by its name."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    ci: dict[str, tuple[float, float]]


class Group(BaseModel):
    """The requests that have something in common: a turn or a route."""

    name: str
    completed: int
    failed: int
    ttft_ms: Stat
    itl_ms: Stat
    tpot_ms: Stat
    e2e_ms: Stat
    cached_token_rate: float | None


class Steady(BaseModel):
    """The part of the run without ramp-up and drain, in seconds from its start."""

    start_s: float
    end_s: float
    completed: int
    output_tokens_per_s: float | None
    requests_per_s: float
    ttft_ms: Stat
    itl_ms: Stat


class Summary(BaseModel):
    """The figures of a run. Latencies count from when a request was due."""

    duration_s: float
    completed: int
    failed: int
    aborted: int
    errors: dict[str, int]
    ttft_ms: Stat
    first_gap_ms: Stat
    itl_ms: Stat
    tpot_ms: Stat
    e2e_ms: Stat
    service_ttft_ms: Stat
    service_e2e_ms: Stat
    prompt_tokens: int | None
    output_tokens: int | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float
    offered_per_s: float | None
    achieved_per_s: float
    goodput_per_s: float | None
    goodput_share: float | None
    cached_token_rate: float | None
    schedule_lag_ms: float | None
    by_turn: list[Group]
    by_route: list[Group]
    steady: Steady | None


class Request(BaseModel):
    """One request. Times in seconds are from the start of the run, latencies in ms from when it was due
    (`service_…`: from when it was sent)."""

    session: int
    turn: int
    input_len: int
    output_len: int
    due_s: float
    sent_s: float
    ended_s: float
    ttft_ms: float | None
    answer_ms: float | None
    first_gap_ms: float | None
    itl_ms: list[float]
    tpot_ms: float | None
    e2e_ms: float | None
    service_ttft_ms: float | None
    service_e2e_ms: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    status: int
    error: str
    detail: str
    finish_reason: str
    route: str
    good: bool | None


class Accuracy(BaseModel):
    """What the self-test found: the client's own error against a server of known behaviour."""

    streams: int
    chunks_per_s: float
    ttft_error: float
    itl_error: float
    delay_ms_p50: float
    delay_ms_p99: float


class Client(BaseModel):
    """The client's own part in the figures.

    Attributes:
        limited: It was too slow for them to be the server's.
        reasons: Why.
        warnings: What a reader has to know of figures that are good otherwise.
        processes, cpu_share, loop_lag_ms_p50, loop_lag_ms_p99, machine_share, machine_idle: see
            `bench.load.plan.Health`.
    """

    limited: bool
    reasons: list[str]
    warnings: list[str] = []
    processes: int
    cpu_share: float
    loop_lag_ms_p50: float
    loop_lag_ms_p99: float
    machine_share: float
    machine_idle: float
    selftest: Accuracy | None


class Result(BaseModel):
    """One run, whole."""

    schema_: Literal["cpd-bench/1"] = Field(SCHEMA, alias="schema")
    label: str
    command: list[str]
    started_at: str
    versions: dict[str, str]
    settings: dict[str, Any]
    seed: int
    interrupted: bool
    simulated: bool = False
    cluster_before: dict[str, Any] | None
    cluster_after: dict[str, Any] | None
    client: Client
    summary: Summary
    requests: list[Request]

    def save(self, path: Path) -> None:
        """Writes it as JSON.

        Raises:
            BenchError: The file cannot be written.
        """
        write_json(self, path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads what `save` wrote.

        Raises:
            BenchError: The file cannot be read or is no result of `cpd bench run`.
        """
        try:
            fields = orjson.loads(path.read_bytes())
            if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
                raise BenchError(f"{path} is no result of `cpd bench run --json`")
            return cls.model_validate(fields)
        except OSError as error:
            raise BenchError(f"cannot read {path}: {error.strerror}") from error
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise BenchError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
