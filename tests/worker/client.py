"""A router's end of a session, for tests: submits engine requests and collects the answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import grpc

from cpd.common.blocks import pack_tokens
from cpd.common.stream import MAX_MESSAGE_BYTES, StreamError, connect
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, HandshakeError, open_as
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from engine.types import Finish, Request
from tests.waiting import DEADLINE_S, eventually
from worker.grpc_options import admin_metadata
from worker.wire_format import sampling_to_wire


@dataclass
class Answer:
    """Everything that a worker has sent for one (request, attempt)."""

    choices: set[int]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, Finish] = field(default_factory=dict)
    prefilled: dict[int, pb.Prefilled] = field(default_factory=dict)
    queue_ms: dict[int, float] = field(default_factory=dict)
    fetched: pb.Landed | None = None
    landed: pb.Landed | None = None
    refusal: pb.Refusal | None = None

    @property
    def started(self) -> bool:
        """True if a token has arrived."""
        return bool(self.tokens)

    @property
    def done(self) -> bool:
        """True if all choices have ended, or the request was refused."""
        return self.refusal is not None or self.choices == set(self.finish)

    def take(self, output: pb.Output) -> None:
        """Adds an output, and checks that none follows the last one."""
        assert self.refusal is None, "an output after a refusal"
        assert output.choice in self.choices
        assert output.choice not in self.finish, "an output after the last one"
        assert output.HasField("prefilled") == (output.choice not in self.tokens)
        if output.HasField("prefilled"):
            self.queue_ms[output.choice] = output.prefilled.queue_ms
            output.prefilled.ClearField("queue_ms")
            if output.prefilled.HasField("fetched"):
                self.fetched = pb.Landed.FromString(output.prefilled.fetched.SerializeToString())
                output.prefilled.ClearField("fetched")
            self.prefilled[output.choice] = output.prefilled
        if output.HasField("landed"):
            assert self.landed is None, "the pages are told twice"
            self.landed = output.landed
        self.tokens.setdefault(output.choice, []).extend(output.token_ids)
        if output.finish:
            self.finish[output.choice] = Finish(output.finish)


class Listens(Protocol):
    """A worker with an address for sessions."""

    @property
    def id(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def session(self) -> str: ...


class Client:
    """A session with a worker."""

    def __init__(self, worker: Listens, *, router_id: str = "test", token: str = "") -> None:
        self.worker_id = worker.id
        self.address = worker.address
        self.session = worker.session
        self.router_id = router_id
        self.answers: dict[tuple[int, int], Answer] = {}
        self.hello = pb.Hello()
        self.load = pb.Load()
        self.cached: dict[bytes, pb.Tier.ValueType] = {}
        self.broken: str | None = None
        self.messages: list[pb.WorkerMessage] = []
        self._secret = ClusterSecret(token)
        self._event_number = -1

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address)
        self._wire = await connect(self.session, pb.WorkerMessage, MAX_MESSAGE_BYTES)
        self._reader = asyncio.create_task(self._read())
        await eventually(lambda: self.load.state != pb.STATE_UNSPECIFIED or self._reader.done())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wire.abort()
        await asyncio.wait([self._reader])
        await self._channel.close(None)
        if not self._reader.cancelled() and (error := self._reader.exception()):
            raise error

    async def drain(self) -> None:
        """Asks the worker to drain."""
        await self.administer("Drain")

    async def administer(self, what: str, **fields: Any) -> None:
        """Makes a call of `Admin` with these fields in its request."""
        call = getattr(rpc.AdminStub(self._channel), what)
        message = getattr(pb, f"{what}Request")(**fields)
        await call(message, metadata=admin_metadata(self._secret.admin_key), timeout=DEADLINE_S)

    async def submit(
        self,
        request: Request,
        number: int,
        *,
        attempt: int = 0,
        candidates: Sequence[pb.PrefillCandidate] = (),
        long_prefill_tokens: int = 32,
        prefix_source: pb.PrefixSource | None = None,
        resumes: pb.Park | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
    ) -> Answer:
        """Submits a request under a number."""
        answer = Answer(set(range(request.first_choice, request.first_choice + request.n)))
        self.answers[number, attempt] = answer
        self._wire.send(
            pb.RouterMessage(
                submit=pb.Submit(
                    request=number,
                    attempt=attempt,
                    tokens=pack_tokens(request.token_ids),
                    prompt_len=request.prompt_len,
                    hash_root=request.hash_root,
                    block_hashes=b"".join(request.block_hashes),
                    sampling=sampling_to_wire(request.params),
                    n=request.n,
                    choice=request.first_choice,
                    prefill_candidates=candidates,
                    long_prefill_tokens=long_prefill_tokens,
                    prefix_source=prefix_source,
                    resumes=resumes,
                    trace_id=request.id,
                    tenant=tenant,
                    priority=priority,
                    deadline_ms=deadline_ms,
                )
            )
        )
        return answer

    async def abort(
        self, number: int, choices: Sequence[int] = (), attempt: int = 0, *, given_up: bool = False
    ) -> None:
        """Aborts a request. Outputs sent before may still arrive."""
        abort = pb.Abort(request=number, attempt=attempt, choices=choices, given_up=given_up)
        self._wire.send(pb.RouterMessage(abort=abort))

    async def park(self, number: int, attempt: int = 0) -> None:
        """Asks the worker to park a request."""
        self._wire.send(pb.RouterMessage(park=pb.Park(request=number, attempt=attempt)))

    async def done(self, *answers: Answer) -> None:
        """Waits until all these answers have ended."""
        await eventually(lambda: all(answer.done for answer in answers) or self._reader.done())
        assert all(answer.done for answer in answers), f"the session ended: {self.broken}"

    async def balanced(self) -> None:
        """Waits until the worker is idle and each of its pages is free or cached."""

        def idle() -> bool:
            load = self.load
            held = load.used_pages + load.reserved_pages + load.quarantined_pages
            return not (load.running or load.waiting or held)

        try:
            await eventually(lambda: idle() or self._reader.done())
        except TimeoutError:
            raise AssertionError(f"still busy: {self.load}") from None
        assert idle(), f"the session ended: {self.broken}"
        assert self.load.free_pages + self.load.cached_pages == self.hello.num_pages, str(self.load)

    async def _read(self) -> None:
        try:
            await open_as(Caller("router", self.router_id), self._wire, self.worker_id, self._secret)
            while (message := await self._wire.receive()) is not None:
                self._take(message)
            self.broken = self.broken or "the stream is closed"
        except (HandshakeError, StreamError) as error:
            self.broken = str(error)

    def _take(self, message: pb.WorkerMessage) -> None:
        if message.WhichOneof("kind") == "batch":
            for one in message.batch.messages:
                self._take(one)
            return
        self.messages.append(message)
        match message.WhichOneof("kind"):
            case "hello":
                self.hello = message.hello
            case "snapshot":
                self._event_number = message.snapshot.number
                self._follow(message.snapshot)
            case "cache":
                assert message.cache.number == self._event_number + 1, "a gap in the cache events"
                self._event_number += 1
                for event in message.cache.events:
                    self._follow(event)
            case "step":
                for output in message.step.outputs:
                    self.answers[output.request, output.attempt].take(output)
            case "refusal":
                answer = self.answers[message.refusal.request, message.refusal.attempt]
                assert not answer.done, "a refusal after the end"
                answer.refusal = message.refusal
            case "load":
                self.load = message.load
            case "end":
                self.broken = message.end.reason

    def _follow(self, told: pb.Snapshot | pb.CacheEvent) -> None:
        for block_hash in _hashes(told.hashes):
            assert self.cached.pop(block_hash, pb.TIER_NONE) != told.tier, "an event without effect"
            if told.tier != pb.TIER_NONE:
                self.cached[block_hash] = told.tier


def _hashes(joined: bytes) -> list[bytes]:
    return [joined[i : i + 8] for i in range(0, len(joined), 8)]
