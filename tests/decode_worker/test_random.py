"""A random mix of events: no token is wrong, and no request or page is lost."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from cpd.common.blocks import extend_hashes
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Request
from kvtransfer.local import LocalNetwork
from tests.engine.fakes import ROOT, expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import MAX_MODEL_LEN, fake_loader

REQUESTS = 60


@pytest.mark.parametrize("seed", range(6))
async def test_any_mix_of_routes_aborts_and_failures(redis_url: str, seed: int) -> None:
    rng = random.Random(seed)
    network = LocalNetwork()
    async with AsyncExitStack() as stack:
        prefills = [
            await stack.enter_async_context(
                running(
                    "prefill",
                    redis_url,
                    load=fake_loader(num_pages=rng.randint(70, 150), host_pages=100),
                    network=network,
                )
            )
            for _ in range(3)
        ]
        decode = await stack.enter_async_context(
            running(
                "combined", redis_url, load=fake_loader(num_pages=rng.randint(70, 200), host_pages=100), network=network
            )
        )
        router = await stack.enter_async_context(Client(decode))
        source = await stack.enter_async_context(
            running(
                "combined", redis_url, load=fake_loader(num_pages=rng.randint(70, 200), host_pages=100), network=network
            )
        )
        views = [await stack.enter_async_context(Client(worker)) for worker in (*prefills[1:], source)]
        await views[-1].done(*[await views[-1].submit(make_request(f"s{i}", prompt(300, i)), i) for i in range(3)])
        hint = pb.PrefixSource(worker_id=source.worker.id, address=source.session, blocks=18)
        requests = [_request(rng, number) for number in range(REQUESTS)]
        tasks = [
            asyncio.create_task(_ask(rng, router, request, number, prefills, hint))
            for number, request in enumerate(requests)
        ]
        stopping = asyncio.create_task(_stop_later(rng, router, prefills[0]))
        passing = asyncio.create_task(_come_and_go(rng, decode, prefills))
        await asyncio.gather(*tasks, stopping, passing)
        await router.balanced()
        for view in views:
            await view.balanced()


def _request(rng: random.Random, number: int) -> Request:
    shared = prompt(rng.choice([0, 100, 200, 300]), rng.randrange(3))
    own = prompt(rng.randint(1, 200), 3 + number)
    n = rng.choice([1, 1, 1, 2, 3])
    return make_request(f"r{number}", shared + own, seed=number, n=n, max_tokens=rng.choice([1, 2, 10, 60]))


async def _ask(
    rng: random.Random,
    router: Client,
    request: Request,
    number: int,
    prefills: list[Running],
    hint: pb.PrefixSource,
) -> None:
    """Acts as a router: reroutes a refused request with its tokens so far, or aborts it."""
    await asyncio.sleep(rng.random() * 0.5)
    candidates = [prefill.candidate for prefill in rng.sample(prefills, rng.randint(0, 3))]
    answer = await router.submit(
        request,
        number,
        candidates=candidates,
        long_prefill_tokens=rng.choice([0, 32, 150]),
        prefix_source=None if candidates else hint,
    )
    if rng.random() < 0.3:
        await asyncio.sleep(rng.random() * 0.1)
        await router.abort(number, rng.sample(range(request.n), rng.randint(0, request.n)))
        return
    await router.done(answer)
    for choice in range(request.n):
        await _finish(router, request, number, choice, answer)


async def _finish(router: Client, request: Request, number: int, choice: int, answer: Answer) -> None:
    want = expected(request, choice, MAX_MODEL_LEN)
    tokens, finish, attempt = answer.tokens.get(choice, []), answer.finish.get(choice), 10 * choice
    while finish is None:
        assert answer.refusal is not None
        assert answer.refusal.kind in (pb.Refusal.KIND_REROUTE, pb.Refusal.KIND_QUEUE_FULL), answer.refusal
        attempt += 1
        answer = await router.submit(_rest(request, choice, tokens), number, attempt=attempt)
        await router.done(answer)
        tokens, finish = tokens + answer.tokens.get(choice, []), answer.finish.get(choice)
    assert tokens == want.token_ids
    assert finish is want.finish is Finish.LENGTH


def _rest(request: Request, choice: int, tokens: list[int]) -> Request:
    token_ids = [*request.token_ids, *tokens]
    return replace(request, token_ids=token_ids, block_hashes=extend_hashes(ROOT, token_ids), first_choice=choice, n=1)


async def _stop_later(rng: random.Random, router: Client, prefill: Running) -> None:
    enough = rng.randrange(REQUESTS // 2)
    await eventually(lambda: sum(answer.started for answer in router.answers.values()) >= enough)
    await prefill.stop()


async def _come_and_go(rng: random.Random, decode: Running, prefills: list[Running]) -> None:
    """Another router. Its sessions end in the middle of requests."""
    for visit in range(4):
        async with Client(decode, router_id="another") as router:
            for number in range(5):
                candidates = [rng.choice(prefills).candidate]
                await router.submit(_request(rng, 100 + 10 * visit + number), number, candidates=candidates)
            await asyncio.sleep(rng.random() * 0.2)
