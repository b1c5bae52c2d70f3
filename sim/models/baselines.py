"""Baselines: what others do, to compare with."""

from collections.abc import Sequence
from dataclasses import replace

from cpd.residency.rule import Rule
from cpd.residency.snapshot import Action, Decision, Device, Fail, Fairness, Model, ModelState, SleepSettings, Wake

_SWAP_AT_ONCE = Fairness(min_runtime_s=0, max_wait_time_s=0)
_REQUESTS_END = SleepSettings(drain_timeout_s=1e9)


class LruSwap:
    """Swaps at once for whichever model is asked for: the least recently used ones go, once their requests have ended.

    It is the rule without `min_runtime`, `max_wait_time` and `drain_timeout`.
    """

    def decide(self, device: Device, now: float) -> Decision:
        """See `ResidencyPolicy`."""
        unbounded = replace(
            device,
            models=[_without_bounds(one) for one in device.models],
            occupants=[replace(one, model=_without_bounds(one.model)) for one in device.occupants],
            intents=[replace(one, model=_without_bounds(one.model)) for one in device.intents],
        )
        return Rule().decide(unbounded, now)


def _without_bounds(model: Model) -> Model:
    return replace(model, fairness=_SWAP_AT_ONCE, sleep=_REQUESTS_END)


class Static:
    """The most popular models that fit stay awake for ever; requests for others fail.

    Args:
        popular: Names of all models, the most popular first.
    """

    def __init__(self, popular: Sequence[str]) -> None:
        self._rank = {name: rank for rank, name in enumerate(popular)}

    def decide(self, device: Device, now: float) -> Decision:
        """See `ResidencyPolicy`."""
        awake, left = set[str](), device.memory_bytes
        for model in sorted(device.models, key=lambda one: self._rank[one.name]):
            if model.memory_bytes <= left:
                awake.add(model.name)
                left -= model.memory_bytes
        locked = any(one.state is ModelState.WAKING for one in device.occupants)
        actions: list[Action] = []
        for intent in device.intents:
            name = intent.model.name
            if name not in awake:
                actions.append(Fail(name, f"{name} is not among the models that are always awake"))
            elif not locked:
                actions.append(Wake(name))
                locked = True
        return Decision(actions, float("inf"))
