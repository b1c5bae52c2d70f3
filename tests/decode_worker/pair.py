"""A prefill and a decode worker in one process, whose steps and transfers a test can hold."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cpd.rpc import cpd_pb2 as pb
from decode_worker.remote_prefill import RemotePrefillState
from decode_worker.service import DecodeService
from engine.types import Request
from kvtransfer.local import LocalNetwork
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import MAX_MODEL_LEN, Gate, fake_loader


@dataclass
class Pair:
    """One prefill and one decode worker, a session with each, and a gate before the steps of each."""

    prefill: Running
    decode: Running
    router: Client
    prefill_view: Client
    prefill_gate: Gate
    decode_gate: Gate
    transfer_gate: asyncio.Event
    network: LocalNetwork

    async def submit(self, request: Request, number: int, **options: Any) -> Answer:
        """Submits with the prefill worker as candidate."""
        return await self.router.submit(request, number, **{"candidates": [self.prefill.candidate], **options})

    def states(self) -> list[RemotePrefillState]:
        """The states of the decode worker's remote prefills."""
        return [prefill.state for prefill in self._service._coordinator.running]

    @property
    def restarts_soon(self) -> bool:
        """True if the decode worker will restart unless its pages leave quarantine."""
        return self._service._restart is not None

    @property
    def _service(self) -> DecodeService:
        service = self.decode.worker._service.decode
        assert isinstance(service, DecodeService)
        return service

    async def waits_for_pages(self, answer: Answer) -> None:
        """Waits until the only remote prefill has its first tokens, and then a landing, which may come later."""
        await eventually_started(answer)
        await eventually(lambda: self.states() == [RemotePrefillState.LANDED])

    async def balanced(self) -> None:
        await self.router.balanced()
        await self.prefill_view.balanced()


@asynccontextmanager
async def pair(
    redis_url: str, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Pair]:
    prefill_gate, decode_gate, transfer_gate = Gate(), Gate(), asyncio.Event()
    transfer_gate.set()
    network = settings.setdefault("network", LocalNetwork())
    prefill_load = fake_loader(before_step=prefill_gate.wait, **(prefill or {}))
    decode_load = fake_loader(before_step=decode_gate.wait, **(decode or {}))
    async with (
        running("prefill", redis_url, load=prefill_load, transfer_gate=transfer_gate, **settings) as p,
        running("combined", redis_url, load=decode_load, **settings) as d,
        Client(p) as prefill_view,
        Client(d) as router,
    ):
        try:
            yield Pair(p, d, router, prefill_view, prefill_gate, decode_gate, transfer_gate, network)
        finally:
            transfer_gate.set()
            prefill_gate.open()
            decode_gate.open()


def assert_right(request: Request, answer: Answer) -> None:
    for choice in range(request.first_choice, request.first_choice + request.n):
        want = expected(request, choice, MAX_MODEL_LEN)
        assert answer.tokens[choice] == want.token_ids
        assert answer.finish[choice] is want.finish


class Stage(Enum):
    """Stage of a request with a prefill candidate: its state, and whether first tokens were sent."""

    CONNECTING = RemotePrefillState.CONNECTING, False
    QUEUED = RemotePrefillState.QUEUED, False
    RESERVING = RemotePrefillState.RESERVING, False
    RESERVING_FIRST = RemotePrefillState.RESERVING, True
    LANDED = RemotePrefillState.LANDED, False
    LANDED_FIRST = RemotePrefillState.LANDED, True
    DECODING = RemotePrefillState.DECIDED, True


TARGET = 1


@asynccontextmanager
async def reached(
    redis_url: str,
    stage: Stage,
    n: int = 1,
    num_pages: int = 66,
    decode: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Pair, Answer]]:
    """A request with number TARGET that is held in `stage`, if necessary behind another request.

    Args:
        decode: More arguments of `fake_loader` for the decode worker.
    """
    async with (
        pair(redis_url, decode={"num_pages": num_pages, **(decode or {})}, **settings) as p,
        silent_server() as silent,
    ):
        candidates = [p.prefill.candidate]
        ahead = make_request("ahead", prompt(900, 9), max_tokens=2)
        match stage:
            case Stage.CONNECTING:
                candidates = [pb.PrefillCandidate(worker_id="silent", address=silent)]
            case Stage.QUEUED:
                p.prefill_gate.close()
                await p.submit(ahead, 2)
                await eventually(lambda: p.states() == [RemotePrefillState.LANDED] and p.prefill_gate.held)
            case Stage.RESERVING | Stage.RESERVING_FIRST:
                p.transfer_gate.clear()
                await eventually_started(await p.submit(ahead, 2))
                if stage is Stage.RESERVING:
                    p.prefill_gate.close()
            case Stage.LANDED:
                p.prefill_gate.close()
            case Stage.LANDED_FIRST:
                p.transfer_gate.clear()
            case Stage.DECODING:
                p.decode_gate.slow()
        request = make_request("a", prompt(300), max_tokens=700 if stage is Stage.DECODING else 20, n=n)
        answer = await p.submit(request, TARGET, candidates=candidates)
        state, with_first = stage.value
        if with_first:
            await eventually_started(answer)
        if stage is Stage.DECODING:
            await eventually(lambda: all(len(tokens) > 1 for tokens in answer.tokens.values()))
        else:
            await eventually(lambda: p.states()[-1:] == [state])
        yield p, answer
        p.prefill_gate.open()
        p.transfer_gate.set()


async def eventually_started(answer: Answer) -> None:
    """Waits for the first token of every choice."""
    await eventually(lambda: set(answer.tokens) == answer.choices)


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """A server that accepts connections and sends nothing. Yields its address."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"
