"""Lets an operator decide which models of shared devices sleep, as `cpd sleep`, `wake` and `pin` do."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cpd.common.errors import CPDError
from router.dispatch.worker_session import WorkerSession
from router.errors import invalid, one_line, unavailable
from router.operations.drains import RETRY_S
from router.operations.status import Served

if TYPE_CHECKING:
    from worker.admin_calls import AdminCall


class Residencies:
    """Finds the workers of a model and tells them.

    All methods take the name of a model, an alias of it or the name of one worker, and return the names of the workers
    that were told. They raise ApiError if there is no such model or worker (404), its device is not shared (409), or a
    worker does not answer (503).

    Args:
        admin_key: The cluster's admin key, for workers.
    """

    def __init__(self, models: Sequence[Served], admin_key: str) -> None:
        self._models = models
        self._admin_key = admin_key

    async def sleep(self, name: str) -> list[str]:
        """Sends a model to sleep, once its requests have ended or are parked."""
        from worker.admin_calls import sleep_worker  # gRPC, which a router needs for nothing else

        return await self._tell(name, sleep_worker)

    async def wake(self, name: str) -> list[str]:
        """Wakes a model as a request would."""
        from worker.admin_calls import wake_worker

        return await self._tell(name, wake_worker)

    async def pin(self, name: str, *, pinned: bool) -> list[str]:
        """Says whether other models may displace this one."""
        from worker.admin_calls import pin_worker

        return await self._tell(name, partial(pin_worker, pinned=pinned))

    async def _tell(self, name: str, call: "AdminCall") -> list[str]:
        sessions = self._named(name)
        calls = (asyncio.to_thread(call, one.id, one.member.address, self._admin_key) for one in sessions)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if answer is not None]
        if unexpected := [error for error in errors if not isinstance(error, CPDError)]:
            raise unexpected[0]
        if errors:
            raise unavailable(one_line(f"{'; '.join(map(str, errors))}."), RETRY_S)
        return [one.id for one in sessions]

    def _named(self, name: str) -> list[WorkerSession]:
        models = [one for one in self._models if name in (one.name, *one.aliases)]
        sessions = [session for one in self._models for session in one.workers.sessions if session.id == name]
        sessions = sessions or [session for one in models for session in one.workers.sessions]
        if not sessions and models:
            raise unavailable(f"No worker of the model {one_line(name)!r} runs.", RETRY_S)
        if not sessions:
            message = f"This cluster has no model or worker {one_line(name)!r}."
            raise invalid("name", message, code="process_not_found", status=404)
        shared = [session for session in sessions if session.shared]
        if not shared:
            message = f"{one_line(name)} has its device for itself, so it never sleeps."
            raise invalid("name", message, code="never_sleeps", status=409)
        return shared
