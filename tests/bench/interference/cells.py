"""Cells made without a server."""

from collections.abc import Callable
from typing import Any

from bench.interference.result import Burst, Cell, Window

BEFORE_MS = 10.0


def burst(increase_percent: float, **fields: Any) -> Burst:
    """A successful burst of 100 tokens."""
    during_ms = BEFORE_MS * (1 + increase_percent / 100)
    usual: dict[str, Any] = {
        "before": Window(mean_ms=BEFORE_MS, p99_ms=11, max_ms=12),
        "during": Window(mean_ms=during_ms, p99_ms=during_ms, max_ms=during_ms),
        "after_ms": BEFORE_MS,
        "burst_ms": 50.0,
        "recovery_s": 0.1,
        "ttft_ms": [40.0, 50.0],
        "idle_ttft_ms": [20.0, 30.0],
        "prompt_tokens": 100,
        "failed": {},
        "routes": {},
        "client_late_ms": 0.2,
        "restarts": 0,
        "steady": True,
        "drained": True,
        "timeline": [(-5.0, BEFORE_MS), (5.0, during_ms)],
    }
    return Burst(**usual | fields)


def grid(increase_percent: Callable[[int], float]) -> list[Cell]:
    """One burst of each size from 128 to 65,536 tokens. `increase_percent` maps a size to its increase."""
    return [
        Cell(prefills=count, prefill_len=length, bursts=[burst(increase_percent(count * length))])
        for length in (128, 512, 2048, 4096)
        for count in (1, 2, 4, 8, 16)
    ]
