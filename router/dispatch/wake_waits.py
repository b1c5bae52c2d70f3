"""Attempts that wait for a model to wake, and until when a request without a first token is kept.

    a prompt on a worker that does not serve ──▶ waits ──▶ its workers serve, a token comes, or it leaves its worker
    a stream on a worker that is not awake ───────▲

A worker that drains for another model goes on with its streams, and perhaps with a prompt that it has begun. If a token
comes from there, the prompt has not waited for a wake.

A request is given up once it has waited as long as it may, where the time that it waits for a wake does not count. Of a
wait that goes on, only the time up to the first promise is known: a worker that promises again and again keeps no
request for ever.
"""

import asyncio
from collections.abc import Callable, Iterable
from math import inf

from router.dispatch.attempts import Attempt, RoutedRequest
from router.dispatch.worker_session import WorkerSession


class WakeWaits:
    """The waits of all attempts of a model.

    Args:
        give_up: Called with a request that has waited too long.
    """

    def __init__(self, give_up: Callable[[RoutedRequest], None]) -> None:
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._waiting: set[Attempt] = set()

    def limit(self, attempt: Attempt, gives_up_at: float) -> None:
        """Gives up a request without a first token at this loop time, later by the time that it waits for a wake."""
        attempt.request.gives_up_at = gives_up_at
        self._set_expiry(attempt)

    def placed(self, attempt: Attempt) -> None:
        """The attempt was sent to its workers."""
        assert attempt.decision is not None
        placement = attempt.decision.placement
        if not (placement.decode.serving and placement.prompt_worker.serving):
            self._begin(attempt)

    def reported(self, session: WorkerSession, attempts: Iterable[Attempt]) -> None:
        """A worker of a shared device has sent a load report.

        Args:
            attempts: All attempts of the model.
        """
        if session.residency == "serving":
            for attempt in [one for one in self._waiting if session in one.workers]:
                if all(one.residency == "serving" for one in attempt.workers):
                    self.end(attempt)
            return
        for attempt in attempts:
            if session not in attempt.workers:
                continue
            if attempt.waits_since is not None:
                self._note_promise(attempt)
            elif session.residency != "draining" or attempt.prefill_session is not None:
                self._begin(attempt)

    def end(self, attempt: Attempt) -> None:
        """The attempt does not wait for a wake any more, if it did."""
        if attempt.waits_since is None:
            return
        waited_s = self._loop.time() - attempt.waits_since
        attempt.waits_since = attempt.promised_at = None
        self._waiting.discard(attempt)
        of_prompt = attempt.prefill_session is not None  # otherwise it is a gap in the stream
        if of_prompt and attempt.decision is not None and all(one.residency != "draining" for one in attempt.workers):
            attempt.decision.wake_s += waited_s
        self._set_expiry(attempt)

    def _begin(self, attempt: Attempt) -> None:
        attempt.waits_since = self._loop.time()
        self._waiting.add(attempt)
        self._note_promise(attempt)

    def _note_promise(self, attempt: Attempt) -> None:
        """Takes the first promise of the workers that an attempt waits for."""
        if attempt.promised_at is not None:
            return
        waking = [one.worker_load.candidate for one in attempt.workers if one.worker_load is not None]
        promised = [one.serves_at for one in waking if not one.serving and one.serves_at < inf]
        if promised:
            attempt.promised_at = max(promised)
            self._set_expiry(attempt)

    def _set_expiry(self, attempt: Attempt) -> None:
        request = attempt.request
        request.end_expiry()
        if request.started or request.gives_up_at == inf:
            return
        at = request.gives_up_at + request.wake_s
        if attempt.decision is not None:
            at += attempt.decision.wake_s
        if attempt.waits_since is not None and attempt.promised_at is not None:
            at += max(0.0, attempt.promised_at - attempt.waits_since)
        request.expiry = self._loop.call_at(min(at, request.needed_at), self._give_up, request)
