"""Workers whose model goes to sleep while pages move between them."""

import asyncio
import time
from typing import Any

import pytest

from cpd.residency.snapshot import ModelState
from cpd.rpc import cpd_pb2 as pb
from tests.decode_worker import duo, pair
from tests.decode_worker.duo import TARGET, TOKENS, let_go
from tests.decode_worker.pair import assert_right
from tests.decode_worker.unsafe import Unsafe
from tests.engine.fakes import make_request, prompt
from tests.waiting import DEADLINE_S, eventually
from tests.worker.cluster import Running
from worker.context import EXIT_RESTART
from worker.sleeper import ResidencyError, Sleeper

SHARED: dict[str, Any] = {"device_memory": 1 << 30}
"""Settings of workers whose models can sleep."""


def sleeper(worker: Running) -> Sleeper:
    it = worker.worker._sleeper
    assert it is not None
    return it


async def falls_asleep(worker: Running) -> "asyncio.Task[int]":
    """Begins to put the model to sleep."""
    task = asyncio.create_task(sleeper(worker).sleep())
    await eventually(lambda: sleeper(worker).state is not ModelState.SERVING)
    return task


class TestRemotePrefill:
    @pytest.mark.parametrize(("n", "host_pages"), [(1, 0), (3, 200)])
    @pytest.mark.parametrize("stage", pair.Stage)
    async def test_the_decode_worker_sleeps_in_every_stage(
        self, redis_url: str, stage: pair.Stage, n: int, host_pages: int
    ) -> None:
        async with pair.reached(redis_url, stage, n=n, decode={"host_pages": host_pages}, **SHARED) as (p, answer):
            sleep = await falls_asleep(p.decode)
            p.decode_gate.open()
            if stage in (pair.Stage.RESERVING, pair.Stage.RESERVING_FIRST):  # the one ahead
                p.transfer_gate.set()
            await asyncio.wait_for(sleep, DEADLINE_S)
            await eventually(lambda: p.router.load.residency.state == pb.Residency.STATE_ASLEEP)
            await eventually(lambda: p.router.load.free_pages == p.router.hello.num_pages)
            sent = {choice: list(tokens) for choice, tokens in answer.tokens.items()}
            p.prefill_gate.open()
            p.transfer_gate.set()
            await p.prefill_view.balanced()
            assert answer.tokens == sent
            await sleeper(p.decode).wake()
            await p.router.done(answer)
            max_tokens = 700 if stage is pair.Stage.DECODING else 20
            assert_right(make_request("a", prompt(300), max_tokens=max_tokens, n=n), answer)
            again = make_request("again", prompt(400, 3), max_tokens=20)
            remote = await p.submit(again, 50)
            await p.router.done(remote)
            assert_right(again, remote)
            assert remote.prefilled[0].prefill_worker == p.prefill.worker.id
            await p.balanced()

    @pytest.mark.parametrize("stage", [stage for stage in pair.Stage if stage is not pair.Stage.CONNECTING])
    async def test_the_prefill_worker_sleeps_in_every_stage(self, redis_url: str, stage: pair.Stage) -> None:
        async with pair.reached(redis_url, stage, **SHARED) as (p, answer):
            sleep = await falls_asleep(p.prefill)
            p.prefill_gate.open()
            p.decode_gate.open()
            await asyncio.wait_for(sleep, DEADLINE_S)
            p.transfer_gate.set()
            await p.router.done(answer)
            if answer.refusal is not None:
                assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            else:
                assert_right(make_request("a", prompt(300), max_tokens=len(answer.tokens[0])), answer)
            await p.router.balanced()
            await eventually(lambda: p.prefill_view.load.free_pages == p.prefill_view.hello.num_pages)
            await sleeper(p.prefill).wake()
            again = make_request("again", prompt(400, 3), max_tokens=20)
            remote = await p.submit(again, 50)
            await p.router.done(remote)
            assert_right(again, remote)
            assert remote.prefilled[0].prefill_worker == p.prefill.worker.id
            await p.balanced()

    async def test_a_request_that_comes_meanwhile_is_computed_here_after_the_wake(self, redis_url: str) -> None:
        async with pair.pair(redis_url, **SHARED) as p:
            request = make_request("a", prompt(300), max_tokens=20)
            sleeper(p.decode).drain()
            draining = await p.submit(request, 1)
            await eventually(lambda: p.router.load.waiting == 1)
            await sleeper(p.decode).sleep()
            asleep = await p.submit(make_request("b", prompt(300, 5), max_tokens=20), 2)
            await eventually(lambda: p.router.load.waiting == 2)
            await sleeper(p.decode).wake()
            await p.router.done(draining, asleep)
            assert_right(request, draining)
            assert_right(make_request("b", prompt(300, 5), max_tokens=20), asleep)
            assert p.router.load.remote_prefills == {}
            await p.balanced()

    @pytest.mark.parametrize("drains", [True, False])
    async def test_a_prefill_worker_that_does_not_serve_refuses_and_is_known_to_be_needed(
        self, redis_url: str, drains: bool
    ) -> None:
        async with pair.pair(redis_url, **SHARED) as p:
            if drains:
                sleeper(p.prefill).drain()
            else:
                await sleeper(p.prefill).sleep()
            assert sleeper(p.prefill).facts(time.monotonic()).waiting == 0
            answer = await p.submit(make_request("a", prompt(300), max_tokens=20), 1)
            await p.router.done(answer)
            assert answer.refusal is not None
            assert "this worker's model sleeps" in answer.refusal.message
            facts = sleeper(p.prefill).facts(time.monotonic())
            assert (facts.waiting, facts.running) == (1, 0)


