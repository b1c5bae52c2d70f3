"""Decides who is awake by predicted costs, within the bounds of the rule. Pure.

Steps 1 to 6 of the rule hold (`rule.py`): the order of the intents, `min_runtime`, `popular` and the limits of
`max_wait_time` and `drain_timeout`. Within these limits, costs decide which models are displaced and when, and when
their running requests are parked. Costs are numbers of requests:

    gap(v, i)       = sleep_s(v) + wake_s(i) + min_runtime(i)           least time until v is awake again
    missed(v, i)    = running requests of v that miss their target if they pause for gap, or have paused before
    displaced(v, i) = arrivals_per_s(v) · gap + missed(v, i)            requests of v that wait or pause
    lost(i, t)      = requests of i whose target can be met now, and no longer in t

- *Which*: the victims that displace the fewest requests for each byte they free.
- *When*: as soon as at least as many requests wait for i as would be displaced; when the first of its
  deadlines that can be met would be lost; after `max_wait_time` at the latest; at once if the victims have no requests,
  as in the rule. Until then its requests gather, so that one residence serves many.
- *Parking*: a victim drains until i would miss a deadline. Then its requests are parked, unless that misses more
  requests than it saves: missed(v, i) > lost(i, drain_s(v)).
- *Staging*: the weights of models whose memory is not free yet are prepared in host memory, in the order of the
  intents.
"""

from collections.abc import Sequence

from cpd.residency.allocation import allocate, drain_end_s
from cpd.residency.rule import enough, runtime_end_s
from cpd.residency.snapshot import Decision, Device, Intent, Occupant

MARGIN_S = 1.0
"""Time that a waiting prompt takes after the wake, and errors of predictions, in seconds."""

CHECK_S = 0.5
"""Time after which a victim that drains on is looked at again, in seconds."""


class Predicted:
    """The policy."""

    def decide(self, device: Device, now: float) -> Decision:
        """See `ResidencyPolicy`."""
        sleep_s = max(one.sleep_s for one in device.models)
        urgent = min(device.intents, key=lambda one: _lost_at_s(one, sleep_s, now), default=None)

        def choose(intent: Intent, serving: Sequence[Occupant], size: int) -> tuple[Sequence[Occupant], float]:
            latest_s = intent.since_s + intent.model.fairness.max_wait_time_s
            start_s = min(latest_s, _lost_at_s(intent, sleep_s, now))
            eligible = [one for one in serving if now >= runtime_end_s(one)]
            times_s = [runtime_end_s(one) for one in serving] + [start_s, latest_s]
            ask_at_s = min((one for one in times_s if one > now), default=float("inf"))
            victims = _cheapest(eligible, intent, size, now)
            displaced = sum(_displaced(one, intent, now) for one in victims)
            if now >= start_s or len(intent.deadlines) >= displaced:
                return victims, ask_at_s
            return _cheapest([one for one in eligible if not one.running], intent, size, now), ask_at_s

        def park_at_s(one: Occupant) -> float:
            if urgent is None:
                return drain_end_s(one)
            park_s = max(now, _lost_at_s(urgent, sleep_s, now))
            if park_s <= now and _missed(one, urgent, now) > _lost(urgent, sleep_s, one.drain_s, now):
                park_s = now + CHECK_S
            return min(drain_end_s(one), park_s)

        return allocate(device, now, device.intents, choose, park_at_s=park_at_s, stage=True)


def _gap_s(victim: Occupant, intent: Intent) -> float:
    return victim.model.sleep_s + intent.wake_s + intent.model.fairness.min_runtime_s


def _missed(victim: Occupant, intent: Intent, now: float) -> int:
    until_s = now + _gap_s(victim, intent)
    return sum(deadline_s < until_s for deadline_s in victim.deadlines) + victim.resumed


def _displaced(victim: Occupant, intent: Intent, now: float) -> float:
    return victim.arrivals_per_s * _gap_s(victim, intent) + _missed(victim, intent, now)


def _cheapest(eligible: Sequence[Occupant], intent: Intent, size: int, now: float) -> list[Occupant]:
    """Returns the victims that free `size` bytes at the lowest cost; none if all of them free too little."""
    return enough(sorted(eligible, key=lambda one: _displaced(one, intent, now) / one.model.memory_bytes), size)


def _lost_at_s(intent: Intent, sleep_s: float, now: float) -> float:
    """Returns when victims must be parked to meet the first deadline that can be met; infinite if none can."""
    ready_s = sleep_s + intent.wake_s + MARGIN_S
    return next((one - ready_s for one in intent.deadlines if one >= now + ready_s), float("inf"))


def _lost(intent: Intent, sleep_s: float, seconds: float, now: float) -> int:
    """Returns how many of an intent's requests can meet their deadlines now, and no longer after some seconds."""
    ready_s = now + sleep_s + intent.wake_s
    return sum(ready_s <= deadline_s < ready_s + seconds for deadline_s in intent.deadlines)
