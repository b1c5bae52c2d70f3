"""The router's session with one worker.

States of a session:

    connecting -> syncing -> ready <-> draining
         ^           |         |          |
         +-----------+---------+----------+    the session ended; connect again after a pause
    refused: the worker does not fit this cluster, such as one with another model or another secret, or it refuses this
        router; tried again nevertheless

A session is `connected` after the worker's Hello, and `live` once its cache snapshot is complete. When a session ends,
the worker aborts its requests, and the listener replays them on other workers. The pause before the next connection
doubles with each failure, from FIRST_PAUSE_S to LONGEST_PAUSE_S. A message that breaks the protocol ends the session
like a lost connection.

The listener learns whether the worker crashed: it said that its engine failed, or its side closed the connection
without a word and nothing listens at its address any more. A worker that was told to stop, breaks the protocol, is
silent or still takes connections has not crashed.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from cpd.common.blocks import Tier
from cpd.common.errors import CPDError
from cpd.common.membership import Member
from cpd.common.stream import MAX_MESSAGE_BYTES, BrokenError, Stream, StreamError, connect
from cpd.common.tls import without_fingerprint
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, HandshakeError, open_as
from cpd.protocol.version import UnknownMessages
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError, check_hello
from router.errors import describe, one_line
from router.events import Events
from router.placement.learning import Learning, WorkerErrors
from router.placement.worker_load import Residency, WorkerLoad, residency_of
from router.prefix_index.block_table import KEY_BYTES
from router.prefix_index.index import PrefixIndex

log = logging.getLogger(__name__)

_ROLES: Mapping[int, str] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_COMBINED: "combined"}

CONNECT_S = 5.0
"""Time limit for opening a connection, in seconds."""

PROBE_S = 0.5
"""Time within which a worker that closed its session must take a new connection, or it has crashed; in seconds."""

SYNC_S = 30.0
"""Time limit for the worker's Hello and its snapshot, in seconds."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses before connecting again, in seconds: doubled while sessions fail or end soon."""

PIECE_HASHES = 1024
"""Hashes added to the index in one slice of the event loop, which takes about a millisecond."""

YIELD_MESSAGES = 64
"""Number of messages after which the event loop runs other work."""

State = Literal["connecting", "syncing", "ready", "draining", "refused"]


class RefusedError(CPDError):
    """The worker does not fit this cluster; the message says why."""


class EndedError(CPDError):
    """The worker ended the session; the message says why, and `failed` whether its engine failed."""

    def __init__(self, end: pb.End) -> None:
        super().__init__(end.reason)
        self.failed = end.failed


class Listener(Protocol):
    """Receives the events of a session. Called on the event loop; must not block."""

    def ready(self, session: "WorkerSession") -> None: ...

    def step(self, session: "WorkerSession", step: pb.StepOutput) -> None: ...

    def refusal(self, session: "WorkerSession", refusal: pb.Refusal) -> None: ...

    def reported(self, session: "WorkerSession") -> None: ...

    def lost(self, session: "WorkerSession", *, crashed: bool) -> None: ...


