"""Whose output is next, where many have some.

A request's first output is handed on when it comes. What comes after that waits for a turn of the event loop, and a
turn is for a few tokens only: so new requests and first tokens pass, and don't wait for whatever all the others bring.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

TURN_TOKENS = 16
"""Handed on in a turn, about: in half a millisecond."""

MOST_TOKENS = 8192
"""More than these don't wait, so that workers notice a router that is too slow."""

T = TypeVar("T")


class Turns(Generic[T]):
    """Outputs that wait, in the order in which they came.

    Args:
        handle: Hands an output on.
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self._waiting: deque[tuple[T, int]] = deque()
        self._tokens = 0
        self._due = False

    def wait(self, output: T, tokens: int) -> None:
        """Has `output`, of so many tokens, handed on when it is its turn."""
        self._waiting.append((output, tokens))
        self._tokens += tokens
        while self._tokens > MOST_TOKENS:
            self._next()
        self._plan()

    def finish(self) -> None:
        """Hands on all that waits."""
        while self._waiting:
            self._next()

    def _plan(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        tokens = 0
        while self._waiting and tokens < TURN_TOKENS:
            tokens += self._next()
        self._plan()

    def _next(self) -> int:
        output, tokens = self._waiting.popleft()
        self._tokens -= tokens
        self._handle(output)
        return tokens
