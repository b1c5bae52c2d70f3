"""The spans of a sampled request on the worker that answers it. They follow one another, so they add up:

    grammar ─▶ fetch ─▶ queue ─▶ prefill ────────────────────────────────▶ decode     computed here
    grammar ─▶ remote prefill (of each prefill worker asked) ─▶ transfer ─▶ decode    computed elsewhere

Those that do not happen are left out. The spans of the other worker are below `fetch` and `remote prefill`.
"""

import time
from typing import TYPE_CHECKING

from cpd.rpc import cpd_pb2 as pb

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan


class AnswerTrace:
    """Makes the spans.

    Args:
        span: The worker's part of the request, which ends with `end`.
        received: When the request came.

    Attributes:
        error: Why the worker gave the request back; empty if it did not.
    """

    def __init__(self, span: "TracedSpan", received: float) -> None:
        self._span = span
        self._received = received
        self._call: TracedSpan | None = None  # to another worker
        self._started = False
        self.error = ""

    def grammar_compiled(self) -> None:
        """The request's grammar is ready."""
        self._span.phase("grammar", time.monotonic())

    def ask(self, kind: str, worker_id: str) -> str:
        """Begins a fetch or a remote prefill; returns what names it to that worker."""
        self._call = self._span.open_phase(kind, "CLIENT", {"cpd.worker": worker_id})
        return self._call.traceparent

    def answered(self, error: str = "") -> None:
        """The other worker has done what was asked, or has failed."""
        if self._call is not None:
            self._span.close_phase(self._call, time.monotonic(), error)
            self._call = None

    def first_tokens(self, prefilled: pb.Prefilled) -> None:
        """The first tokens are here. `prefilled` tells how."""
        if self._started:
            return  # those of another choice
        self._started = True
        now = time.monotonic()
        self._span.set({"cpd.cached_tokens": prefilled.cached_tokens, "cpd.prefill_worker": prefilled.prefill_worker})
        if prefilled.prefill_worker:
            self.answered()
        else:
            self._span.phase("queue", min(now, self._received + prefilled.queue_ms / 1e3))
            self._span.phase("prefill", now)

    def landed(self, landed: pb.Landed) -> None:
        """The KV pages of a remote prefill are here."""
        self._span.phase("transfer", time.monotonic(), {"cpd.pages": landed.pages})

    def end(self) -> None:
        """The request has ended."""
        now = time.monotonic()
        self.answered("given up")
        if self._started:
            self._span.phase("decode", now)
        self._span.end(now, self.error)
