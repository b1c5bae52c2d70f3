"""What a placement policy gets and what it returns.

A policy decides which workers serve a request. `policies.py` has those that come with the router; the setting
`policy: module:object` takes any other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple, Protocol

from cpd.common.blocks import BLOCK_SIZE
from router.placement.candidate import Candidate
from router.prefix_index.index import Prefixes


@dataclass(slots=True)  # not frozen, as all that is made for each request: that takes three times longer
class Prompt:
    """A prompt to place.

    Attributes:
        tokens: Tokens of the prompt; after a replay also those of the output so far.
        output_tokens: Upper bound on the tokens of each choice.
        choices: Number of sequences that will decode.
        expected_output: Tokens that an answer usually has.
    """

    tokens: int
    output_tokens: int = 1
    choices: int = 1
    expected_output: int = 256


@dataclass(frozen=True, slots=True)
class Targets:
    """What the operator asks of every policy.

    Attributes:
        slo_ttft_ms: Target time to first token.
        slo_itl_ms: Target for the longest gap between two tokens of a stream; 0 is no target.
        long_prefill_tokens: Prompts with more uncached tokens go to a prefill worker; auto leaves it to the policy.
    """

    slo_ttft_ms: float = 2000.0
    slo_itl_ms: float = 50.0
    long_prefill_tokens: int | Literal["auto"] = "auto"


class QueuedBehind(NamedTuple):
    """How many other prompts wait for a prefill that is to begin after a wait: `fixed + per_ms · (wait + prefill / 2)`.

    A prompt that arrives during the wait is delayed by the whole prefill, one that arrives during the prefill by half
    of it on average, and so are those that arrive before the worker is next idle.

    Attributes:
        fixed: A number that does not depend on the times: before arrivals have been counted.
        per_ms: Prompts that arrive each ms, divided by the idle share of the worker's time.
    """

    fixed: float
    per_ms: float = 0.0

    def number(self, wait_ms: float, prefill_ms: float) -> float:
        """The number of prompts behind a prefill that begins after `wait_ms` and takes `prefill_ms`."""
        return self.fixed + self.per_ms * (wait_ms + prefill_ms / 2)


ASSUMED_BEHIND = QueuedBehind(2.0)


@dataclass(slots=True)
class Situation:
    """A prompt to place, and what the router knows at that moment.

    Attributes:
        combined, prefill: Live workers of either role; at least one combined worker.
        cached: Leading blocks of the prompt that each worker has cached.
        now: Time in seconds, of the clock of `Candidate.idle_at`.
        rng: Decides between equally good options.
        trusted: Recent predictions were mostly right.
        evicted_reuse: Probability that an evicted page is wanted again.
        behind_combined, behind_prefill: The prompts behind a prefill on a worker of either role.
    """

    prompt: Prompt
    combined: Sequence[Candidate]
    prefill: Sequence[Candidate]
    cached: Prefixes
    targets: Targets
    now: float
    rng: Random
    trusted: bool = True
    evicted_reuse: float = 0.25
    behind_combined: QueuedBehind = ASSUMED_BEHIND
    behind_prefill: QueuedBehind = ASSUMED_BEHIND

    @property
    def most_cached_tokens(self) -> int:
        """The most tokens of the prompt that a worker has cached."""
        return min(max(self.cached.cached.values(), default=0) * BLOCK_SIZE, self.prompt.tokens)

    def cached_blocks(self, worker: Candidate) -> int:
        """The number of leading blocks of the prompt that the worker has cached."""
        return self.cached.cached.get(worker.worker_id, 0)


class Cost(NamedTuple):
    """The terms of an option's cost, in the order of the formula in `costs.py`."""

    wake_ms: float
    wait_ms: float
    prefill_ms: float
    handoff_ms: float
    first_gap_ms: float
    decode_ms: float
    interference_ms: float
    stall_ms: float
    queued_behind_ms: float
    eviction_ms: float
    imbalance_ms: float
    slo_violation_ms: float
    late_ms: float


class Option(NamedTuple):  # six times faster to create than a frozen dataclass
    """One way to serve a request, with predictions.

    Attributes:
        decode: The combined worker.
        prefill: The prefill worker; empty if `decode` computes the prompt.
        prefix_source: Another combined worker from which `decode` fetches the first blocks; empty if none.
        uncached_tokens: Tokens to compute.
        host_tokens: Tokens loaded from host memory first, by `prefix_source` or else by the worker that computes.
        ttft_ms: Time to first token.
        itl_ms: Gap between later tokens.
        gaps_ms: Sum of the terms that are delays of later tokens, of this request and of others.
        cost_ms: Sum of the terms of `cost`, with `gaps_ms` counted `gap_weight` times. The lowest one wins.
    """

    decode: str
    prefill: str
    prefix_source: str
    uncached_tokens: int
    host_tokens: int
    ttft_ms: float
    itl_ms: float
    gaps_ms: float
    cost_ms: float
    cost: Cost


@dataclass(slots=True)
class Placement:
    """A decision. `costs.placement_of` makes the simplest ones.

    Attributes:
        decode: The combined worker that runs the request.
        prefill: Prefill workers to try, in this order; empty if `decode` computes the prompt.
        prefix_source: The worker from which `decode` fetches the first blocks.
        long_prefill_tokens: `decode` computes up to this many uncached tokens without remote prefill or fetch.
        replicates_prefix: Another combined worker has more of the prompt cached; `decode` gets a further copy.
        predicted: The options predicted in full, the chosen one first.
        prefix_source_blocks: The number of blocks to fetch.
        others: Predicts the remaining options, which can't be as good, for display.
    """

    decode: Candidate
    prefill: tuple[Candidate, ...]
    prefix_source: Candidate | None
    long_prefill_tokens: int
    replicates_prefix: bool
    predicted: tuple[Option, ...]
    prefix_source_blocks: int = 0
    others: Callable[[], Iterable[Option]] = field(default=tuple, compare=False)

    @property
    def route(self) -> str:
        """`local` or `remote`."""
        return "remote" if self.prefill else "local"

    @property
    def prompt_worker(self) -> Candidate:
        """The worker that computes the prompt."""
        return self.prefill[0] if self.prefill else self.decode

    @property
    def chosen(self) -> Option:
        """The chosen option."""
        return self.predicted[0]

    @property
    def options(self) -> tuple[Option, ...]:
        """All options, the chosen one first."""
        return (*self.predicted, *self.others())


class PlacementPolicy(Protocol):
    """Chooses the workers for requests. It may have state, and is called from one thread."""

    def place(self, seen: Situation) -> Placement:
        """Chooses the workers for a prompt."""
