"""Predicts how many requests are good with each number of prefill workers. Pure.

Of `n` workers, `p` only prefill; a prompt that they compute takes `remote_ms`. On a combined worker with `k` streams it
takes `local_ms(k)` beside them, on the prefill lane or in their batch, and delays each of them by `delay_ms(k)`:

    k             = tokens/s · step_ms(k) / (1 - Σ rate · delay_ms(k))      streams of a combined worker
    local busy    = Σ rate · local_ms(k) of prompts on the lane             of each combined worker
    remote busy   = Σ rate · remote_ms                                      of each prefill worker
    late          = C · exp(-(slo_ttft - service) / τ)                      probability of a late first token
        C = busy ^ (√(2 (m + 1)) - 1)                                       probability of waiting (Sakasegawa 1977)
        τ = (1 + cv²) / 2 · mean service / (m · (1 - busy))                 mean wait of those that wait
    decoded       = share of the tokens/s that combined workers reach with as many streams as batch slots, pages and
                    slo_itl allow
    good          = decoded · Σ rate · (1 - late)

Prompts of prefill workers wait in one queue of all `m` of them, those of combined workers, which look for a cache, in
queues of `m = QUEUE_WORKERS`. Prefill workers get the prompts whose computing takes them the least compared with a
combined worker, as long as they are no busier than these. If not all can be in time, the prompts that take longest are
given up, as workers do (engine/scheduling/fair_queue.py): as many as leaves the most good requests. That they are
computed late, and what of it others notice, is left out: it is about the same with every number.

Combined workers hold the caches that later turns look for. What requests find because only some workers have it cached
is proportional to the number of combined workers. With fewer of them, some requests find only what all workers have.
With more, some find their whole prompt: requests of any length, since nothing tells which ones missed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.colocation import Colocation, PrefillEstimator
from cpd.performance.model import Work

Floats = npt.NDArray[np.float64]

STREAMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of streams for which times are predicted; those between are interpolated."""

DEVIATIONS = 2
"""Pages are left free for this many standard deviations of the number of streams, which varies as Poisson's does."""

QUEUE_WORKERS = 2
"""Among how many combined workers a prompt that looks for a cache can choose. With 2, predictions agree with
simulations (docs/decisions/0038-planner.md)."""

MOST_FOUND = 0.5
"""The largest share of what is computed now that more combined workers might find."""

MAX_BUSY = 0.98
"""Busier workers count as this busy: waits would be endless."""

GIVEN_UP = (0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)
"""Shares of the prompts' work that might be given up."""

_SPREAD = 0.1
"""Relative uncertainty of predicted times: of prompts that just fit into the target, half are late."""

_BALANCE_STEPS = 10


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of about the same length.

    Attributes:
        rate: Requests a second.
        local_tokens: Prompt tokens that a combined worker computes, after those that it has cached.
        remote_tokens: Prompt tokens that a prefill worker computes.
        prompt_tokens: All prompt tokens.
        output_tokens: Tokens of an answer.
    """

    rate: float
    local_tokens: float
    remote_tokens: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers, which can all have either role.

    Attributes:
        count: Number of workers.
        colocations: How some of them, which stand for all, compute prompts beside decodes.
        slowdowns: How many times longer than predicted their steps take.
        max_num_seqs: Batch slots of a worker.
        num_pages: KV pages of a worker; 0: unknown.
    """

    count: int
    colocations: Sequence[Colocation]
    slowdowns: Sequence[float]
    max_num_seqs: int = 256
    num_pages: int = 0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good request is: times in ms."""

    slo_ttft: float = 2000.0
    slo_itl: float = 50.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted for one number of prefill workers.

    Attributes:
        prefill_workers: This number.
        good_per_s: Requests a second within both targets.
        good_share: Their share of all.
        prefill_busy: Busy share of the prefill workers.
        combined_busy: Busy share of the combined workers' prefill lanes.
        streams: Streams of each combined worker.
    """

    prefill_workers: int
    good_per_s: float
    good_share: float
    prefill_busy: float
    combined_busy: float
    streams: float


