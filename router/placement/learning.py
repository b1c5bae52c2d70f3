"""What a router learns from the requests it has placed, so that wrong profiles correct themselves.

    ttft = overhead + factor · (predicted wait + prefill)      of the worker that computes the prompt
    itl  = factor · predicted gap                              of the worker that decodes
    length of a tenant's answers
    whether predictions can be trusted at all

A first token teaches both figures of its worker, with a normalised least-mean-squares filter: after a short prediction
mostly the overhead changes, after a long one mostly the factor. Figures of a worker decay to what they were at first: a
worker without requests could not show that it has recovered.
"""

import logging
from dataclasses import dataclass, field
from math import exp, log

from cpd.common.policy_settings import PolicySettings
from router.lru import LRU
from router.placement.policy import Placement

PREDICTED_MS = 20.0
"""A prediction of this length teaches the overhead and the factor equally; errors are not relative to less."""

RATE = 0.2
"""Share of an error that one request corrects."""

MAX_FACTOR = 16.0
"""Limit on how many times longer, or shorter, than predicted a worker's times are."""

MAX_OVERHEAD_MS = 60_000.0

FIRST_GAPS = 16
"""Number of gaps at the beginning of a stream that are compared with their prediction: later the load is another."""

FORGET_S = 60.0
"""Decay time of a worker's figures, in seconds."""

ANSWERS = 32
"""Number of recent answers over which a tenant's output length is averaged."""

MAX_TENANTS = 1024

JUDGED = 32
"""Number of recent first tokens by which predictions are judged."""

DISTRUST, TRUST = 0.5, 0.2
"""Predictions are no longer trusted if more than DISTRUST of them are wrong, and again if fewer than TRUST are."""

logger = logging.getLogger(__name__)


class _Decaying:
    """A figure that is learned, and decays to its first value."""

    def __init__(self, first: float, low: float, high: float) -> None:
        self._first, self._low, self._high = first, low, high
        self._offset = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """The figure at a time in seconds."""
        return self._first + self._offset * exp((self._at - now) / FORGET_S)

    def set(self, value: float, now: float) -> None:
        """Sets the figure within its limits."""
        self._offset, self._at = min(max(value, self._low), self._high) - self._first, now


class WorkerErrors:
    """How a worker's times differ from what was predicted.

    Args:
        overhead_ms: What the route over it is assumed to add to the TTFT.

    Attributes:
        count: Number of first tokens.
        ttft_ms: Sum of their TTFTs.
        error_ms: Sum of the absolute errors of the predictions.
    """

    def __init__(self, overhead_ms: float = 0.0) -> None:
        self.count = 0
        self.ttft_ms = 0.0
        self.error_ms = 0.0
        self._overhead_ms = _Decaying(overhead_ms, 0.0, MAX_OVERHEAD_MS)
        self._ttft = _Decaying(0.0, -log(MAX_FACTOR), log(MAX_FACTOR))  # logarithms
        self._itl = _Decaying(0.0, -log(MAX_FACTOR), log(MAX_FACTOR))

    def overhead_ms(self, now: float) -> float:
        """Time that is added to every TTFT, at a time in seconds."""
        return self._overhead_ms.at(now)

    def ttft_factor(self, now: float) -> float:
        """Factor of predicted queues and prefills."""
        return exp(self._ttft.at(now))

    def itl_factor(self, now: float) -> float:
        """Factor of predicted gaps."""
        return exp(self._itl.at(now))

    def count_ttft(self, predicted_ms: float, actual_ms: float) -> None:
        """Counts a first token."""
        self.count += 1
        self.ttft_ms += actual_ms
        self.error_ms += abs(actual_ms - predicted_ms)

    def learn_ttft(self, placement: Placement, actual_ms: float, now: float) -> None:
        """Learns from the TTFT of a prompt that this worker computed, as planned."""
        predicted, worker = placement.chosen, placement.prompt_worker
        # an error counts at most as much as the prediction: one outlier proves nothing
        limit_ms = predicted.ttft_ms + PREDICTED_MS
        error_ms = min(max(actual_ms - predicted.ttft_ms, -limit_ms), limit_ms)
        varying_ms = (predicted.ttft_ms - worker.overhead_ms) / worker.ttft_factor
        step = RATE * error_ms / (varying_ms**2 + PREDICTED_MS**2)
        self._overhead_ms.set(self.overhead_ms(now) + step * PREDICTED_MS**2, now)
        factor = self.ttft_factor(now) + step * varying_ms
        self._ttft.set(log(max(factor, 1 / MAX_FACTOR)), now)

    def gap(self, predicted_ms: float, actual_ms: float, now: float) -> None:
        """Learns from the mean of the first gaps of a stream on this worker."""
        if predicted_ms > 0 and actual_ms > 0:
            self._itl.set(self._itl.at(now) + RATE * log(actual_ms / predicted_ms), now)


@dataclass(slots=True)
class _Answers:
    """Number and mean length of a tenant's answers; the number is limited, so that the mean is of recent ones."""

    count: int = 0
    mean: float = 0.0


@dataclass(slots=True)
class Learning:
    """What one router learns about all workers together.

    Attributes:
        trusted: Predictions are mostly right.
    """

    settings: PolicySettings
    slo_ttft_ms: float
    trusted: bool = True
    _wrong: float = 0.0  # mean of recent first tokens: 1 if far from the prediction
    _answers: LRU[str, _Answers] = field(default_factory=lambda: LRU(MAX_TENANTS))

    def expected_output(self, tenant: str) -> int:
        """Expected tokens of an answer."""
        known = self._answers.get(tenant) or _Answers()
        weight = known.count / ANSWERS
        return max(1, round(weight * known.mean + (1 - weight) * self.settings.expected_output))

    def answer(self, tenant: str, tokens: int) -> None:
        """Learns from a complete answer."""
        known = self._answers.get(tenant)
        if known is None:
            known = _Answers()
            self._answers.put(tenant, known, 1)
        known.count = min(known.count + 1, ANSWERS)
        known.mean += (tokens - known.mean) / known.count

    def first_token(self, errors: WorkerErrors, placement: Placement, actual_ms: float, now: float) -> None:
        """Learns from the TTFT of a prompt that was computed as planned.

        Args:
            errors: Those of the worker that computed it.
            now: Time in seconds.
        """
        predicted = placement.chosen
        errors.count_ttft(predicted.ttft_ms, actual_ms)
        if predicted.ttft_ms > self.slo_ttft_ms:
            return  # it gets even later: prompts that can be in time go first
        self._judge(predicted.ttft_ms, actual_ms)
        if predicted.cost.wait_ms <= predicted.cost.prefill_ms + PREDICTED_MS:  # a queue says little about the worker
            errors.learn_ttft(placement, actual_ms, now)

    def _judge(self, predicted_ms: float, actual_ms: float) -> None:
        limit = self.settings.fallback_error
        ratio = (actual_ms + PREDICTED_MS) / (predicted_ms + PREDICTED_MS)
        self._wrong += (float(not 1 / limit <= ratio <= limit) - self._wrong) / JUDGED
        if self.trusted and self._wrong > DISTRUST:
            self.trusted = False
            logger.warning(
                "more than half of the predicted TTFTs are wrong by a factor of %g: requests go to the worker with "
                "most of the prompt cached, then the one with the fewest requests",
                limit,
            )
        elif not self.trusted and self._wrong < TRUST:
            self.trusted = True
            logger.warning("predicted TTFTs are right again: requests go where the predicted cost is lowest")
