"""Requests without prefill candidates."""

import pytest

from cpd.common.process import EXIT_DRAINED
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish
from kvtransfer.local import LocalNetwork
from tests.engine.fakes import expected, make_request, prompt
from tests.secret import SECRET, secret_file
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.cluster import running
from tests.worker.fakes import MAX_MODEL_LEN, Gate, fake_loader


async def test_tokens_are_right_and_pages_come_back(redis_url: str) -> None:
    requests = [make_request(f"r{i}", prompt(10 + 7 * i, i), max_tokens=5 + i, n=1 + i % 3) for i in range(12)]
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        answers = [await client.submit(request, i) for i, request in enumerate(requests)]
        await client.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            for choice in range(request.n):
                want = expected(request, choice, MAX_MODEL_LEN)
                assert answer.tokens[choice] == want.token_ids
                assert answer.finish[choice] is want.finish
                assert answer.prefilled[choice].prefill_worker == ""
        await client.balanced()


async def test_hello_describes_the_worker(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        assert client.hello.worker_id == worker.worker.id
        assert client.hello.role == pb.ROLE_COMBINED
        assert client.hello.state == pb.STATE_READY
        assert (client.hello.num_pages, client.hello.page_bytes, client.hello.block_size) == (256, 128, 16)
        assert client.hello.max_num_seqs == 64  # so that each can advance in a step of 64 tokens
        assert client.hello.epoch > 0


async def test_the_cache_is_used_and_reported(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        await client.done(await client.submit(make_request("a", prompt(100)), 1))
        second = await client.submit(make_request("b", prompt(100)), 2)
        await client.done(second)
        assert second.prefilled[0].cached_tokens == 96
        blocks = {block_hash[:8] for block_hash in make_request("c", prompt(100)).block_hashes}
        await eventually(lambda: blocks <= client.cached.keys())


async def test_a_replayed_request_continues_after_the_output_so_far(redis_url: str) -> None:
    want = expected(make_request("a", prompt(40), max_tokens=12), 0, MAX_MODEL_LEN)
    replay = make_request("a", prompt(40) + want.token_ids[:5], prompt_len=40, max_tokens=12)
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        answer = await client.submit(replay, 1, attempt=3)
        await client.done(answer)
        assert answer.tokens[0] == want.token_ids[5:]
        assert answer.finish[0] is Finish.LENGTH


async def test_invalid_requests_are_refused_with_the_reason(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        answer = await client.submit(make_request("a", prompt(MAX_MODEL_LEN)), 1)
        await client.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_FAILED
        assert "context" in answer.refusal.message


async def test_a_full_queue_refuses_with_a_retry_time(redis_url: str) -> None:
    gate = Gate()
    async with (
        running(
            "combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait), max_queue_tokens=100
        ) as worker,
        Client(worker) as client,
    ):
        gate.close()
        answers = [await client.submit(make_request(f"r{i}", prompt(60, i), max_tokens=2), i) for i in range(10)]
        await eventually(lambda: gate.held)
        gate.open()
        await client.done(*answers)
        refused = [answer.refusal for answer in answers if answer.refusal]
        assert refused
        assert {refusal.kind for refusal in refused} == {pb.Refusal.KIND_QUEUE_FULL}
        assert all(refusal.retry_after_ms > 0 for refusal in refused)
        await client.balanced()


async def test_aborted_requests_and_choices_send_nothing_more_and_free_their_pages(redis_url: str) -> None:
    gate = Gate()
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait)) as worker,
        Client(worker) as client,
    ):
        gate.slow()
        whole = await client.submit(make_request("a", prompt(40), max_tokens=900), 1)
        parts = await client.submit(make_request("b", prompt(50, 2), max_tokens=900, n=3), 2)
        await eventually(lambda: whole.started and len(parts.tokens) == 3)
        await client.abort(1)
        await client.abort(2, [0, 2])
        await eventually(lambda: client.load.running == 1)
        await client.abort(2, [1])
        await client.balanced()
        assert not whole.done
        assert not parts.done


