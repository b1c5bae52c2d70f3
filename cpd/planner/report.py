"""What the planner says about its last decision, in `/cluster` and to the planner that takes over."""

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict


class LoadClass(TypedDict):
    """Requests of about the same length: `capacity.Demand`."""

    rate: float
    local_tokens: float
    remote_tokens: float
    prompt_tokens: float
    output_tokens: float


class PredictionReport(TypedDict):
    """What is predicted for one number of prefill workers: `capacity.Prediction`."""

    prefill_workers: int
    good_per_s: float
    good_share: float
    prefill_busy: float
    combined_busy: float
    streams: float


class ChangeReport(TypedDict):
    """A change of the number of prefill workers.

    `at` is its time in seconds since 1970, `workers` are those that changed. `error` says why others did not, or is
    empty.
    """

    at: float
    before: int
    after: int
    workers: list[str]
    reason: str
    error: str


class GivenRole(TypedDict):
    """The role that the planner gave to a worker, and the start of that worker (`Member.incarnation`)."""

    role: str
    incarnation: int


class PlanReport(TypedDict):
    """The planner's last decision.

    Attributes:
        mode: `act` if the planner changes roles, `advise` if it only says what it would do.
        at: When it decided, in seconds since 1970.
        workers, current: Workers that are ready, and how many of them are prefill workers.
        prefill_workers: How many should be.
        reason: Why, as a sentence.
        wanted_workers: How many workers there should be.
        size_reason: Why, as a sentence; empty if the planner does not decide it.
        demands: The measured load.
        scale: How many times the measured load `predictions` are for.
        predictions: The last ones, by number of prefill workers.
        predicted_at: When they were made; 0: never.
        changes: The last ones, oldest first; of a planner that only advises, none.
        changes_total: Number of all changes.
        roles: The roles that it has given, by worker.
    """

    mode: str
    at: float
    workers: int
    current: int
    prefill_workers: int
    reason: str
    wanted_workers: int
    size_reason: str
    demands: list[LoadClass]
    scale: float
    predictions: list[PredictionReport]
    predicted_at: float
    changes: list[ChangeReport]
    changes_total: int
    roles: dict[str, GivenRole]


_REPORT = TypeAdapter(PlanReport)


def parse_report(text: bytes) -> PlanReport | None:
    """Returns a report; None if it is empty, or of another version that has other fields."""
    try:
        return _REPORT.validate_json(text) if text else None
    except ValidationError:
        return None
