"""Whole workers inside the test's process: real gRPC, real Redis, real engine, with a runner without a model."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

import kvtransfer
from cpd.common.membership import members
from cpd.common.settings import Role, WorkerSettings
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.rpc import cpd_pb2 as pb
from decode_worker.service import DecodeService
from kvtransfer.base import PoolMemory, Transport
from kvtransfer.local import LocalNetwork
from prefill_worker.service import PrefillService
from tests.waiting import DEADLINE_S
from tests.worker.fakes import GatedTransport, fake_loader
from worker.context import LoadedEngine
from worker.pool_transport import OpenTransport
from worker.worker import Worker

_names = itertools.count()


def opener(network: LocalNetwork | None, gate: asyncio.Event | None) -> OpenTransport:
    """Transports of `network`, or real ones; their pushes begin only while `gate` is set."""

    async def open_transport(name: str, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str) -> Transport:
        transport = (
            network.create(memory, epoch=epoch)
            if network
            else await kvtransfer.create(name, memory, epoch=epoch, host=host, advertise_host=advertise_host)
        )
        return transport if gate is None else GatedTransport(transport, gate)

    return open_transport


class Running:
    """A worker that runs as an asyncio task."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.task = asyncio.create_task(worker.run())

    @property
    def id(self) -> str:
        return self.worker.id

    @property
    def address(self) -> str:
        return self.worker.address

    @property
    def session(self) -> str:
        return self.worker.session_address

    @property
    def candidate(self) -> pb.PrefillCandidate:
        return pb.PrefillCandidate(worker_id=self.worker.id, address=self.session)

    async def stop(self) -> int:
        """Ends the worker; returns its exit code."""
        self.worker.lifecycle.stop("the test ends")
        return await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)


@asynccontextmanager
async def running(
    role: Role,
    redis_url: str,
    *,
    load: Callable[[WorkerSettings], LoadedEngine] | None = None,
    network: LocalNetwork | None = None,
    transfer_gate: asyncio.Event | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A worker that has taken its lease.

    Args:
        network: The network for its pages; None for the real transport.
        transfer_gate: Pushes begin only while this is set.
    """
    name = f"{role}-{next(_names)}"
    given: dict[str, Any] = {"worker_id": name, "cluster": f"test-{name}", "redis_url": redis_url, "token_budget": 64}
    given |= {"kv_checksum": True, **settings}
    worker = Worker(
        WorkerSettings(**given),
        role,
        DecodeService,
        PrefillService,
        build_engine=load or fake_loader(),
        open_transport=opener(network, transfer_gate),
    )
    async with Redis.from_url(redis_url) as redis, asyncio.timeout(DEADLINE_S):
        if "device_memory" in given:  # as `cpd up` does: in a record that it has to make, a worker waits for others
            ledger = Ledger(redis, given["cluster"], ClusterSecret(""), socket.gethostname())
            await ledger.start(given["device_memory"])
        it = Running(worker)
        while not it.task.done() and not await members(redis, given["cluster"], ClusterSecret("")):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    if it.task.done():
        it.task.result()
    try:
        yield it
    finally:
        await it.stop()
