"""The response to one API call: collects the text of its choices and sends it, as a stream or in one piece.

A stream's write has all events since the last write: a client that reads slowly gets several tokens at a time, a client
that keeps up gets each token at once. Status and headers are sent with the first output, when the route is known.

A stream whose first output takes longer than COMMENT_S begins without it. Comments, which clients ignore, then keep
proxies from closing the connection, also while a stream stands still in the middle.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cpd.common.blocks import TOKEN_BYTES
from router.api.connection import connection_of
from router.api.format import Format
from router.api.responses import Usage
from router.api.schemas import GenerateRequest
from router.dispatch.attempts import RequestRoute, RoutedRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.output import Choice
from router.errors import ApiError
from router.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from cpd.common.tracing import Value

COMMENT_S = 10.0
"""Interval of the comments in a stream that has no output, in seconds; one before the first output opens the stream."""

COMMENT = b": waiting\n\n"

INLINE_TOKENS = 256
"""Length of the longest output that is parsed on the event loop, in about a millisecond."""

Headers = list[tuple[bytes, bytes]]


class CompletionResponse(Response):
    """The response to one API call. It is the consumer of the requests for the call's prompts.

    Args:
        request: Says whether to send server-sent events or one JSON document.
        form: The response's format.
        choices: The choices of all prompts, by index.
        received: Loop time at which the call was read.
        charge: Called with the number of output tokens at the end.

    Attributes:
        requests: One request per prompt, set before the first one is dispatched.
        gone: The client hung up.
        outcome: `completed`, `error` or `client_gone`, once the response has ended.
        error: Why the call failed.
        usage: Tokens of the call, once the response has ended.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RequestMetrics,
        request: GenerateRequest,
        form: Format,
        choices: Sequence[Choice],
        *,
        received: float,
        charge: Callable[[int], None],
    ) -> None:
        self.requests: Sequence[RoutedRequest] = ()
        self.gone = False
        self.outcome = "error"
        self.error: ApiError | None = None
        self.usage: Usage | None = None
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._request = request
        self._format = form
        if request.continuous_usage:
            form.count_with(self._usage)
        self._choices = choices
        self._received = received
        self._charge = charge
        self._loop = asyncio.get_running_loop()
        self._route: RequestRoute | None = None
        self._ttft_s: float | None = None
        self._cached_tokens = 0
        self._running = len(choices)
        self._updated: dict[int, Choice] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._comments: asyncio.TimerHandle | None = None
        self._idle_ticks = 1  # those of `_comments` since something was sent; a comment is due after two

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, or nothing if the client hangs up first.

        Raises:
            ApiError: The call failed before anything was sent.
        """
        try:
            with connection_of(scope).on_hang_up(self._hang_up):
                await (self._send_stream(send) if self._request.stream else self._send_whole(send))
            if self.error is None:
                self.outcome = "client_gone" if self._running else "completed"
        finally:
            self.cancel()
            self.usage = self._usage()
            self._count(self.outcome, self.usage)
            self.forget()

    async def break_off(self, error: ApiError, send: Send) -> None:
        """Ends a stream that has begun with an error."""
        if self._request.stream:
            await send({"type": "http.response.body", "body": self._format.failure(error), "more_body": False})

    def cancel(self) -> None:
        """Cancels what still runs, on the workers too."""
        for request in self.requests:
            self._dispatcher.cancel(request)

    def report(self) -> dict[str, object]:
        """Route, times and tokens of the call for the access log, once the response has ended."""
        route, report = self._route, dict[str, object]()
        if route is not None:
            report |= {"route": route.kind, "decode_worker": route.decode_worker}
            if route.prefill_worker:
                report["prefill_worker"] = route.prefill_worker
            report["queue_ms"] = round(route.queue_ms, 1)
            if route.wake_ms:
                report["wake_ms"] = round(route.wake_ms, 1)
        if self._ttft_s is not None:
            report["ttft_ms"] = round(self._ttft_s * 1e3, 1)
        if self.usage is not None:
            report["prompt_tokens"] = self.usage["prompt_tokens"]
            report["cached_tokens"] = self._cached_tokens
            report["output_tokens"] = self.usage["completion_tokens"]
        return report

    def trace_report(self) -> "dict[str, Value]":
        """Ends, times and tokens of the call for its span, once the response has ended."""
        report: dict[str, Value] = {
            "gen_ai.response.finish_reasons": [choice.finish or self.outcome for choice in self._choices]
        }
        if self._ttft_s is not None:
            report["gen_ai.server.time_to_first_token"] = self._ttft_s
        if self.usage is not None:
            report["gen_ai.usage.input_tokens"] = self.usage["prompt_tokens"]
            report["gen_ai.usage.cache_read.input_tokens"] = self._cached_tokens
            report["gen_ai.usage.output_tokens"] = self.usage["completion_tokens"]
        return report

    def forget(self) -> None:
        """Frees the requests, which refer to this object as it does to them."""
        if self._comments is not None:
            self._comments.cancel()
        self.requests = ()

    # ---- called by the dispatcher ----

    def started(self, route: RequestRoute) -> None:
        """The first output of a prompt has arrived."""
        self._cached_tokens += route.cached_tokens
        if self._route is None:
            self._route = route
            if self._request.stream:
                self._wake()
            self._ttft_s = self._loop.time() - self._received
            self._loop.call_soon(self._count_first, route, self._ttft_s)  # after the token is on its way

    def updated(self, choice: Choice) -> None:
        """A choice has new text, or has ended."""
        self._running -= choice.finish is not None
        self._updated[choice.index] = choice
        if self._request.stream or not self._running:
            self._wake()

    def failed(self, error: ApiError) -> None:
        """The request for a prompt has failed, and with it the call."""
        self.error = self.error or error.with_traceback(None)  # whose frames refer to this object
        self._wake()

    # ---- sending ----

    @property
    def _over(self) -> bool:
        """Nothing more will come."""
        return not self._running or self.gone or self.error is not None

    async def _send_whole(self, send: Send) -> None:
        while not self._over:
            await self._wait()
        if self.error is not None:
            raise self.error
        if self.gone:
            return
        body = await self._whole()
        await self._format.written()
        headers = [*self._start_headers(b"application/json"), (b"content-length", b"%d" % len(body))]
        if not self.gone:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _whole(self) -> bytes:
        usage, prompts = self._usage(), [request.tokens for request in self.requests]
        whole = partial(self._format.whole, self._choices, prompts, usage)
        if self._format.PARSES and usage["completion_tokens"] > INLINE_TOKENS:
            return await asyncio.to_thread(whole)
        return whole()

    async def _send_stream(self, send: Send) -> None:
        opened = False
        self._comments = self._loop.call_later(COMMENT_S, self._tick)
        while self._route is None and not self._over:
            await self._wait()
            if self._idle_ticks > 1 and self._route is None and not self._over:
                if not opened:
                    await self._open_stream(send)
                    opened = True
                await self._send_comment(send)
        if not opened:
            if self.error is not None:
                raise self.error
            await self._open_stream(send)
        chunks = [self._opening(choice) for choice in self._choices] if self.error is None else []
        over = False
        while not over:
            if any(chunks):
                self._idle_ticks = 0
                await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
            while not (self._updated or self._over):
                await self._wait()
                if self._idle_ticks > 1 and not self._over:
                    await self._send_comment(send)
            updated, self._updated = self._updated, {}
            chunks = [chunk for choice in updated.values() for chunk in self._chunks(choice)]
            over = self._over
        chunks.append(await self._closing())
        await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": False})

    async def _open_stream(self, send: Send) -> None:
        headers = [*self._start_headers(b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_comment(self, send: Send) -> None:
        self._idle_ticks = 1
        await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def _opening(self, choice: Choice) -> bytes:
        prompt = self.requests[choice.index // self._request.n].tokens
        return self._format.first(choice.index, prompt, self._usage())

    def _chunks(self, choice: Choice) -> Iterator[bytes]:
        """The choice's new chunks."""
        delta = choice.take()
        if delta.pieces:
            yield self._format.delta(choice.index, delta)
            delta = choice.take()
        if choice.finish is not None:
            yield self._format.final(choice, delta)

    async def _closing(self) -> bytes:
        if self.error is not None:
            return self._format.failure(self.error)
        if self._running:  # the client is gone, and whatever it still reads is not all of the output
            return b""
        closing = self._format.closing(self._usage())
        if not self.gone:
            await self._format.written()
        return closing

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(request.tokens) for request in self.requests) // TOKEN_BYTES
        output_tokens = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _start_headers(self, content_type: bytes) -> Headers:
        headers, route = [(b"content-type", content_type)], self._route
        if route is not None:
            headers += [(b"x-cpd-route", route.kind.encode()), (b"x-cpd-decode-worker", route.decode_worker.encode())]
            if route.prefill_worker:
                headers.append((b"x-cpd-prefill-worker", route.prefill_worker.encode()))
            if route.wake_ms:
                headers.append((b"x-cpd-wake-ms", b"%d" % round(route.wake_ms)))
        return headers

    # ---- waiting and ending ----

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        """Has a comment sent if nothing was sent since the tick before."""
        self._comments = self._loop.call_later(COMMENT_S, self._tick)
        self._idle_ticks += 1
        if self._idle_ticks > 1:
            self._wake()

    def _hang_up(self) -> None:
        self.gone = True
        self.cancel()
        self._wake()

    def _count_first(self, route: RequestRoute, ttft_s: float) -> None:
        self._metrics.ttft(route.kind).observe(ttft_s)
        self._metrics.activity.ttfts_ms.append(ttft_s * 1e3)

    def _count(self, outcome: str, usage: Usage) -> None:
        """Adds the call to the metrics."""
        metrics, route = self._metrics, self._route.kind if self._route is not None else "none"
        metrics.requests(outcome, route).inc()
        self._charge(usage["completion_tokens"])
        metrics.usage.call(self.requests[0].tenant, usage["completion_tokens"])
        metrics.prompt_tokens.count += usage["prompt_tokens"]
        metrics.cached_tokens.count += self._cached_tokens
        if self._route is not None:
            for request in self.requests:
                metrics.prompt_length.observe(request.prompt_len)
            for choice in self._choices:
                metrics.output_length.observe(choice.num_tokens)
        for choice in self._choices:
            metrics.choices(choice.finish or ("abort" if self.gone else "error")).inc()
        if outcome == "completed" and self._route is not None and self._ttft_s is not None:
            e2e_s, queue_s = self._loop.time() - self._received, self._route.queue_ms / 1e3
            metrics.e2e(route).observe(e2e_s)
            metrics.prefill.observe(max(0.0, self._ttft_s - queue_s))
            metrics.decode.observe(e2e_s - self._ttft_s)
