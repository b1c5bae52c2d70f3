"""Effects of injected faults between two workers in the test process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.decode_worker.pair import Pair, assert_right, pair
from tests.engine.fakes import make_request, prompt
from tests.faults.points import Action, InjectionPoints, Point
from tests.faults.transport import FaultyNetwork
from tests.waiting import eventually


@asynccontextmanager
async def faulty_pair(redis_url: str, **settings: Any) -> AsyncIterator[tuple[Pair, InjectionPoints]]:
    network = FaultyNetwork()
    async with pair(redis_url, network=network, **settings) as p:
        yield p, network.points
        network.points.disarm()


@pytest.mark.parametrize(
    ("point", "k", "action", "reason"),
    [
        (Point.CONNECT, 0, Action.FAIL, "transfer"),
        (Point.PAGE, 0, Action.FAIL, "transfer"),
        (Point.PAGE, 7, Action.FAIL, "transfer"),
        (Point.PAGE, 7, Action.DROP, "stalled"),
        (Point.LANDED, 0, Action.FAIL, "transfer"),
        (Point.LANDED, 0, Action.CORRUPT, "damaged"),
    ],
)
async def test_a_fault_uses_up_one_candidate_and_is_counted_by_reason(
    redis_url: str, point: Point, k: int, action: Action, reason: str
) -> None:
    request = make_request("a", prompt(300), max_tokens=20)
    patience_s = 3.0 if action is Action.DROP else 60.0  # a dropped page is noticed by its silence
    async with faulty_pair(redis_url, prefill_progress_s=patience_s) as (p, points):
        points.arm(point, action, k)
        answer = await p.submit(request, 1, candidates=[p.prefill.candidate, p.prefill.candidate])
        await p.router.done(answer)
        assert_right(request, answer)
        await p.balanced()
        await eventually(lambda: dict(p.router.load.transfer_failures) == {reason: 1})
        assert dict(p.router.load.remote_prefills) in (
            {"failed": 1, "completed": 1},
            {"failed": 1, "local_fallback": 1},
        )


async def test_a_corrupt_page_is_neither_served_nor_cached(redis_url: str) -> None:
    async with faulty_pair(redis_url) as (p, points):
        points.arm(Point.LANDED, Action.CORRUPT)
        answer = await p.submit(make_request("a", prompt(300)), 1)
        await p.router.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
        assert "arrived damaged" in answer.refusal.message
        assert not p.router.cached
        await p.balanced()


async def test_a_held_or_delayed_transfer_completes_with_the_right_tokens(redis_url: str) -> None:
    async with faulty_pair(redis_url) as (p, points):
        for number, point in enumerate((Point.CONNECT, Point.PAGE, Point.SENT, Point.LANDED)):
            request = make_request(f"r{number}", prompt(300, number), max_tokens=20)
            points.arm(point, Action.HOLD)
            answer = await p.submit(request, number)
            await eventually(lambda point=point: points.triggered(point))  # type: ignore[misc]
            points.disarm()
            await p.router.done(answer)
            assert_right(request, answer)
        points.arm(Point.PAGE, Action.DELAY, delay_s=0.01)
        request = make_request("slow", prompt(300, 9), max_tokens=20)
        answer = await p.submit(request, 9)
        await p.router.done(answer)
        assert_right(request, answer)
        await p.balanced()
        assert not p.router.load.transfer_failures
