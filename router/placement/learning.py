"""What a router learns from the requests it has placed, so that wrong profiles correct themselves.

- ttft = overhead + factor · (predicted wait + prefill): both figures, of the worker that computes the prompt
- the length of a tenant's answers
- how likely a page is wanted again
- how many prompts wait behind a prefill
- whether predictions can be trusted at all

How long decode steps take beside prompts is measured by the workers (`worker_load.py`).

A first token teaches both figures of its worker, with a normalised least-mean-squares filter: after a short prediction
mostly the overhead changes, after a long one mostly the factor. Figures of a worker decay to the mean of its role: a
worker without requests could not show that it has recovered, and must not look slow beside others that have shown that
all profiles are too slow.

A prompt that its worker computes alone, with no other request there, teaches figures of their own, too, which predict
the next such prompt: what was learned under load says little about it, and a route that looks dear is not tried again.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log1p
from random import Random
from typing import Self

from cpd.common.policy_settings import PolicySettings
from router.lru import LRU
from router.placement.candidate import Candidate
from router.placement.policy import Placement, QueuedBehind, Situation

TAUGHT_MS = 100.0
"""A prediction of this length teaches the overhead and the factor equally. Where requests wait for steps and for each
other, times vary by about as much. With 20 ms, the many short prompts of a full worker drove its factor to 8."""

PREDICTED_MS = 20.0
"""Errors are not relative to less."""

RATE = 0.2
"""Share of an error that one request corrects."""

MAX_FACTOR = 16.0
"""Limit on how many times longer, or shorter, than predicted a worker's times are."""

MAX_OVERHEAD_MS = 60_000.0

FORGET_S = 60.0
"""Decay time of a worker's figures, in seconds."""

ROLE_REQUESTS = 32
"""Number of recent requests over which the figures of a role are averaged."""

ANSWERS = 32
"""Number of recent answers over which a tenant's output length is averaged."""

MAX_TENANTS = 1024

PROMPTS = 256
"""Number of recent prompts over which the share of cached tokens is averaged."""

ARRIVALS = 64
"""Number of prompts for a role from which on what waits behind a prefill is counted, and not assumed."""

RATE_S = 10.0
"""Time over which prompts for a role are counted."""

MAX_BUSY = 0.97
"""Busier workers count as this busy: nothing would be cheap enough for them."""

LOOKED_AT = 16
"""Number of workers of a role of which it is asked at each arrival whether they are busy."""

JUDGED = 32
"""Number of recent first tokens by which predictions are judged."""

DISTRUST, TRUST = 0.5, 0.2
"""Predictions are no longer trusted if more than DISTRUST of them are wrong, and again if fewer than TRUST are."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Mean:
    """The mean of a figure over recent requests to all workers of a role."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Adds a request's figure."""
        self.count = min(self.count + 1, ROLE_REQUESTS)
        self.value += (value - self.value) / self.count


class _Figure:
    """A figure of one worker, which is learned and decays to a mean.

    Args:
        general: What it is as long as no worker of the role has learned it.
    """

    def __init__(self, mean: _Mean, low: float, high: float, general: Self | None = None) -> None:
        self._mean, self._low, self._high, self._general = mean, low, high, general
        self._offset = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """The figure at a time in seconds."""
        if self._general is not None and not self._mean.count:
            return self._general.at(now)
        value = self._mean.value + self._offset * exp((self._at - now) / FORGET_S)
        return min(max(value, self._low), self._high)

    def set(self, value: float, now: float) -> None:
        """Changes the figure, and the mean a little."""
        value = min(max(value, self._low), self._high)
        self._mean.add(value)
        self._offset, self._at = value - self._mean.value, now


class RoleErrors:
    """The means of all workers of a role.

    Args:
        overhead_ms: What the route over them is assumed to add to the TTFT.
    """

    def __init__(self, overhead_ms: float = 0.0) -> None:
        self.overhead_ms, self.overhead_alone_ms = _Mean(overhead_ms), _Mean()
        self.ttft, self.ttft_alone = _Mean(), _Mean()


