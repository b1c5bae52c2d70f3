"""Requests whose first blocks are in another decode worker's cache."""

import asyncio

import pytest

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.process import EXIT_DRAINED
from cpd.rpc import cpd_pb2 as pb
from decode_worker.remote_prefill import RemotePrefillState
from tests.decode_worker.duo import CACHED, TARGET, TOKENS, Duo, Stage, duo, let_go, reached
from tests.decode_worker.pair import assert_right
from tests.decode_worker.unsafe import Unsafe
from tests.engine.fakes import expected, make_request, prompt
from tests.faults.points import Action, Point
from tests.faults.transport import FaultyNetwork
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.fakes import MAX_MODEL_LEN


class TestPrefixFetch:
    async def test_blocks_cached_by_another_worker_are_not_computed(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url) as d:
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED, prefix_worker=d.source.worker.worker.id)
            assert answer.fetched is not None
            assert (answer.fetched.pages, answer.fetched.waited_ms > 0) == (CACHED // BLOCK_SIZE, True)
            assert answer.landed is None
            await d.balanced()
            await eventually(lambda: d.here.router.load.prefill_tokens == TOKENS - CACHED)
            await eventually(lambda: dict(d.here.router.load.prefix_fetches) == {"completed": 1})
            await eventually(lambda: dict(d.source.router.load.prefix_fetches) == {"served": 1})
            assert d.source.router.load.prefill_tokens == TOKENS

    async def test_fetched_blocks_are_in_this_workers_cache(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            await d.here.router.done(await d.submit(make_request("a", prompt(TOKENS)), 1))
            request = make_request("b", prompt(TOKENS), seed=3, max_tokens=20)
            answer = await d.submit(request, 2)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED)
            assert dict(d.here.router.load.prefix_fetches) == {"completed": 1}

    async def test_only_missing_blocks_are_sent(self, redis_url: str) -> None:
        sent: list[int] = []
        async with duo(redis_url) as d:
            await d.here.serve(make_request("short", prompt(100)), 1)
            expect = d.here.worker.worker._transport.expect

            def counted(reservation: int, generation: int, pages: list[int]) -> object:
                sent.append(len(pages))
                return expect(reservation, generation, pages)

            d.here.worker.worker._transport.expect = counted  # type: ignore[assignment, method-assign]
            request = make_request("a", prompt(TOKENS), max_tokens=20)
            answer = await d.submit(request, 2)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert sent == [CACHED // BLOCK_SIZE - 100 // BLOCK_SIZE]
            await d.balanced()

    async def test_a_completely_cached_prompt_recomputes_one_token(self, redis_url: str) -> None:
        request = make_request("a", prompt(CACHED), max_tokens=20)
        async with duo(redis_url) as d:
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].cached_tokens == CACHED - 1
            await d.balanced()

    async def test_blocks_evicted_there_come_from_its_host_memory(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, source={"num_pages": 64, "host_pages": 100}) as d:
            await d.source.serve(make_request("evicts", prompt(1010, 5), max_tokens=8), 1)
            answer = await d.submit(request, 2)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED, prefix_worker=d.source.worker.worker.id)
            await d.balanced()
            await eventually(lambda: d.source.router.load.host_blocks["loaded"] == CACHED // BLOCK_SIZE)

    async def test_several_choices_share_one_fetch(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20, n=3)
        async with duo(redis_url) as d:
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            await d.balanced()
            assert dict(d.here.router.load.prefix_fetches) == {"completed": 1}

    async def test_equal_prefixes_at_once_are_fetched_once(self, redis_url: str) -> None:
        requests = [make_request(f"r{i}", prompt(TOKENS), seed=i, max_tokens=20) for i in range(5)]
        async with duo(redis_url) as d:
            answers = [await d.submit(request, i) for i, request in enumerate(requests)]
            await d.here.router.done(*answers)
            for request, answer in zip(requests, answers, strict=True):
                assert_right(request, answer)
            await d.balanced()
            assert dict(d.here.router.load.prefix_fetches) == {"completed": 1}

    async def test_a_request_without_a_hint_waits_for_a_fetch_of_its_prefix(self, redis_url: str) -> None:
        async with reached(redis_url, Stage.LANDED) as (d, answer):
            request = make_request("b", prompt(TOKENS), seed=3, max_tokens=20)
            other = await d.here.router.submit(request, 2)
            await eventually(lambda: d.here.router.load.waiting == 2)
            let_go(d)
            await d.here.router.done(answer, other)
            assert_right(request, other)
            assert other.prefilled[0].cached_tokens == CACHED
            await d.balanced()

    @pytest.mark.parametrize("num_pages", [256, 44, 40])
    async def test_two_workers_fetch_from_each_other_at_once(self, redis_url: str, num_pages: int) -> None:
        """Also with pools that have pages for nothing else."""
        async with duo(redis_url, here={"num_pages": num_pages}, source={"num_pages": num_pages}) as d:
            await d.here.serve(make_request("there", prompt(TOKENS, 5)), 1)
            d.here.pushes.clear()
            d.source.pushes.clear()
            ours = make_request("ours", prompt(TOKENS), max_tokens=10)
            theirs = make_request("theirs", prompt(TOKENS, 5), max_tokens=10)
            answer = await d.submit(ours, 2)
            other = await d.source.router.submit(theirs, 2, prefix_source=d.here.hint())
            if num_pages == 256:
                await eventually(lambda: d.here.states() == d.source.states() == [RemotePrefillState.LANDED])
            let_go(d)
            await d.here.router.done(answer)
            await d.source.router.done(other)
            assert_right(ours, answer)
            assert_right(theirs, other)
            await d.balanced()


class TestWithoutPrefixFetch:
    """If the prefix does not arrive, or only a part of it, the rest is computed."""

    async def test_a_short_prefix_is_computed_and_not_fetched(self, redis_url: str) -> None:
        request = make_request("a", prompt(32), max_tokens=20)
        async with duo(redis_url) as d:
            answer = await d.submit(request, 1, d.source.hint(2))
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled()
            assert dict(d.here.router.load.prefix_fetches) == {}

    async def test_a_cached_prefix_is_not_fetched(self, redis_url: str) -> None:
        async with duo(redis_url) as d:
            await d.here.serve(make_request("short", prompt(100)), 1)
            request = make_request("a", prompt(TOKENS), max_tokens=20)
            answer = await d.submit(request, 2, d.source.hint(6))
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=96)
            assert dict(d.here.router.load.prefix_fetches) == {}

    async def test_it_was_evicted(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, source={"num_pages": 64}) as d:
            await d.source.serve(make_request("evicts", prompt(1010, 5), max_tokens=8), 1)
            answer = await d.submit(request, 2)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled()
            await d.balanced()
            await eventually(lambda: dict(d.here.router.load.transfer_failures) == {"refused": 1})
            assert dict(d.here.router.load.prefix_fetches) == {"failed": 1}

    async def test_a_part_of_it_was_evicted(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, source={"num_pages": 66}) as d:
            await d.source.serve(make_request("evicts", prompt(800, 5)), 1)
            answer = await d.submit(request, 2)
            await d.here.router.done(answer)
            assert_right(request, answer)
            cached = answer.prefilled[0].cached_tokens
            assert 0 < cached < CACHED
            await d.balanced()
            await eventually(lambda: d.here.router.load.prefill_tokens == TOKENS - cached)
            assert dict(d.here.router.load.prefix_fetches) == {"completed": 1}

    async def test_pinned_blocks_are_not_evicted(self, redis_url: str) -> None:
        """Another request needs nearly the whole pool of the other worker."""
        async with duo(redis_url, source={"num_pages": 66}) as d:
            d.source.pushes.clear()
            request = make_request("a", prompt(TOKENS), max_tokens=20)
            answer = await d.submit(request, 1)
            await eventually(lambda: d.here.states() == [RemotePrefillState.LANDED])
            evicts = await d.source.router.submit(make_request("evicts", prompt(1000, 5)), 2)
            await eventually(lambda: d.source.router.load.waiting == 1)
            d.source.pushes.set()
            await d.here.router.done(answer)
            await d.source.router.done(evicts)
            assert_right(request, answer)
            assert answer.prefilled[0].cached_tokens == CACHED
            await d.balanced()

    async def test_there_are_no_pages_for_it_here(self, redis_url: str) -> None:
        """A request does not wait for pages while it pins the cache of another worker."""
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, here={"num_pages": 34}) as d:
            d.here.gate.slow()
            busy = await d.here.router.submit(make_request("busy", prompt(300, 5), max_tokens=230), 1)
            await eventually(lambda: busy.started)
            answer = await d.submit(request, 2)
            await eventually(lambda: dict(d.here.router.load.prefix_fetches) == {"cancelled": 1})
            await d.source.router.balanced()
            d.here.gate.open()
            await d.here.router.done(busy, answer)
            assert_right(request, answer)
            await d.balanced()

    async def test_other_weights(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, source={"fingerprint": b"another model"}) as d:
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert dict(d.here.router.load.prefix_fetches) == {"failed": 1}
            await d.balanced()

    async def test_a_worker_that_drains_still_provides_its_cache(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url) as d:
            await _hold_in_decoding(d)
            await d.source.router.drain()
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].prefix_worker == d.source.worker.worker.id
            d.source.gate.open()

    async def test_a_draining_worker_finishes_fetches_under_way(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with reached(redis_url, Stage.LANDED) as (d, answer):
            await d.source.router.drain()
            await eventually(lambda: d.source.router.load.state == pb.STATE_DRAINING)
            let_go(d)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].cached_tokens == CACHED
            assert await asyncio.wait_for(asyncio.shield(d.source.worker.task), 20) == EXIT_DRAINED

    async def test_it_takes_too_long(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url, prefill_progress_s=0.5) as d:
            d.source.pushes.clear()
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled()
            await eventually(lambda: dict(d.here.router.load.prefix_fetches) in ({"cancelled": 1}, {"failed": 1}))
            await d.balanced()

    @pytest.mark.parametrize(
        ("point", "k", "action", "reason"),
        [
            (Point.CONNECT, 0, Action.FAIL, "transfer"),
            (Point.PAGE, 0, Action.FAIL, "transfer"),
            (Point.PAGE, 7, Action.FAIL, "transfer"),
            (Point.LANDED, 0, Action.FAIL, "transfer"),
            (Point.LANDED, 0, Action.CORRUPT, "damaged"),
        ],
    )
    async def test_a_transfer_fault_is_counted_and_its_pages_are_not_used(
        self, redis_url: str, point: Point, k: int, action: Action, reason: str
    ) -> None:
        request, network = make_request("a", prompt(TOKENS), max_tokens=20), FaultyNetwork()
        async with duo(redis_url, network=network) as d:
            network.points.arm(point, action, k)
            answer = await d.submit(request, 1)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled()
            await d.balanced()
            await eventually(lambda: dict(d.here.router.load.transfer_failures) == {reason: 1})
            assert dict(d.here.router.load.prefix_fetches) == {"failed": 1}

    async def test_pages_that_may_still_be_written_are_quarantined(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with duo(redis_url) as d:
            unsafe = Unsafe(d.here.worker)
            d.source.pushes.clear()
            answer = await d.submit(request, 1)
            await eventually(lambda: d.here.states() == [RemotePrefillState.LANDED])
            await d.source.worker.stop()
            await d.here.router.done(answer)
            assert_right(request, answer)
            await eventually(lambda: d.here.router.load.quarantined_pages == CACHED // BLOCK_SIZE)
            unsafe.gone.set()
            await d.here.router.balanced()


class TestEnds:
    """A client or worker goes away during a prefix fetch: nothing hangs, and every page is freed."""

    @pytest.mark.parametrize("stage", Stage)
    async def test_the_request_is_aborted(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (d, answer):
            await d.here.router.abort(TARGET)
            await eventually(lambda: not d.here.has(TARGET))
            let_go(d)
            await d.balanced()
            assert not answer.started

    @pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.RESERVING, Stage.LANDED])
    async def test_one_choice_is_aborted(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage, n=2) as (d, answer):
            await d.here.router.abort(TARGET, [0])
            let_go(d)
            await eventually(lambda: 1 in answer.finish)
            want = expected(make_request("a", prompt(TOKENS), max_tokens=20, n=2), 1, MAX_MODEL_LEN)
            assert answer.tokens[1] == want.token_ids
            await d.balanced()

    @pytest.mark.parametrize("stage", Stage)
    async def test_the_session_ends(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (d, _):
            await d.here.router.__aexit__()
            let_go(d)
            async with Client(d.here.worker, router_id="other") as other:
                await other.balanced()
            await d.source.router.balanced()

    @pytest.mark.parametrize("stage", Stage)
    async def test_the_other_worker_ends(self, monkeypatch: pytest.MonkeyPatch, redis_url: str, stage: Stage) -> None:
        monkeypatch.setattr("decode_worker.remote_prefill.SILENT_S", 0.5)
        monkeypatch.setattr("worker.prefill_server.HEARTBEAT_S", 0.1)
        async with reached(redis_url, stage) as (d, answer):
            stopping = asyncio.create_task(d.source.worker.stop())
            d.source.gate.open()
            await stopping
            d.here.gate.open()
            await d.here.router.done(answer)
            assert_right(make_request("a", prompt(TOKENS), max_tokens=20), answer)
            await d.here.router.balanced()
            ended = dict(d.here.router.load.prefix_fetches)
            assert ended == {"failed": 1} or (stage is Stage.QUEUED and ended == {"completed": 1})

    @pytest.mark.parametrize("stage", Stage)
    async def test_this_worker_ends(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (d, answer):
            stopping = asyncio.create_task(d.here.worker.stop())
            d.here.gate.open()
            await stopping
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            let_go(d)
            await d.source.router.balanced()


async def _hold_in_decoding(d: Duo) -> None:
    d.source.gate.slow()
    busy = await d.source.router.submit(make_request("busy", prompt(20, 7), max_tokens=900), 2000)
    await eventually(lambda: busy.started)
