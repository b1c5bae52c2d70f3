"""The state of the cluster as server-sent events, for everybody who watches it.

While somebody listens, a snapshot is made every PERIOD_S, one for all. A listener asks for the next one when its client
has taken the last one: a slow client misses snapshots, and holds nothing but the one that it is being sent.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

import orjson

from router.operations.overview import Overview
from router.operations.status import ClusterStatus, with_peers

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Interval between two snapshots, in seconds."""

BYTES_PER_S = 1 << 16
"""Most bytes that a listener gets a second: snapshots of large clusters come less often."""

MAX_PERIOD_S = 10.0
"""Longest interval between two snapshots, in seconds: the page takes a stream without a sign of life for dead."""

PEERS_S = 5.0
"""Interval at which the other routers are asked for what they see, in seconds."""

UNCHANGED = b": unchanged\n\n"
"""Sent in place of a snapshot that is the same as the last one. To the client it is a comment, and a sign of life."""


class ClusterFeed:
    """Makes the snapshots.

    Args:
        overview: Describes the cluster.
        authorization: The `Authorization` header for the questions to other routers.
        ended: Set when the router drains. Then all streams end, since they would hold the drain up.
    """

    def __init__(self, overview: Overview, authorization: bytes, ended: asyncio.Event) -> None:
        self._overview = overview
        self._authorization = authorization
        self._ended = ended
        self._peers: Mapping[str, ClusterStatus] = {}
        self._errors: Mapping[str, str] = {}
        self._event = b""
        self._number = 0
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def listen(self) -> Iterator["Listener"]:
        """Returns a new listener, which counts while the context is open."""
        listener = Listener(self)
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._event = b""
            self._task = asyncio.create_task(self._run(), name="cluster-feed")
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        try:
            await self._ask_peers()
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._follow_peers())
                while not self._ended.is_set():
                    await self._make()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._period_s()):
                            await self._ended.wait()
                asking.cancel()
        except Exception:
            log.exception("the cluster's state could not be described")
        for listener in list(self._listeners):
            listener.hang_up()

    def _period_s(self) -> float:
        return min(max(PERIOD_S, len(self._event) / BYTES_PER_S), MAX_PERIOD_S)

    async def _make(self) -> None:
        own = await self._overview.own()
        # what another router said up to PEERS_S ago must not bring back a worker that has gone since
        known = {worker["id"] for worker in own["workers"]}
        peers: dict[str, ClusterStatus] = {
            router_id: {**status, "workers": [one for one in status["workers"] if one["id"] in known]}
            for router_id, status in self._peers.items()
        }
        event = b"data: %b\n\n" % orjson.dumps(with_peers(own, self._overview.router_id, peers, self._errors))
        if event != self._event:
            self._event = event
        self._number += 1
        for listener in self._listeners:
            listener.wake()

    async def _follow_peers(self) -> None:
        while True:
            await asyncio.sleep(PEERS_S)
            await self._ask_peers()

    async def _ask_peers(self) -> None:
        self._peers, self._errors = await self._overview.peers(self._authorization)


class Listener:
    """One client's place in the feed."""

    def __init__(self, feed: ClusterFeed) -> None:
        self._feed = feed
        self._number = 0
        self._sent = b""
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> bytes | None:
        """Waits for a snapshot that is newer than the last one; returns None when there will be no more."""
        feed = self._feed
        while not self._gone and (feed._number == self._number or not feed._event):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            return None
        self._number = feed._number
        if feed._event is self._sent:
            return UNCHANGED
        self._sent = feed._event
        return self._sent

    def hang_up(self) -> None:
        """Ends the stream."""
        self._gone = True
        self.wake()

    def wake(self) -> None:
        """Lets `next` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
