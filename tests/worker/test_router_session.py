import asyncio

import pytest

from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Output, TokenLogprobs
from worker import router_session
from worker.router_session import MESSAGES_PER_BATCH, OUTPUTS_PER_MESSAGE, RouterSession


def tokens(*token_ids: int, choice: int = 0, finish: Finish | None = None) -> Output:
    """New tokens of a choice."""
    return Output("", choice, list(token_ids), [], finish)


def opened() -> RouterSession:
    return RouterSession(1, "router")


async def taken(session: RouterSession) -> list[pb.WorkerMessage]:
    """The waiting messages, unpacked from their batch."""
    [message] = await session.take()
    assert message.WhichOneof("kind") == "batch"
    return list(message.batch.messages)


async def test_results_keep_their_order_and_adjacent_outputs_share_a_message() -> None:
    session = opened()
    session.send_output(1, 0, tokens())
    session.send_output(2, 0, tokens())
    session.refuse(pb.Refusal(request=3))
    session.send_output(4, 0, tokens())
    first, second, third = await taken(session)
    assert [output.request for output in first.step.outputs] == [1, 2]
    assert second.refusal.request == 3
    assert [output.request for output in third.step.outputs] == [4]


async def test_outputs_of_a_choice_merge_while_they_wait() -> None:
    session = opened()
    session.send_output(1, 0, tokens(1), pb.Prefilled(cached_tokens=16))
    session.send_output(1, 0, tokens(8, choice=1))
    session.send_output(1, 1, tokens(9))
    session.send_output(1, 0, Output("", 0, [2], [TokenLogprobs(-1.0, [(2, -1.0)])]))
    session.send_output(1, 0, tokens(3, finish=Finish.STOP), landed=pb.Landed(pages=7))
    [message] = await session.take()
    merged, other_choice, other_attempt = message.step.outputs
    assert (list(merged.token_ids), merged.finish, len(merged.logprobs)) == ([1, 2, 3], pb.FINISH_STOP, 1)
    assert (list(merged.logprobs[0].top_ids), merged.logprobs[0].logprob) == ([2], -1)
    assert merged.prefilled.cached_tokens == 16
    assert merged.landed.pages == 7
    assert not other_choice.HasField("landed")
    assert (list(other_choice.token_ids), list(other_attempt.token_ids)) == ([8], [9])
    session.send_output(1, 0, tokens(4))
    [message] = await session.take()
    assert [output.token_ids for output in message.step.outputs] == [[4]]


async def test_messages_stay_small_even_if_the_router_is_far_behind() -> None:
    session = opened()
    for request in range(2 * OUTPUTS_PER_MESSAGE + 1):
        session.send_output(request, 0, tokens())
    sizes = [len(message.step.outputs) for message in await taken(session)]
    assert sizes == [OUTPUTS_PER_MESSAGE, OUTPUTS_PER_MESSAGE, 1]


async def test_only_the_latest_load_is_sent() -> None:
    session = opened()
    session.send_load(pb.Load(running=1))
    session.send_load(pb.Load(running=2))
    assert await session.take() == [pb.WorkerMessage(load=pb.Load(running=2))]


async def test_events_that_a_snapshot_includes_are_dropped() -> None:
    session = opened()
    for number in range(1, 4):
        session.send_cache(pb.CacheEvents(number=number, events=[pb.CacheEvent(hashes=bytes(8))]))
    session.forget_cache(2)
    assert [message.cache.number for message in await session.take()] == [3]


async def test_too_many_waiting_hashes_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_session, "MAX_PENDING_HASHES", 2)
    session = opened()
    for number in range(1, 5):
        session.send_cache(pb.CacheEvents(number=number, events=[pb.CacheEvent(hashes=bytes(8))]))
        session.forget_cache(number - 1)
    assert not session.ended.done()
    for number in (5, 6):
        session.send_cache(pb.CacheEvents(number=number, events=[pb.CacheEvent(hashes=bytes(8))]))
    assert "too far behind" in session.ended.result()


async def test_waiting_messages_are_sent_in_batches_of_bounded_size() -> None:
    session = opened()
    session.send_load(pb.Load(running=1))
    session.send_output(1, 0, tokens())
    for number in range(MESSAGES_PER_BATCH):
        session.send_cache(pb.CacheEvents(number=number))
    first, second = await session.take()
    kinds = [message.WhichOneof("kind") for message in first.batch.messages]
    assert kinds == ["step"] + ["cache"] * (MESSAGES_PER_BATCH - 1)
    assert [message.WhichOneof("kind") for message in second.batch.messages] == ["cache", "load"]


async def test_too_many_waiting_results_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_session, "MAX_PENDING_OUTPUTS", 2)
    session = opened()
    for _ in range(2):
        for _ in range(2):
            session.send_output(0, 0, tokens())
        assert not session.ended.done()
        await session.take()
    for _ in range(3):
        session.send_output(0, 0, tokens())
    assert "too far behind" in session.ended.result()
    session.send_output(1, 0, tokens())
    session.refuse(pb.Refusal(request=2))
    [message] = await session.take()
    assert [output.request for output in message.step.outputs] == [0]


async def test_messages_count_as_written_when_the_writer_asks_for_more() -> None:
    session = opened()
    await asyncio.wait_for(session.written(), 20)
    session.send_output(0, 0, tokens())
    await session.take()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.written(), 0.01)
    writer = asyncio.create_task(session.take())
    await asyncio.wait_for(session.written(), 20)
    writer.cancel()
