"""What a decision about a device sees, and what it answers.

A model on a device is in one of these states; each but `asleep` makes it an *occupant*, whose memory is taken:

    asleep ──Wake──▶ waking ──▶ serving ──Drain──▶ draining ──Sleep──▶ sleeping ──▶ asleep
                                   └────────────────Sleep (idle)──────────▲

Waking holds the device's wake lock. A draining model takes no new requests. Requests for a model that is not serving
wait; the first of them writes an *intent*, which ends when the model serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cpd.common.residency_settings import Fairness as Fairness
from cpd.common.residency_settings import SleepSettings as SleepSettings


@dataclass(frozen=True, slots=True)
class Model:
    """A model that shares a device.

    Attributes:
        memory_bytes: Device memory that it takes while it is awake.
        wake_s: Predicted time to load and verify it.
        sleep_s: Predicted time to free its memory, once its requests have ended.
    """

    name: str
    memory_bytes: int
    fairness: Fairness = field(default_factory=Fairness)
    sleep: SleepSettings = field(default_factory=SleepSettings)
    wake_s: float = 0.0
    sleep_s: float = 0.0


class ModelState(StrEnum):
    """State of a model on a device; see the module."""

    ASLEEP = "asleep"
    WAKING = "waking"
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"

    @property
    def has_memory(self) -> bool:
        """True if steps can be computed, and pages be read and written."""
        return self in (ModelState.SERVING, ModelState.DRAINING)


@dataclass(frozen=True, slots=True)
class Occupant:
    """A model whose memory is taken.

    Attributes:
        state: Not `asleep`.
        since_s: When its state began.
        last_access_s: When its last request arrived.
        running: Number of its running requests.
        resumed: Number of those that were parked before.
        deadlines: When each of them misses its target if it pauses now, in any order.
        drain_s: Predicted time until these have ended.
        arrivals_per_s: Its recent requests a second.
        responds: False while its process is silent: it is no victim, and nobody knows when its memory will be free.
    """

    model: Model
    state: ModelState
    since_s: float
    last_access_s: float = 0.0
    running: int = 0
    resumed: int = 0
    deadlines: Sequence[float] = ()
    drain_s: float = 0.0
    arrivals_per_s: float = 0.0
    responds: bool = True


@dataclass(frozen=True, slots=True)
class Intent:
    """A model that is not serving, and has requests.

    Attributes:
        since_s: When the intent was written.
        latest_s: When the model serves or has failed at the latest, as promised at that time (`longest_wait_s`).
        deadlines: When each of its requests misses its target if it waits on, ascending.
        wake_s: Predicted time to load the model, less than `Model.wake_s` if it is staged.
    """

    model: Model
    since_s: float
    latest_s: float
    deadlines: Sequence[float] = ()
    wake_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """A device at one time.

    Attributes:
        memory_bytes: Memory for models.
        models: All models that share it, also those asleep.
        intents: In the order in which they were written.
    """

    memory_bytes: int
    models: Sequence[Model]
    occupants: Sequence[Occupant]
    intents: Sequence[Intent]


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the wake lock and load the model."""

    model: str


@dataclass(frozen=True, slots=True)
class Drain:
    """The model takes no new requests, since another one needs its memory."""

    model: str
    needed_by: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Park the requests that still run, and free the memory."""

    model: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Prepare the weights in host memory, so that loading them is quicker. May be said again."""

    model: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The model's intent ends, and its waiting requests fail with `reason`, a sentence."""

    model: str
    reason: str


Action = Wake | Drain | Sleep | Stage | Fail


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Attributes:
        check_at_s: When the answer may become another one although nothing has changed; infinite: never.
    """

    actions: Sequence[Action]
    check_at_s: float


class ResidencyPolicy(Protocol):
    """Decides who is awake. Has no state: everything is in the snapshot."""

    def decide(self, device: Device, now: float) -> Decision:
        """Returns what to do on a device. Carry it out, and ask again at each change and at `check_at_s`."""
