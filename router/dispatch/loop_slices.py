"""Shares the event loop between new requests and the output of running ones.

A request's first output is handled at once. Later outputs wait in a queue. Each slice of the event loop handles only a
few tokens of it, so that new requests and first tokens do not wait for all the others.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

SLICE_TOKENS = 16
"""Tokens handled in one slice, which takes about half a millisecond."""

MAX_WAITING_TOKENS = 8192
"""If more tokens than this wait, outputs are handled at once, so that workers notice that the router is too slow."""

T = TypeVar("T")


class LoopSlices(Generic[T]):
    """Queue of outputs, in order of arrival.

    Args:
        handle: Called with each output.
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[T, int]] = deque()
        self._tokens = 0
        self._scheduled = False

    def add(self, output: T, tokens: int) -> None:
        """Queues `output`, which has `tokens` tokens."""
        self._waiting.append((output, tokens))
        self._tokens += tokens
        while self._tokens > MAX_WAITING_TOKENS:
            self._next()
        self._schedule()

    def flush(self) -> None:
        """Handles everything that waits."""
        while self._waiting:
            self._next()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._slice)

    def _slice(self) -> None:
        self._scheduled = False
        tokens = 0
        while self._waiting and tokens < SLICE_TOKENS:
            tokens += self._next()
        self._schedule()

    def _next(self) -> int:
        output, tokens = self._waiting.popleft()
        self._tokens -= tokens
        self._handle(output)
        return tokens
