"""Requests whose prompt a prefill worker computes."""

import pytest

from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish
from tests.decode_worker.pair import TARGET, Stage, assert_right, pair, reached
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.cluster import running
from tests.worker.fakes import MAX_MODEL_LEN


async def test_a_long_prompt_is_computed_there_and_decoded_here(redis_url: str) -> None:
    request = make_request("a", prompt(300), max_tokens=20)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=0, prefill_worker=p.prefill.worker.id)
        assert answer.landed is not None
        assert (answer.landed.pages, answer.landed.waited_ms >= 0) == (19, True)
        await p.balanced()
        assert p.router.load.prefill_tokens == 0
        await eventually(lambda: p.prefill_view.load.prefill_tokens == 300)
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1})
        await eventually(lambda: dict(p.prefill_view.load.remote_prefills) == {"completed": 1})


async def test_a_short_prompt_is_computed_here(redis_url: str) -> None:
    request = make_request("a", prompt(32))
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1, long_prefill_tokens=32)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].prefill_worker == ""
        assert p.router.load.remote_prefills == {}


async def test_a_prompt_that_is_mostly_cached_is_computed_here(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        request = make_request("b", prompt(310), max_tokens=20)
        answer = await p.submit(request, 2)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=288)


async def test_only_missing_blocks_are_sent(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        request = make_request("b", prompt(300) + prompt(200, 3), max_tokens=20)
        answer = await p.submit(request, 2)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].cached_tokens == 288
        await p.balanced()
        await eventually(lambda: p.prefill_view.load.prefill_tokens == 300 + 500 - 288)


async def test_blocks_cached_by_the_prefill_worker_are_sent_too(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        async with running("combined", redis_url, network=p.network) as other, Client(other) as router:
            request = make_request("b", prompt(300), max_tokens=20)
            answer = await router.submit(request, 1, candidates=[p.prefill.candidate])
            await router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].cached_tokens == 288
            await router.balanced()


async def test_several_choices_share_one_remote_prefill(redis_url: str) -> None:
    request = make_request("a", prompt(200), max_tokens=20, n=4)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert {prefilled.prefill_worker for prefilled in answer.prefilled.values()} == {p.prefill.worker.id}
        await p.balanced()


@pytest.mark.parametrize("n", [1, 3])
async def test_first_tokens_that_are_the_last_cancel_the_push(redis_url: str, n: int) -> None:
    request = make_request("a", prompt(200), max_tokens=1, n=n)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        await p.balanced()
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1})


async def test_a_choice_that_ends_with_its_first_token_does_not_stop_the_others(redis_url: str) -> None:
    free = make_request("a", prompt(200), max_tokens=20, n=3)
    firsts = [expected(free, choice, MAX_MODEL_LEN).token_ids[0] for choice in range(3)]
    assert len(set(firsts)) == 3
    request = make_request("a", prompt(200), max_tokens=20, n=3, stop=[firsts[1]])
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert (answer.tokens[1], answer.finish[1]) == ([firsts[1]], Finish.STOP)
        await p.balanced()


async def test_a_replayed_request_is_prefilled_with_its_output(redis_url: str) -> None:
    want = expected(make_request("a", prompt(200), max_tokens=30), 0, MAX_MODEL_LEN)
    request = make_request("a", prompt(200) + want.token_ids[:13], prompt_len=200, max_tokens=30)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert answer.tokens[0] == want.token_ids[13:]
        assert answer.prefilled[0].prefill_worker == p.prefill.worker.id


async def test_equal_prompts_at_once_are_prefilled_once(redis_url: str) -> None:
    requests = [make_request(f"r{i}", [*prompt(300), i], seed=i, max_tokens=20) for i in range(10)]
    async with pair(redis_url) as p:
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(request, answer)
        await p.balanced()
        await eventually(lambda: p.prefill_view.load.prefill_tokens == 301)
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1})


async def test_many_prompts_are_served_with_few_pages(redis_url: str) -> None:
    requests = [make_request(f"r{i}", prompt(200 + i, i), max_tokens=30, n=1 + i % 2) for i in range(20)]
    async with pair(redis_url, prefill={"num_pages": 40}, decode={"num_pages": 70}) as p:
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(request, answer)
        await p.balanced()
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 20})


async def test_the_prefill_worker_tells_routers_which_of_their_requests_it_has(redis_url: str) -> None:
    async with reached(redis_url, Stage.QUEUED) as (p, answer):
        await eventually(lambda: TARGET in p.prefill_view.load.awaiting_first_token)
        p.prefill_gate.open()
        await p.router.done(answer)
        await eventually(lambda: not p.prefill_view.load.awaiting_first_token)
