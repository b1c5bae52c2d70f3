"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Returns the text before the first stop string, or up to its end.

    The first stop string is the one that is complete first (the longest of several), so the result does not depend on
    how the text is cut into pieces. Text is held back only while it may be the start of a stop string. Each stop string
    is looked for from where it may have begun, so long texts that are held back do not cost more than others.

    Args:
        stops: The stop strings, none of them empty.
        include: The stop string is part of the text.

    Attributes:
        found: The stop string that ended the text; empty if there was none.
    """

    __slots__ = ("_held", "_include", "_overlaps", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._overlaps = [0] * len(stops)  # how much of each stop string is at the end of what is held
        self.found = ""

    @property
    def matched(self) -> bool:
        """True if there was a stop string."""
        return bool(self.found)

    def push(self, text: str) -> str:
        """Adds a piece and returns the text that is certain now. Sets `found` at a stop string."""
        begins = [len(self._held) - length for length in self._overlaps]
        text = self._held + text
        searched = list(zip(self._stops, begins, strict=True))
        ends = [(start + len(stop), start) for stop, begin in searched if (start := text.find(stop, begin)) >= 0]
        if ends:
            end, start = min(ends)
            self.found = text[start:end]
            self.flush()
            return text[: end if self._include else start]
        self._overlaps = [overlap(text, stop, begin) for stop, begin in searched]
        keep = max(self._overlaps, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text held back, after the last piece."""
        held, self._held = self._held, ""
        self._overlaps = [0] * len(self._stops)
        return held


def overlap(text: str, stop: str, begin: int = 0) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `stop`; `text` does not contain `stop`.

    Args:
        begin: The suffix does not begin before this place.
    """
    first = max(begin, len(text) - len(stop) + 1)
    while (first := text.find(stop[0], first)) >= 0:
        if stop.startswith(text[first:]):
            return len(text) - first
        first += 1
    return 0
