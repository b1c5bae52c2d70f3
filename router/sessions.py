"""The router's session with one worker.

States of a session:

    connecting -> syncing -> ready <-> draining
         ^           |         |          |
         +-----------+---------+----------+    the stream ended: again, after a pause
    refused: the worker can't be used, or sent what it must not send, and why; tried again at long intervals

A session is `connected` from the worker's Hello on, and `live` once its cache snapshot is complete. Whatever was in
flight when the stream ends is lost: the worker aborts it.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Literal, Protocol

from cpd.blocks import Tier
from cpd.errors import CPDError
from cpd.membership import Member
from cpd.rpc import cpd_pb2 as pb
from cpd.stream import BadMessageError, Stream, StreamError, connect
from router.blocktable import KEY_BYTES
from router.checks import NonsenseError, check_hello, check_refusal, check_step
from router.errors import describe, one_line
from router.index import InvalidEventError, PrefixIndex
from router.view import WorkerView

log = logging.getLogger(__name__)

SILENT_S = 3.0
"""A worker that has not said anything for so long is stopped or cut off: it says something every second."""

CONNECT_S = 5.0
"""A worker's machine has this long to answer."""

SYNC_S = 30.0
"""A worker has this long to say Hello and to send its snapshot."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between attempts to open a session: it doubles while they fail, or soon end."""

FIRST_REFUSAL_S, LONGEST_REFUSAL_S = 5.0, 300.0
"""A worker that sent what it must not send is left alone that long: it doubles each time."""

PIECE_HASHES = 1024
"""Put into the index at a time, in about a millisecond; other work has its turn before the next ones."""

TURN_MESSAGES = 64
"""Likewise: a worker may send any number of small ones."""

MOST_MESSAGE_BYTES = 64 << 20
"""What a worker sends at a time is a fraction of that, even where it has waited long for this router."""

Wire = Stream[pb.WorkerMessage]

State = Literal["connecting", "syncing", "ready", "draining", "refused"]


class RefusedError(CPDError):
    """The worker can't be used by this router; the message says why."""


class EndedError(CPDError):
    """The worker ended the session, and why."""


class OutOfStepError(CPDError):
    """Something the worker sent is missing; the session starts anew."""


class Listener(Protocol):
    """Who hears of what a session brings. Called on the event loop; must not block."""

    def ready(self, session: "Session") -> None: ...

    def step(self, session: "Session", step: pb.StepOutput) -> None: ...

    def refusal(self, session: "Session", refusal: pb.Refusal) -> None: ...

    def lost(self, session: "Session") -> None: ...


