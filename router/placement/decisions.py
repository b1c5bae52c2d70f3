"""Recent placements: where requests went and why, with predicted and actual times.

A decision is one placement of one prompt. A request that was placed again or has several prompts has several.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cpd.rpc import cpd_pb2 as pb
from router.placement.policy import Option, Placement

MAX_DECISIONS = 500
"""Number of decisions remembered; the oldest are dropped first."""


@dataclass(slots=True, eq=False)
class Decision:
    """One placement. Times are in seconds, on the event loop's clock.

    Attributes:
        attempt: Number of earlier placements of the same prompt.
        choice: The choice whose tokens are timed.
        placed_at: When the request was sent to the worker.
        outcome: `running`, `finished`, `cancelled`, or why the request was placed again or failed.
        prefilled: The worker's description of the prefill; it comes with the first token.
        first_at, last_at: Time of the first and of the last token.
        outputs: Number of outputs; an output is usually one token.
        wake_s: Time in which the prompt waited for a worker to wake.
    """

    tenant: str
    request_id: str
    placement: Placement
    prompt_tokens: int
    attempt: int
    choice: int
    placed_at: float
    outcome: str = "running"
    prefilled: pb.Prefilled = field(default_factory=pb.Prefilled)
    first_at: float = 0.0
    last_at: float = 0.0
    first_gap_s: float = 0.0
    longest_gap_s: float = 0.0
    outputs: int = 0
    wake_s: float = 0.0

    def on_prefilled(self, prefilled: pb.Prefilled) -> None:
        """Records how the prompt was computed."""
        self.prefilled.CopyFrom(prefilled)
        if not prefilled.prefill_worker:  # it waited in this queue; that the worker serves was heard a little later
            self.wake_s = min(self.wake_s, prefilled.queue_ms / 1e3)

    def on_output(self, now: float) -> None:
        """Records an output of the choice."""
        self.outputs += 1
        gap_s = now - self.last_at
        self.last_at = now
        if self.outputs == 1:
            self.first_at = now
        elif self.outputs == 2:
            self.first_gap_s = self.longest_gap_s = gap_s
        elif gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s

    def describe(self) -> dict[str, Any]:
        """The decision as a JSON document."""
        placement = self.placement
        return {
            "attempt": self.attempt,
            "prompt_tokens": self.prompt_tokens,
            "why": _why(placement),
            "replicated": placement.replicates_prefix,
            "outcome": self.outcome,
            "predicted": _describe(placement.chosen) | {"ttft_factor": placement.prompt_worker.ttft_factor},
            "actual": self._actual(),
            "options": [_describe(option) for option in sorted(placement.options, key=lambda option: option.cost_ms)],
        }

    def _actual(self) -> dict[str, Any] | None:
        if not self.outputs:
            return None
        gaps = self.outputs - 1
        return {
            "prefill": self.prefilled.prefill_worker,
            "prefix_source": self.prefilled.prefix_worker,
            "cached_tokens": self.prefilled.cached_tokens,
            "queue_ms": self.prefilled.queue_ms,
            "wake_ms": self.wake_s * 1e3,
            "ttft_ms": (self.first_at - self.placed_at) * 1e3,
            "first_gap_ms": self.first_gap_s * 1e3 if gaps else None,
            "itl_ms": (self.last_at - self.first_at) * 1e3 / gaps if gaps else None,
            "longest_gap_ms": self.longest_gap_s * 1e3 if gaps else None,
            "outputs": self.outputs,
        }


class Decisions:
    """The most recent decisions of one router."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def add(self, decision: Decision) -> None:
        """Adds a decision, which may still change."""
        self._decisions.append(decision)

    def find(self, tenant: str, request_id: str) -> list[Decision]:
        """The decisions for a tenant's request, oldest first."""
        return [one for one in self._decisions if one.request_id == request_id and one.tenant == tenant]


def _describe(option: Option) -> dict[str, Any]:
    return option._asdict() | {"cost": option.cost._asdict()}


def _why(placement: Placement) -> str:
    host_tokens = placement.chosen.host_tokens
    loaded = f"; {host_tokens} tokens are loaded from host memory" if host_tokens else ""
    return _comparison(placement) + loaded


def _comparison(placement: Placement) -> str:
    chosen, *others = placement.options
    if not others:
        return "the only option"
    best = min(others, key=lambda option: option.cost_ms)
    name = best.decode
    if best.prefill:
        name += f" with {best.prefill}"
    if best.prefix_source:
        name += f" with what {best.prefix_source} has cached"
    if best.cost_ms <= chosen.cost_ms:
        return f"as good as {name}, with no more to compute"
    return (
        f"the lowest cost of {len(placement.options)} options; {name} costs {best.cost_ms - chosen.cost_ms:.1f} ms more"
    )
