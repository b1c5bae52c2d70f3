"""Changes the numbers of workers and routers when an operator asks a router for it (`cpd/common/scaling.py`)."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from secrets import token_hex

from cpd.common.redis_client import NoBackoff, Redis, RedisError, Retry
from cpd.common.scaling import ScaleRequest, ScalingMailbox, ScalingReport
from cpd.common.trust import ClusterSecret
from deploy.changes import Changes
from deploy.cluster import Tell
from deploy.control import carry_out

POLL_S = 0.5
"""Interval at which the launcher reports and looks for requests, in seconds."""

REDIS_TIMEOUT_S = 2.0
"""Time limit for an answer of Redis, in seconds."""


@contextlib.contextmanager
def scaled_on_request(
    redis_url: str, cluster: str, secret: ClusterSecret, changes: Changes, busy: threading.Lock, say: Tell
) -> Iterator[None]:
    """Carries out requests, on a thread of its own, while the context is open.

    Args:
        busy: Held while the cluster changes.
        say: Shows the steps to the user of the launcher.
    """
    ended = threading.Event()
    scaler = _Scaler(changes, busy, say)

    async def run() -> None:
        async with Redis.from_url(
            redis_url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the next round tries again
        ) as redis:
            mailbox = ScalingMailbox(redis, cluster, secret)
            while not ended.is_set():
                with contextlib.suppress(RedisError, OSError):
                    await scaler.look(mailbox)
                await asyncio.to_thread(ended.wait, POLL_S)

    threading.Thread(target=lambda: asyncio.run(run()), name="scaling", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Scaler:
    def __init__(self, changes: Changes, busy: threading.Lock, say: Tell) -> None:
        self._changes = changes
        self._busy = busy
        self._say = say
        self._launch = token_hex(16)
        self._taken: set[str] = set()
        self._last = ""  # request
        self._carries_out = False
        self._step = ""
        self._error = ""

    async def look(self, mailbox: ScalingMailbox) -> None:
        """Takes a request, if there is a new one, and reports."""
        request = await mailbox.read_request()
        if request is not None and request["launch"] == self._launch and request["id"] not in self._taken:
            self._taken.add(request["id"])
            self._last, self._carries_out, self._step, self._error = request["id"], True, "", ""
            # not on a thread of asyncio's: the launcher would wait for it when it ends
            threading.Thread(target=self._scale, args=(request,), name="scale", daemon=True).start()
            await mailbox.remove_request()
        await mailbox.write_report(self._report())

    def _scale(self, request: ScaleRequest) -> None:
        def show(step: str) -> None:
            self._step = step

        self._error = carry_out(self._changes.scale, request, self._busy, self._say, show)
        self._carries_out = False

    def _report(self) -> ScalingReport:
        models, routers = self._changes.numbers()
        return {
            "launch": self._launch,
            "models": models,
            "routers": routers,
            "changing": self._carries_out or self._busy.locked(),
            "request": self._last,
            "step": self._step,
            "error": self._error,
        }