class Session:
    """One worker, as this router sees it. `run` keeps the session up.

    Args:
        member: The worker's lease.
        router_id: This router's name.
        cluster_token: Secret that every internal call carries.
        index: Where the worker's cached blocks are kept.
        itl_ms: What the gaps between the tokens of its streams are to be, in ms.
        admit: Called with a worker's Hello; raises RefusedError.
        greeted: Called whenever `hello` has changed.

    Attributes:
        id: The worker's name.
        role: What the worker does: `prefill` or `combined`.
        hello: What the worker said of itself; None while not connected.
        load: Its last report; empty while there is none.
        reason: Why the session is not up, for people.
        view: Its load, and what was sent to it since; None while not connected.
    """

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        cluster_token: str,
        index: PrefixIndex,
        itl_ms: float,
        admit: Callable[[Member, pb.Hello], None],
        greeted: Callable[[], None],
    ) -> None:
        self.member = member
        self.id, self.role = member.id, member.kind
        self.hello: pb.Hello | None = None
        self.load = pb.Load()
        self.reason = ""
        self.view: WorkerView | None = None
        self._router_id = router_id
        self._cluster_token = cluster_token
        self._index = index
        self._itl_ms = itl_ms
        self._admit = admit
        self._greeted = greeted
        self._state: State = "connecting"
        self._next_event: int | None = None
        self._epoch: int | None = None
        self._refusal_s = FIRST_REFUSAL_S
        self._settled = False
        self._heard_at = 0.0
        self._handled = 0
        self._wire: Wire | None = None
        self._fault: NonsenseError | None = None

    @property
    def state(self) -> State:
        """Where the session is in its life."""
        return self._state

    @property
    def connected(self) -> bool:
        """The stream is open and the worker was admitted."""
        return self.hello is not None

    @property
    def settled(self) -> bool:
        """Whether it is known how the first attempt went: the worker's cache is in the index, or it failed."""
        return self._settled

    @property
    def live(self) -> bool:
        """Requests can be placed on the worker."""
        return self._state == "ready"

    def silent(self, now: float) -> bool:
        """Whether the worker has not been heard for a while; `now` is the loop's time."""
        return now - self._heard_at > SILENT_S

    def submit(self, submit: pb.Submit) -> None:
        """Sends a request to the worker."""
        self._send(pb.RouterMessage(submit=submit))

    def abort(self, abort: pb.Abort) -> None:
        """Ends a request, or some of its choices."""
        self._send(pb.RouterMessage(abort=abort))

    @property
    def broken_off(self) -> bool:
        """Nothing that the worker sent may be used any more."""
        return self._fault is not None

    def break_off(self, fault: NonsenseError) -> None:
        """What the worker sent was found to be wrong."""
        self._fault = fault
        if self._wire is not None:
            self._wire.abort()

    async def run(self, listener: Listener) -> None:
        """Keeps the session up until cancelled."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            refused_s, offended, began = 0.0, False, loop.time()
            try:
                await self._connect(listener)
                reason = "the worker closed the session"
            except RefusedError as error:
                reason, refused_s = str(error), LONGEST_PAUSE_S
            except (NonsenseError, InvalidEventError, BadMessageError) as error:
                reason, offended = str(error), True
            except TimeoutError:
                reason = f"the worker did not send its state within {SYNC_S:g} s"
            except OSError as error:
                reason = f"it can't be reached: {error.strerror or error}"
            except (OutOfStepError, EndedError, StreamError) as error:
                reason = str(error)
            except Exception as error:  # whatever a worker sends, this router keeps trying
                log.exception("the session with worker %s failed", self.id)
                reason = describe(error)
            reason = one_line(reason)
            if offended:
                refused_s = self._refusal_s
                reason += f"; left alone for {refused_s:g} s"
                self._refusal_s = min(refused_s * 2, LONGEST_REFUSAL_S)
            if self.connected or reason != self.reason:
                log.warning("no session with worker %s at %s: %s", self.id, self.member.address, reason)
            if loop.time() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._settled = True
            self._disconnected(listener, reason, "refused" if refused_s else "connecting")
            await asyncio.sleep(refused_s or pause_s * random.uniform(0.5, 1))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def close(self, listener: Listener) -> None:
        """What was in flight is lost. For the owner, after it has cancelled `run`."""
        self._settled = True
        self._disconnected(listener, "the worker is gone", "connecting")

    def _disconnected(self, listener: Listener, reason: str, state: State) -> None:
        connected = self.connected
        self.reason, self._state = reason, state
        self._next_event = None
        self._wire = None
        self._index.forget(self.id)
        if connected:
            try:
                listener.lost(self)
            except Exception:  # one request's trouble must not end the session with this worker for good
                log.exception("what ran on worker %s could not be placed anew", self.id)
        self.hello, self.load, self.view = None, pb.Load(), None
        self._greeted()

    async def _connect(self, listener: Listener) -> None:
        """One stream, from its opening to its end."""
        if self._state != "refused":  # which it stays until the worker is heard
            self._state = "connecting"
        self._fault = None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                wire = await connect(self.member.session, pb.WorkerMessage, MOST_MESSAGE_BYTES)
        except TimeoutError:
            raise StreamError("it can't be reached: no answer") from None
        try:
            async with asyncio.timeout(SYNC_S):
                await self._synchronise(wire)
            self._wire = wire
            self._heard_state(pb.STATE_READY if self.hello is None else self.hello.state)
            self.reason, self._settled, self._heard_at = "", True, loop.time()
            log.info("session with %s worker %s at %s is up", self.role, self.id, self.member.session)
            listener.ready(self)
            while not self.broken_off and (message := await wire.receive()) is not None:
                self._heard_at = loop.time()
                await self._handle(message, listener)
            if self._fault is not None:
                raise self._fault
        finally:
            wire.abort()

    async def _synchronise(self, wire: Wire) -> None:
        """Hello both ways, then the snapshot of the worker's cache."""
        hello = pb.RouterHello(router_id=self._router_id, token=self._cluster_token)
        wire.send(pb.RouterMessage(hello=hello))
        first = await wire.receive()
        if first is None:
            raise OutOfStepError("the session ended before the worker's Hello")
        if first.WhichOneof("kind") == "end":
            raise EndedError(first.end.reason)
        if first.WhichOneof("kind") != "hello":
            raise NonsenseError("the worker did not begin with Hello")
        said = first.hello
        check_hello(said)
        self._admit(self.member, said)
        if self._epoch not in (None, said.epoch):
            raise NonsenseError(f"the epoch of its KV pool changed from {self._epoch} to {said.epoch} in one process")
        self.view = WorkerView(said, self.member.session, itl_ms=self._itl_ms)
        self._epoch, self.hello, self._state = said.epoch, said, "syncing"
        self._greeted()
        self._index.reset(self.id, said.num_pages, said.host_pages)
        while True:
            message = await wire.receive()
            if message is None:
                raise OutOfStepError("the session ended within the snapshot")
            await self._take_turns()
            match message.WhichOneof("kind"):
                case "snapshot":
                    await self._heard_blocks(message.snapshot)
                    self._next_event = message.snapshot.number + 1
                    if message.snapshot.last:
                        return
                case "load":
                    self._heard_load(message.load)
                case "end":
                    raise EndedError(message.end.reason)
                case kind:
                    raise NonsenseError(f"{kind} came before the snapshot was complete")

    def _send(self, message: pb.RouterMessage) -> None:
        if self._wire is not None:  # that the stream has ended is for the reader to tell
            self._wire.send(message)

    async def _handle(self, message: pb.WorkerMessage, listener: Listener) -> None:
        await self._take_turns()
        match message.WhichOneof("kind"):
            case "step":
                check_step(message.step)
                listener.step(self, message.step)
            case "cache":
                await self._heard_events(message.cache)
            case "load":
                self._heard_load(message.load)
                self._heard_state(message.load.state)
            case "refusal":
                check_refusal(message.refusal)
                listener.refusal(self, message.refusal)
            case "end":
                raise EndedError(message.end.reason)
            case "batch":
                for one in message.batch.messages:
                    await self._handle(one, listener)
            case kind:
                raise NonsenseError(f"{kind} came where it has no place")

    async def _heard_events(self, events: pb.CacheEvents) -> None:
        if events.number != self._next_event:
            raise OutOfStepError(f"cache event {events.number} came where {self._next_event} was due")
        self._next_event += 1
        for event in events.events:
            await self._take_turns()
            await self._heard_blocks(event)

    async def _heard_blocks(self, told: pb.Snapshot | pb.CacheEvent) -> None:
        try:
            tier = Tier(told.tier)
        except ValueError:
            raise NonsenseError(f"it sent the tier {told.tier}, which there is not") from None
        hashes, piece = told.hashes, PIECE_HASHES * KEY_BYTES
        for start in range(0, len(hashes), piece):
            if start:
                await asyncio.sleep(0)
            self._index.move(self.id, hashes[start : start + piece], tier)

    async def _take_turns(self) -> None:
        """Other work has its turn, once in TURN_MESSAGES calls."""
        self._handled += 1
        if self._handled % TURN_MESSAGES == 0:
            await asyncio.sleep(0)

    def _heard_load(self, load: pb.Load) -> None:
        assert self.view is not None
        self.view.reported(load, asyncio.get_running_loop().time())
        self.load = load

    def _heard_state(self, state: "pb.State.ValueType") -> None:
        self._state = "draining" if state == pb.STATE_DRAINING else "ready"
