"""Sends a completion to its client, as a stream or in one piece, and ends it when the client hangs up.

Written straight to ASGI: one write for whatever came since the last one, so a client that reads slowly gets several
tokens at a time, and one that keeps up gets each as it comes. Each is an event of its own. The status and the headers
go out with the first output, when it is known how the request went.
"""

from collections.abc import Iterator

from starlette.types import Receive, Scope, Send

from router.completion import Completion
from router.connection import connection_of
from router.errors import error_event
from router.legs import Route
from router.openai import DONE, Format, Usage
from router.output import Choice

Headers = list[tuple[bytes, bytes]]


class CompletionResponse:
    """The response to one API call.

    Args:
        form: How it is written.
        stream: Server-sent events, with a usage chunk at the end if `include_usage`; otherwise one JSON document.
        n: Choices of each prompt.
    """

    def __init__(self, completion: Completion, form: Format, *, stream: bool, include_usage: bool, n: int) -> None:
        self._completion = completion
        self._format = form
        self._stream = stream
        self._include_usage = include_usage
        self._n = n

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response; nothing, where the client hangs up before.

        Raises:
            ApiError: The call failed before anything was sent.
        """
        completion = self._completion
        outcome = "error"
        try:
            with connection_of(scope).on_hang_up(completion.hang_up):
                await (self._send_stream(send) if self._stream else self._send_whole(send))
            if completion.error is None:
                outcome = "completed" if completion.done else "client_gone"
        finally:
            completion.cancel()
            completion.account(outcome)

    async def _send_whole(self, send: Send) -> None:
        completion = self._completion
        await completion.fresh()
        if completion.error is not None:
            raise completion.error
        if completion.gone:
            return
        body = self._format.whole(completion.choices, completion.prompts, self._usage())
        headers = [*self._start_headers(b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        completion = self._completion
        await completion.started()
        if completion.error is not None:
            raise completion.error
        headers = [*self._start_headers(b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = [self._opening(choice) for choice in completion.choices]
        over = False
        while not over:
            if any(chunks):
                await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
            chunks = [chunk for choice in await completion.fresh() for chunk in self._chunks(choice)]
            over = completion.over
        chunks.extend(self._closing())
        await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": False})

    def _opening(self, choice: Choice) -> bytes:
        return self._format.first(choice.index, self._completion.prompts[choice.index // self._n])

    def _chunks(self, choice: Choice) -> Iterator[bytes]:
        """What a choice brought since the last time."""
        delta = choice.take()
        if delta.pieces:
            yield self._format.delta(choice.index, delta)
            delta = choice.take()
        if choice.finish is not None:
            yield self._format.final(choice.index, choice.finish, delta)

    def _closing(self) -> Iterator[bytes]:
        if self._completion.error is not None:
            yield error_event(self._completion.error)
            return
        if self._include_usage:
            yield self._format.usage(self._usage())
        yield DONE

    def _usage(self) -> Usage:
        completion = self._completion
        return Usage(completion.prompt_tokens, completion.output_tokens, completion.cached_tokens)

    def _start_headers(self, content_type: bytes) -> Headers:
        route = self._completion.route
        return [(b"content-type", content_type), *(_route_headers(route) if route is not None else ())]


def _route_headers(route: Route) -> Headers:
    """Tell where the (first) prompt of a call ran."""
    headers = [(b"x-cpd-route", route.kind.encode()), (b"x-cpd-decode-worker", route.decode_worker.encode())]
    if route.prefill_worker:
        headers.append((b"x-cpd-prefill-worker", route.prefill_worker.encode()))
    return headers
