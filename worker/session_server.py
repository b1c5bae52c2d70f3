"""Serves the streams of routers (sessions) and of other workers (prefill requests).

Order of a session's messages: the handshake (`cpd/protocol/handshake.py`), Hello, the snapshot of the cache, then
everything else as it comes; End, if the worker ends the session.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from cpd.common.blocks import Tier, short_hashes
from cpd.common.stream import MAX_MESSAGE_BYTES, StreamError
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import HandshakeError, answer_as
from cpd.protocol.version import UnknownMessages
from cpd.rpc import cpd_pb2 as pb
from engine.types import CacheEvent
from worker.async_engine import AsyncEngine, EngineDiedError, Update
from worker.prefill_server import IncomingStream
from worker.router_session import RouterSession
from worker.wire_format import tier_to_wire

log = logging.getLogger(__name__)

SNAPSHOT_HASHES = 8192
"""Hashes in one snapshot message: 64 KiB, about 1 ms of work."""

HELLO_BYTES = 4096
"""Size limit of the first messages: their sender is not authenticated yet."""

HELLO_S = 10.0
"""Time limit for the handshake."""

MAX_REMEMBERED = 1000
"""Number of reasons for refusing a stream that are remembered, to log each once."""

END_TIMEOUT_S = 2.0
"""How long the reason of a session's end may wait behind unread messages before the connection is cut."""


class RequestHandler(Protocol):
    """Answers the requests of sessions."""

    def submit(self, session: RouterSession, message: pb.Submit) -> None: ...

    def abort(self, session: RouterSession, message: pb.Abort) -> None: ...

    def park(self, session: RouterSession, message: pb.Park) -> None: ...

    def session_ended(self, session: RouterSession) -> None:
        """Aborts all requests of `session`; nothing can be sent to it any more."""


