"""The worker's side of Session: one stream per router. (Other workers' streams begin like one, and are for fills.)

States of a session:
    OPEN      registered; results, cache events and loads go into its outbox, and a writer sends them
    ENDED     closed by the router, superseded by a newer session of the same router, or cut off because it fell
              behind: its requests were aborted, whatever is still reported for it is dropped

Order on the stream: Hello, the snapshot of the cache, then everything else as it comes; End, if the worker ends it.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from cpd.common.blocks import Tier, short_hashes
from cpd.common.stream import StreamError
from cpd.rpc import cpd_pb2 as pb
from engine.types import CacheEvent, Output
from worker.channels import MAX_MESSAGE_BYTES
from worker.convert import tier_to_wire
from worker.engine_bridge import EngineBridge, EngineDiedError, Update
from worker.fills import Wire
from worker.outbox import Outbox

log = logging.getLogger(__name__)

SNAPSHOT_HASHES = 8192
"""Hashes in one snapshot message: 64 KiB, and about a millisecond of work."""

HELLO_BYTES = 4096
"""Of a first message at most: nobody knows yet who sent it."""

HELLO_S = 10.0
"""It has this long to come."""

END_TIMEOUT_S = 2.0
"""The reason of a session's end waits behind unread messages at most this long; then the connection is cut."""


