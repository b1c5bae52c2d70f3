from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import QueueFullError
from engine.scheduling.queue_limit import DEFAULT_RETRY_S, MAX_RETRY_S, WINDOW_S, QueueLimit


def refused(limit: QueueLimit, tenant: str, tokens: int, bound: int = 1000, now: float = 0.0) -> QueueFullError | None:
    try:
        limit.check(tenant, tokens, bound, now)
    except QueueFullError as error:
        return error
    return None


def test_one_tenant_may_fill_the_queue_and_an_empty_queue_takes_anything() -> None:
    limit = QueueLimit()
    assert refused(limit, "a", 5000) is None
    limit.add("a", 1000, 0.0)
    error = refused(limit, "a", 1)
    assert error is not None
    assert not error.over_share
    assert "1000 tokens wait in a queue of 1000" in str(error)


def test_a_full_queue_accepts_a_tenant_below_its_share() -> None:
    limit = QueueLimit()
    limit.add("flood", 1000, 0.0)
    assert refused(limit, "new", 400) is None
    limit.add("new", 400, 0.0)
    assert refused(limit, "new", 100) is None
    own, flood = refused(limit, "new", 101), refused(limit, "flood", 1)
    assert own is not None
    assert flood is not None
    assert (own.over_share, flood.over_share) == (True, True)


def test_no_queue_exceeds_twice_its_bound() -> None:
    limit = QueueLimit()
    limit.add("a", 1000, 0.0)
    limit.add("b", 900, 0.0)
    error = refused(limit, "c", 101)
    assert error is not None
    assert not error.over_share
    assert refused(limit, "c", 100) is None


def test_the_only_request_of_a_tenant_may_exceed_the_share() -> None:
    limit = QueueLimit()
    limit.add("a", 1000, 0.0)
    assert refused(limit, "b", 900) is None


def test_retry_after_is_when_the_queue_will_be_empty_at_the_rate_of_the_recent_past() -> None:
    limit = QueueLimit(lambda tokens: 7.0)
    for _ in range(20):
        limit.add("a", 100, 0.0)
    for second in range(1, 11):
        limit.take("a", 100, float(second))
    error = refused(limit, "a", 200, now=10.0)
    assert error is not None
    assert error.retry_after_s == pytest.approx(10.0)  # 1000 wait, 100 a second leave


def test_a_tenant_over_its_share_waits_for_its_own_requests() -> None:
    limit = QueueLimit()
    for _ in range(10):
        limit.add("a", 100, 0.0)
        limit.add("b", 40, 0.0)
    for second in range(1, 6):
        limit.take("a", 100, float(second))
    error = refused(limit, "a", 200, bound=600, now=5.0)
    assert error is not None
    assert error.over_share
    assert error.retry_after_s == pytest.approx(10.0)  # 500 wait, and every other one of 100 a second is its own


def test_the_rate_ignores_the_distant_past_and_times_without_requests() -> None:
    limit = QueueLimit()
    limit.add("a", 10_000, 0.0)
    limit.take("a", 9_000, 1.0)
    limit.take("a", 500, WINDOW_S + 2)
    assert limit.seconds_for(100, WINDOW_S + 2) == pytest.approx(100 / (500 / WINDOW_S))
    limit.take("a", 500, 30.0)
    limit.add("a", 100, 100.0)
    assert limit.seconds_for(100, 102.0) == DEFAULT_RETRY_S


def test_without_a_rate_the_prediction_is_used() -> None:
    limit = QueueLimit(lambda tokens: tokens / 50)
    limit.add("a", 1000, 0.0)
    assert limit.seconds_for(200, 0.5) == 4.0
    assert limit.seconds_for(10**9, 0.5) == MAX_RETRY_S


def test_more_than_leaves_within_the_longest_wait_is_refused() -> None:
    limit = QueueLimit(lambda tokens: tokens / 50, max_wait_s=4.0)
    limit.add("a", 150, 0.0)
    assert refused(limit, "a", 50) is None
    error = refused(limit, "a", 51)
    assert error is not None
    assert error.retry_after_s == pytest.approx(3.0)
    for second in range(1, 5):
        limit.add("a", 100, float(second))
        limit.take("a", 100, float(second))
    assert refused(limit, "a", 250, now=4.0) is None  # 100 a second instead of the 50 predicted
    assert refused(limit, "a", 251, now=4.0) is not None


def test_what_is_not_predicted_is_not_refused() -> None:
    limit = QueueLimit(max_wait_s=0.001)
    limit.add("a", 500, 0.0)
    assert refused(limit, "a", 500) is None


ACTIONS = st.tuples(st.sampled_from("abc"), st.integers(1, 1500), st.sampled_from(["add", "add", "take", "remove"]))


@given(st.lists(ACTIONS, max_size=60))
def test_a_tenant_within_its_share_is_refused_only_at_twice_the_bound(actions: list[tuple[str, int, str]]) -> None:
    bound, now = 2000, 0.0
    limit = QueueLimit()
    waiting: list[tuple[str, int]] = []
    for tenant, tokens, action in actions:
        now += 0.5
        if action == "add":
            own = Counter({one: sum(size for name, size in waiting if name == one) for one, _ in waiting})
            error, total = refused(limit, tenant, tokens, bound, now), sum(own.values())
            if error is None:
                assert not total or total + tokens <= 2 * bound
                limit.add(tenant, tokens, now)
                waiting.append((tenant, tokens))
            else:
                assert total + tokens > bound
                assert 0 < error.retry_after_s <= MAX_RETRY_S
                others = len(own.keys() - {tenant})
                if others and own[tenant] + tokens <= bound / (others + 1):
                    assert total + tokens > 2 * bound
                if error.over_share:
                    assert own[tenant]
                    assert others
        elif waiting:
            name, size = waiting.pop(0)
            if action == "take":
                limit.take(name, size, now)
            else:
                limit.remove(name, size)
        assert limit.tokens == sum(size for _, size in waiting)
