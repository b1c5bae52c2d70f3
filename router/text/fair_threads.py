"""Threads for work on long texts, shared fairly among tenants. Everything here runs on the event loop.

The tenant that has had the least work done goes first (start-time fair queueing: Goyal, Vin and Cheng, 1996); the work
of a call is known before it starts, such as the characters to tokenize. A tenant's calls start in their order.

A call that has started can't be interrupted. Those with more than LARGE leave one thread free, so that one with little
work never waits for one with much.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cpd.common.process import give_way

T = TypeVar("T")

LARGE = 1 << 18
"""In characters or bytes: about a tenth of a second's work."""


@dataclass(slots=True)
class _Job:
    work: int
    call: Callable[[], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Tenant:
    """`start` is the virtual time at which its next job starts: how much work a tenant has had that always had some."""

    start: float
    running: int = 0
    jobs: deque[_Job] = field(default_factory=deque)


class FairThreads:
    """A pool of threads. Its tenants are any hashable values."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "text", initializer=give_way)
        self._free = num_threads
        self._large_free = max(1, num_threads - 1)
        self._tenants: dict[bytes, _Tenant] = {}
        self._now = 0.0

    async def run(self, tenant: bytes, work: int, call: Callable[[], T]) -> T:
        """Returns what `call` returns on a thread. A call that is cancelled before its start never starts."""
        account = self._tenants.get(tenant)
        if account is None:
            account = self._tenants[tenant] = _Tenant(self._now)
        job = _Job(work, call, asyncio.get_running_loop().create_future())
        account.start = max(account.start, self._now) if not account.jobs else account.start
        account.jobs.append(job)
        self._start_some()
        result: T = await job.done
        return result

    def _start_some(self) -> None:
        while self._free and (key := self._next()) is not None:
            account = self._tenants[key]
            job = account.jobs.popleft()
            if job.done.done():  # cancelled
                self._forget(key)
                continue
            self._now = account.start
            account.start += job.work
            account.running += 1
            self._free -= 1
            self._large_free -= job.work > LARGE
            running = asyncio.get_running_loop().run_in_executor(self._pool, job.call)
            running.add_done_callback(lambda ended, key=key, job=job: self._ended(key, job, ended))  # type: ignore[misc]

    def _next(self) -> bytes | None:
        able = [
            (account.start, key)
            for key, account in self._tenants.items()
            if account.jobs and (self._large_free > 0 or account.jobs[0].work <= LARGE)
        ]
        return min(able)[1] if able else None

    def _ended(self, key: bytes, job: _Job, ended: asyncio.Future[Any]) -> None:
        self._free += 1
        self._large_free += job.work > LARGE
        self._tenants[key].running -= 1
        self._forget(key)
        if not job.done.done():
            if (error := ended.exception()) is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(ended.result())
        self._start_some()

    def _forget(self, key: bytes) -> None:
        """Forgets a tenant that has no jobs, unless it has had more work than others."""
        account = self._tenants[key]
        if not (account.jobs or account.running) and (account.start <= self._now or len(self._tenants) == 1):
            del self._tenants[key]
