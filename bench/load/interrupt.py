"""Lets Ctrl-C end a measurement without losing it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_interrupt() -> Iterator[list[bool]]:
    """Yields a list that is empty until Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""
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