class _Served(NamedTuple):
    """What is served.

    Attributes:
        good: Good requests a second. [given up, number]
        remote: Share that prefill workers compute. [given up, number, demand]
        local_busy, streams: Of each combined worker; see `Prediction`. [given up, number]
    """

    good: Floats
    remote: Floats
    local_busy: Floats
    streams: Floats


class CapacityModel:
    """Predictions for some demands on a fleet.

    Args:
        demands: At least one, each with a rate above 0.
        current: Number of prefill workers with which they were measured.
    """

    def __init__(self, demands: Sequence[Demand], fleet: Fleet, targets: Targets, current: int = 0) -> None:
        self._fleet = fleet
        self._targets = targets
        self._combined_now = fleet.count - current
        self._measured = np.array([one.rate for one in demands])
        computed = sum(one.rate * one.local_tokens for one in demands)
        self._found = sum(one.rate * max(0.0, one.remote_tokens - one.local_tokens) for one in demands) / computed
        less = [replace(one, local_tokens=max(one.local_tokens, one.remote_tokens)) for one in demands]
        more = [replace(one, local_tokens=1) for one in demands]
        demands = [*demands, *less, *more]
        self._outputs = np.array([one.output_tokens for one in demands])
        decoding = np.tile(self._measured, 3) * self._outputs
        contexts = np.array([one.prompt_tokens + one.output_tokens / 2 for one in demands])
        context = float((decoding * contexts).sum() / max(decoding.sum(), 1e-9))
        tables = [
            _Table(demands, colocation, slowdown, context)
            for colocation, slowdown in zip(fleet.colocations, fleet.slowdowns, strict=True)
        ]
        self._remote_ms = _mean([one.remote_ms for one in tables])
        self._local_ms = _mean([one.local_ms for one in tables])  # [streams, demand]
        self._lane_ms = _mean([one.lane_ms for one in tables])
        self._delay_ms = _mean([one.delay_ms for one in tables])
        self._step_ms = _mean([one.step_ms for one in tables])  # [streams]
        pages = fleet.num_pages * BLOCK_SIZE / max(context, 1.0) if fleet.num_pages else np.inf
        pages = (np.sqrt(DEVIATIONS**2 / 4 + pages) - DEVIATIONS / 2) ** 2
        in_steps = np.interp(targets.slo_itl or np.inf, self._step_ms, STREAMS)
        self._max_streams = float(max(1.0, min(fleet.max_num_seqs, pages, in_steps)))
        measured_as = np.tile(np.arange(len(self._measured)), 3)  # in the order of demands, where prompts take as long
        self._longest_first = np.lexsort((measured_as, -self._local_ms[0]))
        gain = self._remote_ms / self._local_ms[0]
        self._remote_order = np.lexsort((-self._remote_ms, np.round(gain, 2)))

    def predict(self, prefill_workers: Sequence[int], scale: float = 1.0, workers: int = 0) -> list[Prediction]:
        """Predicts for these numbers of prefill workers, each below that of the workers.

        Args:
            scale: Factor of all rates.
            workers: Number of workers; 0: as many as there are now.
        """
        numbers = np.array(prefill_workers, dtype=float)
        combined = (workers or self._fleet.count) - numbers
        rates = self._kept(scale * self._rates(combined))  # [given up, number, demand]
        served = self._served(rates, numbers, combined)
        best = served.good.argmax(axis=0)
        total = scale * self._measured.sum()
        found = []
        for column, number in enumerate(prefill_workers):
            row = best[column]
            work = (rates[row, column] * served.remote[row, column] * self._remote_ms).sum() / 1e3
            found.append(
                Prediction(
                    number,
                    float(served.good[row, column]),
                    float(served.good[row, column] / total),
                    float(work / number) if number else 0.0,
                    float(served.local_busy[row, column]),
                    float(served.streams[row, column]),
                )
            )
        return found

    def _served(self, rates: Floats, numbers: Floats, combined: Floats) -> _Served:
        """Serves requests at these rates [given up, number, demand]."""
        # the most work that prefill workers take without being busier than combined ones
        low, high = np.zeros(rates.shape[:2]), np.ones(rates.shape[:2])
        for _ in range(_BALANCE_STEPS):
            busy = (low + high) / 2
            local_busy, _, _ = self._combined(rates, self._remote_share(rates, busy * numbers), combined)
            less = local_busy < busy
            low, high = np.where(less, low, busy), np.where(less, busy, high)
        remote = self._remote_share(rates, high * numbers)
        local_busy, streams, decoded = self._combined(rates, remote, combined)
        good = decoded * self._in_time(rates, remote, local_busy, streams, numbers, combined)
        return _Served(good, remote, local_busy, streams)

    def _rates(self, combined: Floats) -> Floats:
        """Rates of the demands as measured, of those that find less, and of those that find all. [number, demand]"""
        kept = combined / self._combined_now
        less = np.maximum(1 - kept, 0)
        more = np.clip((kept - 1) * self._found, 0, MOST_FOUND)
        shares = np.stack([1 - less - more, less, more], 1)
        result: Floats = (shares[..., None] * self._measured).reshape(len(combined), -1)
        return result

    def _kept(self, rates: Floats) -> Floats:
        """Rates of what is served if each of GIVEN_UP of the work is given up, the longest prompts first.

        The shape is [given up, number, demand].
        """
        work = (rates * self._local_ms[0])[:, self._longest_first]
        before = np.cumsum(work, axis=1) - work
        given_up = np.array(GIVEN_UP)[:, None, None] * work.sum(axis=1)[:, None]
        kept = np.empty((len(GIVEN_UP), *work.shape))
        kept[..., self._longest_first] = 1 - np.clip((given_up - before) / np.maximum(work, 1e-12), 0, 1)
        result: Floats = kept * rates
        return result

    def _remote_share(self, rates: Floats, remote_s: Floats) -> Floats:
        """Share of each demand that prefill workers compute if they work this many seconds a second."""
        order = self._remote_order
        work = (rates * self._remote_ms / 1e3)[:, :, order]
        before = np.cumsum(work, axis=2) - work
        shares = np.empty(rates.shape)
        shares[:, :, order] = np.clip((remote_s[:, :, None] - before) / np.maximum(work, 1e-12), 0, 1)
        return shares

    def _combined(self, rates: Floats, remote: Floats, combined: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the busy share of combined workers' prefill lanes, their streams, and the share that they decode."""
        local = rates * (1 - remote) / combined[None, :, None]
        tokens_per_s = (rates * self._outputs).sum(axis=2) / combined
        delayed = local @ self._delay_ms.T / 1e3  # [given up, number, streams]
        wanted = tokens_per_s[:, :, None] * self._step_ms / 1e3 / np.maximum(1 - delayed, 1e-3)
        streams = np.minimum(_crossing(wanted), self._max_streams)
        fastest = self._max_streams / np.interp(self._max_streams, STREAMS, self._step_ms) * 1e3  # tokens a second
        delayed_most = _at(delayed, np.full_like(streams, self._max_streams))
        decoded = np.minimum(1, fastest / (tokens_per_s + fastest * delayed_most))
        return decoded * _at(local @ self._lane_ms.T / 1e3, streams), streams, decoded

    def _in_time(
        self, rates: Floats, remote: Floats, local_busy: Floats, streams: Floats, prefill: Floats, combined: Floats
    ) -> Floats:
        local_rates, remote_rates = rates * (1 - remote), rates * remote
        local_ms = np.stack(
            [_at(np.broadcast_to(ms, (*streams.shape, len(ms))), streams) for ms in self._local_ms.T], 2
        )
        late_local = self._late(local_rates, local_ms, local_busy, np.minimum(QUEUE_WORKERS, combined))
        prefill = np.where(prefill, prefill, 1)
        remote_busy = (remote_rates @ self._remote_ms) / 1e3 / prefill
        remote_ms = np.broadcast_to(self._remote_ms, remote.shape)
        late_remote = self._late(remote_rates, remote_ms, remote_busy, prefill)
        in_time: Floats = (local_rates * (1 - late_local) + remote_rates * (1 - late_remote)).sum(axis=2)
        return in_time

    def _late(self, rates: Floats, ms: Floats, busy: Floats, workers: Floats) -> Floats:
        """Probability that a first token is late. [given up, number, demand]

        Args:
            workers: How many share a queue. [number]
        """
        mean = (rates * ms).sum(axis=2) / np.maximum(rates.sum(axis=2), 1e-12)
        square = (rates * ms**2).sum(axis=2) / np.maximum(rates.sum(axis=2), 1e-12)
        busy = np.minimum(busy, MAX_BUSY)
        waits = (busy ** (np.sqrt(2 * (workers + 1)) - 1))[:, :, None]
        tau = np.maximum(square / np.maximum(mean, 1e-9) / 2 / (workers * (1 - busy)), 1e-6)[:, :, None]
        slo = self._targets.slo_ttft
        queued = waits * np.exp(-np.maximum(slo - ms, 0) / tau)
        result: Floats = 1 - _sigmoid((1 - ms / slo) / _SPREAD) * (1 - queued)
        return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-np.clip(x, -50, 50)))
    return result


