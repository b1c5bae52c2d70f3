"""Many models on few devices over one day."""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel

from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile
from cpd.residency.predicted import Predicted
from cpd.residency.rule import Rule
from cpd.residency.snapshot import ResidencyPolicy
from sim.events import Events
from sim.models.baselines import LruSwap, Static
from sim.models.device import SimDevice
from sim.models.engine import FluidEngine, Request
from sim.models.fleet import SimulatedModel, make_fleet
from sim.models.settings import ModelsSettings
from sim.models.workload import Arrival, make_arrivals

POLICIES = "rule", "predicted", "lru-swap", "static"


class ModelOutcome(BaseModel):
    """Figures of one model.

    Attributes:
        device: Number of its device.
        good_share: Share of its requests that met both targets.
        wait_p50_s, wait_p99_s, wait_longest_s: Time that its requests waited until it was awake, pauses of parked ones
            included; 0 if it was. None: all requests failed.
    """

    name: str
    device: int
    requests: int
    failed: int
    good_share: float
    wait_p50_s: float | None
    wait_p99_s: float | None
    wait_longest_s: float | None


class Outcome(BaseModel):
    """Figures of one policy with one seed.

    Attributes:
        good_per_s: Goodput: requests a second that met both targets.
        good_share: Their share.
        swaps_per_hour: Wakes an hour, on all devices.
        longest_wait_s: Longest wait of a request for its model to be awake.
        jain: Jain's index of the models' shares of good requests: 1 if all are equal, 1 / models if one has all.
        broken_promises: Number of intents that took longer than was promised when they were written.
    """

    policy: str
    seed: int
    requests: int
    good_per_s: float
    good_share: float
    swaps_per_hour: float
    longest_wait_s: float | None
    jain: float
    broken_promises: int
    models: list[ModelOutcome]


def make_policy(name: str, fleet: Sequence[SimulatedModel]) -> ResidencyPolicy:
    """Returns a policy by its name.

    Raises:
        ConfigError: There is none of that name.
    """
    match name:
        case "rule":
            return Rule()
        case "predicted":
            return Predicted()
        case "lru-swap":
            return LruSwap()
        case "static":
            return Static([one.spec.name for one in fleet])
    raise ConfigError(f"there is no policy {name!r}: give some of {', '.join(POLICIES)}")


def simulate(settings: ModelsSettings, policy: str, seed: int) -> Outcome:
    """Simulates one day with one policy.

    Raises:
        ConfigError: A setting or the file of models is invalid.
    """
    fleet = make_fleet(settings)
    arrivals = make_arrivals(settings, fleet, seed)
    events = Events()
    model = PerfModel(Profile.load(settings.profile))
    requests: dict[str, list[Request]] = {one.spec.name: [] for one in fleet}
    unfinished = len(arrivals)

    def ended(name: str, request: Request) -> None:
        nonlocal unfinished
        requests[name].append(request)
        unfinished -= 1

    def engine(one: SimulatedModel) -> FluidEngine:
        return FluidEngine(model, one.weights_bytes / settings.profile_weights, settings.max_num_seqs)

    devices = [
        SimDevice(
            settings,
            [(one, engine(one)) for one in fleet if one.device == number],
            make_policy(policy, fleet),
            events,
            ended,
        )
        for number in range(settings.devices)
    ]
    device_of = {one.spec.name: devices[one.device] for one in fleet}
    later = iter(arrivals)

    def arrive(one: Arrival) -> None:
        following = next(later, None)
        if following is not None:
            events.at(following.time_s, arrive, following)
        device_of[one.model].submit(one.model, Request(one.time_s, one.prompt_len, one.output_len))

    first = next(later, None)
    if first is not None:
        events.at(first.time_s, arrive, first)
    events.run(until=lambda: not unfinished)
    if unfinished:
        raise AssertionError(f"{unfinished} requests never ended with {policy}")
    return _outcome(settings, policy, seed, fleet, requests, devices)


def _outcome(
    settings: ModelsSettings,
    policy: str,
    seed: int,
    fleet: Sequence[SimulatedModel],
    requests: dict[str, list[Request]],
    devices: Sequence[SimDevice],
) -> Outcome:
    models = [_model_outcome(settings, one, requests[one.spec.name]) for one in fleet]
    shares = [one.good_share for one in models if one.requests]
    good = sum(is_good(one, settings) for some in requests.values() for one in some)
    total = sum(len(some) for some in requests.values())
    squares = sum(share**2 for share in shares)
    waits = [one.wait_longest_s for one in models if one.wait_longest_s is not None]
    return Outcome(
        policy=policy,
        seed=seed,
        requests=total,
        good_per_s=good / settings.day_s,
        good_share=good / max(1, total),
        swaps_per_hour=sum(one.wakes for one in devices) * 3600 / settings.day_s,
        longest_wait_s=max(waits, default=None),
        jain=sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0,
        broken_promises=sum(took_s > promised_s + 1e-6 for one in devices for took_s, promised_s in one.intents),
        models=models,
    )


def is_good(request: Request, settings: ModelsSettings) -> bool:
    """Whether a request met both targets."""
    if request.failed or request.first_s is None or request.ended_s is None:
        return False
    gaps_s = request.ended_s - request.first_s
    return (
        request.first_s - request.due_s <= settings.slo_ttft / 1e3
        and gaps_s <= (request.output_len - 1) * settings.slo_itl / 1e3
    )


def _model_outcome(settings: ModelsSettings, model: SimulatedModel, requests: Sequence[Request]) -> ModelOutcome:
    waits = np.array([one.waited_s for one in requests if not one.failed])
    p50, p99, longest = np.percentile(waits, (50, 99, 100)) if waits.size else (None, None, None)
    return ModelOutcome(
        name=model.spec.name,
        device=model.device,
        requests=len(requests),
        failed=sum(one.failed for one in requests),
        good_share=sum(is_good(one, settings) for one in requests) / max(1, len(requests)),
        wait_p50_s=p50,
        wait_p99_s=p99,
        wait_longest_s=longest,
    )
