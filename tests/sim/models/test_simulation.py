from collections.abc import Sequence

import pytest

from sim.models.fleet import make_fleet
from sim.models.settings import ModelsSettings
from sim.models.simulation import Outcome, simulate
from sim.models.workload import make_arrivals

SMALL = ModelsSettings.load({"day_s": 300, "rate": 6, "quiet_s": 60, "burst_s": 20})


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: simulate(SMALL, name, 7) for name in ("rule", "predicted", "lru-swap", "static")}


def failed(outcome: Outcome) -> list[str]:
    return [one.name for one in outcome.models if one.failed]


def test_a_seed_gives_the_same_figures_again(outcomes: dict[str, Outcome]) -> None:
    assert simulate(SMALL, "predicted", 7) == outcomes["predicted"]
    assert simulate(SMALL, "predicted", 8) != outcomes["predicted"]


def test_all_policies_get_the_same_requests_and_lose_none(outcomes: dict[str, Outcome]) -> None:
    expected = len(make_arrivals(SMALL, make_fleet(SMALL), 7))
    assert {one.requests for one in outcomes.values()} == {expected}


def test_promises_are_kept(outcomes: dict[str, Outcome]) -> None:
    assert [outcomes[name].broken_promises for name in ("rule", "predicted")] == [0, 0]


def test_static_fails_what_does_not_fit_and_never_swaps(outcomes: dict[str, Outcome]) -> None:
    static = outcomes["static"]
    awake = [one for one in static.models if not one.failed]
    assert static.swaps_per_hour * SMALL.day_s / 3600 == pytest.approx(len(awake))
    for device in range(SMALL.devices):
        fleet = {one.spec.name: one for one in make_fleet(SMALL) if one.device == device}
        memory = sum(fleet[one.name].spec.memory_bytes for one in awake if one.name in fleet)
        assert memory <= SMALL.device_memory
        left = SMALL.device_memory - memory
        assert all(fleet[name].spec.memory_bytes > left for name in failed(static) if name in fleet)
    assert all(one.failed == one.requests for one in static.models if one.failed)


def test_only_static_fails_requests(outcomes: dict[str, Outcome]) -> None:
    assert [name for name, one in outcomes.items() if failed(one)] == ["static"]


def test_lru_swap_swaps_most(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["lru-swap"].swaps_per_hour > max(
        outcomes[name].swaps_per_hour for name in ("rule", "predicted", "static")
    )


def test_with_memory_for_all_models_each_wakes_once() -> None:
    settings = SMALL.model_copy(update={"device_memory": 1 << 40})
    outcome = simulate(settings, "rule", 7)
    assert outcome.swaps_per_hour * settings.day_s / 3600 == pytest.approx(len(outcome.models))
    assert all(one.wait_p50_s == 0 for one in outcome.models)


@pytest.mark.parametrize("kept", ["copy", "drop"])
def test_parked_requests_go_on_whatever_becomes_of_their_pages(kept: str) -> None:
    settings = SMALL.model_copy(update={"parked_kv": kept, "output": "800"})
    outcome = simulate(settings, "predicted", 7)
    assert outcome.broken_promises == 0
    assert not failed(outcome)


def test_the_rate_and_the_popularity_are_those_of_the_settings() -> None:
    settings = ModelsSettings.load({"day_s": 20_000})
    fleet = make_fleet(settings)
    arrivals = make_arrivals(settings, fleet, 3)
    assert len(arrivals) / settings.day_s == pytest.approx(settings.rate, rel=0.15)
    counts = _counts([one.model for one in arrivals], [one.spec.name for one in fleet])
    assert counts[0] > 1.5 * counts[2] > 1.5 * 1.5 * counts[8]
    assert [one.time_s for one in arrivals] == sorted(one.time_s for one in arrivals)


def _counts(names: Sequence[str], of: Sequence[str]) -> list[int]:
    return [names.count(name) for name in of]
