"""Puts a worker's model to sleep, and wakes it. The worker keeps its process, lease, sessions and requests.

    asleep ──wake──▶ waking ──▶ serving ──drain──▶ draining ──sleep──▶ sleeping ──▶ asleep
      ▲────failed──────┘         ▲  └──────────────sleep──────────────────▲ └──▶ the process restarts
                                 └──────undrain──────┘

| state    | memory    | transport | requests of routers            | requests of other workers                |
| serving  | here      | open      | run                            | are served                               |
| draining | here      | open      | go on if they ran; others wait | go on; new ones get cached blocks only   |
| sleeping | leaves    | closes    | wait                           | are ended                                |
| asleep   | none      | closed    | wait                           | are refused                              |
| waking   | comes     | opens     | wait                           | are refused                              |

A request that waits is in the engine's queue. One that ran is parked there: the engine has preempted it, and goes on
with it after the wake, from its blocks in host memory or from its tokens.

Memory is freed when nothing can write into it any more. First everything that sends or receives pages is ended, then
the transport is closed, then the engine gives up the pages; those in quarantine are waited for. If that takes longer
than `prefill_progress_s`, the process ends and is started again, which is always safe.

Weights are copied, read and dropped on one thread. Steps don't run then, except beside `stage`. The pool becomes
resident while the model serves already.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import exp
from typing import Protocol, TypeVar

from cpd.common.errors import CPDError
from cpd.common.lifecycle import Lifecycle
from cpd.residency.snapshot import ModelState
from engine.engine import Engine
from engine.types import EngineStats
from worker.async_engine import AsyncEngine
from worker.context import EXIT_RESTART, ModelMemory
from worker.pool_transport import PoolTransport
from worker.resident import Facts
from worker.service import Outlook

log = logging.getLogger(__name__)

T = TypeVar("T")

RATE_S = 60.0
"""Time over which arrivals are averaged."""

POOL = "pool"
"""The part of a wake that goes on while the model serves."""

REFUSED_S = 5.0
"""For this long a refused request of another worker counts as one that waits: the model is needed."""


class ResidencyError(CPDError):
    """The model can't go to sleep or wake now."""


class Pausable(Protocol):
    """The service of the worker, as far as it matters here; see `worker/service.py`."""

    @property
    def served(self) -> int: ...

    def outlook(self) -> Outlook: ...

    async def pause(self) -> None: ...


