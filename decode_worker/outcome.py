"""How a fill ended, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.types import Output


class Status(Enum):
    """How a fill ended; see the table in `decode_worker.remote_prefill`."""

    COMPLETE = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class Failure(Enum):
    """Why a fill failed. The values are labels in the metrics (docs/metrics.md)."""

    UNREACHABLE = "unreachable"  # the stream ended before anything was heard
    LOST = "lost"  # the stream ended
    SILENT = "silent"  # nothing was heard for longer than a running process is silent
    STALLED = "stalled"  # the process runs, but nothing moves
    REFUSED = "refused"
    QUEUE_FULL = "queue_full"
    TRANSFER = "transfer"  # pages did not arrive
    DAMAGED = "damaged"  # pages arrived with another content
    PROTOCOL = "protocol"  # it sent what it must not send
    INTERNAL = "internal"  # this worker's own fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fill.

    Attributes:
        reason: Why it failed, for people.
        failure: Why it failed, for counting; only of those that did.
        first: The first token of each choice, if it came; it was emitted.
        ended: Ends of choices that the engine could not go on with.
    """

    status: Status
    reason: str = ""
    failure: Failure | None = None
    first: Sequence[Output] = ()
    ended: Sequence[Output] = ()