class WorkerSession:
    """One worker, as this router sees it. `run` keeps the connection open.

    Args:
        member: The worker's lease.
        router_id: This router's name.
        secret: The cluster's secret.
        index: Gets the worker's cached blocks.
        itl_ms: Target for the gaps between the tokens of its streams, in ms.
        learning: What this router learns from requests.
        events: Gets what happens to the worker.
        admit: Called with the worker's Hello; raises RefusedError if the worker does not fit.
        on_hello: Called when `hello` or `role` has changed.

    Attributes:
        id: The worker's name.
        role: What the worker prefers to do: `prefill` or `combined`. It may change while the worker runs.
        takes_any: The worker serves requests and prefill requests whatever its role; older workers do not.
        hello: The worker's description of itself; None while not connected.
        load: Its last load report; empty before the first.
        residency_since: When `residency` last changed, or the session began, in seconds since 1970.
        reason: Reason why there is no session, for humans.
        worker_load: The load estimate for placements; None while not connected.
        settled: True after the first attempt to connect has succeeded or failed.
        state: See the module.
    """

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        secret: ClusterSecret,
        index: PrefixIndex,
        itl_ms: float,
        learning: Learning,
        events: Events,
        admit: Callable[[Member, pb.Hello], None],
        on_hello: Callable[[], None],
    ) -> None:
        self.member = member
        self.id = member.id
        self.hello: pb.Hello | None = None
        self.load = pb.Load()
        self.residency_since = 0.0
        self.reason = ""
        self.worker_load: WorkerLoad | None = None
        self.settled = False
        self.state: State = "connecting"
        self._caller = Caller("router", router_id)
        self._secret = secret
        self._index = index
        self._itl_ms = itl_ms
        self._learning = learning
        self._events = events
        self._admit = admit
        self._on_hello = on_hello
        self._next_event: int | None = None
        self._handled = 0
        self._stream: Stream[pb.WorkerMessage] | None = None
        self._heard_before = 0.0
        self._unknown = UnknownMessages(f"worker {self.id}")
        self._error: ProtocolError | None = None
        self._drained = False
        self._set_role(pb.ROLE_UNSPECIFIED)

    @property
    def connected(self) -> bool:
        """True if the stream is open and the worker was admitted."""
        return self.hello is not None

    @property
    def live(self) -> bool:
        """True if requests can be placed on the worker."""
        return self.state == "ready"

    @property
    def may_serve(self) -> bool:
        """True if requests of clients can be placed on the worker, at least while there is no combined one."""
        return self.live and (self.role == "combined" or self.takes_any)

    @property
    def drained(self) -> bool:
        """True if the worker has ended in order, after a drain."""
        return self._drained

    @property
    def gives_away(self) -> bool:
        """True if this router's requests move from the worker to others that take them."""
        return self.load.moving or self.role == "prefill" or self.residency == "draining"

    @property
    def residency(self) -> Residency:
        """State of its model; `serving` if the device is not shared."""
        return residency_of(self.load)

    @property
    def shared(self) -> bool:
        """True if its device is shared, so that its model may sleep."""
        return self.load.HasField("residency")

    @property
    def failed(self) -> bool:
        """True if the session is ending because of a protocol error. Its messages are ignored."""
        return self._error is not None

    @property
    def heard_at(self) -> float:
        """Loop time at which the worker last sent anything, in this session or a former one; 0 if it never did."""
        return self._stream.heard_at if self._stream is not None else self._heard_before

    def submit(self, submit: pb.Submit) -> None:
        """Sends a request to the worker."""
        self._send(pb.RouterMessage(submit=submit))

    def abort(self, abort: pb.Abort) -> None:
        """Tells the worker to end a request, or some of its choices."""
        self._send(pb.RouterMessage(abort=abort))

    def park(self, park: pb.Park) -> None:
        """Tells the worker to stop computing a request, and to keep its pages."""
        self._send(pb.RouterMessage(park=park))

    def fail(self, error: ProtocolError) -> None:
        """Ends the session because of an error in a message of the worker."""
        self._error = error
        if self._stream is not None:
            self._stream.abort()

    async def run(self, listener: Listener) -> None:
        """Connects, and connects again whenever the session ends, until cancelled."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            state: State = "connecting"
            began = loop.time()
            crashed = closed = False
            try:
                await self._connect(listener)
                reason, closed = "the worker closed the session", True
            except EndedError as error:
                reason, crashed = str(error), error.failed
                self._drained |= self.state == "draining" and not crashed
            except BrokenError as error:
                reason, closed = str(error), True
            except (RefusedError, HandshakeError) as error:
                reason, state = str(error), "refused"
            except TimeoutError:
                reason = f"the worker did not send its state within {SYNC_S:g} s"
            except OSError as error:
                reason = f"it can't be reached: {error.strerror or error}"
            except CPDError as error:
                reason = str(error)
            except Exception as error:  # the session must come back whatever happened
                log.exception("the session with worker %s failed", self.id)
                reason = describe(error)
            reason = one_line(reason)
            if self.connected or reason != self.reason:
                address = without_fingerprint(self.member.address)
                level = logging.INFO if self._drained else logging.WARNING  # until its lease is gone it is tried again
                log.log(level, "no session with worker %s at %s: %s", self.id, address, reason)
            if loop.time() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            if closed and self.connected:
                self.state = state  # nothing is placed on it from now on
                crashed = not await self._listens()
            self._disconnected(listener, reason, state, crashed=crashed)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def close(self, listener: Listener) -> None:
        """Ends the session for good. Call it after `run` was cancelled."""
        self._disconnected(listener, "the worker is gone", "connecting", crashed=False)

    async def _listens(self) -> bool:
        """Returns whether the worker's process still takes connections."""
        try:
            async with asyncio.timeout(PROBE_S):
                probe = await connect(self.member.session, pb.WorkerMessage, MAX_MESSAGE_BYTES)
        except (OSError, TimeoutError):
            return False
        probe.abort()
        return True

    def _disconnected(self, listener: Listener, reason: str, state: State, *, crashed: bool) -> None:
        connected = self.connected
        self.reason, self.state, self.settled = reason, state, True
        self._next_event = None
        self._heard_before, self._stream = self.heard_at, None
        self._index.forget(self.id)
        if connected:
            try:
                listener.lost(self, crashed=crashed)
            except Exception:  # an error with one request must not end the session with this worker for good
                log.exception("the requests of worker %s could not be placed again", self.id)
        self.hello, self.load, self.worker_load, self.residency_since = None, pb.Load(), None, 0.0
        self._set_role(pb.ROLE_UNSPECIFIED)
        self._on_hello()

    async def _connect(self, listener: Listener) -> None:
        """Runs one stream, from its opening to its end."""
        if self.state != "refused":  # that state stays until the worker is admitted
            self.state = "connecting"
        self._error = None
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await connect(self.member.session, pb.WorkerMessage, MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise StreamError("it can't be reached: no answer") from None
        try:
            async with asyncio.timeout(SYNC_S):
                state = await self._synchronise(stream)
            self._stream = stream
            self._set_state(state)
            self.reason, self.settled, self._drained = "", True, False
            log.info(
                "session with %s worker %s at %s is up", self.role, self.id, without_fingerprint(self.member.session)
            )
            self._events.add("joined", self.id, f"{self.role} worker on {self.member.host}")
            listener.ready(self)
            while not self.failed and (message := await stream.receive()) is not None:
                await self._handle(message, listener)
            if self._error is not None:
                raise self._error
        finally:
            stream.abort()

    async def _synchronise(self, stream: Stream[pb.WorkerMessage]) -> "pb.State.ValueType":
        """Opens the session and reads the snapshot of the worker's cache. Returns the worker's state."""
        await open_as(self._caller, stream, self.id, self._secret)
        first = await stream.receive()
        if first is None:
            raise StreamError("the session ended before the worker's Hello")
        if first.WhichOneof("kind") == "end":
            raise EndedError(first.end)
        if first.WhichOneof("kind") != "hello":
            raise ProtocolError("the worker did not begin with Hello")
        hello = first.hello
        check_hello(hello)
        self._admit(self.member, hello)
        self._set_role(hello.current_role)
        self.worker_load = WorkerLoad(hello, self.member.session, itl_ms=self._itl_ms, errors=self._new_errors())
        self.hello, self.state = hello, "syncing"
        self._on_hello()
        self._index.reset(self.id)
        while True:
            message = await stream.receive()
            if message is None:
                raise StreamError("the session ended within the snapshot")
            await self._yield_sometimes()
            match message.WhichOneof("kind"):
                case "snapshot":
                    await self._on_blocks(message.snapshot)
                    self._next_event = message.snapshot.number + 1
                    if message.snapshot.last:
                        return hello.state
                case "load":
                    self._on_load(message.load)
                case "end":
                    raise EndedError(message.end)
                case None:
                    self._unknown.ignore()
                case kind:
                    raise ProtocolError(f"{kind} came before the snapshot was complete")

    def _send(self, message: pb.RouterMessage) -> None:
        if self._stream is not None:  # None: `run` handles the end of the stream
            self._stream.send(message)

    async def _handle(self, message: pb.WorkerMessage, listener: Listener) -> None:
        await self._yield_sometimes()
        match message.WhichOneof("kind"):
            case "step":
                listener.step(self, message.step)
            case "cache":
                await self._on_events(message.cache)
            case "load":
                role, residency = self.role, self.load.residency
                self._on_load(message.load)
                self._set_state(message.load.state)
                if self.role != role:
                    listener.ready(self)
                if self.worker_load is not None and (self.worker_load.sequences or self.load.residency != residency):
                    listener.reported(self)
            case "refusal":
                listener.refusal(self, message.refusal)
            case "end":
                raise EndedError(message.end)
            case "batch":
                for one in message.batch.messages:
                    await self._handle(one, listener)
            case None:
                self._unknown.ignore()
            case kind:
                raise ProtocolError(f"{kind} came at the wrong time")

    async def _on_events(self, events: pb.CacheEvents) -> None:
        if events.number != self._next_event:  # events were lost; the next session starts with a new snapshot
            raise ProtocolError(f"cache event {events.number} came instead of {self._next_event}")
        self._next_event += 1
        for event in events.events:
            await self._yield_sometimes()
            await self._on_blocks(event)

    async def _on_blocks(self, blocks: pb.Snapshot | pb.CacheEvent) -> None:
        try:
            tier = Tier(blocks.tier)
        except ValueError:
            raise ProtocolError(f"it sent the tier {blocks.tier}, which does not exist") from None
        hashes, piece = blocks.hashes, PIECE_HASHES * KEY_BYTES
        for start in range(0, len(hashes), piece):
            if start:
                await asyncio.sleep(0)
            self._index.move(self.id, hashes[start : start + piece], tier)

    async def _yield_sometimes(self) -> None:
        """Lets the event loop run other work, every YIELD_MESSAGES calls."""
        self._handled += 1
        if self._handled % YIELD_MESSAGES == 0:
            await asyncio.sleep(0)

    def _on_load(self, load: pb.Load) -> None:
        assert self.worker_load is not None
        before, residency = self.role, self.residency
        self.worker_load.on_report(load, asyncio.get_running_loop().time())
        self.load = load
        if self.residency != residency or not self.residency_since:
            self.residency_since = time.time()
        if load.role:
            self._set_role(load.role)
        if self.role != before:
            log.info("%s worker %s is a %s worker now", before, self.id, self.role)
            self._events.add("role", self.id, f"{before} worker became a {self.role} worker")
            self.worker_load.errors = self._new_errors()
            self._on_hello()

    def _set_role(self, role: int) -> None:
        self.role: str = _ROLES.get(role, self.member.kind)  # an older worker does not tell it
        self.takes_any = role != pb.ROLE_UNSPECIFIED

    def _new_errors(self) -> WorkerErrors:
        return self._learning.worker(prefills_only=self.role == "prefill")

    def _set_state(self, state: "pb.State.ValueType") -> None:
        before, self.state = self.state, "draining" if state == pb.STATE_DRAINING else "ready"
        if self.state == "draining" and before != "draining":
            self._events.add("drains", self.id, "takes no new requests")
