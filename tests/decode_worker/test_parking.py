"""Requests that are parked, most of them because their worker drains, and go on elsewhere or there."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cpd.common.blocks import BLOCK_SIZE, extend_hashes
from cpd.rpc import cpd_pb2 as pb
from engine.types import Request
from tests.decode_worker.duo import TOKENS, Duo, Side, duo
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import DEADLINE_S, eventually
from tests.worker.client import Answer
from tests.worker.fakes import MAX_MODEL_LEN

LONG = 600
"""Tokens of output: at the slow pace of the tests it does not end by itself."""


def continued(request: Request, choice: int, tokens: Sequence[int]) -> Request:
    """The rest of a choice after these tokens."""
    token_ids = [*request.token_ids, *tokens]
    hashes = extend_hashes(request.hash_root, token_ids)
    return replace(request, token_ids=token_ids, block_hashes=hashes, first_choice=choice, n=1)


def drain(side: Side, timeout_s: float = 0.0) -> None:
    side.worker.worker.lifecycle.drain("test", timeout_s=timeout_s)


async def park(d: Duo, n: int = 1) -> tuple[Request, Answer]:
    """A request of `source`, with number 1, that was parked after a few tokens."""
    request = make_request("a", prompt(TOKENS), max_tokens=LONG, n=n)
    d.source.gate.slow()
    answer = await d.source.router.submit(request, 1)
    await eventually(lambda: all(len(answer.tokens.get(choice, ())) > 20 for choice in answer.choices))
    drain(d.source)
    await eventually(lambda: d.source.router.load.moving)
    await d.source.router.park(1)
    await eventually(lambda: answer.refusal is not None)
    assert answer.refusal is not None
    assert answer.refusal.kind == pb.Refusal.KIND_PARKED
    return request, answer


def check(request: Request, choice: int, *parts: Sequence[int]) -> None:
    """Checks that these tokens follow one another as if nothing had happened."""
    assert [token for part in parts for token in part] == expected(request, choice, MAX_MODEL_LEN).token_ids


async def exited(side: Side) -> None:
    await eventually(lambda: side.worker.task.done())
    assert side.worker.task.result() == 0


class TestMove:
    @pytest.mark.parametrize("n", [1, 3])
    async def test_it_goes_on_elsewhere_with_its_pages_and_the_worker_ends_then(self, redis_url: str, n: int) -> None:
        async with duo(redis_url) as d:
            request, answer = await park(d, n)
            service = d.source.worker.worker._service
            for choice in sorted(answer.choices):
                assert service.busy
                rest = continued(request, choice, answer.tokens[choice])
                blocks = len(rest.block_hashes)
                moved = await d.submit(rest, 10 + choice, d.source.hint(blocks))
                await eventually(lambda moved=moved: moved.started)  # type: ignore[misc]
                if choice == 0:
                    assert moved.prefilled[0].cached_tokens == TOKENS
                    await eventually(lambda: 0 < d.here.router.load.prefill_tokens <= 2 * BLOCK_SIZE)
                    assert moved.prefilled[0].prefix_worker == d.source.worker.worker.id
                await d.source.router.abort(1, [choice])
                await d.here.router.done(moved)
                check(request, choice, answer.tokens[choice], moved.tokens[choice])
            await exited(d.source)
            await d.here.router.balanced()

    async def test_a_worker_that_does_not_drain_parks_too(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            d.source.gate.slow()
            request = make_request("a", prompt(TOKENS), max_tokens=LONG)
            answer = await d.source.router.submit(request, 1)
            await eventually(lambda: answer.started)
            await d.source.router.park(1)
            await eventually(lambda: answer.refusal is not None)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_PARKED
            rest = continued(request, 0, answer.tokens[0])
            moved = await d.submit(rest, 2, d.source.hint(len(rest.block_hashes)))
            await d.here.router.done(moved)
            check(request, 0, answer.tokens[0], moved.tokens[0])
            await d.source.router.abort(1)
            await d.balanced()

    async def test_its_full_blocks_are_kept_until_it_is_aborted(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            request, answer = await park(d)
            blocks = len(continued(request, 0, answer.tokens[0]).block_hashes)
            await eventually(
                lambda: d.source.router.load.used_pages in (blocks, blocks - 1)
            )  # one may be half computed
            await d.source.router.abort(1)
            await exited(d.source)
            assert d.source.worker.worker._stats.pages.used == 0


class TestReturn:
    async def test_it_goes_on_where_it_was_parked(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            request, answer = await park(d)
            before = d.source.router.load.prefill_tokens
            rest = continued(request, 0, answer.tokens[0])
            again = await d.source.router.submit(rest, 1, attempt=1, resumes=pb.Park(request=1))
            await eventually(lambda: again.started)
            await eventually(lambda: d.source.router.load.prefill_tokens > before)
            assert d.source.router.load.prefill_tokens - before <= 2 * BLOCK_SIZE
            d.source.gate.open()
            await d.source.router.done(again)
            check(request, 0, answer.tokens[0], again.tokens[0])
            await exited(d.source)

    async def test_a_full_queue_does_not_keep_it_out(self, redis_url: str) -> None:
        async with duo(redis_url, max_queue_tokens=1) as d:
            request, answer = await park(d)
            again = await d.source.router.submit(
                continued(request, 0, answer.tokens[0]), 1, attempt=1, resumes=pb.Park(request=1)
            )
            d.source.gate.open()
            await d.source.router.done(again)
            check(request, 0, answer.tokens[0], again.tokens[0])

    @pytest.mark.parametrize("resumes", [None, pb.Park(request=2), pb.Park(request=1, attempt=1)])
    async def test_nothing_else_is_taken(self, redis_url: str, resumes: pb.Park | None) -> None:
        async with duo(redis_url) as d:
            request, answer = await park(d)
            refused = await d.source.router.submit(continued(request, 0, answer.tokens[0]), 3, resumes=resumes)
            await d.source.router.done(refused)
            assert refused.refusal is not None
            assert refused.refusal.kind == pb.Refusal.KIND_REROUTE


class TestNotParked:
    async def test_a_request_without_a_token_is_rerouted(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            d.source.gate.close()
            answer = await d.source.router.submit(make_request("a", prompt(100, 5)), 1)
            await eventually(lambda: d.source.has(1))
            drain(d.source)
            await d.source.router.park(1)
            await d.source.router.done(answer)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            d.source.gate.open()
            await exited(d.source)

    async def test_without_a_router_that_parks_the_drain_waits_for_the_requests(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            d.source.gate.slow()
            request = make_request("a", prompt(TOKENS), max_tokens=30)
            answer = await d.source.router.submit(request, 1)
            await eventually(lambda: answer.started)
            drain(d.source)
            await d.source.router.done(answer)
            check(request, 0, answer.tokens[0])
            await exited(d.source)

    async def test_requests_stay_until_the_time_is_over_and_a_second_drain_may_shorten_it(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            d.source.gate.slow()
            answer = await d.source.router.submit(make_request("a", prompt(TOKENS), max_tokens=LONG), 1)
            await eventually(lambda: answer.started)
            drain(d.source, 10 * DEADLINE_S)
            await eventually(lambda: d.source.router.load.state == pb.STATE_DRAINING)
            assert not d.source.router.load.moving
            drain(d.source, 0)
            await eventually(lambda: d.source.router.load.moving)


class TestGivenBack:
    async def test_the_worker_ends_when_the_router_is_gone(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            await park(d)
            await d.source.router.__aexit__(None, None, None)
            await exited(d.source)

    async def test_a_request_may_be_aborted_while_it_is_parked(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            request = make_request("a", prompt(TOKENS), max_tokens=LONG)
            d.source.gate.slow()
            answer = await d.source.router.submit(request, 1)
            await eventually(lambda: answer.started)
            drain(d.source)
            d.source.gate.close()
            await d.source.router.park(1)
            await d.source.router.park(1)
            await d.source.router.abort(1)
            await eventually(lambda: not d.source.has(1))
            d.source.gate.open()
            await exited(d.source)
