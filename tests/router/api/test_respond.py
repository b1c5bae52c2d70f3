"""Data and timing of a response's writes, with a scripted ASGI client."""

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
from cpd.common.policy_settings import PolicySettings
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.api.openai import ChatFormat
from router.api.respond import CompletionResponse
from router.api.schemas import ChatRequest
from router.dispatch.attempts import RequestRoute, RoutedRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.output import Choice
from router.dispatch.workers import Workers
from router.errors import ApiError, failed
from router.placement.cost_policy import CostPolicy
from router.placement.learning import Learning
from router.placement.policy import Targets
from router.request_metrics import RequestMetrics, RouterMetrics
from router.text.detokenize import Vocabulary
from tests.router.conftest import eventually

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Client:
    """A client with its connection.

    Attributes:
        scope: The ASGI scope of its request.
        hang_up: The callback for its hang-up.
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
    """A response with tokens and a client that the test controls.

    Attributes:
        sent: The ASGI messages that the response sent, in order.
        may_read: The client reads while it is set.
    """

    def __init__(self, tokenizer: Tokenizer, *, stream: bool) -> None:
        metrics = RequestMetrics(RouterMetrics())
        workers = Workers("router-a", ClusterSecret(""), itl_ms=50.0, learning=Learning(PolicySettings(), 2000.0))
        dispatcher = Dispatcher(
            workers, metrics, CostPolicy(PolicySettings()), Targets(), max_wait_s=60.0, rng=Random(0)
        )
        vocabulary = Vocabulary(tokenizer)
        request = ChatRequest.model_validate(ASKED | {"stream": stream})
        self.choice = Choice(0, vocabulary.detokenizer(b""), (), 0)
        form = ChatFormat(request, vocabulary, b"")
        charged: list[int] = []
        self.response = CompletionResponse(
            dispatcher, metrics, request, form, [self.choice], received=0.0, charge=charged.append
        )
        self.response.requests = [
            RoutedRequest(
                trace_id="",
                tenant="",
                tokens=pack_tokens([1, 2, 3]),
                fingerprint=b"",
                hash_root=b"",
                block_hashes=[],
                sampling=pb.Sampling(),
                choices=[self.choice],
                consumer=self.response,
                priority=0,
                received=0.0,
            )
        ]
        self.sent: list[Message] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.client = Client()
        self.running = asyncio.ensure_future(self.response(self.client.scope, self._receive, self._send))

    def output(self, token_ids: list[int], finish: int = pb.FINISH_NONE) -> None:
        """New tokens arrive, as from the dispatcher."""
        self.choice.push(token_ids, [], finish)
        if self.choice.has_delta:
            self.response.updated(self.choice)

    async def _receive(self) -> Message:
        raise AssertionError("the request has been read")

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        self.sent.append(message)

    async def wrote(self, count: int) -> None:
        """Waits until the response has sent `count` messages."""

        async def enough() -> bool:
            return len(self.sent) >= count

        await eventually(enough)

    @property
    def chunks(self) -> list[list[Any]]:
        """The events of the body, by write."""
        bodies = [message["body"].decode() for message in self.sent if message["type"] == "http.response.body"]
        return [[event.removeprefix("data: ") for event in body.split("\n\n")[:-1]] for body in bodies]


async def test_a_client_that_keeps_up_gets_every_token_at_once(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    await asyncio.sleep(0)
    assert exchange.sent == []
    exchange.response.started(RequestRoute("d", "", 0, 0.0))
    for count, token_id in enumerate(tokenizer.encode("the quick brown fox").ids):
        exchange.output([token_id])
        await exchange.wrote(count + 3)  # the start, the opening chunk, and one more each time
    exchange.output([1], pb.FINISH_STOP)
    await exchange.running
    contents = [
        [json.loads(event)["choices"][0]["delta"].get("content") for event in write] for write in exchange.chunks[:-1]
    ]
    assert contents == [[""], ["the"], [" quick"], [" brown"], [" fox"]]
    final, done = exchange.chunks[-1]
    assert json.loads(final)["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_a_slow_client_gets_several_tokens_in_one_write(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    exchange.response.started(RequestRoute("d", "", 0, 0.0))
    ids = tokenizer.encode("the quick brown fox jumps").ids
    exchange.output(ids[:1])
    await exchange.wrote(3)
    exchange.may_read.clear()
    for token_id in ids[1:]:
        exchange.output([token_id])
        await asyncio.sleep(0)
    exchange.output([1], pb.FINISH_STOP)
    exchange.may_read.set()
    await exchange.running
    events = [event for write in exchange.chunks for event in write]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert pieces == ["", "the", " quick", " brown", " fox", " jumps", ""]
    assert len(exchange.chunks) <= 4


async def test_nothing_is_sent_before_a_failure_is_known(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    exchange.response.failed(failed("no"))
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
    assert exchange.response.gone
    assert exchange.client.hang_up is None


async def test_a_stream_that_its_client_broke_off_has_no_end(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=True)
    exchange.response.started(RequestRoute("d", "", 0, 0.0))
    exchange.output(tokenizer.encode("the").ids)
    await exchange.wrote(3)
    assert exchange.client.hang_up is not None
    exchange.client.hang_up()
    await exchange.running
    assert not any(b"[DONE]" in message.get("body", b"") for message in exchange.sent)


async def test_without_a_stream_the_response_waits_for_the_end(tokenizer: Tokenizer) -> None:
    exchange = Exchange(tokenizer, stream=False)
    exchange.response.started(RequestRoute("d", "p", 2, 0.0))
    exchange.output(tokenizer.encode("the fox").ids)
    await asyncio.sleep(0)
    assert exchange.sent == []
    exchange.output([1], pb.FINISH_STOP)
    await exchange.running
    start, body = exchange.sent
    headers = dict(start["headers"])
    assert headers[b"x-cpd-route"] == b"remote"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"])["choices"][0]["message"]["content"] == "the fox"
