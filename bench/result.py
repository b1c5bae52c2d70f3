"""The result of a run: `--json` writes it, and reports are made from it.

docs/metrics.md defines the figures. A figure without a sample is None.
"""

from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field, ValidationError

from bench.errors import BenchError

SCHEMA: Literal["cpd-bench/1"] = "cpd-bench/1"


def write_json(result: BaseModel, path: Path) -> None:
    """Writes a result as JSON.

    Raises:
        BenchError: The file cannot be written.
    """
    content = orjson.dumps(result.model_dump(mode="json", by_alias=True), option=orjson.OPT_INDENT_2)
    try:
        path.write_bytes(content + b"\n")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


class Stat(BaseModel):
    """A distribution. `ci` has the 95 % bootstrap confidence interval [low, high] of each figure by name."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    ci: dict[str, tuple[float, float]]


class Group(BaseModel):
    """The requests of one turn or one route."""

    name: str
    completed: int
    failed: int
    ttft_ms: Stat
    itl_ms: Stat
    tpot_ms: Stat
    e2e_ms: Stat
    cached_token_rate: float | None


class Steady(BaseModel):
    """The part of the run without ramp-up and drain; times in seconds from its start."""

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
    """One request. Times are in seconds from the start of the run, latencies in ms from when the request was due
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
    worker: str = ""
    good: bool | None


class Accuracy(BaseModel):
    """Result of the self-test: the client's own error against a server of known timing."""

    streams: int
    chunks_per_s: float
    ttft_error: float
    itl_error: float
    delay_ms_p50: float
    delay_ms_p99: float


class Client(BaseModel):
    """The client's influence on the figures. `bench.load.plan.Health` describes the fields not listed here.

    Attributes:
        limited: The client was too slow: the figures are not the server's.
        reasons: The reasons for `limited`.
        warnings: Warnings about figures that are valid.
        selftest: Result of the self-test, if it ran.
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


class Measurement(BaseModel):
    """The fields that results of `run` and `interference` share: what was measured, and when."""

    schema_: str = Field(alias="schema")
    label: str
    command: list[str]
    started_at: str
    versions: dict[str, str]
    settings: dict[str, Any]
    seed: int
    interrupted: bool


class Result(Measurement):
    """One whole run."""

    schema_: Literal["cpd-bench/1"] = Field(SCHEMA, alias="schema")
    simulated: bool = False
    cluster_before: dict[str, Any] | None
    cluster_after: dict[str, Any] | None
    client: Client
    summary: Summary
    requests: list[Request]

    def save(self, path: Path) -> None:
        """Writes the result as JSON. Raises as `write_json`."""
        write_json(self, path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads what `save` wrote.

        Raises:
            BenchError: The file cannot be read or is not a result of `cpd bench run`.
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
