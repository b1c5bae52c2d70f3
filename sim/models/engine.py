"""A model's requests while it is awake, as a fluid: no single steps, but rates that change with each request.

    prompts   one after the other, each for as long as the profile says a step with it takes
    decodes   all together: a token each per step, whose time the profile gives for their number and mean context

Continuous batching is approximated: while there are both, each gets half of the model's share of the device, as with a
prefill lane of half the device. A request joins the decodes when its prompt is done.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from cpd.performance.model import PerfModel, Work

_DONE_TOKENS = 1e-6


@dataclass(eq=False, slots=True)
class Request:
    """A request in the simulation.

    Attributes:
        due_s: When it arrived.
        tokens: Output tokens so far. While it decodes: as of when it began to.
        first_s, ended_s: Times of the first and the last token.
        waiting_since_s: When it began to wait for its model to be awake.
        waited_s: How long it has waited for that, pauses included.
    """

    due_s: float
    prompt_len: int
    output_len: int
    tokens: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    waiting_since_s: float | None = None
    waited_s: float = 0.0
    failed: bool = False
    kv_tokens: int = 0  # in host memory, while it is parked
    parked: bool = False


@dataclass(order=True, slots=True)
class _Stream:
    ends_at: float  # the clock's value at its last token
    number: int
    request: Request = field(compare=False)


class FluidEngine:
    """The requests of one model.

    Args:
        scale: How many times as long steps take as in the profile.
    """

    def __init__(self, model: PerfModel, scale: float, max_num_seqs: int) -> None:
        self._model = model
        self._scale = scale
        self._max_num_seqs = max_num_seqs
        self._prompts: deque[Request] = deque()
        self._prompt_left_s = 0.0  # of the first, on the whole device
        self._streams: list[_Stream] = []
        self._numbers = count()
        self._clock = 0.0  # tokens that a stream that was always there has got
        self._newest = 0.0  # the clock when the newest stream began
        self._context = 0.0
        self._step_s = 0.0

    def __len__(self) -> int:
        return len(self._prompts) + len(self._streams)

    def add(self, request: Request) -> None:
        """Adds a request. One whose KV pages were kept goes on; others compute their prompt and tokens so far."""
        if request.kv_tokens:
            request.kv_tokens = 0
            self._begin_decodes(request)
            return
        self._prompts.append(request)
        if len(self._prompts) == 1:
            self._begin_prompt()

    def drain_s(self, share: float, expected_output: float) -> float:
        """Predicts when the requests have ended, without knowing how long their outputs are."""
        if not len(self):
            return 0.0
        left = expected_output
        if not self._prompts:
            left = max(expected_output - (self._clock - self._newest), expected_output / 4)
        return left * max(self._step_s, self._decode_step_s(1, 1000)) / share

    def next_s(self, share: float) -> float:
        """Returns the time until a prompt or a stream ends, with a share of the device."""
        prompt, decode = self._rates(share)
        times = []
        if prompt:
            times.append(self._prompt_left_s / prompt)
        if decode:
            times.append(max(0.0, self._streams[0].ends_at - self._clock) / decode)
        return min(times, default=float("inf"))

    def advance(self, seconds: float, share: float) -> None:
        """Lets time pass in which no prompt and no stream ends."""
        prompt, decode = self._rates(share)
        self._prompt_left_s -= seconds * prompt
        self._clock += seconds * decode

    def collect(self, now: float) -> Iterator[Request]:
        """Moves prompts that are done to the decodes, and yields the requests that have ended."""
        while self._streams and self._streams[0].ends_at <= self._clock + _DONE_TOKENS:
            request = heappop(self._streams).request
            request.tokens = request.output_len
            self._changed(-self._context_of(request))
            yield request
        while self._prompts and self._prompt_left_s <= 1e-9:
            request = self._prompts.popleft()
            if self._prompts:
                self._begin_prompt()
            if request.first_s is None:
                request.first_s = now
            request.tokens += 1
            if request.tokens >= request.output_len:
                yield request
            else:
                self._begin_decodes(request)

    def park(self, keep_kv: bool) -> list[Request]:
        """Takes all requests out, in the order in which they arrived; with `keep_kv`, streams keep their KV pages."""
        for stream in self._streams:
            request = stream.request
            request.tokens = request.output_len - (stream.ends_at - self._clock)
            request.parked = True
            request.kv_tokens = request.prompt_len + round(request.tokens) if keep_kv else 0
        requests = [stream.request for stream in self._streams] + list(self._prompts)
        self._streams.clear()
        self._prompts.clear()
        self._context = 0.0
        return sorted(requests, key=lambda one: one.due_s)

    @property
    def resumed(self) -> int:
        """Number of streams that were parked before."""
        return sum(one.request.parked for one in self._streams) + sum(one.parked for one in self._prompts)

    def deadlines(self, slo_ttft_s: float, slo_itl_s: float) -> list[float]:
        """Returns until when each request could pause and still meet its targets."""
        return [
            (stream.request.first_s or 0.0)
            + slo_itl_s * (stream.request.output_len - max(0.0, stream.ends_at - self._clock))
            for stream in self._streams
        ] + [request.due_s + slo_ttft_s for request in self._prompts]

    def _begin_decodes(self, request: Request) -> None:
        ends_at = self._clock + request.output_len - request.tokens
        heappush(self._streams, _Stream(ends_at, next(self._numbers), request))
        self._newest = self._clock
        self._changed(self._context_of(request))

    def _begin_prompt(self) -> None:
        request = self._prompts[0]
        tokens = request.prompt_len + round(request.tokens)
        self._prompt_left_s = self._scale * self._model.step_ms(Work.prefill(tokens)) / 1e3

    def _rates(self, share: float) -> tuple[float, float]:
        """Returns progress a second: of the first prompt in seconds, and of each decode in tokens."""
        decodes = bool(self._streams)
        prompts = bool(self._prompts) and len(self._streams) < self._max_num_seqs
        if prompts and decodes:
            share /= 2
        return share if prompts else 0.0, share / self._step_s if decodes else 0.0

    def _changed(self, context: float) -> None:
        """Streams have come or gone."""
        self._context += context
        if self._streams:
            self._step_s = self._decode_step_s(len(self._streams), self._context)

    def _decode_step_s(self, seqs: int, context: float) -> float:
        return self._scale * self._model.step_ms(Work.decode(seqs, max(seqs, round(context)))) / 1e3

    @staticmethod
    def _context_of(request: Request) -> float:
        """Returns a stream's mean context."""
        return request.prompt_len + request.output_len / 2