class _Correction:
    """Corrects predicted TTFTs of one worker.

    Args:
        overhead_ms: What is added.
        ttft: Logarithm of the factor.
    """

    def __init__(self, overhead_ms: _Mean, ttft: _Mean, general: Self | None = None) -> None:
        limit = log(MAX_FACTOR)
        self._overhead_ms: _Figure = _Figure(
            overhead_ms, 0.0, MAX_OVERHEAD_MS, general._overhead_ms if general else None
        )
        self._ttft: _Figure = _Figure(ttft, -limit, limit, general._ttft if general else None)

    def overhead_ms(self, now: float) -> float:
        """Time that is added to every TTFT, at a time in seconds."""
        return self._overhead_ms.at(now)

    def factor(self, now: float) -> float:
        """Factor of predicted queues and prefills."""
        return exp(self._ttft.at(now))

    def learn(self, varying_ms: float, actual_ms: float, now: float) -> None:
        """Learns from a TTFT, whose queue and prefill were predicted to take `varying_ms`."""
        overhead_ms, ttft = self._overhead_ms.at(now), self._ttft.at(now)
        factor = exp(ttft)
        predicted_ms = overhead_ms + factor * varying_ms
        # an error counts at most as much as the prediction: one outlier proves nothing
        limit_ms = predicted_ms + PREDICTED_MS
        error_ms = min(max(actual_ms - predicted_ms, -limit_ms), limit_ms)
        step = RATE * error_ms / (varying_ms**2 + TAUGHT_MS**2)
        self._overhead_ms.set(overhead_ms + step * TAUGHT_MS**2, now)
        self._ttft.set(ttft + log1p(max(step * varying_ms / factor, -0.5)), now)


class WorkerErrors:
    """How a worker's times differ from what was predicted.

    Args:
        role: What its figures decay to.

    Attributes:
        count: Number of first tokens.
        ttft_ms: Sum of their TTFTs.
        error_ms: Sum of the absolute errors of the predictions.
    """

    def __init__(self, role: RoleErrors) -> None:
        self.count = 0
        self.ttft_ms = 0.0
        self.error_ms = 0.0
        self._general = _Correction(role.overhead_ms, role.ttft)
        self._alone = _Correction(role.overhead_alone_ms, role.ttft_alone, self._general)

    def overhead_ms(self, now: float, *, alone: bool = False) -> float:
        """Time that is added to every TTFT, at a time in seconds; `alone`: where the worker has no other request."""
        return (self._alone if alone else self._general).overhead_ms(now)

    def ttft_factor(self, now: float, *, alone: bool = False) -> float:
        """Factor of predicted queues and prefills."""
        return (self._alone if alone else self._general).factor(now)

    def count_ttft(self, predicted_ms: float, actual_ms: float) -> None:
        """Counts a first token."""
        self.count += 1
        self.ttft_ms += actual_ms
        self.error_ms += abs(actual_ms - predicted_ms)

    def learn_ttft(self, placement: Placement, actual_ms: float, now: float) -> None:
        """Learns from the TTFT of a prompt that this worker computed, as planned."""
        worker = placement.prompt_worker
        varying_ms = (placement.chosen.ttft_ms - worker.overhead_ms) / worker.ttft_factor
        if worker.alone:
            self._alone.learn(varying_ms, actual_ms, now)
        self._general.learn(varying_ms, actual_ms, now)


@dataclass(slots=True)
class _Answers:
    """Number and mean length of a tenant's answers; the number is limited, so that the mean is of recent ones."""

    count: int = 0
    mean: float = 0.0


