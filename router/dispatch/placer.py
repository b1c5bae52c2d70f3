"""Finds workers for an attempt: gathers what the placement policy decides by, and writes its decision as a Submit."""

from dataclasses import dataclass
from random import Random

from cpd.common.blocks import TOKEN_BYTES
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.attempts import Attempt, RoutedRequest
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import Workers
from router.placement.costs import PolicySettings, Prompt
from router.placement.policy import Placement, place


@dataclass(frozen=True, slots=True)
class PlacedAttempt:
    """An attempt's workers, and the message for the first of them.

    Attributes:
        decode: The combined worker that runs the attempt.
        prefill: The worker that computes its prompt, perhaps the same.
    """

    placement: Placement
    decode: WorkerSession
    prefill: WorkerSession
    submit: pb.Submit


class Placer:
    """Asks the placement policy about the workers that are live.

    Args:
        rng: Decides between equally good workers.
    """

    def __init__(self, workers: Workers, settings: PolicySettings, rng: Random) -> None:
        self._workers = workers
        self._settings = settings
        self._rng = rng

    def place(self, attempt: Attempt, now: float) -> PlacedAttempt | None:
        """The best workers for an attempt; None if no worker can take it."""
        request, workers = attempt.request, self._workers
        if workers.fingerprint != request.fingerprint:
            return None
        emitted = request.outputs[min(attempt.choices)]
        tokens, hashes = request.with_output(emitted)
        cached = workers.index.cached_prefixes(hashes)
        total, longest = len(tokens) // TOKEN_BYTES, request.prompt_len + request.sampling.max_tokens
        placement = place(
            Prompt(total, request.sampling.max_tokens - len(emitted), len(attempt.choices)),
            workers.candidates("combined", longest, exclude=attempt.lost_by | attempt.refused_by)
            or workers.candidates("combined", longest, exclude=attempt.refused_by),
            workers.candidates("prefill", total + 1, exclude=attempt.failed_prefill),
            cached,
            self._settings,
            now=now,
            rng=self._rng,
        )
        if placement is None:
            return None
        prefix_source = None
        if source := placement.prefix_source:
            blocks = cached.cached[source.worker_id]
            prefix_source = pb.PrefixSource(worker_id=source.worker_id, address=source.address, blocks=blocks)
        submit = pb.Submit(
            request=attempt.id,
            attempt=attempt.number + 1,
            tokens=tokens,
            prompt_len=request.prompt_len,
            hash_root=request.hash_root,
            block_hashes=b"".join(hashes),
            sampling=request.sampling,
            n=len(attempt.choices),
            choice=min(attempt.choices),
            tenant=request.tenant,
            prefill_candidates=[
                pb.PrefillCandidate(worker_id=one.worker_id, address=one.address) for one in placement.prefill
            ],
            long_prefill_tokens=placement.long_prefill_tokens,
            prefix_source=prefix_source,
            trace_id=request.trace_id,
            priority=request.priority,
            deadline_ms=self._deadline_ms(request, now),
        )
        decode, prefill = workers.get(placement.decode.worker_id), workers.get(placement.prompt_worker.worker_id)
        return PlacedAttempt(placement, decode, prefill, submit)

    def _deadline_ms(self, request: RoutedRequest, now: float) -> int:
        """What is left of the TTFT target. After a replay all of it, since the next token is as urgent as a first."""
        waited_ms = 0.0 if request.started else (now - request.received) * 1e3
        return max(1, round(self._settings.slo_ttft_ms - waited_ms))
