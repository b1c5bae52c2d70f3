"""The result of a remote prefill or a prefix fetch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.types import Output


class Status(Enum):
    """How it ended; see the table in `decode_worker.remote_prefill`."""

    COMPLETE = auto()
    FINISHED = auto()
    FAILED = auto()
    INTERRUPTED = auto()
    CANCELLED = auto()


class Failure(Enum):
    """Why it failed. The values are labels in the metrics (docs/metrics.md)."""

    UNREACHABLE = "unreachable"  # the stream ended before any message came
    LOST = "lost"  # the stream ended later
    SILENT = "silent"  # no message for longer than a running process stays silent
    STALLED = "stalled"  # the process runs but makes no progress
    REFUSED = "refused"
    QUEUE_FULL = "queue_full"
    TRANSFER = "transfer"  # pages did not arrive
    DAMAGED = "damaged"  # pages arrived with wrong content
    PROTOCOL = "protocol"  # the other worker sent an invalid message
    INTERNAL = "internal"  # an error in this worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a remote prefill.

    Attributes:
        reason: Why it failed, for people to read.
        failure: Why it failed, for metrics; None if it did not fail.
        first: The first token of each choice, if they came; they were sent to the router.
        ended: The ends of choices that the engine could not continue.
    """

    status: Status
    reason: str = ""
    failure: Failure | None = None
    first: Sequence[Output] = ()
    ended: Sequence[Output] = ()
