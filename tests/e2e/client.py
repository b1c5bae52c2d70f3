"""An HTTP client for tests: token ids in, token ids out."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 90.0
MODEL = "test"


@dataclass(slots=True)
class Answer:
    """A completion with one choice.

    Attributes:
        route: `local` or `remote`.
        worker: Name of the worker that began it.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    route: str = ""
    worker: str = ""
    cached_tokens: int = 0


def client(url: str) -> httpx.AsyncClient:
    """An HTTP client for `complete`, with a new connection for each request."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, headers={"connection": "close"})


async def complete(
    http: httpx.AsyncClient,
    prompt: Sequence[int],
    *,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
    on_event: Callable[[], None] = lambda: None,
    on_begin: Callable[[str], None] = lambda worker: None,
    **fields: Any,
) -> Answer:
    """Requests a completion of `prompt`, greedy and without stop tokens unless `fields` override it.

    Args:
        on_event: Called for each event of a stream.
        on_begin: Called before them, with the name of the worker.

    Raises:
        httpx.HTTPError: The request failed.
    """
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    if stream:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return await _stream(http, streamed, headers, on_event, on_begin)
    response = await http.post("/v1/completions", json=body, headers=headers)
    _check(response, response.text)
    whole = response.json()
    [choice] = whole["choices"]
    return Answer(
        choice["token_ids"],
        choice["text"],
        choice["finish_reason"],
        response.headers["x-cpd-route"],
        response.headers["x-cpd-decode-worker"],
        whole["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def begin(http: httpx.AsyncClient, prompt: Sequence[int], **fields: Any) -> asyncio.Task[Answer]:
    """Requests a streamed completion as `complete` does, and returns its task once the first event has arrived.

    Only the streams that have begun move when their worker drains: others are given back and placed again.
    """
    begun = asyncio.Event()
    stream = asyncio.create_task(complete(http, prompt, stream=True, on_event=begun.set, **fields))
    stream.add_done_callback(lambda _: begun.set())  # it may end without an event
    await begun.wait()
    return stream


async def _stream(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    headers: Mapping[str, str] | None,
    on_event: Callable[[], None],
    on_begin: Callable[[str], None],
) -> Answer:
    answer = Answer()
    end = error = ""
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.is_error:
            _check(response, (await response.aread()).decode())
        # A stream that waits for a model to wake opens before it is placed, with comments.
        answer.route = response.headers.get("x-cpd-route", "")
        answer.worker = response.headers.get("x-cpd-decode-worker", "")
        on_begin(answer.worker)
        async for line in _lines(response):
            if not line or line.startswith(":"):
                continue
            assert line.startswith("data: "), line
            assert not end, f"after {end}: {line}"
            on_event()
            if line == "data: [DONE]":
                end = line
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                end = error = str(chunk["error"])
            else:
                _append(answer, chunk)
    assert end, f"a whole response ends with [DONE] or an error: {answer}"
    if error:
        raise httpx.RemoteProtocolError(error)
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yields lines ending in "\\n". `aiter_lines` also splits at characters that JSON need not escape."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _append(answer: Answer, chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        answer.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert chunk["usage"]["completion_tokens"] == len(answer.token_ids)
    for choice in chunk["choices"]:
        assert not answer.finish, "a chunk after the finish reason"
        answer.token_ids += choice["token_ids"]
        answer.text += choice["text"]
        answer.finish = choice["finish_reason"] or ""


def _check(response: httpx.Response, text: str) -> None:
    if response.is_error:
        raise httpx.HTTPStatusError(f"{response.status_code}: {text}", request=response.request, response=response)


async def complete_all(url: str, prompts: Sequence[Sequence[int]], at_once: int, **fields: Any) -> list[Answer]:
    """Requests completions of all prompts, `at_once` at a time, every second one streamed."""
    slots = asyncio.Semaphore(at_once)

    async def one(http: httpx.AsyncClient, index: int) -> Answer:
        async with slots:
            return await complete(http, prompts[index], stream=index % 2 == 1, **fields)

    async with client(url) as http:
        return list(await asyncio.gather(*(one(http, index) for index in range(len(prompts)))))
