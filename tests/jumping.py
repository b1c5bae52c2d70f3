"""An event loop in which nobody waits: time jumps to whatever is due next."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LATE_S = 1e-4
"""Timers are late by this much, each time that nothing else happens."""


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self.now_s += timeout + LATE_S
        return ready


def run_jumping(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Runs `main`; returns what it does, and the loop's time at the end, in ms (it began at 0)."""
    selector = _JumpingSelector()

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        result = runner.run(main)
    return result, selector.now_s * 1e3
