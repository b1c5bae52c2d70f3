"""An event loop with virtual time, which jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

T = TypeVar("T")

TIMER_LATENESS_S = 1e-4
"""Lateness of each timer."""


class _VirtualTimeSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self.now_s += timeout + TIMER_LATENESS_S
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Runs `main`; returns its result and the virtual time that has passed, in ms."""
    selector = _VirtualTimeSelector()

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        result = runner.run(main)
    return result, selector.now_s * 1e3


@contextmanager
def virtual_perf_counter() -> Iterator[None]:
    """Within `run_in_virtual_time`: makes `time.perf_counter()` return virtual time, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", asyncio.get_running_loop().time)
        yield


class VirtualClock:
    """A `bench.load.clock.Clock` in virtual time; the real one uses alarms of the kernel."""

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
        """Calls `callback` at `due_s` of the loop's time, unless the clock was closed by then."""
        self._loop.call_at(due_s, lambda: None if self._ended else callback())
