"""What holds whatever arrives. The ledger checks memory, the wake lock, min_runtime, popular and drain_timeout."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.residency.predicted import Predicted
from cpd.residency.rule import Rule
from cpd.residency.snapshot import Drain, Fairness, Model, ResidencyPolicy, SleepSettings, Wake
from tests.cpd.residency.ledger import Ledger

MEMORY = 10


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Each run begins with a garbage collection (`Events.run`). It need not look at all the modules of the tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@st.composite
def models(draw: st.DrawFn, popular: bool) -> list[Model]:
    """Models that each fit on the device."""
    seconds = st.integers(0, 60).map(lambda halves: halves / 2)
    return [
        Model(
            f"model-{number}",
            draw(st.integers(1, MEMORY)),
            Fairness(
                min_runtime_s=draw(seconds),
                max_wait_time_s=draw(seconds),
                popular=popular and draw(st.integers(0, 3)) == 0,
            ),
            SleepSettings(idle_timeout_s=draw(st.sampled_from([0.0, 0.0, 1.0, 8.0])), drain_timeout_s=draw(seconds)),
            wake_s=draw(st.integers(1, 30)) / 10,
            sleep_s=draw(st.integers(0, 10)) / 10,
        )
        for number in range(draw(st.integers(2, 6)))
    ]


@st.composite
def loads(draw: st.DrawFn, popular: bool) -> tuple[list[Model], list[tuple[float, str, float]]]:
    """Models and their requests."""
    some = draw(models(popular))
    request = st.tuples(
        st.integers(0, 1_000).map(lambda tenths: tenths / 10),
        st.sampled_from([one.name for one in some]),
        st.integers(1, 400).map(lambda tenths: tenths / 10),
    )
    return some, draw(st.lists(request, min_size=1, max_size=40))


@pytest.mark.parametrize(("policy", "parks_early"), [(Rule(), False), (Predicted(), True)])
@settings(max_examples=150, deadline=None)
@given(load=loads(popular=True))
def test_each_intent_is_served_or_fails_within_its_bound(
    policy: ResidencyPolicy, parks_early: bool, load: tuple[list[Model], list[tuple[float, str, float]]]
) -> None:
    some, arrivals = load
    ledger = Ledger(MEMORY, some, policy, parks_early=parks_early)
    ledger.run(arrivals)
    for name, took_s, promised_s in ledger.waits:
        assert took_s <= promised_s + 1e-6, f"{name} waited for {took_s} s, and was promised {promised_s} s"
    assert all(one.ended_s is not None or one.failed for one in ledger.requests)


@pytest.mark.parametrize(("policy", "parks_early"), [(Rule(), False), (Predicted(), True)])
@settings(max_examples=50, deadline=None)
@given(load=loads(popular=False))
def test_without_popular_models_every_request_ends(
    policy: ResidencyPolicy, parks_early: bool, load: tuple[list[Model], list[tuple[float, str, float]]]
) -> None:
    some, arrivals = load
    ledger = Ledger(MEMORY, some, policy, parks_early=parks_early)
    ledger.run(arrivals)
    assert all(one.ended_s is not None for one in ledger.requests)


@pytest.mark.parametrize("policy", [Rule(), Predicted()])
def test_a_flood_for_one_model_does_not_keep_another_one_out(policy: ResidencyPolicy) -> None:
    flood = [(0.1 * number, "flood", 20.0) for number in range(1_000)]
    some = [Model("flood", MEMORY, wake_s=1.0, sleep_s=0.1), Model("other", MEMORY, wake_s=1.0, sleep_s=0.1)]
    ledger = Ledger(MEMORY, some, policy, parks_early=True)
    ledger.run([*flood, (30.0, "other", 1.0)])
    wakes = [time_s for time_s, name in ledger.did(Wake) if name == "other"]
    assert wakes[0] <= 30 + 5 + 30 + 0.1 + 1e-6  # max_wait_time, drain_timeout, sleep
    assert ledger.did(Drain)[0][1] == "flood"
