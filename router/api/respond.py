"""Sends a completion to its client, as a stream or in one piece, and ends it when the client hangs up.

A stream's write has all events since the last write: a client that reads slowly gets several tokens at a time, a client
that keeps up gets each token at once. Status and headers are sent with the first output, when the route is known.
"""

from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.connection import connection_of
from router.api.openai import DONE, Format
from router.api.responses import Usage
from router.api.schemas import GenerateRequest
from router.dispatch.attempts import RequestRoute
from router.dispatch.completion import Completion
from router.dispatch.output import Choice
from router.errors import error_event

Headers = list[tuple[bytes, bytes]]


class CompletionResponse(Response):
    """The response to one API call.

    Args:
        form: The response's format.
        request: Says whether to send server-sent events or one JSON document.
    """

    def __init__(self, completion: Completion, form: Format, request: GenerateRequest) -> None:
        self._completion = completion
        self._format = form
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, or nothing if the client hangs up first.

        Raises:
            ApiError: The call failed before anything was sent.
        """
        completion = self._completion
        outcome = "error"
        try:
            with connection_of(scope).on_hang_up(completion.hang_up):
                await (self._send_stream(send) if self._request.stream else self._send_whole(send))
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
        return self._format.first(choice.index, self._completion.prompts[choice.index // self._request.n])

    def _chunks(self, choice: Choice) -> Iterator[bytes]:
        """The choice's new chunks."""
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
        if self._request.include_usage:
            yield self._format.usage(self._usage())
        yield DONE

    def _usage(self) -> Usage:
        completion = self._completion
        return {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.output_tokens,
            "total_tokens": completion.prompt_tokens + completion.output_tokens,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        }

    def _start_headers(self, content_type: bytes) -> Headers:
        route = self._completion.route
        return [(b"content-type", content_type), *(_route_headers(route) if route is not None else ())]


def _route_headers(route: RequestRoute) -> Headers:
    """Headers that tell where the first prompt of a call ran."""
    headers = [(b"x-cpd-route", route.kind.encode()), (b"x-cpd-decode-worker", route.decode_worker.encode())]
    if route.prefill_worker:
        headers.append((b"x-cpd-prefill-worker", route.prefill_worker.encode()))
    return headers
