"""An API call in progress: the choices of all its prompts, for the response that waits for them."""

import asyncio
from collections.abc import Sequence

from cpd.common.blocks import TOKEN_BYTES
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.attempts import RequestRoute, RoutedRequest
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.output import Choice
from router.errors import ApiError
from router.metrics import Metrics


class Completion:
    """Collects the outputs of one API call.

    Args:
        choices: The choices of all prompts, by index.
        eager: Wakes the waiting response for every delta (streaming), not only at the end.
        started: Loop time at which the call was read.

    Attributes:
        prompts: Packed token ids of the prompts.
        route: Where the first token was computed; None before it has come.
        error: Why the call failed; None if it did not.
        gone: The client hung up.
        cached_tokens: Prompt tokens taken from a cache.
    """

    def __init__(
        self, dispatcher: Dispatcher, metrics: Metrics, choices: Sequence[Choice], *, eager: bool, started: float
    ) -> None:
        self.choices = choices
        self.prompts: list[bytes] = []
        self.route: RequestRoute | None = None
        self.error: ApiError | None = None
        self.gone = False
        self.cached_tokens = 0
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._eager = eager
        self._started = started
        self._loop = asyncio.get_running_loop()
        self._requests: list[RoutedRequest] = []
        self._open = len(choices)
        self._fresh: dict[int, Choice] = {}
        self._waiter: asyncio.Future[None] | None = None

    def start(self, request: RoutedRequest) -> None:
        """Places the request of the next prompt.

        Raises:
            ApiError: No worker is live.
        """
        self.prompts.append(request.tokens)
        self._requests.append(request)
        self._dispatcher.start(request)

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return self._open == 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts)) // TOKEN_BYTES

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.done or self.gone or self.error is not None

    async def started(self) -> None:
        """Waits for the first output, or for an end without any."""
        while self.route is None and not self.over:
            await self._wait()

    async def fresh(self) -> list[Choice]:
        """Waits for choices with a delta to take, or for the end. Unless eager, waits only for the end."""
        while not self._fresh and not self.over:
            await self._wait()
        choices = list(self._fresh.values())
        self._fresh.clear()
        return choices

    def hang_up(self) -> None:
        """The client is gone: cancels what still runs, on the workers too."""
        self.gone = True
        self.cancel()
        self._wake()

    def cancel(self) -> None:
        """Cancels what still runs. Call it at the end in any case."""
        for request in self._requests:
            self._dispatcher.cancel(request)

    def account(self, outcome: str) -> None:
        """Adds the call to the metrics. Call it once, at the end."""
        metrics, route = self._metrics, self.route.kind if self.route is not None else "none"
        metrics.requests(outcome, route).inc()
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.cached_tokens.inc(self.cached_tokens)
        metrics.output_tokens.inc(self.output_tokens)
        if outcome == "completed":
            metrics.e2e(route).observe(self._loop.time() - self._started)

    # ---- called by the prompts' consumers ----

    def prompt_started(self, route: RequestRoute) -> None:
        """The first output of a prompt has come."""
        self.cached_tokens += route.cached_tokens
        if self.route is None:
            self.route = route
            if self._eager:
                self._wake()
            ttft = self._metrics.ttft(route.kind)
            self._loop.call_soon(ttft.observe, self._loop.time() - self._started)  # after the token is on its way

    def prompt_failed(self, error: ApiError) -> None:
        """A prompt's request failed, and with it the call."""
        self.error = self.error or error
        self._wake()

    def grown(self, choice: Choice) -> None:
        """A choice has a delta to take, or has ended."""
        if choice.finish is not None:
            self._open -= 1
        if self._eager:
            self._fresh[choice.index] = choice
            self._wake()
        elif self.done:
            self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PromptConsumer:
    """Receives the tokens of one prompt's request for its completion.

    Args:
        choices: The prompt's choices.
    """

    __slots__ = ("_choices", "_completion", "_last", "_loop", "_metrics")

    def __init__(self, completion: Completion, metrics: Metrics, choices: Sequence[Choice]) -> None:
        self._completion = completion
        self._metrics = metrics
        self._choices = choices
        self._last = [0.0] * len(choices)
        self._loop = asyncio.get_running_loop()

    def started(self, route: RequestRoute) -> None:
        """The first output has come."""
        self._completion.prompt_started(route)

    def output(self, choice: int, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int) -> bool:
        """New tokens of a choice. Returns whether it wants more."""
        target = self._choices[choice]
        now = self._loop.time()
        if target.num_tokens:
            self._metrics.itl.observe(now - self._last[choice])
        self._last[choice] = now
        target.push(token_ids, logprobs, finish)
        if target.has_delta:
            self._completion.grown(target)
        return target.finish is None

    def failed(self, error: ApiError) -> None:
        """The request has failed."""
        self._completion.prompt_failed(error)