class Sleeper:
    """See the module. Implements `worker.resident.Resident` and `ModelUse`.

    Args:
        transport: Of the pool. It is open.
        release_s: Longest time in which pages must be free when the model goes to sleep.
        changed: Called when the state changes.
        arrived: Called when a request came.
        given_up: Called when a request has waited too long.

    Attributes:
        state: See the module.
        took_s: See `Resident`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        memory: ModelMemory,
        transport: PoolTransport,
        lifecycle: Lifecycle,
        *,
        release_s: float,
        changed: Callable[[], None],
        arrived: Callable[[], None],
        given_up: Callable[[], None],
    ) -> None:
        self.state = ModelState.SERVING
        self.took_s: dict[str, float] = {}
        self._engine = engine
        self._memory = memory
        self._transport = transport
        self._lifecycle = lifecycle
        self._release_s = release_s
        self._changed = changed
        self._arrived, self._given_up = arrived, given_up
        self._service: Pausable
        self._stats: Callable[[], EngineStats]
        self._thread = ThreadPoolExecutor(1, "model-memory")
        self._arrivals = 0.0  # recent ones, each with less weight as it grows old
        self._last_access = time.monotonic()
        self._refused_at = -REFUSED_S

    def attach(self, service: Pausable, stats: Callable[[], EngineStats]) -> None:
        """Sets what is made after it.

        Args:
            stats: Returns the engine's latest figures.
        """
        self._service, self._stats = service, stats

    async def populate(self) -> int:
        """Makes all memory of the model resident, as far as the system has some; returns its size in bytes.

        What is not resident yet counts, too: it will be when the pages are used.
        """
        try:
            await self._run(self._memory.populate_pool)
        except OSError as error:
            log.warning("the system has no memory for all KV pages: %s", error.strerror)
        return self._memory.num_bytes

    # ---- what the worker's parts tell it ----

    def request_arrived(self) -> None:
        """Records that a request came."""
        now = time.monotonic()
        self._arrivals = self._arrivals_at(now) + 1
        self._last_access = now
        self._arrived()

    def request_given_up(self) -> None:
        """Records that a request has waited too long."""
        self._given_up()

    def prefill_refused(self) -> None:
        """Records that another worker's request was refused."""
        self._refused_at = time.monotonic()

    # ---- what decides asks and tells it ----

    def facts(self, now: float) -> Facts:
        """See `Resident`."""
        outlook, stats, served = self._service.outlook(), self._stats(), self._service.served
        total = outlook.requests
        match self.state:
            case ModelState.SERVING:
                running = total
            case ModelState.DRAINING:
                running = min(total, stats.started + outlook.under_way)
            case _:
                running = 0
        refused = self.state is not ModelState.SERVING and now - self._refused_at < REFUSED_S
        drain_ms = outlook.tokens_left * stats.step_ms + stats.prefill_ms
        return Facts(
            waiting=total - running + refused,
            running=running + served,
            resumed=stats.resumed if running else 0,
            deadlines=sorted(outlook.deadlines),
            drain_s=drain_ms / 1e3 if running else 0.0,
            arrivals_per_s=self._arrivals_at(now) / RATE_S,
            last_access=self._last_access,
            staged_bytes=self._memory.staged_bytes,
        )

    async def stage(self) -> None:
        """See `Resident`."""
        await self._run(self._memory.stage)

    def unstage(self) -> None:
        """See `Resident`."""
        self._thread.submit(self._memory.unstage)

    def drain(self) -> None:
        """See `Resident`."""
        self._expect(ModelState.SERVING)
        self._enter(ModelState.DRAINING)
        self._engine.post(Engine.hold_new)

    def undrain(self) -> None:
        """See `Resident`."""
        self._expect(ModelState.DRAINING)
        self._enter(ModelState.SERVING)
        self._engine.post(_go_on)

    async def sleep(self) -> int:
        """See `Resident`."""
        self._expect(ModelState.SERVING, ModelState.DRAINING)
        self._enter(ModelState.SLEEPING)
        times = _Times()
        try:
            await self._engine.call(Engine.pause)  # when its step ends
            times.end("pause")
            async with asyncio.timeout(self._release_s):
                await self._service.pause()
                await self._transport.close()
                times.end("transfers")
                await self._engine.poll(lambda engine: engine.park_all() or None)
                times.end("park")
        except TimeoutError:
            reason = f"pages were not free {self._release_s:g} s after the model went to sleep"
            self._lifecycle.drain(reason, EXIT_RESTART, timeout_s=0.0)
            raise ResidencyError(reason) from None
        held = await self._run(self._release)
        times.end("release")
        self.took_s = times.took_s
        log.info("the model sleeps, after %s; %.1f MiB are still held", times, held / 2**20)
        self._enter(ModelState.ASLEEP)
        return held

    async def wake(self) -> int:
        """See `Resident`."""
        self._expect(ModelState.ASLEEP)
        self._enter(ModelState.WAKING)
        times = _Times()
        try:
            times.end(await self._run(self._restore))
            await self._transport.open()
            times.end("transport")
            await self._engine.call(_go_on)
        except CPDError as error:
            await self._roll_back(str(error))
            raise
        except Exception as error:
            log.exception("an unexpected error while the model woke")
            await self._roll_back(repr(error))
            raise ResidencyError(repr(error)) from error
        self._enter(ModelState.SERVING)
        num_bytes = await self.populate()
        times.end(POOL)
        self.took_s = times.took_s
        log.info("the model is awake, after %s", times)
        return num_bytes

    # ---- small parts ----

    async def _roll_back(self, reason: str) -> None:
        log.warning("the model did not wake: %s", reason)
        await self._transport.close()
        await self._run(self._memory.release)
        self._enter(ModelState.ASLEEP)

    def _release(self) -> int:
        self._memory.release()
        return self._memory.resident_bytes()

    def _restore(self) -> str:
        source = "copy" if self._memory.staged_bytes else "read"
        self._memory.restore()
        return source

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _enter(self, state: ModelState) -> None:
        self.state = state
        self._changed()

    def _expect(self, *states: ModelState) -> None:
        if self.state not in states:
            raise ResidencyError(f"the model is {self.state}")

    def _arrivals_at(self, now: float) -> float:
        return self._arrivals * exp((self._last_access - now) / RATE_S)


class _Times:
    """Measures the parts of a change."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self._began_s = time.perf_counter()

    def end(self, part: str) -> None:
        """Ends a part; the next one begins."""
        now_s = time.perf_counter()
        self.took_s[part], self._began_s = now_s - self._began_s, now_s

    def __str__(self) -> str:
        return ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in self.took_s.items())


def _go_on(engine: Engine) -> None:
    engine.go_on(time.monotonic())
