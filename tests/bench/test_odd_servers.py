"""The client against a server process with every known odd behaviour: each is counted correctly."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from bench.client.client import Client
from bench.client.target import Target
from bench.load.plan import Plan
from bench.load.run import run_load
from bench.metrics import summarise
from bench.mock.answer import WORD
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.record import Failure, Record
from bench.result import Summary
from bench.settings import RunSettings
from bench.tokens import Texts
from bench.workloads.base import Message
from tests.waiting import eventually

Endpoint = Literal["chat", "completions"]

PROMPT = (Message("user", "one two three"),)
TOKENS = 6


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(Behaviour(ttft_ms=5, itl_ms=1)) as server:
        yield server


@asynccontextmanager
async def asking(
    url: str, endpoint: Endpoint = "chat", timeout_s: float = 30.0, model: str = "mock", **odd: Any
) -> AsyncIterator[Client]:
    """A client of a server with this odd behaviour."""
    client = Client(Target(url, model, "", endpoint, 0.0, True, {"mock": odd}, timeout_s))
    try:
        yield client
    finally:
        await client.close()


def new_record() -> Record:
    return Record(session=0, turn=0, input_len=3, output_len=TOKENS, due_s=0.0, sent_s=0.0)


async def ask(url: str, endpoint: Endpoint = "chat", **odd: Any) -> tuple[Record, str]:
    record = new_record()
    async with asking(url, endpoint, **odd) as client:
        return record, await client.stream(record, PROMPT)


def errors_of(records: Sequence[Record]) -> dict[str, int]:
    return summarise(records, start_s=0.0, slo=None, offered_per_s=None)[0].errors


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_an_ordinary_server(mock: MockServer, endpoint: Endpoint) -> None:
    record, answer = await ask(mock.url, endpoint, cached_tokens=2, route="remote")
    assert (record.error, record.status, record.finish_reason, record.route) == ("", 200, "length", "remote")
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, TOKENS, 2)
    assert answer == WORD * TOKENS
    assert len(record.content_s) == TOKENS
    assert record.answer_s == record.content_s[0]


async def test_a_first_chunk_with_only_a_role_is_not_the_first_token(mock: MockServer) -> None:
    record, _ = await ask(mock.url, role_first=True, ttft_ms=100)
    assert len(record.content_s) == TOKENS
    assert record.content_s[0] - record.sent_s >= 0.1


@pytest.mark.parametrize("opening", ["reasoning_content", "reasoning", "tool_calls"])
async def test_reasoning_and_tool_calls_are_tokens_but_no_answer(mock: MockServer, opening: str) -> None:
    record, answer = await ask(mock.url, opening=opening, opening_tokens=2)
    assert record.error == ""
    assert len(record.content_s) == record.output_tokens == TOKENS
    assert answer == WORD * (TOKENS - 2)
    assert record.answer_s == record.content_s[2]


async def test_an_answer_that_is_all_reasoning_is_complete(mock: MockServer) -> None:
    record, answer = await ask(mock.url, opening_tokens=TOKENS)
    assert (record.error, record.answer_s, answer) == ("", None, "")


@pytest.mark.parametrize("usage", ["last", "every"])
async def test_chunks_of_several_tokens_are_not_counted_as_tokens(mock: MockServer, usage: str) -> None:
    record, answer = await ask(mock.url, tokens_per_chunk=4, usage=usage)
    assert (len(record.content_s), record.output_tokens) == (2, TOKENS)
    assert answer == WORD * TOKENS


async def test_tokens_of_a_server_without_usage_are_unknown(mock: MockServer) -> None:
    record, _ = await ask(mock.url, usage="none")
    assert record.error == ""
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (None, None, None)


async def test_a_server_that_sends_less_than_was_asked_for(mock: MockServer) -> None:
    record, _ = await ask(mock.url, output_tokens=2)
    assert (record.error, record.output_tokens) == ("", 2)


@pytest.mark.parametrize(
    ("odd", "error", "detail"),
    [
        ({"no_done": True}, Failure.INCOMPLETE, "DONE"),
        ({"no_finish_reason": True}, Failure.INCOMPLETE, "finish_reason"),
        ({"no_done": True, "no_finish_reason": True}, Failure.INCOMPLETE, "finish_reason"),
        ({"output_tokens": 0}, Failure.EMPTY, ""),
        ({"fault": "status", "status": 429}, "http_429", "told to fail"),
        ({"fault": "status", "status": 500}, "http_500", "told to fail"),
        ({"fault": "json"}, Failure.MALFORMED, "stream"),
        ({"fault": "garbage", "fault_after": 2}, Failure.MALFORMED, "JSON"),
        ({"fault": "error", "fault_after": 2}, Failure.STREAM_ERROR, "failed in the middle"),
        ({"fault": "cut", "fault_after": 2}, Failure.DISCONNECTED, ""),
        ({"fault": "reset", "fault_after": 2}, Failure.DISCONNECTED, ""),
        ({"fault": "cut"}, Failure.DISCONNECTED, ""),
        ({"fault": "hang", "fault_after": 2, "timeout_s": 2.0}, Failure.TIMEOUT, "for 2 s"),
        ({"no_such_field": 1}, "http_400", "no_such_field"),
        ({"model": "another"}, "http_404", "`another` does not exist"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_failure_is_called_what_it_is(
    mock: MockServer, endpoint: Endpoint, odd: dict[str, Any], error: str, detail: str
) -> None:
    record, answer = await ask(mock.url, endpoint, **odd)
    assert record.error == error
    assert detail in record.detail
    assert errors_of([record]) == {error: 1}
    if "fault_after" in odd:
        assert len(record.content_s) == 2
        assert answer == WORD * 2


async def test_failures_among_others_are_counted_exactly(mock: MockServer) -> None:
    records = [new_record() for _ in range(100)]
    async with asking(mock.url, fault="error", fault_after=1, fault_share=0.2) as client:
        await asyncio.gather(*(client.stream(record, PROMPT) for record in records))
    assert errors_of(records) == {Failure.STREAM_ERROR: 20}
    assert Counter(len(record.content_s) for record in records) == {1: 20, TOKENS: 80}


async def test_a_failure_does_not_affect_the_next_request(mock: MockServer) -> None:
    async with asking(mock.url, fault="garbage", fault_share=0.5) as client:
        records = [new_record() for _ in range(10)]
        for record in records:
            await client.stream(record, PROMPT)
    assert Counter(record.error for record in records) == {"": 5, Failure.MALFORMED: 5}


async def test_a_server_that_dies_disconnects_and_is_then_not_there() -> None:
    with MockServer(Behaviour(itl_ms=20)) as server:
        client = Client(Target(server.url, "mock", "", "chat", 0.0, True, {"mock": {"output_tokens": 10_000}}, 30.0))
        record = new_record()
        asking = asyncio.create_task(client.stream(record, PROMPT))
        await eventually(lambda: len(record.content_s) > 2)
    await asking
    assert record.error == Failure.DISCONNECTED
    after = new_record()
    await client.stream(after, PROMPT)
    assert after.error == Failure.CONNECT
    await client.close()


def measured(url: str, **settings: Any) -> Summary:
    made = RunSettings.model_construct(url=url, input_len="8", output_len="4", **settings)
    plan = Plan(Target.of(made, "mock"), made, Texts.measured(1.0, 0), seed=0, processes=1)
    report = run_load(plan, _Unwatched())
    return summarise(report.records, start_s=report.start_s, slo=None, offered_per_s=None)[0]


class _Unwatched:
    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None: ...


def test_a_stall_of_a_second_is_in_the_tail_of_an_open_loop() -> None:
    with MockServer(Behaviour(ttft_ms=5, itl_ms=1, stall_at_s=0.3, stall_s=1.0)) as server:
        summary = measured(server.url, rate=100.0, arrival="constant", num_requests=160)
    assert summary.completed == 160
    assert summary.ttft_ms.p99 is not None
    assert summary.ttft_ms.p99 >= 900
    # A hundred requests were due in that second: they wait for half of it, on average.
    assert summary.ttft_ms.mean is not None
    assert summary.ttft_ms.mean >= 300
