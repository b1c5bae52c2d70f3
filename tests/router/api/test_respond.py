"""What a response writes, and when: driven through ASGI, with a client that reads as the test says."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from starlette.types import Message
from tokenizers import Tokenizer

from cpd.common.blocks import pack_tokens
from cpd.rpc import cpd_pb2 as pb
from router.api.openai import ChatFormat
from router.api.respond import CompletionResponse
from router.api.schemas import ChatRequest
from router.dispatch.attempts import RequestRoute
from router.dispatch.completion import Completion, PromptConsumer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.output import Choice
from router.dispatch.workers import Workers
from router.errors import ApiError, failed
from router.metrics import Metrics
from router.placement.costs import PolicySettings
from router.text.detokenize import Vocabulary
from tests.router.conftest import eventually

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Client:
    """Stands for its connection.

    Attributes:
        scope: Of a request that came on it.
        hang_up: What is to be called when it hangs up.
    """

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"type": "http", "state": {"connection": self}}
        self.hang_up: Callable[[], None] | None = None

    @contextlib.contextmanager
    def on_hang_up(self, call: Callable[[], None]) -> Iterator[None]:
        self.hang_up = call
        yield
        self.hang_up = None


class Exchange:
    """A response whose tokens and whose client are the test's.

    Attributes:
        sent: What the response wrote, in order.
        may_read: The client takes writes while it is set.
    """

    def __init__(self, tokenizer: Tokenizer, *, stream: bool) -> None:
        metrics = Metrics("router-a", list)
        workers = Workers("router-a", "", itl_ms=50.0)
        dispatcher = Dispatcher(workers, metrics, PolicySettings(), rng=Random(0))
        vocabulary = Vocabulary(tokenizer)
        choice = Choice(0, vocabulary.detokenizer(b""), (), 0)
        self.completion = Completion(dispatcher, metrics, [choice], eager=stream, started=0.0)
        self.completion.prompts.append(pack_tokens([1, 2, 3]))
        self.consumer = PromptConsumer(self.completion, metrics, [choice])
        self.sent: list[Message] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.client = Client()
        request = ChatRequest.model_validate(ASKED | {"stream": stream})
        response = CompletionResponse(self.completion, ChatFormat(request, vocabulary, b""), request)
        self.running = asyncio.ensure_future(response(self.client.scope, self._receive, self._send))

    async def _receive(self) -> Message:
        raise AssertionError("the request has been read")

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        self.sent.append(message)

    async def wrote(self, count: int) -> None:
        """Waits until the response has written so many messages."""

        async def enough() -> bool:
            return len(self.sent) >= count

        await eventually(enough)

    @property
    def chunks(self) -> list[list[Any]]:
        """The events of every write of the body."""
        bodies = [message["body"].decode() for message in self.sent if message["type"] == "http.response.body"]
        return [[event.removeprefix("data: ") for event in body.split("\n\n")[:-1]] for body in bodies]


async def test_every_token_is_written_as_it_comes_to_a_client_that_keeps_up(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    await asyncio.sleep(0)
    assert exchange.sent == []
    exchange.consumer.started(RequestRoute("d", "", 0))
    for count, token_id in enumerate(tokenizer.encode("the quick brown fox").ids):
        exchange.consumer.output(0, [token_id], [], pb.FINISH_NONE)
        await exchange.wrote(count + 3)  # the start, the opening chunk, and one more each time
    exchange.consumer.output(0, [1], [], pb.FINISH_STOP)
    await exchange.running
    contents = [
        [json.loads(event)["choices"][0]["delta"].get("content") for event in write] for write in exchange.chunks[:-1]
    ]
    assert contents == [[""], ["the"], [" quick"], [" brown"], [" fox"]]
    final, done = exchange.chunks[-1]
    assert json.loads(final)["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_tokens_that_came_while_the_client_was_behind_share_a_write(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    exchange.consumer.started(RequestRoute("d", "", 0))
    ids = tokenizer.encode("the quick brown fox jumps").ids
    exchange.consumer.output(0, ids[:1], [], pb.FINISH_NONE)
    await exchange.wrote(3)
    exchange.may_read.clear()
    for token_id in ids[1:]:
        exchange.consumer.output(0, [token_id], [], pb.FINISH_NONE)
        await asyncio.sleep(0)
    exchange.consumer.output(0, [1], [], pb.FINISH_STOP)
    exchange.may_read.set()
    await exchange.running
    events = [event for write in exchange.chunks for event in write]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert pieces == ["", "the", " quick", " brown", " fox", " jumps", ""]
    assert len(exchange.chunks) <= 4


async def test_nothing_is_sent_before_a_failure_is_known(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    exchange.consumer.failed(failed("no"))
    with pytest.raises(ApiError, match="no"):
        await exchange.running
    assert exchange.sent == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_the_response(tokenizer: Tokenizer, stream: bool) -> None:
    exchange = Exchange(tokenizer, stream=stream)
    await asyncio.sleep(0)
    assert exchange.client.hang_up is not None
    exchange.client.hang_up()
    await exchange.running
    assert exchange.completion.gone
    assert exchange.client.hang_up is None


async def test_without_a_stream_the_response_waits_for_the_end(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=False)
    exchange.consumer.started(RequestRoute("d", "p", 2))
    exchange.consumer.output(0, tokenizer.encode("the fox").ids, [], pb.FINISH_NONE)
    await asyncio.sleep(0)
    assert exchange.sent == []
    exchange.consumer.output(0, [1], [], pb.FINISH_STOP)
    await exchange.running
    start, body = exchange.sent
    headers = dict(start["headers"])
    assert headers[b"x-cpd-route"] == b"remote"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["choices"][0]["message"]["content"] == "the fox"
