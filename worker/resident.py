"""A worker's model: what those who decide about it (`residency.py`) and the worker's other parts see of it.

residency  ──wake, stage, drain, sleep──▶  resident (`sleeper.py`)  ──▶ engine, memory, transport
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpd.residency.snapshot import ModelState


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision needs to know of a worker's model. Times are of `time.monotonic`.

    Attributes:
        waiting: Requests that wait for the next wake.
        running: Requests that the model works on; while it drains, those that do not wait for the next wake.
        resumed: Number of running sequences that were parked before.
        deadlines: When each request misses its target if it waits, or pauses, on; ascending.
        drain_s: Predicted time until the running requests have ended.
        arrivals_per_s: Recent requests a second.
        last_access: When the last request arrived.
        staged_bytes: Size of the staged copy of the weights; 0 if there is none.
    """

    waiting: int
    running: int
    resumed: int
    deadlines: Sequence[float]
    drain_s: float
    arrivals_per_s: float
    last_access: float
    staged_bytes: int


class Resident(Protocol):
    """A worker's model, which gives its memory away and gets it back. One change at a time; see `sleeper.py`."""

    @property
    def state(self) -> ModelState: ...

    @property
    def took_s(self) -> Mapping[str, float]:
        """How long the parts of the last change took, in seconds: of a wake `copy` (staged weights) or `read` (the
        checkpoint), `transport` and `pool`; of going to sleep `pause`, `transfers`, `park` and `release`."""

    async def wake(self) -> int:
        """Loads and verifies the weights, and serves. Returns the bytes of memory that it takes, when it has all.

        Raises:
            CPDError: It failed. No memory is held, and it may be tried again.
        """

    async def stage(self) -> None:
        """Prepares the weights in host memory, so that the next wake is quicker.

        Raises:
            CPDError: It failed. There is no staged copy.
        """

    def unstage(self) -> None:
        """Frees the host memory of the staged copy."""

    def drain(self) -> None:
        """Lets new requests wait from now on. Those that run go on."""

    def undrain(self) -> None:
        """Lets the requests that wait run."""

    async def sleep(self) -> int:
        """Parks what still runs, and frees the memory. Returns the bytes that are still held.

        Raises:
            CPDError: It failed. The process ends, and is started again.
        """

    def facts(self, now: float) -> Facts:
        """Returns what a decision needs to know at the time `now`, of `time.monotonic`."""


class ModelUse(Protocol):
    """A worker's model as the worker's parts see it."""

    @property
    def state(self) -> ModelState: ...

    def request_arrived(self) -> None:
        """Records that a request came, of a router or of another worker."""

    def request_given_up(self) -> None:
        """Records that a router's request has waited too long. If it waited for a wake, the wake goes on."""

    def prefill_refused(self) -> None:
        """Records that another worker's request was refused because the model does not serve."""


class AlwaysServing:
    """A model that never sleeps."""

    state = ModelState.SERVING

    def request_arrived(self) -> None:
        """Does nothing."""

    def request_given_up(self) -> None:
        """Does nothing."""

    def prefill_refused(self) -> None:
        """Does nothing."""