def _crossing(wanted: Floats) -> Floats:
    """The smallest number of streams that is enough where STREAMS would become the `wanted` ones (last axis)."""
    knots = np.array(STREAMS, dtype=float)
    enough = wanted <= knots
    first = np.where(enough.any(axis=-1), enough.argmax(axis=-1), len(knots) - 1)
    below = np.maximum(first - 1, 0)
    pick = np.take_along_axis
    lack = pick(wanted - knots, below[..., None], -1)[..., 0]
    spare = pick(knots - wanted, first[..., None], -1)[..., 0]
    share = np.clip(lack / np.maximum(lack + spare, 1e-12), 0, 1)
    inside = knots[below] + share * (knots[first] - knots[below])
    return np.where(first == 0, np.clip(wanted[..., 0], 0, 1), inside)


def _at(table: Floats, streams: Floats) -> Floats:
    """Interpolates a table over STREAMS (last axis)."""
    knots = np.array(STREAMS, dtype=float)
    position = np.clip(np.interp(streams, knots, np.arange(len(knots))), 0, len(knots) - 1.001)
    below = position.astype(int)[..., None]
    weight = position - below[..., 0]
    low, high = np.take_along_axis(table, below, -1)[..., 0], np.take_along_axis(table, below + 1, -1)[..., 0]
    result: Floats = low * (1 - weight) + high * weight
    return result