class Session:
    """One router's stream, as those who answer its requests see it.

    Attributes:
        number: Unique in this process.
        router_id: The router's name.
    """

    def __init__(self, number: int, router_id: str, outbox: Outbox) -> None:
        self.number = number
        self.router_id = router_id
        self.outbox = outbox
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, request: int, attempt: int, output: Output, prefilled: pb.Prefilled | None = None) -> None:
        """Queues tokens for the router, which is cut off if it is too far behind. See `Outbox.put_output`."""
        if not self.ended.done():
            self.outbox.put_output(request, attempt, output, prefilled)
            self._check()

    def refuse(self, refusal: pb.Refusal) -> None:
        """Queues a refusal."""
        if not self.ended.done():
            self.outbox.put_refusal(refusal)
            self._check()

    def send_cache(self, events: pb.CacheEvents) -> None:
        """Queues cache events."""
        if not self.ended.done():
            self.outbox.put_cache(events)
            self._check()

    def end(self, reason: str) -> None:
        """Ends the session; the first reason counts. It is empty where the router is gone."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def _check(self) -> None:
        if self.outbox.overfull():
            log.warning("router %s reads too slowly and is cut off", self.router_id)
            self.end("the router fell too far behind")


class RequestHandler(Protocol):
    """Who answers the requests of sessions."""

    def submit(self, session: Session, message: pb.Submit) -> None: ...

    def abort(self, session: Session, message: pb.Abort) -> None: ...

    def session_ended(self, session: Session) -> None:
        """Aborts all requests of `session`; nothing can be sent to it any more."""


class SessionServer:
    """All sessions of a worker.

    Args:
        hello: Describes the worker as it is now.
        load: The worker's load as it is now.
        engine: Where the snapshots come from.
        handler: Answers the requests.
        serve_fills: Serves another worker's stream.
        token: The cluster's secret; empty lets every router in.
        make_outbox: For tests, with smaller bounds.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], pb.Hello],
        load: Callable[[], pb.Load],
        engine: EngineBridge,
        handler: RequestHandler,
        serve_fills: Callable[[Wire], Awaitable[None]],
        token: str,
        make_outbox: Callable[[], Outbox] = Outbox,
    ) -> None:
        self._hello = hello
        self._load = load
        self._engine = engine
        self._handler = handler
        self._serve_fills = serve_fills
        self._token = token.encode()
        self._make_outbox = make_outbox
        self._numbers = itertools.count(1)
        self._sessions: dict[str, Session] = {}

    async def serve(self, wire: Wire) -> None:
        """Serves one stream to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                first = await wire.receive()
        except (StreamError, TimeoutError):
            return
        if refused := self._refused(first):
            await _say_end(wire, refused)
            return
        assert first is not None
        wire.most_bytes = MAX_MESSAGE_BYTES
        if first.hello.worker_id:
            wire.send(pb.WorkerMessage(hello=pb.Hello()))
            await self._serve_fills(wire)
            return
        session = self._open(first.hello.router_id)
        reader = asyncio.create_task(self._read(session, wire), name=f"session-{session.number}-reader")
        writer = asyncio.create_task(self._write(session, wire), name=f"session-{session.number}-writer")
        ends: list[asyncio.Future[Any]] = [session.ended, reader, writer]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                if task.done() and (error := task.exception()):
                    log.warning("session %d with router %s breaks", session.number, session.router_id, exc_info=error)
                    session.end("the worker could not go on with the session")
        finally:
            self._close(session)
            reader.cancel()
            writer.cancel()
        if reason := session.ended.result():
            await _say_end(wire, reason)

    def _refused(self, first: pb.RouterMessage | None) -> str:
        """Why nobody is served who begins like this; empty: there is no reason."""
        if first is None or first.WhichOneof("kind") != "hello" or not (first.hello.router_id or first.hello.worker_id):
            return "a stream starts with a RouterHello with router_id or worker_id"
        if self._token and not hmac.compare_digest(first.hello.token.encode(), self._token):
            return "the cluster token is missing or wrong"
        return ""

    def publish(self, update: Update) -> None:
        """Tells every router what changed in the cache."""
        if update.events is None or not self._sessions:
            return
        message = _cache_events(update.number, update.events)
        for session in list(self._sessions.values()):
            session.send_cache(message)

    def publish_load(self, load: pb.Load) -> None:
        """Tells every router the worker's load."""
        for session in self._sessions.values():
            session.outbox.put_load(load)

    async def flush(self) -> None:
        """Returns when everything has been handed to the connections. Give it a deadline."""
        await asyncio.gather(*(session.outbox.written() for session in self._sessions.values()))

    def end_all(self, reason: str) -> None:
        """Ends every session because the worker stops."""
        for session in self._sessions.values():
            session.end(reason)

    # ---- one session ----

    def _open(self, router_id: str) -> Session:
        if old := self._sessions.get(router_id):
            old.end("superseded by a newer session of this router")
            self._close(old)
        session = Session(next(self._numbers), router_id, self._make_outbox())
        self._sessions[router_id] = session
        log.info("session %d with router %s", session.number, router_id)
        return session

    def _close(self, session: Session) -> None:
        session.end("")
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
            log.info("session %d with router %s ended", session.number, session.router_id)
            self._handler.session_ended(session)

    async def _read(self, session: Session, wire: Wire) -> None:
        try:
            while (message := await wire.receive()) is not None:
                if session.ended.done():
                    return
                match message.WhichOneof("kind"):
                    case "submit":
                        self._handler.submit(session, message.submit)
                    case "abort":
                        self._handler.abort(session, message.abort)
                    case other:
                        session.end(f"unexpected message {other!r} in a session")
                        return
        except StreamError as error:
            log.info("router %s: %s", session.router_id, error)
        session.end("")

    async def _write(self, session: Session, wire: Wire) -> None:
        try:
            wire.send(pb.WorkerMessage(hello=self._hello()))
            await self._write_snapshot(session, wire)
            session.outbox.put_load(self._load())
            while True:
                for message in await session.outbox.take():
                    wire.send(message)
                await wire.drained()
        except EngineDiedError as error:
            session.end(str(error))

    async def _write_snapshot(self, session: Session, wire: Wire) -> None:
        snapshot = await self._engine.snapshot()
        session.outbox.forget_cache(snapshot.number)
        parts = [
            (tier, hashes[start : start + SNAPSHOT_HASHES])
            for tier, hashes in snapshot.hashes.items()
            for start in range(0, len(hashes), SNAPSHOT_HASHES)
        ] or [(Tier.PAGES, [])]
        for number, (tier, hashes) in enumerate(parts, 1):
            wire.send(
                pb.WorkerMessage(
                    snapshot=pb.Snapshot(
                        number=snapshot.number,
                        tier=tier_to_wire(tier),
                        hashes=short_hashes(hashes),
                        last=number == len(parts),
                    )
                )
            )
            await asyncio.sleep(0)  # other work has its turn
            await wire.drained()


async def _say_end(wire: Wire, reason: str) -> None:
    """Tells the router why the session ends, and ends the stream."""
    wire.send(pb.WorkerMessage(end=pb.End(reason=reason)))
    wire.finish()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wire.closed(), END_TIMEOUT_S)
    wire.abort()


def _cache_events(number: int, events: list[CacheEvent]) -> pb.CacheEvents:
    return pb.CacheEvents(
        number=number,
        events=[pb.CacheEvent(tier=tier_to_wire(event.tier), hashes=short_hashes(event.hashes)) for event in events],
    )
