"""The longest wait of an intent, whatever arrives after it.

    wait = lock + Σ (max(max_wait_time left, min_runtime left) + drain + sleep + 2 · wake)

The sum goes over the intents served before it, and itself. For the first one, what is left of `min_runtime` is that of
the models awake now; for a later one it may be all of it, since the one before may just have begun. `drain`, `sleep`,
`wake` and `min_runtime` are the longest of the device's models, since it is not known which of them will be awake then.
`wake` counts twice: a model that fits beside everybody may hold the wake lock when the memory becomes free. `lock` is
the rest of a wake in progress.

An intent that does not fit beside all popular models of the device may be passed over while they are awake. Those that
pass it may just have begun when it fits again, so for it the maximum becomes
max_wait_time left + wake + min_runtime.

Times to drain are limits. Those to sleep and wake are predictions: what takes longer there comes on top.
"""

from collections.abc import Sequence

from cpd.residency.snapshot import Device, Intent, ModelState


def longest_wait_s(device: Device, order: Sequence[Intent], now: float) -> float:
    """Returns the longest time until the last intent of `order` is served or has failed.

    Args:
        order: Intents in the order in which they are served.
    """
    models = device.models
    displaceable = [one for one in models if not one.fairness.popular]
    min_runtime_s = max((one.fairness.min_runtime_s for one in displaceable), default=0.0)
    drain_s = max((one.sleep.drain_timeout_s for one in displaceable), default=0.0)
    wake_s = max(one.wake_s for one in models)
    turn_s = drain_s + max(one.sleep_s for one in models) + 2 * wake_s
    popular = {one.name: one.memory_bytes for one in models if one.fairness.popular}
    total_s = runtime_left_s = 0.0
    for one in device.occupants:
        ran_s = now - one.since_s
        if one.state is ModelState.WAKING:
            total_s = max(total_s, one.model.wake_s - ran_s)
        if not one.model.fairness.popular and one.state in (ModelState.WAKING, ModelState.SERVING):
            left_s = one.model.fairness.min_runtime_s - (ran_s if one.state is ModelState.SERVING else 0.0)
            runtime_left_s = max(runtime_left_s, left_s)
    for intent in order:
        model = intent.model
        wait_left_s = max(0.0, intent.since_s + model.fairness.max_wait_time_s - now)
        if model.memory_bytes + sum(popular.values()) - popular.get(model.name, 0) > device.memory_bytes:
            total_s += wait_left_s + wake_s + min_runtime_s + turn_s
        else:
            total_s += max(wait_left_s, runtime_left_s) + turn_s
        runtime_left_s = min_runtime_s
    return total_s
