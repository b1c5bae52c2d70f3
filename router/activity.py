"""What a router has done lately, for the summary in its log (router/operations/summary.py)."""

from collections import deque
from statistics import median

_MAX_TTFTS = 1000
"""The median is that of this many TTFTs at most, the latest ones."""


class Activity:
    """Calls and tokens since the figures were last taken.

    Attributes:
        calls: Calls of routes that generate text, which have ended.
        errors: Those that failed or were refused.
        tokens: Output tokens.
        ttfts_ms: Times to first token, in ms.
    """

    def __init__(self) -> None:
        self.calls = self.errors = self.tokens = 0
        self.ttfts_ms = deque[float](maxlen=_MAX_TTFTS)

    def take(self, period_s: float) -> dict[str, object]:
        """Returns the figures of the last `period_s` seconds and starts again from 0. Empty if nothing happened."""
        figures: dict[str, object] = {}
        if self.calls or self.tokens:
            figures = {"calls": self.calls, "errors": self.errors, "tokens_per_s": round(self.tokens / period_s, 1)}
            if self.ttfts_ms:
                figures["ttft_p50_ms"] = round(median(self.ttfts_ms), 1)
        self.calls = self.errors = self.tokens = 0
        self.ttfts_ms.clear()
        return figures
