import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.planner.arrivals import ArrivalFeed, Arrivals
from cpd.planner.load import LoadMeter

PROMPT = (2_000, 200, 1_000)


def _feed() -> ArrivalFeed:
    return ArrivalFeed(LoadMeter(0.0, expected_output=256))


def _ask(feed: ArrivalFeed, now: float, *routers: Arrivals) -> None:
    for index, one in enumerate(routers):
        feed.add(f"router-{index}", one.began, one.totals(), now)


def test_arrivals_of_all_routers_are_measured() -> None:
    feed, routers = _feed(), (Arrivals(), Arrivals())
    _ask(feed, 0.0, *routers)
    for second in range(5, 301, 5):
        for one, count in zip(routers, (10, 40), strict=True):
            for _ in range(count):
                one.answered(one.arrived(*PROMPT), 300)
        _ask(feed, float(second), *routers)
    (demand,) = feed.meter.demands(300.0)
    assert demand.rate == pytest.approx(10.0, rel=0.02)
    assert (demand.local_tokens, demand.remote_tokens, demand.prompt_tokens) == pytest.approx((200, 1_000, 2_000))
    assert demand.output_tokens == pytest.approx(300, rel=0.02)


def test_what_was_counted_before_the_first_question_does_not_count() -> None:
    feed, router = _feed(), Arrivals()
    for _ in range(1000):
        router.arrived(*PROMPT)
    _ask(feed, 5.0, router)
    assert feed.meter.seen(5.0).recent == 0


def test_a_router_that_restarts_changes_nothing_in_what_was_measured() -> None:
    feed, router = _feed(), Arrivals()
    _ask(feed, 0.0, router)
    for _ in range(100):
        router.arrived(*PROMPT)
    _ask(feed, 5.0, router)
    before = feed.meter.seen(10.0).recent
    router = Arrivals()
    router.arrived(*PROMPT)
    _ask(feed, 10.0, router)
    assert feed.meter.seen(10.0).recent == pytest.approx(before + 1, abs=0.05)


def test_a_question_that_fails_loses_nothing() -> None:
    feed, router = _feed(), Arrivals()
    _ask(feed, 0.0, router)
    router.arrived(*PROMPT)
    _ask(feed, 5.0)
    router.arrived(*PROMPT)
    _ask(feed, 10.0, router)
    assert feed.meter.seen(5.0).recent == pytest.approx(2, abs=0.01)


def test_a_router_that_misses_questions_does_not_seem_to_have_a_burst() -> None:
    feed, router = _feed(), Arrivals()
    _ask(feed, 0.0, router)
    for second in range(5, 301, 5):
        for _ in range(25):
            router.arrived(*PROMPT)
        if not 180 < second <= 240:
            _ask(feed, float(second), router)
        if second > 240:
            (demand,) = feed.meter.demands(float(second))
            assert demand.rate == pytest.approx(5.0, rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(-5, 50_000), st.integers(-5, 50_000)), max_size=50))
def test_any_lengths_can_be_passed_on(requests: list[tuple[int, int, int]]) -> None:
    feed, router = _feed(), Arrivals()
    _ask(feed, 0.0, router)
    for one in requests:
        router.answered(router.arrived(*one), 5)
    _ask(feed, 5.0, router)
    assert feed.meter.seen(2.5).recent == pytest.approx(len(requests), rel=0.01)