@dataclass(slots=True)
class _Arrivals:
    """The prompts that come to the workers of a role, and how busy these are.

    Attributes:
        workers: Number of the workers.
        count: Number of prompts, up to ARRIVALS.
        recent: Number of prompts, decayed over RATE_S.
        busy: Share of the workers that recent prompts found with a queue: what is busy of their time, whoever sent the
            prompts before (Wolff, Poisson arrivals see time averages, 1982).
        at: Time of the last prompt.
    """

    workers: int = 0
    count: int = 0
    recent: float = 0.0
    busy: float = 0.0
    at: float = 0.0

    def found(self, workers: Sequence[Candidate], rng: Random, now: float) -> None:
        """A prompt has found these workers."""
        self.workers = len(workers)
        if not workers:
            return
        seen = workers if len(workers) <= LOOKED_AT else rng.sample(workers, LOOKED_AT)
        busy = sum([one.idle_at > now for one in seen]) / len(seen)
        self.busy += (busy - self.busy) / (min(self.count, ARRIVALS) + 1)

    def add(self, now: float) -> None:
        """A prompt has gone to one of the workers."""
        self.count = min(self.count + 1, ARRIVALS)
        self.recent = self.recent * exp((self.at - now) / RATE_S) + 1
        self.at = now

    def behind(self, assumed: float, now: float) -> QueuedBehind:
        """The prompts behind a prefill, as counted; `assumed` before there were any."""
        weight = self.count / ARRIVALS
        per_s = self.recent * exp((self.at - now) / RATE_S) / RATE_S / max(self.workers, 1)
        return QueuedBehind((1 - weight) * assumed, weight * per_s / 1e3 / (1 - min(self.busy, MAX_BUSY)))


@dataclass(slots=True)
class Learning:
    """What one router learns about all workers together.

    Attributes:
        trusted: Predictions are mostly right.
    """

    settings: PolicySettings
    slo_ttft_ms: float
    trusted: bool = True
    _combined: RoleErrors = field(default_factory=RoleErrors)
    _prefill: RoleErrors = field(init=False)
    _wrong: float = 0.0  # mean of recent first tokens: 1 if far from the prediction
    _answers: LRU[str, _Answers] = field(default_factory=lambda: LRU(MAX_TENANTS))
    _combined_arrivals: _Arrivals = field(default_factory=_Arrivals)
    _prefill_arrivals: _Arrivals = field(default_factory=_Arrivals)
    _prompts: int = 0  # number of recent prompts, and two sums over them
    _prompt_tokens: float = 0.0
    _cached_tokens: float = 0.0

    def __post_init__(self) -> None:
        self._prefill = RoleErrors(self.settings.handoff_ms)

    def worker(self, *, prefills_only: bool) -> WorkerErrors:
        """Begins to learn about a worker."""
        return WorkerErrors(self._prefill if prefills_only else self._combined)

    @property
    def evicted_reuse(self) -> float:
        """Probability that an evicted page is wanted again: the share of recent prompts' tokens that were cached."""
        weight = self._prompts / PROMPTS
        cached = self._cached_tokens / self._prompt_tokens if self._prompts else 0.0
        return weight * cached + (1 - weight) * self.settings.evicted_reuse

    def prompt(self, tokens: int, cached_tokens: int) -> None:
        """Learns from a new prompt, of which some worker has this many tokens cached."""
        self._prompts = min(self._prompts + 1, PROMPTS)
        kept = 1 - 1 / self._prompts
        self._prompt_tokens = kept * self._prompt_tokens + tokens
        self._cached_tokens = kept * self._cached_tokens + cached_tokens

    def placed(self, seen: Situation, placement: Placement) -> None:
        """Learns from a request's first placement how many prompts wait behind a prefill."""
        self._combined_arrivals.found(seen.combined, seen.rng, seen.now)
        self._prefill_arrivals.found(seen.prefill, seen.rng, seen.now)
        if placement.chosen.ttft_ms <= self.slo_ttft_ms:  # others go before one that is late
            (self._prefill_arrivals if placement.chosen.prefill else self._combined_arrivals).add(seen.now)

    def behind_combined(self, now: float) -> QueuedBehind:
        """The prompts behind a prefill on a combined worker."""
        return self._combined_arrivals.behind(self.settings.queued_behind, now)

    def behind_prefill(self, now: float) -> QueuedBehind:
        """The prompts behind a prefill on a prefill worker."""
        return self._prefill_arrivals.behind(self.settings.queued_behind, now)

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
