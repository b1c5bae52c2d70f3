"""Injection points: where a test can hold, delay or break what a worker does.

A test arms a point with an action. The action triggers when the worker reaches the point for the k-th time after that,
counted from 0.

CONNECT    a sender is about to connect to a receiver's pool
PAGE       a sender is about to send a page
SENT       a sender has sent the last page of a push, and has not reported it yet
LANDED     all pages of a landing have arrived, and the receiver has not been told yet
STEP       the engine is about to compute a step
RELEASE    a model that goes to sleep is about to give its memory back: all of its streams are parked
RELEASED   it has, and nobody knows yet
RESTORE    a model that wakes is about to take its memory
RESTORED   it has, and its weights are right, and nobody knows yet
"""

import asyncio
import threading
from dataclasses import dataclass, field
from enum import Enum

from cpd.common.errors import TransferError


class Point(Enum):
    """An injection point: see the table above."""

    CONNECT = "connect"
    PAGE = "page"
    SENT = "sent"
    LANDED = "landed"
    STEP = "step"
    RELEASE = "release"
    RELEASED = "released"
    RESTORE = "restore"
    RESTORED = "restored"


class Action(Enum):
    """What happens when an armed point is reached.

    HOLD       waits until the point is disarmed
    FAIL       raises TransferError
    DROP       the sender leaves the page out (PAGE only)
    CORRUPT    one byte of the landing changes (LANDED only)
    DELAY      waits `delay_s` seconds, this time and every time after
    """

    HOLD = "hold"
    FAIL = "fail"
    DROP = "drop"
    CORRUPT = "corrupt"
    DELAY = "delay"


@dataclass(eq=False, slots=True)
class _Armed:
    action: Action
    remaining: int
    delay_s: float
    triggered: bool = False
    disarmed: threading.Event = field(default_factory=threading.Event)


class InjectionPoints:
    """The injection points of one worker. Thread-safe.

    Attributes:
        any_reached: True if the worker has reached a point, armed or not, since all were disarmed.
    """

    def __init__(self) -> None:
        self.any_reached = False
        self._armed: dict[Point, _Armed] = {}

    def arm(self, point: Point, action: Action, k: int = 0, delay_s: float = 0.0) -> None:
        """`action` triggers when `point` is reached for the k-th time from now, counted from 0.

        Replaces what the point was armed with before.
        """
        self.disarm(point)
        self._armed[point] = _Armed(action, k, delay_s)

    def disarm(self, *points: Point) -> None:
        """Disarms these points, or all if none are given. Workers held there continue."""
        if not points:
            self.any_reached = False
        for point in points or tuple(Point):
            if (armed := self._armed.pop(point, None)) is not None:
                armed.disarmed.set()

    def is_armed(self, point: Point) -> bool:
        """True from `arm` to `disarm`, triggered or not."""
        return point in self._armed

    def triggered(self, point: Point) -> bool:
        """True if the action at `point` has begun."""
        armed = self._armed.get(point)
        return armed is not None and armed.triggered

    async def reach(self, point: Point) -> Action | None:
        """The transport calls this on the event loop each time it reaches `point`.

        Returns DROP or CORRUPT if the caller must carry it out.

        Raises:
            TransferError: The action is FAIL.
        """
        armed = self._trigger(point)
        if armed is None:
            return None
        match armed.action:
            case Action.HOLD:
                while not armed.disarmed.is_set():  # noqa: ASYNC110 - shared with another thread
                    await asyncio.sleep(0.005)
            case Action.DELAY:
                await asyncio.sleep(armed.delay_s)
            case Action.FAIL:
                raise TransferError(f"injected failure at {point.value}")
            case Action.DROP | Action.CORRUPT:
                return armed.action
        return None

    def reach_on_thread(self, point: Point) -> None:
        """Like `reach`, for threads without an event loop: they can be held or delayed."""
        armed = self._trigger(point)
        if armed is not None:
            armed.disarmed.wait(armed.delay_s if armed.action is Action.DELAY else None)

    def _trigger(self, point: Point) -> _Armed | None:
        self.any_reached = True
        armed = self._armed.get(point)
        if armed is None:
            return None
        if armed.remaining:
            armed.remaining -= 1
            return None
        if armed.triggered and armed.action not in (Action.DELAY, Action.HOLD):
            return None
        armed.triggered = True
        return armed
