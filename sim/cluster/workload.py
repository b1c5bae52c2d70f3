"""Workloads: sessions of token ids, without text.

    mix      short turns of chats and agents, and a share of long prompts without cached prefix
    day      chats by day, agents in the evening and at night, long prompts in batches at night
    trace    requests of a file in Mooncake's format, at their times

Sessions of a mix or a day arrive as a Poisson process. A later turn is due when the previous answer is complete and the
user or the agent's tool has paused. Everything follows from the seed.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from bench.workloads.lengths import Distribution
from bench.workloads.trace import BLOCK_TOKENS, TracedRequest, read_trace
from cpd.common.errors import ConfigError
from sim.cluster.settings import ClusterShape
from sim.cluster.worker import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session.

    Attributes:
        token_ids: New prompt tokens, after the session's tokens so far.
        output_len: Length of the answer, in tokens.
        pause_s: Time from the end of the last answer to this turn.
    """

    token_ids: "array[int]"
    output_len: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation.

    Attributes:
        start_s: Time of its first turn.
        shared: Number of leading tokens of that turn that other sessions share.
    """

    start_s: float
    turns: Sequence[Turn]
    shared: int = 0


class Workload(ABC):
    """An endless or finite sequence of sessions, in the order of their starts."""

    @abstractmethod
    def sessions(self) -> Iterator[Session]:
        """Yields the sessions."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of session. Lengths are in tokens, pauses in seconds.

    Attributes:
        turns: Number of turns.
        first, later: New prompt tokens of the first turn, after the shared ones, and of each later turn.
        output: Length of each answer.
        groups: Number of groups; sessions of a group begin with the same `shared` tokens.
    """

    turns: Distribution
    first: Distribution
    later: Distribution
    output: Distribution
    pause: Distribution
    groups: int = 0
    shared: int = 0


CHAT = Kind(
    turns=Distribution("uniform", 2, 8, 1),
    first=Distribution("lognormal", 400, 0.8, 1),
    later=Distribution("lognormal", 120, 0.8, 1),
    output=Distribution("lognormal", 250, 0.6, 1),
    pause=Distribution("lognormal", 6, 0.8, 0),
    groups=4,
    shared=512,
)
"""People, who read each answer before they go on."""

AGENT = Kind(
    turns=Distribution("uniform", 4, 12, 1),
    first=Distribution("lognormal", 300, 0.6, 1),
    later=Distribution("lognormal", 600, 0.8, 1),
    output=Distribution("lognormal", 120, 0.6, 1),
    pause=Distribution("lognormal", 1, 0.8, 0),
    groups=16,
    shared=4096,
)
"""Programs, with a long system prompt and quick tool results."""

LONG = Kind(
    turns=Distribution("constant", 1, 1, 1),
    first=Distribution("uniform", 8192, 32768, 1),
    later=Distribution("constant", 1, 1, 1),
    output=Distribution("lognormal", 250, 0.6, 1),
    pause=Distribution("constant", 0, 0, 0),
)
"""Documents: long prompts that are new each time."""


class Mix(Workload):
    """Chats, agents and long prompts.

    Args:
        rate: Average requests (turns) a second.
        long_share: Share of long prompts among the requests.
        agent_share: Share of agents among the other sessions.
        max_len: Most tokens of a session; it ends before a turn that would exceed them.
    """

    def __init__(self, rate: float, long_share: float, agent_share: float, seed: int, max_len: int) -> None:
        self._seed = seed
        self._turns = _Turns(seed, max_len)
        turns = agent_share * AGENT.turns.mean + (1 - agent_share) * CHAT.turns.mean
        # The share among sessions that gives `long_share` among requests, as other sessions have several turns.
        long_sessions = long_share * turns / (1 - long_share + long_share * turns)
        self._odds = (long_sessions, long_sessions + (1 - long_sessions) * agent_share)
        self._sessions_per_s = rate / (long_sessions + (1 - long_sessions) * turns)

    def sessions(self) -> Iterator[Session]:
        rng = _generator(self._seed, _Stream.SESSIONS)
        start_s = 0.0
        while True:
            start_s += rng.exponential(1 / self._sessions_per_s)
            draw = rng.random()
            kind = LONG if draw < self._odds[0] else AGENT if draw < self._odds[1] else CHAT
            yield Session(start_s, self._turns.draw(kind, rng), kind.shared)


class Day(Workload):
    """A day, from midnight on, which repeats.

    Args:
        rate: Requests a second of chats at their peak.
        day_s: Seconds that a day takes.
        max_len: As in `Mix`.
    """

    def __init__(self, rate: float, day_s: float, seed: int, max_len: int) -> None:
        self._rate = rate
        self._day_s = day_s
        self._seed = seed
        self._turns = _Turns(seed, max_len)

    def sessions(self) -> Iterator[Session]:
        rng = _generator(self._seed, _Stream.SESSIONS)
        peaks = [self._rate * one.peak / one.kind.turns.mean for one in DAY]
        start_s = 0.0
        while True:
            start_s += rng.exponential(1 / sum(peaks))
            hour = 24 * start_s / self._day_s % 24
            draw = rng.random() * sum(peaks)
            for one, peak in zip(DAY, peaks, strict=True):
                if draw < peak * one.level(hour):
                    yield Session(start_s, self._turns.draw(one.kind, rng), one.kind.shared)
                    break
                draw -= peak
                if draw < 0:
                    break


@dataclass(frozen=True, slots=True)
class Shift:
    """When sessions of a kind begin.

    Attributes:
        peak: Requests a second at its peak, relative to those of chats.
        hour: Hour of the peak.
        night: Level half a day later, relative to the peak.
        width: Larger numbers make the peak narrower.
    """

    kind: Kind
    peak: float
    hour: float
    night: float
    width: float

    def level(self, hour: float) -> float:
        """The requests a second at an hour of the day, relative to the peak."""
        wave: float = (0.5 + 0.5 * np.cos(2 * np.pi * (hour - self.hour) / 24)) ** self.width
        return self.night + (1 - self.night) * wave


DAY = (Shift(CHAT, 1.0, 14, 0.05, 1.0), Shift(AGENT, 0.35, 21, 0.1, 1.5), Shift(LONG, 0.036, 3, 0.02, 1.5))
"""The peaks are about as much work."""


class _Turns:
    """Draws the turns of sessions.

    Args:
        max_len: Most tokens of a session; it ends before a turn that would exceed them.
    """

    def __init__(self, seed: int, max_len: int) -> None:
        self._max_len = max_len
        self._shared = {kind: _shared_prompts(kind, seed) for kind in (CHAT, AGENT)}

    def draw(self, kind: Kind, rng: np.random.Generator) -> list[Turn]:
        """Draws the turns of one session."""
        number = kind.turns.tokens(rng)
        shared = self._shared[kind][rng.integers(kind.groups)] if kind.groups else array("i")
        turns: list[Turn] = []
        total = 0
        for turn in range(number):
            new = (kind.later if turn else kind.first).tokens(rng)
            wanted = kind.output.tokens(rng)
            token_ids = _tokens(rng, new)
            if turn == 0:
                token_ids = shared + token_ids
            total += len(token_ids) + wanted
            if total >= self._max_len:
                break
            turns.append(Turn(token_ids, wanted, kind.pause.draw(rng) if turn else 0.0))
        return turns


class Trace(Workload):
    """The requests of a trace, each a session of one turn. Prompts share the prefixes that the trace says.

    Args:
        speedup: Replays the trace this many times faster.
        max_len: Requests with more tokens are left out.

    Raises:
        ConfigError: No request is left.
    """

    def __init__(self, requests: Sequence[TracedRequest], speedup: float, seed: int, max_len: int) -> None:
        self._requests = [one for one in requests if one.input_length + one.output_length < max_len]
        if not self._requests:
            raise ConfigError(f"no request of the trace fits into --max-model-len {max_len}")
        self._first_ms = requests[0].timestamp
        self._speedup = speedup
        self._seed = seed

    def sessions(self) -> Iterator[Session]:
        for index, request in enumerate(self._requests):
            start_s = (request.timestamp - self._first_ms) / 1e3 / self._speedup
            yield Session(start_s, [Turn(self._token_ids(index, request), request.output_length)])

    def _token_ids(self, index: int, request: TracedRequest) -> "array[int]":
        blocks = -(-request.input_length // BLOCK_TOKENS)
        parts = [_generator(self._seed, _Stream.BLOCK, number) for number in request.hash_ids[:blocks]]
        parts.append(_generator(self._seed, _Stream.REST, index))
        token_ids = array("i")
        for part in parts[:-1]:
            token_ids += _tokens(part, BLOCK_TOKENS)
        token_ids += _tokens(parts[-1], max(0, request.input_length - len(token_ids)))
        return token_ids[: request.input_length]


def make_workload(settings: ClusterShape, rate: float) -> Workload:
    """Returns the workload of the settings.

    Args:
        rate: Requests a second of a mix, or of chats at their peak in a day; a trace has its own times.

    Raises:
        ConfigError: A setting is missing.
        BenchError: The file is not a trace.
    """
    if settings.workload == "mix":
        return Mix(rate, settings.long_share, settings.agent_share, settings.seed, settings.max_model_len)
    if settings.workload == "day":
        return Day(rate, settings.day_s, settings.seed, settings.max_model_len)
    if settings.file is None:
        raise ConfigError("--workload trace needs --file")
    return Trace(read_trace(settings.file), settings.speedup, settings.seed, settings.max_model_len)


class _Stream(IntEnum):
    SESSIONS = 0
    SHARED = 1
    BLOCK = 2
    REST = 3


def _generator(seed: int, stream: _Stream, index: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, stream, index))))


def _tokens(rng: np.random.Generator, count: int) -> "array[int]":
    return array("i", rng.integers(VOCAB_SIZE, size=count, dtype=np.int32).tobytes())


def _shared_prompts(kind: Kind, seed: int) -> "list[array[int]]":
    rng = _generator(seed, _Stream.SHARED, kind.shared)
    return [_tokens(rng, kind.shared) for _ in range(kind.groups)]
