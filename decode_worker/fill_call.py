"""The gRPC call of one fill: requests out, events in, and one event that says that no more will come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from cpd.rpc import cpd_pb2 as pb
from worker.auth import token_metadata
from worker.node import Node


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The call is over."""

    reason: str


@contextlib.asynccontextmanager
async def fill_call(
    node: Node, address: str, on_event: Callable[[pb.FillEvent | StreamEnded], None]
) -> AsyncIterator[Callable[[pb.FillRequest], None]]:
    """Calls Fill of the worker at `address`; yields what sends a request without waiting.

    The end of the context cancels the call if it is still going on.
    """
    outgoing: asyncio.Queue[pb.FillRequest] = asyncio.Queue()
    async with node.channels.use(address) as stub:
        token = node.settings.cluster_token.get_secret_value()
        call = stub.Fill(metadata=token_metadata(token))  # type: ignore[call-arg]
        tasks = [asyncio.create_task(_read(call, on_event)), asyncio.create_task(_write(call, outgoing))]
        try:
            yield outgoing.put_nowait
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()


async def _read(call: Any, on_event: Callable[[pb.FillEvent | StreamEnded], None]) -> None:
    reason = "the prefill worker ended the call early"
    try:
        async for event in call:
            on_event(event)
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
    on_event(StreamEnded(reason))


async def _write(call: Any, outgoing: asyncio.Queue[pb.FillRequest]) -> None:
    # That the call is over is for `_read` to say, with the reason.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outgoing.get())
