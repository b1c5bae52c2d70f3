"""Where a request goes: a pure function of what is known about the workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from cpd.blocks import BLOCK_SIZE
from router.candidate import Candidate


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed.

    Attributes:
        tokens: To compute: the prompt, with output that was already emitted after a replay.
        output_tokens: Of each choice at most.
        choices: Sequences that will decode.
    """

    tokens: int
    output_tokens: int = 1
    choices: int = 1


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the operator wants.

    Attributes:
        slo_ttft_ms: A first token is to come within this time.
        slo_itl_ms: So long at most between two tokens of a stream.
        long_prefill_tokens: More uncached tokens go to a prefill worker; auto: where it is predicted to be better.
    """

    slo_ttft_ms: float = 2000.0
    slo_itl_ms: float = 50.0
    long_prefill_tokens: int | Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a request, and what is predicted of it.

    Attributes:
        decode: The combined worker.
        prefill: The prefill worker; empty: `decode` computes the prompt itself.
        uncached_tokens: What is to be computed.
        queue_ms: Until that begins.
        prefill_ms: Until it is done, from then on.
        transfer_ms: What the pages' way adds to the gap after the first token.
        ttft_ms: Until the first token.
        itl_ms: Between the tokens after it.
        harm_ms: What other users' tokens are delayed by, summed over all of them.
        cost_ms: What is compared.
    """

    decode: str
    prefill: str
    uncached_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    itl_ms: float
    harm_ms: float
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty where `decode` computes the prompt itself.
        long_prefill_tokens: What `decode` may compute itself of a prompt with prefill workers.
        replicated: Another combined worker has more of the prompt cached.
        options: Those that were predicted in full, the chosen one first.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]
    long_prefill_tokens: int
    replicated: bool
    options: tuple[Option, ...]

    @property
    def chosen(self) -> Option:
        """What was predicted of the decision."""
        return self.options[0]


def place(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate],
    cached: Mapping[str, int],
    settings: PolicySettings,
    *,
    now: float,
    rng: Random,
) -> Placement | None:
    """The worker with most of the prompt cached, then the least loaded one, then any.

    Args:
        combined, prefill: Live workers of either role.
        cached: Leading blocks of the prompt that a worker has, by its name; without those that have none.
        now: In seconds, of the clock of `Candidate.idle_at`.
        rng: Decides among equals.

    Returns:
        None where no combined worker is live.
    """

    def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(
            candidates,
            key=lambda one: (-cached.get(one.worker_id, 0), one.requests, one.queue_ms(now), rng.random()),
        )

    ranked = rank(combined)
    if not ranked:
        return None
    threshold = 1024 if settings.long_prefill_tokens == "auto" else settings.long_prefill_tokens
    uncached = prompt.tokens - cached.get(ranked[0].worker_id, 0) * BLOCK_SIZE
    helpers = tuple(rank(prefill)) if uncached > threshold else ()
    computes = helpers[0] if helpers else ranked[0]
    before = cached.get(computes.worker_id, 0) * BLOCK_SIZE
    queue_ms, ms = computes.queue_ms(now), computes.prefill(prompt.tokens - before, before).ms
    option = Option(
        decode=ranked[0].worker_id,
        prefill=computes.worker_id if helpers else "",
        uncached_tokens=prompt.tokens - before,
        queue_ms=queue_ms,
        prefill_ms=ms,
        transfer_ms=0.0,
        ttft_ms=queue_ms + ms,
        itl_ms=ranked[0].grown_ms(prompt.tokens),
        harm_ms=0.0,
        cost_ms=queue_ms + ms,
    )
    return Placement(ranked[0], helpers, threshold, False, (option,))
