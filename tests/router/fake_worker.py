"""A worker without an engine: real streams and a real lease, with scripted answers."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from redis.asyncio import Redis

from cpd.common.blocks import TOKEN_BYTES
from cpd.common.membership import Member, lease, members
from cpd.common.stream import Stream, StreamError, StreamServer
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import HandshakeError, answer_as
from cpd.rpc import cpd_pb2 as pb
from tests.secret import SECRET

Answer = pb.Output | pb.Refusal
Script = Callable[[pb.Submit], AsyncIterator[Answer]]


def outputs(submit: pb.Submit, replies: Sequence[Sequence[int]], *, prefill_worker: str = "") -> Iterator[pb.Output]:
    """Yields the outputs that a real worker would send for a request whose choices have the text `replies`.

    It goes on after what was already emitted, and ends with the stop token or at max_tokens.
    """
    emitted = len(submit.tokens) // TOKEN_BYTES - submit.prompt_len
    sampling = submit.sampling
    for position in range(emitted, sampling.max_tokens):
        running = False
        for choice in range(submit.choice, submit.choice + submit.n):
            reply = replies[choice % len(replies)]
            if position >= len(reply):
                continue
            running = True
            token = reply[position]
            stops = token in sampling.stop_token_ids
            at_limit = position + 1 == sampling.max_tokens
            logprobs = []
            if sampling.HasField("top_logprobs"):
                top = [token, *((token + rank) % 256 for rank in range(1, sampling.top_logprobs))]
                top = top[: sampling.top_logprobs]
                scores = [-0.5 - rank for rank in range(len(top))]
                logprobs = [pb.TokenLogprobs(logprob=-0.5, top_ids=top, top_logprobs=scores)]
            finish = pb.FINISH_STOP if stops else pb.FINISH_LENGTH if at_limit else pb.FINISH_NONE
            output = pb.Output(choice=choice, token_ids=[token], logprobs=logprobs, finish=finish)
            if position == emitted:
                output.prefilled.cached_tokens = 16 * (submit.prompt_len > 16)
                output.prefilled.prefill_worker = prefill_worker
            yield output
        if not running:
            return


class FakeWorker:
    """A scripted worker.

    Args:
        script: Answers a Submit; request and attempt are filled in.
        cached: Short hashes (8 bytes each) of the blocks in its snapshot.
        token: The cluster's secret.
        lease_token: The secret that signs its lease.
        hello: Fields of its Hello that differ from the usual.
        model: The model that its lease names.
        residency: State of its model; None if its device is not shared.
        admin: `host:port` of its gRPC port; empty: it has none that answers.

    Attributes:
        submits, aborts, parks: What came, in order. It parks a request at once.
        hellos: Router ids of all sessions so far.
        script: May be changed for the next Submit.
    """

    def __init__(
        self,
        redis: Redis,
        script: Script | None = None,
        *,
        worker_id: str = "combined-0",
        cluster: str = "test",
        kind: Literal["prefill", "combined"] = "combined",
        token: str = SECRET,
        lease_token: str = SECRET,
        cached: bytes = b"",
        hello: Mapping[str, Any] | None = None,
        model: str = "",
        residency: pb.Residency | None = None,
        admin: str = "",
    ) -> None:
        self.id = worker_id
        self._admin = admin
        self._model = model
        self.residency = residency
        self.submits: list[pb.Submit] = []
        self.aborts: list[pb.Abort] = []
        self.parks: list[pb.Park] = []
        self.hellos: list[str] = []
        self.cached = cached
        self.address = ""
        self.role = pb.ROLE_UNSPECIFIED
        self.snapshot_may_go = asyncio.Event()
        self.snapshot_may_go.set()
        self.hello = pb.Hello(
            **{
                "worker_id": worker_id,
                "role": pb.ROLE_COMBINED if kind == "combined" else pb.ROLE_PREFILL,
                "state": pb.STATE_READY,
                "fingerprint": b"model",
                "block_size": 16,
                "epoch": 1,
                "num_pages": 100,
                "max_model_len": 512,
                "vocab_size": 512,
                "dtype": "float32",
                "transport": "ucx",
                **(hello or {}),
            }
        )
        self._redis, self._cluster, self._kind = redis, cluster, kind
        self._token, self._lease_token = token, lease_token
        self.script = script or _silent
        self._queues: list[asyncio.Queue[pb.WorkerMessage | None]] = []
        self._running: dict[int, asyncio.Task[None]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._server = StreamServer(pb.RouterMessage, 1 << 20, self._serve)

    async def __aenter__(self) -> Self:
        port = await self._server.start("127.0.0.1", 0)
        self.session = f"127.0.0.1:{port}"
        self.address = self._admin or self.session
        member = Member(self.id, self._kind, self.address, "host", os.getpid(), session=self.session, model=self._model)
        await self._stack.enter_async_context(
            lease(self._redis, self._cluster, ClusterSecret(self._lease_token), member, 5, lambda: None)
        )
        while self.session not in [it.session for it in await members(self._redis, self._cluster, ClusterSecret(""))]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        await self._stack.aclose()

    async def kill(self) -> None:
        """Ends the server at once; the lease stays until the context ends."""
        for task in self._running.values():
            task.cancel()
        for queue in self._queues:
            queue.put_nowait(None)
        await self._server.close()

    def send(self, message: pb.WorkerMessage) -> None:
        """Sends a message on every session."""
        for queue in self._queues:
            queue.put_nowait(message)

    def become(self, role: "pb.Role.ValueType") -> None:
        """Announces another role."""
        self.role = role
        self.report()

    def reside(self, state: "pb.Residency.State.ValueType", serves_in_s: float = 0.0, *, pinned: bool = False) -> None:
        """Announces whether its model is on its device."""
        self.residency = pb.Residency(state=state, serves_in_s=serves_in_s, pinned=pinned)
        self.report()

    def report(self, running: int = 0) -> None:
        """Sends a load report on every session."""
        self.send(self._load(running))

    def _load(self, running: int = 0) -> pb.WorkerMessage:
        state, pages = self.hello.state, self.hello.num_pages
        load = pb.Load(state=state, role=self.role, running=running, free_pages=pages, residency=self.residency)
        return pb.WorkerMessage(load=load)

    async def _serve(self, wire: Stream[pb.RouterMessage]) -> None:
        with contextlib.suppress(StreamError):  # a router that is gone
            await self._session(wire)

    async def _session(self, wire: Stream[pb.RouterMessage]) -> None:
        try:
            caller = await answer_as(self.id, wire, ClusterSecret(self._token))
        except HandshakeError as error:
            wire.send(pb.WorkerMessage(end=pb.End(reason=str(error))))
            return
        self.hellos.append(caller.id)
        wire.send(pb.WorkerMessage(hello=self.hello))
        await self.snapshot_may_go.wait()
        if self.residency is not None:
            wire.send(self._load())
        half = len(self.cached) // 16 * 8
        for hashes, last in ((self.cached[:half], False), (self.cached[half:], True)):
            snapshot = pb.Snapshot(number=7, tier=pb.TIER_PAGES, hashes=hashes, last=last)
            wire.send(pb.WorkerMessage(snapshot=snapshot))
        queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._queues.append(queue)
        reader = asyncio.create_task(self._read(wire, queue))
        try:
            while (message := await queue.get()) is not None:
                wire.send(message)
                await wire.drained()
        finally:
            self._queues.remove(queue)
            reader.cancel()

    async def _read(self, wire: Stream[pb.RouterMessage], queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        with contextlib.suppress(StreamError):
            await self._hear(wire, queue)
        queue.put_nowait(None)

    async def _hear(self, wire: Stream[pb.RouterMessage], queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        while (message := await wire.receive()) is not None:
            if message.WhichOneof("kind") == "submit":
                self.submits.append(message.submit)
                task = asyncio.create_task(self._answer(message.submit, queue))
                self._running[message.submit.request] = task
            elif message.WhichOneof("kind") == "park":
                park = message.park
                self.parks.append(park)
                if park.request in self._running:
                    self._running[park.request].cancel()
                kind = pb.Refusal.KIND_PARKED
                refusal = pb.Refusal(request=park.request, attempt=park.attempt, kind=kind)
                queue.put_nowait(pb.WorkerMessage(refusal=refusal))
            else:
                self.aborts.append(message.abort)
                if not message.abort.choices and message.abort.request in self._running:
                    self._running[message.abort.request].cancel()

    async def _answer(self, submit: pb.Submit, queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        reported = False
        async for answer in self.script(submit):
            answer.request, answer.attempt = submit.request, submit.attempt
            if isinstance(answer, pb.Output):
                queue.put_nowait(pb.WorkerMessage(step=pb.StepOutput(outputs=[answer])))
            else:
                queue.put_nowait(pb.WorkerMessage(refusal=answer))
            if not reported:  # that the prompt is computed
                queue.put_nowait(self._load(running=1))
                reported = True


async def _silent(submit: pb.Submit) -> AsyncIterator[Answer]:
    await asyncio.Event().wait()
    yield pb.Output()
