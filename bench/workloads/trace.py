"""Replays a trace in Mooncake's format: arrival times, lengths and shared prefixes of requests.

A line is a JSON object with `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`: one number
per 512 prompt tokens, equal for equal prefixes. Each number stands for a text here, so that prompts share exactly what
the traced prompts shared. (Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", 2024.)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field

from bench.errors import BenchError
from bench.tokens import Texts
from bench.workloads.base import Session, Turn, Workload
from bench.workloads.randomness import Stream, generator
from bench.workloads.reading import lines, read, validate

BLOCK_TOKENS = 512

MOST_TOKENS = 1 << 24
"""Most tokens of a prompt or an answer; no model supports more."""


class TracedRequest(BaseModel):
    """One line of a trace."""

    timestamp: Annotated[float, Field(allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, Field(ge=0)]] = []


def read_trace(path: Path) -> list[TracedRequest]:
    """Reads the requests of a trace, in the order of their times.

    Raises:
        BenchError: The file cannot be read, or a line has another form.
    """
    requests = [validate(where, TracedRequest, value) for where, value in lines(path, read(path))]
    if not requests:
        raise BenchError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.timestamp)


class Trace(Workload):
    """The requests of a trace in the order of their times, each a session of one turn.

    Args:
        path: The file, which is read once, here.
        texts: Makes prompts.
        seed: Seed of the texts.
        speedup: Factor by which to replay faster.

    Raises:
        BenchError: The file cannot be read, or a line has another form.
    """

    def __init__(self, path: Path, texts: Texts, seed: int, speedup: float) -> None:
        self._texts = texts
        self._seed = seed
        self._requests = read_trace(path)
        first_ms = self._requests[0].timestamp
        self._times_s = [(request.timestamp - first_ms) / 1e3 / speedup for request in self._requests]

    @property
    def size(self) -> int:
        return len(self._requests)

    @property
    def times_s(self) -> Sequence[float]:
        return self._times_s

    def session(self, index: int) -> Session:
        request = self._requests[index]
        turn = Turn(self._text(index, request), request.input_length, request.output_length)
        return Session(index, (turn,))

    def _text(self, index: int, request: TracedRequest) -> str:
        """Concatenates the blocks' texts by number, and fills the rest with random text."""
        left = max(1, request.input_length - self._texts.overhead)
        parts: list[str] = []
        for hash_id in request.hash_ids:
            tokens = min(left, BLOCK_TOKENS)
            if tokens:
                parts.append(self._piece(generator(self._seed, Stream.BLOCK, hash_id), tokens, follows=bool(parts)))
            left -= tokens
        if left:
            parts.append(self._piece(generator(self._seed, Stream.SESSION, index), left, follows=bool(parts)))
        return "".join(parts)

    def _piece(self, rng: np.random.Generator, tokens: int, *, follows: bool) -> str:
        return self._texts.more(rng, tokens) if follows else self._texts.text(rng, tokens)
