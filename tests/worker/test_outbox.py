import asyncio

import pytest

from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Output, TokenLogprobs
from worker.outbox import MESSAGES_PER_BATCH, OUTPUTS_PER_MESSAGE, Outbox


def tokens(*token_ids: int, choice: int = 0, finish: Finish | None = None) -> Output:
    """New tokens of a choice."""
    return Output("", choice, list(token_ids), [], finish)


async def taken(outbox: Outbox) -> list[pb.WorkerMessage]:
    """What waits, out of its batch."""
    [message] = await outbox.take()
    assert message.WhichOneof("kind") == "batch"
    return list(message.batch.messages)


async def test_results_keep_their_order_and_neighbours_share_a_message() -> None:
    outbox = Outbox()
    outbox.put_output(1, 0, tokens())
    outbox.put_output(2, 0, tokens())
    outbox.put_refusal(pb.Refusal(request=3))
    outbox.put_output(4, 0, tokens())
    first, second, third = await taken(outbox)
    assert [output.request for output in first.step.outputs] == [1, 2]
    assert second.refusal.request == 3
    assert [output.request for output in third.step.outputs] == [4]


async def test_outputs_of_a_choice_merge_while_they_wait() -> None:
    outbox = Outbox()
    outbox.put_output(1, 0, tokens(1), pb.Prefilled(cached_tokens=16))
    outbox.put_output(1, 0, tokens(8, choice=1))
    outbox.put_output(1, 1, tokens(9))
    outbox.put_output(1, 0, Output("", 0, [2], [TokenLogprobs(-1.0, [(2, -1.0)])]))
    outbox.put_output(1, 0, tokens(3, finish=Finish.STOP))
    [message] = await outbox.take()
    merged, other_choice, other_attempt = message.step.outputs
    assert (list(merged.token_ids), merged.finish, len(merged.logprobs)) == ([1, 2, 3], pb.FINISH_STOP, 1)
    assert (list(merged.logprobs[0].top_ids), merged.logprobs[0].logprob) == ([2], -1)
    assert merged.prefilled.cached_tokens == 16
    assert (list(other_choice.token_ids), list(other_attempt.token_ids)) == ([8], [9])
    outbox.put_output(1, 0, tokens(4))
    [message] = await outbox.take()
    assert [output.token_ids for output in message.step.outputs] == [[4]]


async def test_messages_stay_small_however_far_the_router_is_behind() -> None:
    outbox = Outbox()
    for request in range(2 * OUTPUTS_PER_MESSAGE + 1):
        outbox.put_output(request, 0, tokens())
    sizes = [len(message.step.outputs) for message in await taken(outbox)]
    assert sizes == [OUTPUTS_PER_MESSAGE, OUTPUTS_PER_MESSAGE, 1]


async def test_only_the_latest_load_is_sent() -> None:
    outbox = Outbox()
    outbox.put_load(pb.Load(running=1))
    outbox.put_load(pb.Load(running=2))
    assert await outbox.take() == [pb.WorkerMessage(load=pb.Load(running=2))]


async def test_events_that_a_snapshot_holds_are_forgotten() -> None:
    outbox = Outbox(max_pending_hashes=2)
    for number in range(1, 4):
        outbox.put_cache(pb.CacheEvents(number=number, events=[pb.CacheEvent(hashes=bytes(8))]))
    assert outbox.overfull()
    outbox.forget_cache(2)
    assert not outbox.overfull()
    assert [message.cache.number for message in await outbox.take()] == [3]


async def test_what_waits_goes_in_batches_of_bounded_size() -> None:
    outbox = Outbox()
    outbox.put_load(pb.Load(running=1))
    outbox.put_output(1, 0, tokens())
    for number in range(MESSAGES_PER_BATCH):
        outbox.put_cache(pb.CacheEvents(number=number))
    first, second = await outbox.take()
    kinds = [message.WhichOneof("kind") for message in first.batch.messages]
    assert kinds == ["step"] + ["cache"] * (MESSAGES_PER_BATCH - 1)
    assert [message.WhichOneof("kind") for message in second.batch.messages] == ["cache", "load"]


async def test_too_many_results_are_too_many() -> None:
    outbox = Outbox(max_pending_outputs=2)
    for _ in range(2):
        outbox.put_output(0, 0, tokens())
    assert not outbox.overfull()
    outbox.put_output(0, 0, tokens())
    assert outbox.overfull()
    await outbox.take()
    assert not outbox.overfull()


async def test_it_is_written_when_the_writer_comes_back_for_more() -> None:
    outbox = Outbox()
    await asyncio.wait_for(outbox.written(), 20)
    outbox.put_output(0, 0, tokens())
    await outbox.take()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.written(), 0.01)
    writer = asyncio.create_task(outbox.take())
    await asyncio.wait_for(outbox.written(), 20)
    writer.cancel()