async def test_an_abort_of_an_unknown_request_is_ignored(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        await client.abort(7)
        await client.done(await client.submit(make_request("a", prompt(20)), 7))
        await client.abort(7)
        await client.done(await client.submit(make_request("b", prompt(20)), 8))


async def test_an_abort_directly_after_the_submit_ends_the_request(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as client:
        for number in range(20):
            await client.submit(make_request(f"r{number}", prompt(40, number), max_tokens=900), number)
            await client.abort(number)
        await client.balanced()


async def test_the_end_of_a_session_aborts_its_requests_only(redis_url: str) -> None:
    async with (
        running("combined", redis_url, network=LocalNetwork()) as worker,
        Client(worker, router_id="stays") as stays,
    ):
        request = make_request("a", prompt(40), max_tokens=100)
        mine = await stays.submit(request, 1)
        async with Client(worker, router_id="leaves") as leaves:
            await leaves.submit(make_request("a", prompt(40), max_tokens=900), 1)
            await eventually(lambda: leaves.answers[1, 0].started)
        await stays.done(mine)
        assert mine.tokens[0] == expected(request, 0, MAX_MODEL_LEN).token_ids
        await stays.balanced()


async def test_a_new_session_of_the_same_router_supersedes_the_old_one(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as old:
        await old.submit(make_request("a", prompt(40), max_tokens=900), 1)
        await eventually(lambda: old.answers[1, 0].started)
        async with Client(worker) as new:
            answer = await new.submit(make_request("b", prompt(20)), 1)
            await new.done(answer)
            await new.balanced()
            await eventually(lambda: old.broken is not None)


async def test_all_tokens_of_a_step_come_in_one_message(redis_url: str) -> None:
    gate = Gate()
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait)) as worker,
        Client(worker) as client,
    ):
        gate.close()
        answers = [await client.submit(make_request(f"r{i}", prompt(2, i), max_tokens=4), i) for i in range(8)]
        await eventually(lambda: client.load.waiting + client.load.running == 8 or gate.held)
        gate.open()
        await client.done(*answers)
        steps = [message.step for message in client.messages if message.WhichOneof("kind") == "step"]
        assert max(len(step.outputs) for step in steps) >= 7


async def test_a_draining_worker_finishes_and_accepts_nothing_new(redis_url: str) -> None:
    gate = Gate()
    loader = fake_loader(before_step=gate.wait)
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=loader) as worker,
        Client(worker) as client,
    ):
        gate.slow()
        request = make_request("a", prompt(40), max_tokens=400)
        first = await client.submit(request, 1)
        await eventually(lambda: first.started)
        gate.close()
        await client.drain()
        await eventually(lambda: client.load.state == pb.STATE_DRAINING)
        second = await client.submit(make_request("b", prompt(20)), 2)
        await client.done(second)
        assert second.refusal is not None
        assert second.refusal.kind == pb.Refusal.KIND_REROUTE
        gate.open()
        await client.done(first)
        assert first.tokens[0] == expected(request, 0, MAX_MODEL_LEN).token_ids
        assert await worker.task == EXIT_DRAINED


async def test_a_stopping_worker_reroutes_its_requests(redis_url: str) -> None:
    gate = Gate()
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=fake_loader(before_step=gate.wait)) as worker,
        Client(worker) as client,
    ):
        gate.slow()
        answer = await client.submit(make_request("a", prompt(40), max_tokens=900), 1)
        await eventually(lambda: answer.started)
        assert await worker.stop() == 0
        await client.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_session_without_the_secret_is_refused(redis_url: str, token: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork(), secret_file=secret_file()) as worker:
        async with Client(worker, token=token) as client:
            assert client.hello.worker_id == ""
        async with Client(worker, token=SECRET) as client:
            assert client.hello.worker_id == worker.worker.id