class _Table:
    """Times of one worker for each demand, in ms.

    Attributes:
        remote_ms: On an idle device.
        local_ms: Beside each of STREAMS.
        lane_ms: What of it no other prompt can use; prompts that join the decodes' batch share a step.
        delay_ms: Delay of the streams.
        step_ms: A decode step.
    """

    def __init__(self, demands: Sequence[Demand], colocation: Colocation, slowdown: float, context: float) -> None:
        idle = PrefillEstimator(colocation, slowdown=slowdown)
        self.remote_ms = np.array([idle.estimate(*_split(one.remote_tokens, one)).ms for one in demands])
        local, lane, delay = ([list[float]() for _ in demands] for _ in range(3))
        step = []
        for streams in STREAMS:
            beside = PrefillEstimator(colocation, Work.decode(streams, round(streams * context)), slowdown)
            for one, rows in zip(demands, zip(local, lane, delay, strict=True), strict=True):
                tokens, before = _split(one.local_tokens, one)
                estimate = beside.estimate(tokens, before)
                ms = blocked_ms = estimate.ms
                delay_ms = estimate.delay_ms
                if beside.joins_decodes(tokens, before):
                    work = beside.decodes + Work.prefill(tokens, before)
                    blocked_ms = delay_ms = beside.step_ms(work + Work.prefill(tokens, before)) - beside.step_ms(work)
                for row, value in zip(rows, (ms, blocked_ms, delay_ms), strict=True):
                    row.append(value)
            step.append(beside.alone_ms)
        self.local_ms, self.lane_ms, self.delay_ms = np.array(local).T, np.array(lane).T, np.array(delay).T
        self.step_ms = np.array(step)


def _split(computed: float, demand: Demand) -> tuple[int, int]:
    """Returns tokens to compute and tokens before them."""
    tokens = max(1, round(computed))
    return tokens, max(0, round(demand.prompt_tokens) - tokens)


def _mean(tables: Sequence[Floats]) -> Floats:
    result: Floats = np.mean(np.stack(tables), axis=0)
    return result
