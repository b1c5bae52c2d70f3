"""Where recent requests went, why, and what became of them: predicted and actual times side by side.

A record is one placement of one prompt: a request that was placed again, or that has several prompts, has several.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cpd.rpc import cpd_pb2 as pb
from router.policy import Placement

KEPT = 500
"""Records: the oldest one goes first."""


@dataclass(slots=True, eq=False)
class Record:
    """One placement. Times are of the event loop's clock, in seconds.

    Attributes:
        attempt: Placements of the same prompt before this one.
        choice: The one whose tokens are timed.
        placed_at: When it was sent to the worker.
        outcome: `running`, `finished`, `cancelled`, or why the request was placed again or failed.
        prefilled: What the worker told with the first token.
        first_at, last_at: When the first and the last token came.
        outputs: So many came, each one token, usually.
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

    def output(self, now: float) -> None:
        """A token of the choice came."""
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
        """The record as a JSON document."""
        placement = self.placement
        return {
            "attempt": self.attempt,
            "prompt_tokens": self.prompt_tokens,
            "why": _why(placement),
            "replicated": placement.replicated,
            "outcome": self.outcome,
            "predicted": placement.chosen._asdict() | {"late": placement.computes.late},
            "actual": self._actual(),
            "options": [option._asdict() for option in sorted(placement.options, key=lambda option: option.cost_ms)],
        }

    def _actual(self) -> dict[str, Any] | None:
        if not self.outputs:
            return None
        gaps = self.outputs - 1
        return {
            "prefill": self.prefilled.prefill_worker,
            "cached_at": self.prefilled.prefix_worker,
            "cached_tokens": self.prefilled.cached_tokens,
            "queue_ms": self.prefilled.queue_ms,
            "ttft_ms": (self.first_at - self.placed_at) * 1e3,
            "first_gap_ms": self.first_gap_s * 1e3 if gaps else None,
            "itl_ms": (self.last_at - self.first_at) * 1e3 / gaps if gaps else None,
            "longest_gap_ms": self.longest_gap_s * 1e3 if gaps else None,
            "outputs": self.outputs,
        }


class History:
    """The last records of one router."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=KEPT)

    def add(self, record: Record) -> None:
        """Keeps a record; it may change on."""
        self._records.append(record)

    def find(self, tenant: str, request_id: str) -> list[Record]:
        """The records of a tenant's request, oldest first."""
        return [one for one in self._records if one.request_id == request_id and one.tenant == tenant]


def _why(placement: Placement) -> str:
    host_tokens = placement.chosen.host_tokens
    back = f"; {host_tokens} tokens come back from host memory" if host_tokens else ""
    return _against_the_others(placement) + back


def _against_the_others(placement: Placement) -> str:
    chosen, *others = placement.options
    if not others:
        return "the only option"
    best = min(others, key=lambda option: option.cost_ms)
    name = best.decode
    if best.prefill:
        name += f" with {best.prefill}"
    if best.cached_at:
        name += f" with what {best.cached_at} has cached"
    if best.cost_ms <= chosen.cost_ms:
        return f"as good as {name}, with no more to compute"
    return (
        f"the least cost of {len(placement.options)} options; {name} costs {best.cost_ms - chosen.cost_ms:.1f} ms more"
    )
