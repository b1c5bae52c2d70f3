"""One request of a router: what is still sent for it, and how it ends.

    OPEN ──Park──▶ PARKING ──the engine has let go of it──▶ PARKED (its blocks are pinned)
     │                │                                         │
     └────────────────┴─────────────────────────────────────────┴──▶ ENDED
     last outputs,        aborted                  aborted, because they go on elsewhere, or resumed here
     aborted, refused                              by a new request

A choice is open until its last output was sent, it was aborted, or the whole request was refused. Nothing is sent for a
closed choice, so each (request, attempt, choice) gets exactly one last message.
"""

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from cpd.common.errors import QueueFullError
from cpd.common.logs import fields
from cpd.rpc import cpd_pb2 as pb
from engine.types import Output, Request
from worker.async_engine import EngineDiedError
from worker.router_session import RouterSession

if TYPE_CHECKING:
    from decode_worker.answer_trace import AnswerTrace

Key = tuple[int, int, int]
"""Session number, request, attempt."""


class RouterRequest:
    """One (request, attempt) of a session.

    Attributes:
        request: The submitted request.
        log_fields: Names it in a log line.
        closed: Choices that are not open any more. The engine thread reads it, too.
        ended: Set when no choice is open.
        engine_ids: The names that the engine has, or may get, for it.
        prefix_worker: The worker that its first blocks were fetched from; empty if none.
        fetched: The pages of these blocks; None if none.
        parking: The engine was told to park it, and nothing more is sent for it. Its choices stay open until they are
            aborted or resumed.
        pinned: While it is parked, the pins of its pages.
        trace: Its spans; None if it is not traced.
    """

    def __init__(self, session: RouterSession, message: pb.Submit, request: Request) -> None:
        self.session = session
        self.request = request
        self.key: Key = (session.number, message.request, message.attempt)
        self.log_fields = fields(request_id=message.trace_id, tenant=message.tenant)
        self.closed: set[int] = set()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine_ids = [request.id]
        self.prefix_worker = ""
        self.fetched: pb.Landed | None = None
        self.parking = False
        self.pinned: list[int] = []
        self.trace: AnswerTrace | None = None
        self._open = set(range(request.first_choice, request.first_choice + request.n))
        self._prefilled_sent: set[int] = set()
        self._first_sent = math.inf  # time of the first token, of `time.monotonic`
        self._num_tokens = 0
        self._landed: pb.Landed | None = None  # not told to the router yet

    @property
    def open(self) -> Collection[int]:
        """Choices that the router expects more of."""
        return self._open

    @property
    def started(self) -> bool:
        """True if the router has got a token."""
        return bool(self._prefilled_sent)

    @property
    def mean_output(self) -> float:
        """Number of tokens of each choice that were sent, on average."""
        return self._num_tokens / self.request.n

    def deadline(self, slo_itl_s: float) -> float:
        """Returns when the next token is due, for its target to be met; infinite without a target."""
        if not self.started:
            return self.request.deadline
        return self._first_sent + slo_itl_s * self.mean_output if slo_itl_s else math.inf

    def send(self, outputs: Sequence[Output], prefilled: pb.Prefilled | None = None) -> None:
        """Sends new tokens, or the end, of open choices.

        Args:
            prefilled: How the prompt was computed, if not by this worker.
        """
        _, request, attempt = self.key
        for output in outputs:
            if output.choice not in self._open:
                continue
            self._num_tokens += len(output.token_ids)
            if output.choice in self._prefilled_sent:
                landed, self._landed = self._landed, None
                self.session.send_output(request, attempt, output, landed=landed)
            else:
                self._prefilled_sent.add(output.choice)
                self._first_sent = min(self._first_sent, time.monotonic())
                here = pb.Prefilled(
                    cached_tokens=output.cached_tokens or 0,
                    queue_ms=output.queued_s * 1000,
                    prefix_worker=self.prefix_worker,
                    fetched=self.fetched,
                )
                self.session.send_output(request, attempt, output, prefilled or here)
                if self.trace is not None:
                    self.trace.first_tokens(prefilled or here)
            if output.finish is not None:
                self.close({output.choice})

    def prefix_landed(self, landed: pb.Landed) -> None:
        """Takes note of a prefix from another worker, to tell it with the first tokens."""
        self.fetched = landed

    def pages_landed(self, landed: pb.Landed) -> None:
        """Takes note of the pages of a prefill worker, to tell it with the next tokens."""
        self._landed = landed
        if self.trace is not None:
            self.trace.landed(landed)

    def refuse(
        self,
        kind: pb.Refusal.Kind.ValueType,
        message: str,
        *,
        retry_after_s: float = 0.0,
        over_share: bool = False,
        failed_prefill_workers: Collection[str] = (),
    ) -> None:
        """Ends all open choices with one refusal."""
        if not self._open:
            return
        if self.trace is not None:
            self.trace.error = message
        _, request, attempt = self.key
        self.session.refuse(
            pb.Refusal(
                request=request,
                attempt=attempt,
                kind=kind,
                message=message,
                retry_after_ms=round(retry_after_s * 1000),
                over_share=over_share,
                failed_prefill_workers=failed_prefill_workers,
            )
        )
        self.close(self._open)

    def parked(self) -> None:
        """Tells the router that the request is parked."""
        _, request, attempt = self.key
        kind = pb.Refusal.KIND_PARKED
        message = "its router moves it"
        self.session.refuse(pb.Refusal(request=request, attempt=attempt, kind=kind, message=message))

    def refuse_for(self, error: BaseException) -> None:
        """Ends all open choices because the engine raised `error`."""
        match error:
            case QueueFullError():
                kind = pb.Refusal.KIND_QUEUE_FULL
                self.refuse(kind, str(error), retry_after_s=error.retry_after_s, over_share=error.over_share)
            case EngineDiedError():
                self.refuse(pb.Refusal.KIND_REROUTE, str(error))
            case _:
                self.refuse(pb.Refusal.KIND_FAILED, str(error))

    def close(self, choices: Collection[int]) -> None:
        """Sends nothing more for these choices."""
        self.closed |= set(choices)
        self._open -= self.closed
        if not self._open and not self.ended.done():
            self.ended.set_result(None)
