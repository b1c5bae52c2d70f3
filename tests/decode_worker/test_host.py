"""Prompts with some blocks in a worker's host memory and the rest on another worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.rpc import cpd_pb2 as pb
from decode_worker.remote_prefill import RemotePrefillState
from tests.decode_worker.duo import CACHED, TOKENS, Duo, duo
from tests.decode_worker.pair import TARGET, Pair, assert_right, eventually_started, pair
from tests.engine.fakes import FakeHostMemory, make_request, prompt, states_of
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.cluster import Running, running

NUM_PAGES = 64
"""Size of the pool. It has room for the prompt that evicts the first one."""
OFFLOADED = CACHED // BLOCK_SIZE
"""Number of blocks of the prompt that are only in host memory."""

LONGER = prompt(TOKENS) + prompt(200, 3)
"""A longer prompt that begins with the first one."""


def _count_pages(worker: Running) -> list[int]:
    """Records the number of pages of each landing from now on."""
    counts: list[int] = []
    expect = worker.worker._transport.expect

    def counted(reservation: int, generation: int, pages: list[int]) -> object:
        counts.append(len(pages))
        return expect(reservation, generation, pages)

    worker.worker._transport.expect = counted  # type: ignore[assignment, method-assign]
    return counts


async def _serve_and_evict(router: Client) -> None:
    for number, token_ids in ((1001, prompt(TOKENS)), (1002, prompt(1010, 5))):
        await router.done(await router.submit(make_request(str(number), token_ids), number))


@asynccontextmanager
async def _offloaded_here(redis_url: str, **settings: Any) -> AsyncIterator[tuple[Pair, FakeHostMemory, list[int]]]:
    """The decode worker has the prompt in host memory. The list records the pages of each later landing."""
    hosts: list[FakeHostMemory] = []
    decode = {"num_pages": NUM_PAGES, "host_pages": 200, "on_host": hosts.append}
    async with pair(redis_url, decode=decode, **settings) as p:
        await _serve_and_evict(p.router)
        yield p, hosts[0], _count_pages(p.decode)


async def test_routers_know_in_which_tier_a_block_is_from_events_and_from_a_snapshot(redis_url: str) -> None:
    async with _offloaded_here(redis_url) as (p, host, _):
        short = make_request("short", prompt(BLOCK_SIZE * 2))
        hashes = [block_hash[:8] for block_hash in make_request("", prompt(TOKENS)).block_hashes[:OFFLOADED]]
        assert p.router.hello.host_page_ms == host.slot_ms
        await eventually(lambda: {p.router.cached.get(block_hash) for block_hash in hashes} == {pb.TIER_HOST})
        await p.router.done(await p.router.submit(short, 1003))
        await eventually(lambda: [p.router.cached[block_hash] for block_hash in hashes].count(pb.TIER_PAGES) == 2)
        async with Client(p.decode, router_id="another") as late:
            assert late.cached == p.router.cached


class TestFromAPrefillWorker:
    async def test_blocks_in_host_memory_are_not_sent(self, redis_url: str) -> None:
        request = make_request("a", LONGER, max_tokens=20)
        async with _offloaded_here(redis_url) as (p, _, moved):
            answer = await p.submit(request, TARGET)
            await p.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED, prefill_worker=p.prefill.worker.id)
            assert moved == [blocks_for(len(LONGER)) - OFFLOADED]
            await p.balanced()
            await eventually(lambda: p.router.load.host_blocks["loaded"] == OFFLOADED)

    async def test_a_damaged_block_and_its_successors_are_sent(self, redis_url: str) -> None:
        request, good = make_request("a", LONGER, max_tokens=20), 2
        async with _offloaded_here(redis_url) as (p, host, moved):
            content = states_of(LONGER)[good * BLOCK_SIZE : (good + 1) * BLOCK_SIZE]
            host.damaged.add(host.slots.index(content))
            answer = await p.submit(request, TARGET)
            await p.router.done(answer)
            assert_right(request, answer)
            assert moved == [blocks_for(len(LONGER)) - good]
            await p.balanced()
            await eventually(lambda: p.router.load.host_blocks["damaged"] == 1)

    async def test_with_too_few_pages_everything_is_sent(self, redis_url: str) -> None:
        request, ahead = make_request("a", LONGER, max_tokens=20), make_request("ahead", prompt(900, 9), max_tokens=2)
        async with _offloaded_here(redis_url) as (p, host, moved):
            host.by_hand = True
            p.transfer_gate.clear()
            before = await p.submit(ahead, 2)
            await eventually_started(before)
            answer = await p.submit(request, TARGET)
            await eventually(lambda: p.states() == [RemotePrefillState.LANDED, RemotePrefillState.RESERVING])
            p.transfer_gate.set()
            await p.router.done(before, answer)
            assert_right(ahead, before)
            assert_right(request, answer)
            assert not host.copying
            assert moved == [blocks_for(900), blocks_for(len(LONGER))]
            await p.balanced()

    async def test_a_request_that_waits_for_the_copy_delays_no_other(self, redis_url: str) -> None:
        request, other = make_request("a", LONGER, max_tokens=20), make_request("b", prompt(200, 9), max_tokens=20)
        async with _offloaded_here(redis_url, token_budget=1024) as (p, host, moved):
            host.by_hand = True
            answer = await p.submit(request, TARGET)
            await eventually_started(answer)  # from then on it waits only for its pages
            await eventually(lambda: host.copying)
            passing = await p.submit(other, 2)
            await p.router.done(passing)
            assert_right(other, passing)
            assert not answer.done
            host.finish()
            await p.router.done(answer)
            assert_right(request, answer)
            assert moved == [blocks_for(200), blocks_for(len(LONGER)) - OFFLOADED]
            await p.balanced()

    async def test_an_abort_does_not_wait_for_the_copy(self, redis_url: str) -> None:
        async with _offloaded_here(redis_url) as (p, host, moved):
            host.by_hand = True
            await p.submit(make_request("a", LONGER, max_tokens=20), TARGET)
            await eventually(lambda: host.copying)
            await p.router.abort(TARGET)
            await eventually(lambda: dict(p.router.load.remote_prefills) == {"cancelled": 1})
            await p.prefill_view.balanced()
            assert host.copying
            host.finish()
            await p.balanced()
            assert moved == []
            again = make_request("again", prompt(TOKENS), max_tokens=20)
            answer = await p.router.submit(again, 3)
            await p.router.done(answer)
            assert_right(again, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED)
            assert not host.copying, "the blocks copied back for the other request are in the cache"

    async def test_the_decode_worker_ends_during_the_copy(self, redis_url: str) -> None:
        async with _offloaded_here(redis_url) as (p, host, _):
            host.by_hand = True
            answer = await p.submit(make_request("a", LONGER, max_tokens=20), TARGET)
            await eventually(lambda: host.copying)
            assert await p.decode.stop() == 0
            await p.router.done(answer)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            await p.prefill_view.balanced()


@asynccontextmanager
async def _some_offloaded_here(redis_url: str) -> AsyncIterator[tuple[Duo, FakeHostMemory, list[int]]]:
    """The prompt is in another worker's cache, and its first six blocks are in this one's host memory."""
    hosts: list[FakeHostMemory] = []
    here = {"num_pages": NUM_PAGES, "host_pages": 200, "on_host": hosts.append}
    async with duo(redis_url, here=here) as d:
        for number, token_ids in ((1001, prompt(100)), (1002, prompt(1010, 5))):
            await d.here.serve(make_request(str(number), token_ids), number)
        yield d, hosts[0], _count_pages(d.here.worker)


class TestFromAnotherCache:
    async def test_blocks_in_host_memory_are_not_sent(self, redis_url: str) -> None:
        request = make_request("a", prompt(TOKENS), max_tokens=20)
        async with _some_offloaded_here(redis_url) as (d, _, moved):
            answer = await d.submit(request, TARGET)
            await d.here.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED, prefix_worker=d.source.worker.worker.id)
            assert moved == [OFFLOADED - 6]
            await d.balanced()

    async def test_an_abort_does_not_wait_for_the_copy(self, redis_url: str) -> None:
        async with _some_offloaded_here(redis_url) as (d, host, moved):
            host.by_hand = True
            await d.submit(make_request("a", prompt(TOKENS), max_tokens=20), TARGET)
            await eventually(lambda: host.copying)
            await d.here.router.abort(TARGET)
            await eventually(lambda: dict(d.here.router.load.prefix_fetches) == {"cancelled": 1})
            await d.source.router.balanced()
            assert host.copying
            host.finish()
            await d.balanced()
            assert moved == []


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_prefill_worker_computes_only_what_its_host_memory_lacks(redis_url: str, by_hand: bool) -> None:
    hosts: list[FakeHostMemory] = []
    prefill = {"num_pages": NUM_PAGES, "host_pages": 200, "on_host": hosts.append}
    async with pair(redis_url, prefill=prefill) as p:
        for number, token_ids in ((1001, prompt(TOKENS)), (1002, prompt(1010, 5))):
            await p.router.done(await p.submit(make_request(str(number), token_ids), number))
        await p.balanced()
        async with running("combined", redis_url, network=p.network) as other, Client(other) as router:
            hosts[0].by_hand = by_hand
            request = make_request("b", prompt(TOKENS), max_tokens=20)
            answer = await router.submit(request, TARGET, candidates=[p.prefill.candidate])
            if by_hand:
                await eventually(lambda: hosts[0].copying)
                hosts[0].finish()
            await router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=CACHED, prefill_worker=p.prefill.worker.id)
            await router.balanced()
            await p.balanced()
            await eventually(lambda: p.prefill_view.load.prefill_tokens == TOKENS + 1010 + TOKENS - CACHED)
            assert p.prefill_view.load.host_blocks["loaded"] == OFFLOADED
