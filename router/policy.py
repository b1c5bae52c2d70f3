"""Where a request goes: a pure function of what is known about the workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cpd.blocks import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take a request.

    Attributes:
        worker_id: Its name.
        address: `host:port` of its gRPC server.
        cached_blocks: Leading blocks of this request that it has cached.
        requests: Running and waiting ones, with those that this router sent and the worker has not reported yet.
        tokens: Prompt tokens that it has not computed yet, likewise.
    """

    worker_id: str
    address: str
    cached_blocks: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty where `decode` computes the prompt itself.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]


def place(
    num_tokens: int,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    *,
    long_prefill_tokens: int,
    rng: Random,
) -> Placement | None:
    """The worker with most of the prompt cached, then the least loaded one, then any.

    The prompt is computed on a prefill worker where more than `long_prefill_tokens` of it are not cached on the chosen
    worker.

    Args:
        num_tokens: Tokens to compute: the prompt, with output that was already emitted after a replay.
        combined, prefill: Live workers of either role.
        rng: Decides among equals.

    Returns:
        None where no combined worker is live.
    """
    ranked = _rank(combined, rng)
    if not ranked:
        return None
    decode = ranked[0]
    uncached = num_tokens - decode.cached_blocks * BLOCK_SIZE
    remote = uncached > long_prefill_tokens
    return Placement(decode, tuple(_rank(prefill, rng)) if remote else ())


def _rank(candidates: Sequence[Candidate], rng: Random) -> list[Candidate]:
    return sorted(candidates, key=lambda one: (-one.cached_blocks, one.requests, one.tokens, rng.random()))
