"""What has happened to the workers of a model lately, for people: `events` in `GET /cluster`."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from typing_extensions import TypedDict

MAX_EVENTS = 100
"""Number of events remembered; the oldest are dropped first."""

EventKind = Literal["joined", "drains", "lost", "crashed", "left", "role", "request_crashes_workers"]


class Event(TypedDict):
    """Something that happened to a worker.

    `at` is in seconds since 1970. `requests` are those that had to go elsewhere because of it.
    """

    at: float
    kind: EventKind
    worker: str
    requests: int
    text: str


class Events:
    """The latest events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def add(self, kind: EventKind, worker: str, text: str, requests: int = 0) -> None:
        """Adds an event that happens now."""
        self._events.append({"at": time.time(), "kind": kind, "worker": worker, "requests": requests, "text": text})

    def latest(self) -> Sequence[Event]:
        """All events that are remembered, oldest first."""
        return list(self._events)
