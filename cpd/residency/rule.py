"""The rule that decides who is awake on a device, with bounds for everybody. Pure.

 1. A model that is asleep and gets a request wakes if it fits beside those awake.
 2. If not, it writes an intent. Intents are served first come, first served.
 3. For `max_wait_time` it waits for memory that becomes free by itself: others go to sleep after their `idle_timeout`.
    At once it may displace models without requests that are past their `min_runtime`.
 4. Then it displaces a busy one, too: serving, not `popular`, serving for at least `min_runtime`, on this device. The
    victim is the one with the oldest last access, or several in this order if one does not free enough. If those that
    may be displaced do not free enough, it waits until they do.
 5. A victim takes no new requests; they wait. Its running requests have `drain_timeout` to end. Those left are not
    aborted: they are parked, and the model writes an intent, so that they go on after its next wake.
 6. When the memory is free, the model takes the wake lock (one load at a time on a device), loads, verifies and
    releases the lock.

A wake fails only if the model can never fit, or if after `max_wait_time` it does not fit beside the popular models
that are awake; the error says who they are and until when.

So an intent waits at most max(max_wait_time, what is left of min_runtime) + drain + wake, times those ahead
(`bound.py` has the sum). Memory is reserved in the order of the intents: a later one that fits goes ahead only with
what the earlier ones leave over (`allocation.py`).
"""

from collections.abc import Iterable, Sequence
from functools import partial

from cpd.residency.allocation import allocate
from cpd.residency.snapshot import Decision, Device, Intent, Occupant


class Rule:
    """The rule."""

    def decide(self, device: Device, now: float) -> Decision:
        """See `ResidencyPolicy`."""
        return allocate(device, now, device.intents, partial(_oldest, now))


def runtime_end_s(one: Occupant) -> float:
    """Returns when the `min_runtime` of a serving model is over."""
    return one.since_s + one.model.fairness.min_runtime_s


def _oldest(now: float, intent: Intent, serving: Sequence[Occupant], size: int) -> tuple[Sequence[Occupant], float]:
    """Chooses the victims with the oldest last access; see `Choose`."""
    waits_until_s = intent.since_s + intent.model.fairness.max_wait_time_s
    from_s = [max(runtime_end_s(one), waits_until_s) if one.running else runtime_end_s(one) for one in serving]
    eligible = [one for one, time_s in zip(serving, from_s, strict=True) if now >= time_s]
    ask_at_s = min((time_s for time_s in from_s if time_s > now), default=float("inf"))
    return enough(sorted(eligible, key=lambda one: one.last_access_s), size), ask_at_s


def enough(victims: Iterable[Occupant], size: int) -> list[Occupant]:
    """Returns the first victims that free `size` bytes, without those not needed; none if all free too little."""
    chosen: list[Occupant] = []
    freed = 0
    for one in victims:
        if freed >= size:
            break
        chosen.append(one)
        freed += one.model.memory_bytes
    if freed < size:
        return []
    for one in reversed(chosen[:]):
        if freed - one.model.memory_bytes >= size:
            chosen.remove(one)
            freed -= one.model.memory_bytes
    return chosen
