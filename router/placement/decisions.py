"""Recent placements: where requests went and why, with predicted and actual times.

A decision is one placement of one prompt. A request that was placed again or has several prompts has several.
"""

from array import array
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpd.rpc import cpd_pb2 as pb
from router.placement.policy import Option, Placement

MAX_DECISIONS = 500
"""Number of decisions remembered; the oldest are dropped first."""

MAX_TICKS = 4096
"""Number of outputs of a decision whose times are remembered, if its client asked for them."""

Way = tuple[str, str, str]
"""The prefill worker, the combined worker and the prefix source of a request; empty if it has none."""


@dataclass(slots=True, eq=False)
class Decision:
    """One placement. Times are in seconds, on the event loop's clock.

    Attributes:
        attempt: Number of earlier placements of the same prompt.
        choice: The choice whose tokens are timed.
        received: When the call arrived.
        placed_at: When the request was sent to the worker.
        streams: Sequences that decoded on the combined worker then.
        ticks: Times of the outputs in ms since `received`, at most MAX_TICKS; None if the client did not ask for them.
        outcome: `running`, `finished`, `cancelled`, or why the request was placed again or failed.
        ended_at: When the request left the worker; 0 while it is there.
        prefilled: The worker's description of the prefill; it comes with the first token.
        landed: Pages that the prefill worker sent; it comes with a later token.
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
    received: float
    placed_at: float
    streams: int
    ticks: "array[float] | None" = None
    outcome: str = "running"
    ended_at: float = 0.0
    prefilled: pb.Prefilled = field(default_factory=pb.Prefilled)
    landed: pb.Landed | None = None
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
        if self.ticks is not None and len(self.ticks) < MAX_TICKS:
            self.ticks.append(self._since_received(now))

    def end(self, outcome: str, now: float) -> None:
        """Records that the request has left the worker."""
        self.outcome, self.ended_at = outcome, now

    def describe(self, *, internals: bool = True) -> dict[str, Any]:
        """The decision as a JSON document.

        Args:
            internals: Whether to include what tells of other tenants: how loaded workers are, and the names of those
                that did not serve the request.
        """
        placement = self.placement
        options = sorted(placement.options, key=lambda option: option.cost_ms)
        told: dict[str, Any] = {
            "attempt": self.attempt,
            "prompt_tokens": self.prompt_tokens,
            "placed_ms": self._since_received(self.placed_at),
            "ended_ms": self._since_received(self.ended_at) if self.ended_at else None,
            "actual": self._actual(),
        }
        if not internals:
            by_route: dict[str, dict[str, Any]] = {}
            for option in options:
                by_route.setdefault(_route(option), _forecast(option))
            return told | {
                "outcome": self.outcome.partition(":")[0].partition(",")[0],
                "predicted": _forecast(placement.chosen),
                "options": list(by_route.values()),
            }
        return told | {
            "why": _why(placement),
            "replicated": placement.replicates_prefix,
            "outcome": self.outcome,
            "streams": self.streams,
            "predicted": _describe(placement.chosen) | {"ttft_factor": placement.prompt_worker.ttft_factor},
            "options": [_describe(option) for option in options],
        }

    def _actual(self) -> dict[str, Any] | None:
        if not self.outputs:
            return None
        gaps, prefilled, worker = self.outputs - 1, self.prefilled, self.placement.decode
        fetched = prefilled.fetched if prefilled.HasField("fetched") else None
        return {
            "decode": worker.worker_id,
            "prefill": prefilled.prefill_worker,
            "prefix_source": prefilled.prefix_worker,
            "cached_tokens": prefilled.cached_tokens,
            "queue_ms": prefilled.queue_ms,
            "wake_ms": self.wake_s * 1e3,
            "ttft_ms": (self.first_at - self.placed_at) * 1e3,
            "first_gap_ms": self.first_gap_s * 1e3 if gaps else None,
            "itl_ms": (self.last_at - self.first_at) * 1e3 / gaps if gaps else None,
            "longest_gap_ms": self.longest_gap_s * 1e3 if gaps else None,
            "last_ms": self._since_received(self.last_at),
            "outputs": self.outputs,
            "fetched": self._moved(fetched) if fetched is not None else None,
            "landed": self._moved(self.landed) if self.landed is not None else None,
            "ticks_ms": [round(tick, 2) for tick in self.ticks] if self.ticks is not None else None,
        }

    def _moved(self, landed: pb.Landed) -> dict[str, float]:
        """Pages that came from another worker. `alone_ms` is the predicted time to move them."""
        worker = self.placement.decode
        return {
            "pages": landed.pages,
            "bytes": landed.pages * worker.page_bytes,
            "waited_ms": landed.waited_ms,
            "alone_ms": worker.transfer_ms(landed.pages),
        }

    def _since_received(self, at: float) -> float:
        return (at - self.received) * 1e3


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

    def on_the_way(self) -> Mapping[Way, int]:
        """The number of requests that wait for their first token, by the workers chosen for them."""
        waiting = (one.placement.chosen for one in self._decisions if not one.outputs and one.outcome == "running")
        return Counter((option.prefill, option.decode, option.prefix_source) for option in waiting)


def _describe(option: Option) -> dict[str, Any]:
    return option._asdict() | {"route": _route(option), "cost": option.cost._asdict()}


def _forecast(option: Option) -> dict[str, Any]:
    """What an option would have meant for its own request."""
    return {
        "route": _route(option),
        "uncached_tokens": option.uncached_tokens,
        "ttft_ms": option.ttft_ms,
        "itl_ms": option.itl_ms,
    }


def _route(option: Option) -> str:
    """`local`, `fetched` (local after fetching a prefix) or `remote`."""
    return "remote" if option.prefill else "fetched" if option.prefix_source else "local"


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
