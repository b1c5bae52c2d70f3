"""Keeps floods of warnings and errors out of the log: a message that repeats becomes one counted line a second.

Messages are the same if they come from the same place in the code, whatever their arguments. In a period of PERIOD_S
the first BURST of them pass, so that a few different causes all show. The others are counted, and the last of them is
logged at the end of the period, with the count. Lines below WARNING always pass.
"""

import copy
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

BURST = 3
"""Number of lines of one kind that pass in a period."""

PERIOD_S = 1.0


@dataclass(slots=True)
class _Flood:
    """The messages of one kind in the current period. `last` is the last one that did not pass."""

    passed: int = 0
    held_back: int = 0
    last: logging.LogRecord | None = None


class FloodFilter(logging.Filter):
    """A filter for a handler.

    Args:
        emit: Logs a record through the same handler. It comes to this filter again.
        period_s: See PERIOD_S.
    """

    def __init__(self, emit: Callable[[logging.LogRecord], object], period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._emit = emit
        self._period_s = period_s
        self._lock = threading.Lock()
        self._floods: dict[tuple[str, int], _Flood] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is logged now."""
        if record.levelno < logging.WARNING or hasattr(record, "count_of_flood"):
            return True
        place = record.pathname, record.lineno
        with self._lock:
            flood = self._floods.get(place)
            if flood is None:
                flood = self._floods[place] = _Flood()
            if flood.passed < BURST:
                flood.passed += 1
                passes = True
            else:
                flood.held_back += 1
                flood.last = record
                passes = False
            if flood.passed + flood.held_back == 1:
                self._end_later(place)
        return passes

    def _end_later(self, place: tuple[str, int]) -> None:
        timer = threading.Timer(self._period_s, self._end, (place,))
        timer.daemon = True
        timer.start()

    def _end(self, place: tuple[str, int]) -> None:
        with self._lock:
            flood = self._floods.pop(place)
            if flood.held_back:  # it may go on: in the next period nothing passes but the count
                self._floods[place] = _Flood(passed=BURST)
                self._end_later(place)
        if flood.last is not None:
            summary = copy.copy(flood.last)
            summary.msg = f"{flood.last.getMessage()} (and {flood.held_back - 1} more like this)"
            summary.args, summary.exc_info, summary.exc_text = (), None, None
            summary.count_of_flood = flood.held_back
            self._emit(summary)
