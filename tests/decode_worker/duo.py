"""Two decode workers in one process: one has a prompt in its cache, the other one serves a request with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cpd.common.blocks import BLOCK_SIZE
from cpd.rpc import cpd_pb2 as pb
from decode_worker.remote_prefill import RemotePrefillState
from decode_worker.service import DecodeService
from engine.types import Request
from kvtransfer.local import LocalNetwork
from tests.decode_worker.pair import silent_server
from tests.engine.fakes import make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import Gate, fake_loader

TOKENS, CACHED = 300, 288
"""Number of tokens in the prompt, and in its full blocks."""


@dataclass
class Side:
    """One of the workers, a session with it, and gates before its steps and its pushes."""

    worker: Running
    router: Client
    gate: Gate
    pushes: asyncio.Event

    def hint(self, blocks: int = CACHED // BLOCK_SIZE) -> pb.PrefixSource:
        """The prefix source of a router that believes this many blocks to be in this worker's cache."""
        return pb.PrefixSource(worker_id=self.worker.worker.id, address=self.worker.session, blocks=blocks)

    def states(self) -> list[RemotePrefillState]:
        """The states of its prefix fetches."""
        service = self.worker.worker._service.decode
        assert isinstance(service, DecodeService)
        return [prefill.state for prefill in service._coordinator.running]

    def has(self, number: int) -> bool:
        """True if the worker has a request with this number."""
        service = self.worker.worker._service.decode
        assert isinstance(service, DecodeService)
        return any(key[1] == number for key in service._requests)

    async def serve(self, request: Request, number: int) -> None:
        """Lets this worker serve a request alone, which leaves the prompt in its cache."""
        await self.router.done(await self.router.submit(request, number))


@dataclass
class Duo:
    """Two connected decode workers. `source` has the prompt in its cache."""

    here: Side
    source: Side
    network: LocalNetwork

    async def submit(self, request: Request, number: int, hint: pb.PrefixSource | None = None) -> Answer:
        """Submits to `here`. `hint` names the worker that has the prompt cached; by default `source`."""
        return await self.here.router.submit(request, number, prefix_source=hint or self.source.hint())

    async def balanced(self) -> None:
        await self.here.router.balanced()
        await self.source.router.balanced()


@asynccontextmanager
async def _side(redis_url: str, network: LocalNetwork, engine: dict[str, Any], **settings: Any) -> AsyncIterator[Side]:
    gate, pushes = Gate(), asyncio.Event()
    pushes.set()
    load = fake_loader(before_step=gate.wait, **engine)
    async with (
        running("combined", redis_url, load=load, network=network, transfer_gate=pushes, **settings) as worker,
        Client(worker) as router,
    ):
        try:
            yield Side(worker, router, gate, pushes)
        finally:
            gate.open()
            pushes.set()


@asynccontextmanager
async def duo(
    redis_url: str,
    *,
    here: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
    network: LocalNetwork | None = None,
    **settings: Any,
) -> AsyncIterator[Duo]:
    """Starts both workers. `here` and `source` are arguments of `fake_loader` for their engines."""
    network = network or LocalNetwork()
    async with (
        _side(redis_url, network, source or {}, **settings) as there,
        _side(redis_url, network, here or {}, **settings) as asked,
    ):
        await there.serve(make_request("first", prompt(TOKENS)), 1000)
        yield Duo(asked, there, network)


class Stage(Enum):
    """Stage of a prefix fetch."""

    CONNECTING = RemotePrefillState.CONNECTING
    QUEUED = RemotePrefillState.QUEUED
    RESERVING = RemotePrefillState.RESERVING
    LANDED = RemotePrefillState.LANDED


TARGET = 1


@asynccontextmanager
async def reached(redis_url: str, stage: Stage, n: int = 1, **options: Any) -> AsyncIterator[tuple[Duo, Answer]]:
    """A request with number TARGET whose prefix fetch is held in `stage`. Options as in `duo`."""
    async with duo(redis_url, **options) as d, silent_server() as silent:
        hint = d.source.hint()
        match stage:
            case Stage.CONNECTING:
                hint.address = silent
            case Stage.QUEUED | Stage.RESERVING:
                await _hold(d.source)
            case Stage.LANDED:
                d.source.pushes.clear()
        answer = await d.submit(make_request("a", prompt(TOKENS), max_tokens=20, n=n), TARGET, hint)
        if stage is Stage.RESERVING:
            await eventually(lambda: d.here.states() == [RemotePrefillState.QUEUED])
            await _hold(d.here)
            d.source.gate.open()
        await eventually(lambda: d.here.states() == [stage.value])
        yield d, answer


async def _hold(side: Side) -> None:
    """Blocks the worker's engine in a step."""
    side.gate.close()
    await side.router.submit(make_request("holds", prompt(20, 7), max_tokens=2), 2000)
    await eventually(lambda: side.gate.held)


def let_go(d: Duo) -> None:
    """Releases everything that is held."""
    for side in (d.here, d.source):
        side.gate.open()
        side.pushes.set()
