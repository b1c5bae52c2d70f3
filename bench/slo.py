"""Latency targets for goodput."""

import math
from dataclasses import dataclass, fields

import numpy as np

from bench.result import Request
from cpd.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in ms; None for no limit. `itl` limits the 99th percentile of a request's own gaps."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parses limits in ms, such as `ttft=2000,itl=50`.

        Raises:
            ConfigError: The text is malformed, or a name is unknown or given twice, or a limit is not positive.
        """
        known = [field.name for field in fields(cls)]
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in known:
                raise ConfigError(f"slo: {part.strip()!r} is not one of {', '.join(f'{name}=MS' for name in known)}")
            if name in limits:
                raise ConfigError(f"slo: {name} is given twice")
            limits[name] = _milliseconds(name, value)
        return cls(**limits)

    def good(self, request: Request) -> bool:
        """True if `request` completed within every limit. Latencies that it lacks (an answer of one token has no gaps)
        count as met."""
        if request.error:
            return False
        measured = ((request.ttft_ms, self.ttft), (request.tpot_ms, self.tpot), (request.e2e_ms, self.e2e))
        within = all(value is None or limit is None or value <= limit for value, limit in measured)
        return within and (self.itl is None or _p99_within(request.itl_ms, self.itl))


def _milliseconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"slo: {name}={text} is not a positive number of milliseconds")
    return value


def _p99_within(gaps_ms: list[float], limit_ms: float) -> bool:
    # The largest gap usually decides, and costs a hundredth of the percentile.
    return max(gaps_ms, default=0.0) <= limit_ms or float(np.percentile(gaps_ms, 99)) <= limit_ms