class TestQuarantine:
    async def test_pages_that_may_be_written_to_are_waited_for(self, redis_url: str) -> None:
        async with pair.pair(redis_url, **SHARED) as p:
            p.transfer_gate.clear()
            unsafe = Unsafe(p.decode)
            request = make_request("a", prompt(300), max_tokens=20)
            answer = await p.submit(request, 1)
            await p.waits_for_pages(answer)
            sleep = await falls_asleep(p.decode)
            await eventually(lambda: p.router.load.quarantined_pages > 0)
            assert not sleep.done()
            assert sleeper(p.decode)._memory.resident_bytes() > 0
            p.transfer_gate.set()
            unsafe.gone.set()
            assert await asyncio.wait_for(sleep, DEADLINE_S) == 0
            await sleeper(p.decode).wake()
            await p.router.done(answer)
            assert_right(request, answer)
            await p.balanced()

    async def test_if_they_do_not_come_back_the_process_restarts(self, redis_url: str) -> None:
        # a machine that stands still for longer than this makes the worker compute the prompt itself
        async with pair.pair(redis_url, prefill_progress_s=3.0, **SHARED) as p:
            p.transfer_gate.clear()
            Unsafe(p.decode)
            answer = await p.submit(make_request("a", prompt(300)), 1)
            await p.waits_for_pages(answer)
            sleep = await falls_asleep(p.decode)
            with pytest.raises(ResidencyError, match="pages were not free"):
                await sleep
            assert sleeper(p.decode)._memory.resident_bytes() > 0
            assert await p.decode.task == EXIT_RESTART
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE


class TestPrefixFetch:
    @pytest.mark.parametrize("stage", duo.Stage)
    async def test_the_worker_that_fetches_sleeps_in_every_stage(self, redis_url: str, stage: duo.Stage) -> None:
        async with duo.reached(redis_url, stage, **SHARED) as (d, answer):
            sleep = await falls_asleep(d.here.worker)
            d.here.gate.open()
            await asyncio.wait_for(sleep, DEADLINE_S)
            await eventually(lambda: d.here.router.load.free_pages == d.here.router.hello.num_pages)
            let_go(d)
            await d.source.router.balanced()
            await sleeper(d.here.worker).wake()
            await d.here.router.done(answer)
            assert_right(make_request("a", prompt(TOKENS), max_tokens=20), answer)
            await d.balanced()

    @pytest.mark.parametrize("stage", [duo.Stage.QUEUED, duo.Stage.RESERVING, duo.Stage.LANDED])
    async def test_the_worker_that_sends_sleeps_in_every_stage(self, redis_url: str, stage: duo.Stage) -> None:
        async with duo.reached(redis_url, stage, **SHARED) as (d, answer):
            sleep = await falls_asleep(d.source.worker)
            d.source.gate.open()
            d.here.gate.open()
            await asyncio.wait_for(sleep, DEADLINE_S)
            await d.here.router.done(answer)
            assert_right(make_request("a", prompt(TOKENS), max_tokens=20), answer)
            await d.here.router.balanced()
            let_go(d)
            await sleeper(d.source.worker).wake()
            await d.balanced()

    async def test_a_worker_that_drains_still_sends_its_blocks_and_one_that_sleeps_does_not(
        self, redis_url: str
    ) -> None:
        async with duo.duo(redis_url, **SHARED) as d:
            sleeper(d.source.worker).drain()
            answer = await d.submit(make_request("a", prompt(TOKENS), max_tokens=20), TARGET)
            await d.here.router.done(answer)
            assert answer.prefilled[0].prefix_worker == d.source.worker.id
            await sleeper(d.source.worker).sleep()
            other = make_request("b", prompt(TOKENS, 3), max_tokens=20)
            answer = await d.submit(other, 2)
            await d.here.router.done(answer)
            assert_right(other, answer)
            assert answer.prefilled[0].prefix_worker == ""


async def test_two_workers_that_prefill_for_each_other_sleep_at_once(redis_url: str) -> None:
    async with pair.pair(redis_url, **SHARED) as p:
        for gate in (p.prefill_gate, p.decode_gate):
            gate.slow()
        requests = [make_request(f"r{i}", prompt(300, i), max_tokens=20) for i in range(4)]
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await eventually(lambda: any(answer.started for answer in answers))
        await asyncio.gather(*(sleeper(worker).sleep() for worker in (p.prefill, p.decode)))
        p.prefill_gate.open()
        p.decode_gate.open()
        await asyncio.gather(*(sleeper(worker).wake() for worker in (p.prefill, p.decode)))
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            if answer.refusal is None:
                assert_right(request, answer)
            else:
                assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
        await p.balanced()
