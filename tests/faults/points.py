"""Moments at which something can be made to happen: at the k-th time from when that was ordered.

CONNECT    a sender is about to connect to a receiver's pool
PAGE       a sender is about to send a page
SENT       a sender has sent the last page of a push, and is about to say so
LANDED     all pages of a landing have arrived, and the receiver is about to hear of it
STEP       the engine is about to compute a step
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from cpd.common.errors import TransferError


class Point(Enum):
    """See the module's table."""

    CONNECT = "connect"
    PAGE = "page"
    SENT = "sent"
    LANDED = "landed"
    STEP = "step"


class Action(Enum):
    """What happens at a point.

    HOLD waits until released. FAIL raises TransferError. DROP has the sender leave a page out (PAGE), CORRUPT changes
    a byte of what arrived (LANDED): these two are for the transport to do. DELAY waits `value` seconds, then and ever
    after.
    """

    HOLD = "hold"
    FAIL = "fail"
    DROP = "drop"
    CORRUPT = "corrupt"
    DELAY = "delay"


@dataclass(eq=False, slots=True)
class _Order:
    action: Action
    left: int
    value: float
    reached: bool = False
    released: threading.Event = field(default_factory=threading.Event)


class Points:
    """What was ordered for the points of one worker. Any thread.

    Attributes:
        used: Whether some point was reached since all orders were taken back.
    """

    def __init__(self) -> None:
        self.used = False
        self._orders: dict[Point, _Order] = {}

    def order(self, point: Point, action: Action, k: int = 0, value: float = 0.0) -> None:
        """At the k-th time from now (counted from 0), `action` happens at `point`; earlier orders for it are void."""
        self.release(point)
        self._orders[point] = _Order(action, k, value)

    def release(self, *points: Point) -> None:
        """Takes back what was ordered, at all points unless some are given; who is held goes on."""
        self.used = self.used and bool(points)
        for point in points or tuple(Point):
            if (order := self._orders.pop(point, None)) is not None:
                order.released.set()

    def ordered(self, point: Point) -> bool:
        """Whether something is to happen, or happens, at `point`."""
        return point in self._orders

    def reached(self, point: Point) -> bool:
        """Whether what was ordered has begun to happen."""
        order = self._orders.get(point)
        return order is not None and order.reached

    async def passed(self, point: Point) -> Action | None:
        """To be called on the event loop whenever the point is reached. Returns what is left to be done.

        Raises:
            TransferError: That was ordered.
        """
        order = self._take(point)
        if order is None:
            return None
        match order.action:
            case Action.HOLD:
                while not order.released.is_set():  # noqa: ASYNC110 - shared with another thread
                    await asyncio.sleep(0.005)
            case Action.DELAY:
                await asyncio.sleep(order.value)
            case Action.FAIL:
                raise TransferError(f"failed by order at {point.value}")
            case Action.DROP | Action.CORRUPT:
                return order.action
        return None

    def passed_by_thread(self, point: Point) -> None:
        """The same for another thread, which may be held or delayed."""
        order = self._take(point)
        if order is not None:
            order.released.wait(order.value if order.action is Action.DELAY else None)

    def state(self) -> Iterator[str]:
        """The points whose order has begun to happen."""
        return (point.value for point in Point if self.reached(point))

    def _take(self, point: Point) -> _Order | None:
        self.used = True
        order = self._orders.get(point)
        if order is None:
            return None
        if order.left:
            order.left -= 1
            return None
        if order.reached and order.action is not Action.DELAY:
            return None if order.action is not Action.HOLD else order
        order.reached = True
        return order
