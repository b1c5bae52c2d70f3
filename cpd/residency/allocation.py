"""Gives a device's memory to the intents, in the order that a policy chose. Pure.

    available = free memory + memory of models that drain or go to sleep − what earlier intents get

An intent that fits in what is available has its memory reserved, and is woken once that is free and nobody holds the
wake lock. If it does not fit, the policy names victims. Without victims all intents behind it wait, so that none of
them takes what it needs. Memory that becomes free belongs to the first intent, whoever it was freed for. So a later
intent goes ahead only with memory that is free beyond what all earlier ones get.
"""

from collections.abc import Callable, Sequence

from cpd.residency.snapshot import (
    Action,
    Decision,
    Device,
    Drain,
    Fail,
    Intent,
    ModelState,
    Occupant,
    Sleep,
    Stage,
    Wake,
)

Choose = Callable[[Intent, Sequence[Occupant], int], tuple[Sequence[Occupant], float]]
"""Chooses victims for an intent, among serving models, that free a number of bytes; or none, and when to ask again."""


def drain_end_s(one: Occupant) -> float:
    """Returns when the `drain_timeout` of a draining model is over."""
    return one.since_s + one.model.sleep.drain_timeout_s


def allocate(
    device: Device,
    now: float,
    order: Sequence[Intent],
    choose: Choose,
    *,
    park_at_s: Callable[[Occupant], float] = drain_end_s,
    stage: bool = False,
) -> Decision:
    """Returns the decision.

    Args:
        order: The intents, first come first served or as the policy has it.
        park_at_s: Returns when the requests that still run on a draining model are parked.
        stage: Whether models are staged whose memory is not free yet.
    """
    actions: list[Action] = []
    check_at_s: list[float] = []
    serving: list[Occupant] = []
    free = available = device.memory_bytes
    popular: list[Occupant] = []
    stuck = 0
    for one in device.occupants:
        free -= one.model.memory_bytes
        if not one.responds:
            available -= one.model.memory_bytes
            stuck += one.model.memory_bytes
        elif _ends(one, now, park_at_s, check_at_s):
            actions.append(Sleep(one.model.name))
        elif one.state in (ModelState.WAKING, ModelState.SERVING):
            available -= one.model.memory_bytes
            if one.model.fairness.popular:
                popular.append(one)
            elif one.state is ModelState.SERVING:
                serving.append(one)
    held = sum(one.model.memory_bytes for one in popular)
    locked = any(one.state is ModelState.WAKING for one in device.occupants)
    taken = {one.model.name for one in device.occupants}
    for intent in order:
        model, size = intent.model, intent.model.memory_bytes
        if size > device.memory_bytes - held:
            fails_at_s = intent.since_s + model.fairness.max_wait_time_s
            if size > device.memory_bytes:
                actions.append(Fail(model.name, never_fits(model.name, size, device.memory_bytes)))
            elif now >= fails_at_s:
                actions.append(Fail(model.name, _held_by(model.name, popular, now)))
            else:
                check_at_s.append(fails_at_s)
            continue
        if size > device.memory_bytes - held - stuck:  # until those that are silent respond or have ended
            continue
        if size > available:
            victims, ask_at_s = choose(intent, serving, size - available)
            if not victims:
                check_at_s.append(ask_at_s)
                break
            for victim in victims:
                actions.append(Drain(victim.model.name, model.name))
                serving.remove(victim)
                available += victim.model.memory_bytes
        available -= size
        if model.fairness.popular:
            held += size
        if size <= free and not locked and model.name not in taken:
            actions.append(Wake(model.name))
            locked = True
        elif stage:
            actions.append(Stage(model.name))
        free -= size
    return Decision(actions, min(check_at_s, default=float("inf")))


def never_fits(name: str, size: int, memory_bytes: int) -> str:
    """Says that a model is too large for a device."""
    takes, has = (f"{number / 2**30:.2f} GiB" for number in (size, memory_bytes))
    return f"{name} can never be awake: it takes {takes}, and the device has {has} for models (--device-memory)"


def _ends(one: Occupant, now: float, park_at_s: Callable[[Occupant], float], check_at_s: list[float]) -> bool:
    """Whether it is time for a model to go to sleep; adds the time at which it will be."""
    if one.state is ModelState.DRAINING:
        end_s = park_at_s(one)
        ends = not one.running or now >= end_s
    elif one.state is ModelState.SERVING and one.model.sleep.idle_timeout_s and not one.running:
        end_s = max(one.last_access_s, one.since_s) + one.model.sleep.idle_timeout_s
        ends = now >= end_s
    else:
        return False
    if not ends:
        check_at_s.append(end_s)
    return ends


def _held_by(name: str, popular: Sequence[Occupant], now: float) -> str:
    """Says who holds a device and until when."""
    holders = []
    for one in popular:
        idle_s = one.model.sleep.idle_timeout_s
        left_s = max(one.last_access_s, one.since_s) + idle_s - now
        until = f"for at least {max(0.0, left_s):.0f} s" if idle_s else "without limit, as it has no idle_timeout"
        holders.append(f"{one.model.name} {until}")
    return f"{name} does not fit beside popular or pinned models, which nobody may displace: {'; '.join(holders)}"