class SessionServer:
    """All sessions of a worker.

    Args:
        worker_id: The worker's name.
        hello: Returns the worker's current description.
        load: Returns the worker's current load.
        engine: Provides the snapshots.
        handler: Answers the requests.
        serve_worker: Serves another worker's stream.
        secret: The cluster's secret.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        hello: Callable[[], pb.Hello],
        load: Callable[[], pb.Load],
        engine: AsyncEngine,
        handler: RequestHandler,
        serve_worker: Callable[[IncomingStream], Awaitable[None]],
        secret: ClusterSecret,
    ) -> None:
        self._worker_id = worker_id
        self._hello = hello
        self._load = load
        self._engine = engine
        self._handler = handler
        self._serve_worker = serve_worker
        self._secret = secret
        self._refusals: set[str] = set()
        self._numbers = itertools.count(1)
        self._sessions: dict[str, RouterSession] = {}
        self._failed = False

    async def serve(self, stream: IncomingStream) -> None:
        """Serves one stream to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                caller = await answer_as(self._worker_id, stream, self._secret)
        except (StreamError, TimeoutError):
            return
        except HandshakeError as refusal:
            self._log_refusal(stream, str(refusal))
            await _say_end(stream, str(refusal))
            return
        stream.max_bytes = MAX_MESSAGE_BYTES
        if caller.role == "worker":
            stream.send(pb.WorkerMessage(hello=pb.Hello()))
            await self._serve_worker(stream)
            return
        session = self._open(caller.id)
        reader = asyncio.create_task(self._read(session, stream), name=f"session-{session.number}-reader")
        writer = asyncio.create_task(self._write(session, stream), name=f"session-{session.number}-writer")
        ends: list[asyncio.Future[Any]] = [session.ended, reader, writer]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                if task.done() and (error := task.exception()):
                    log.warning("session %d with router %s failed", session.number, session.router_id, exc_info=error)
                    session.end("the worker could not go on with the session")
        finally:
            self._close(session)
            reader.cancel()
            writer.cancel()
        if reason := session.ended.result():
            await _say_end(stream, reason, failed=self._failed)

    def publish(self, update: Update) -> None:
        """Sends every router the changes in the cache."""
        if update.events is None or not self._sessions:
            return
        message = _cache_events(update.number, update.events)
        for session in list(self._sessions.values()):
            session.send_cache(message)

    def publish_load(self, load: pb.Load) -> None:
        """Sends every router the worker's load."""
        for session in self._sessions.values():
            session.send_load(load)

    async def flush(self) -> None:
        """Returns when every queued message was handed to its connection. Give it a deadline."""
        await asyncio.gather(*(session.written() for session in self._sessions.values()))

    def end_all(self, reason: str, *, failed: bool) -> None:
        """Ends every session because the worker stops, by itself (`failed`) or as it was told."""
        self._failed = failed
        for session in self._sessions.values():
            session.end(reason)

    # ---- one session ----

    def _log_refusal(self, stream: IncomingStream, reason: str) -> None:
        """Logs why a stream is refused, once for each reason: peers try again and again."""
        if reason not in self._refusals:
            if len(self._refusals) >= MAX_REMEMBERED:
                self._refusals.clear()
            self._refusals.add(reason)
            log.warning("refused a stream from %s: %s", stream.peer, reason)

    def _open(self, router_id: str) -> RouterSession:
        if old := self._sessions.get(router_id):
            old.end("superseded by a newer session of this router")
            self._close(old)
        session = RouterSession(next(self._numbers), router_id)
        self._sessions[router_id] = session
        log.info("session %d with router %s", session.number, router_id)
        return session

    def _close(self, session: RouterSession) -> None:
        session.end("")
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
            log.info("session %d with router %s ended", session.number, session.router_id)
            self._handler.session_ended(session)

    async def _read(self, session: RouterSession, stream: IncomingStream) -> None:
        unknown = UnknownMessages(f"router {session.router_id}")
        try:
            while (message := await stream.receive()) is not None:
                if session.ended.done():
                    return
                match message.WhichOneof("kind"):
                    case "submit":
                        self._handler.submit(session, message.submit)
                    case "abort":
                        self._handler.abort(session, message.abort)
                    case "park":
                        self._handler.park(session, message.park)
                    case None:
                        unknown.ignore()
                    case other:
                        session.end(f"unexpected message {other!r} in a session")
                        return
        except StreamError as error:
            log.info("router %s: %s", session.router_id, error)
        session.end("")

    async def _write(self, session: RouterSession, stream: IncomingStream) -> None:
        try:
            stream.send(pb.WorkerMessage(hello=self._hello()))
            await self._write_snapshot(session, stream)
        except EngineDiedError as error:
            session.end(str(error))
            return
        session.send_load(self._load())
        await session.write(stream)

    async def _write_snapshot(self, session: RouterSession, stream: IncomingStream) -> None:
        snapshot = await self._engine.snapshot()
        session.forget_cache(snapshot.number)
        parts = [
            (tier, hashes[start : start + SNAPSHOT_HASHES])
            for tier, hashes in snapshot.hashes.items()
            for start in range(0, len(hashes), SNAPSHOT_HASHES)
        ] or [(Tier.PAGES, [])]
        for number, (tier, hashes) in enumerate(parts, 1):
            stream.send(
                pb.WorkerMessage(
                    snapshot=pb.Snapshot(
                        number=snapshot.number,
                        tier=tier_to_wire(tier),
                        hashes=short_hashes(hashes),
                        last=number == len(parts),
                    )
                )
            )
            await asyncio.sleep(0)  # lets the loop's other tasks run
            await stream.drained()


async def _say_end(stream: IncomingStream, reason: str, *, failed: bool = False) -> None:
    """Tells the peer why the worker ends the stream, and ends it."""
    stream.send(pb.WorkerMessage(end=pb.End(reason=reason, failed=failed)))
    stream.finish()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stream.closed(), END_TIMEOUT_S)
    stream.abort()


def _cache_events(number: int, events: list[CacheEvent]) -> pb.CacheEvents:
    return pb.CacheEvents(
        number=number,
        events=[pb.CacheEvent(tier=tier_to_wire(event.tier), hashes=short_hashes(event.hashes)) for event in events],
    )
