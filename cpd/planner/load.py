"""Measures what is asked of the workers: how many requests arrive, of which lengths. Pure.

Requests are counted by class: prompts of about the same length, of which about the same share is cached. Rates are
forecasts by double exponential smoothing (Brown 1963), for arrivals at `age` seconds before now, where
x = seconds measured / MEMORY_S:

    rate = Σ (2 - age / MEMORY_S) · exp(-age / MEMORY_S) / (MEMORY_S · (1 - exp(-x) · (1 - x)))

It follows a rate that rises or falls evenly without lag. Roles change at once, so the forecast is for now.
"""

from dataclasses import dataclass, field
from math import exp, log2
from typing import NamedTuple

from cpd.planner.capacity import Demand

MEMORY_S = 60.0
"""Decay time of the counts. It averages over bursts, and is short beside what changes of load last."""

MIN_REQUESTS = 50
"""Number of requests without which nothing is decided."""

MIN_RECENT = 10
"""Decayed number of requests without which nothing is decided."""

_LEAST_TOKENS = 64
"""Shorter prompts are of one class: computing them takes a step in any case."""

_FORGOTTEN = 0.01
"""Decayed number of requests below which a class no longer counts."""


class RequestClass(NamedTuple):
    """Requests with about as many tokens to compute (in half octaves) and cached (in quarters of the prompt)."""

    half_octave: int
    quarter: int

    @classmethod
    def of(cls, prompt_tokens: int, local_tokens: int) -> "RequestClass":
        """The class of a prompt of which a combined worker computes `local_tokens`, at least one."""
        quarter = min(3, 4 * (prompt_tokens - local_tokens) // max(1, prompt_tokens))
        return cls(int(2 * log2(max(local_tokens, _LEAST_TOKENS))), quarter)


class Seen(NamedTuple):
    """The requests by which a load was measured: all since the meter began, and their decayed number."""

    total: int
    recent: float

    @property
    def enough(self) -> bool:
        """True if something can be decided by them."""
        return self.total >= MIN_REQUESTS and self.recent >= MIN_RECENT


@dataclass(slots=True)
class _Counts:
    """Decayed sums over the requests of a class.

    Attributes:
        at: Time of the last change.
        requests, local, remote, prompt: Number, and sums of tokens.
        ages: Sum of the requests' ages, decayed like them, in seconds.
        answers, output: Number of answers, and sum of their tokens.
    """

    at: float
    requests: float = 0.0
    ages: float = 0.0
    local: float = 0.0
    remote: float = 0.0
    prompt: float = 0.0
    answers: float = 0.0
    output: float = 0.0

    def decay(self, now: float) -> None:
        """Forgets until `now`."""
        kept = exp((self.at - now) / MEMORY_S)
        self.ages = kept * (self.ages + (now - self.at) * self.requests)
        self.at = now
        self.requests *= kept
        self.local *= kept
        self.remote *= kept
        self.prompt *= kept


@dataclass(slots=True)
class LoadMeter:
    """Measures the requests for one model.

    Args:
        began: Time at which it begins, in seconds of the clock of `now`.
        expected_output: Tokens of an answer, before there are any (the policy setting `expected-output`).
    """

    began: float
    expected_output: int
    _total: int = 0
    _classes: dict[RequestClass, _Counts] = field(default_factory=dict)

    def arrived(self, prompt_tokens: int, local_tokens: int, remote_tokens: int, now: float) -> RequestClass:
        """Counts a request.

        Args:
            prompt_tokens: Tokens of its prompt.
            local_tokens: Those that the best combined worker has not cached.
            remote_tokens: Those that a worker has not cached on average: a prefill worker is as good as any.
        """
        local = max(1, local_tokens)
        key = RequestClass.of(prompt_tokens, local)
        counts = self._classes.get(key)
        if counts is None:
            counts = self._classes[key] = _Counts(now)
        counts.decay(now)
        self._total += 1
        counts.requests += 1
        counts.local += local
        counts.remote += max(local, remote_tokens)
        counts.prompt += prompt_tokens
        return key

    def answered(self, key: RequestClass, output_tokens: int) -> None:
        """Counts the answer to a request of this class."""
        counts = self._classes[key]
        counts.answers += 1
        counts.output += output_tokens

    def seen(self, now: float) -> Seen:
        """The number of requests."""
        recent = sum(one.requests * exp((one.at - now) / MEMORY_S) for one in self._classes.values())
        return Seen(self._total, recent)

    def demands(self, now: float) -> list[Demand]:
        """The load, by class; classes without recent requests are left out."""
        x = (now - self.began) / MEMORY_S
        seconds = MEMORY_S * (1 - exp(-x) * (1 - x))
        answers = sum(one.answers for one in self._classes.values())
        mean = (sum(one.output for one in self._classes.values()) + self.expected_output) / (answers + 1)
        found = []
        for counts in self._classes.values():
            counts.decay(now)
            rate = (2 * counts.requests - counts.ages / MEMORY_S) / max(seconds, 1e-3)
            if counts.requests < _FORGOTTEN or rate <= 0:
                continue
            found.append(
                Demand(
                    rate,
                    counts.local / counts.requests,
                    counts.remote / counts.requests,
                    counts.prompt / counts.requests,
                    (counts.output + 8 * mean) / (counts.answers + 8),
                )
            )
        return found
