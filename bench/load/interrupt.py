"""Ctrl-C that ends a measurement, and doesn't throw it away."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_interrupt() -> Iterator[list[bool]]:
    """A list that is empty until Ctrl-C; the second Ctrl-C is an ordinary KeyboardInterrupt."""
    pressed: list[bool] = []
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: object) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
