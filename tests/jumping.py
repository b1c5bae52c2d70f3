"""An event loop in which nobody waits: time jumps to whatever is due next."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

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


@contextmanager
def perf_counter_jumps() -> Iterator[None]:
    """Within `run_jumping`: `time.perf_counter()` is the loop's time, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", asyncio.get_running_loop().time)
        yield


class JumpingClock:
    """Stands for a `bench.load.clock.Clock`, whose alarms are the kernel's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True

    def call_at(self, due_s: float, callback: Callable[[], object]) -> None:
        """Calls `callback` at `due_s` of the loop's time, unless it has ended by then."""
        self._loop.call_at(due_s, lambda: None if self._ended else callback())
