"""Measures the tail of a worker's engine steps while its process does other work.

Usage: `python -m scripts.bench_step_tail [--seconds N] [--rounds N]`, from the repository's root.

Eight streams decode on one combined worker with a full cache, three times for a few seconds: without other load; with
routers that keep reconnecting, each of which gets a snapshot of the whole cache; and with short requests at a steady
rate as well. Steps of the engine's trace count if they decode and prefill nothing.

The model is that of `scripts.bench_main_path`.
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from bench.client.client import Client
from bench.record import Failure
from bench.tokens import Texts
from cpd.common.stream import MAX_MESSAGE_BYTES, connect
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, open_as
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from models.tiny.make import write
from scripts.bench_main_path import MODEL
from scripts.streams import MODEL_NAME, stream, target
from tests.e2e.cluster import ADMIN_KEY, TOKEN, Cluster
from worker.grpc_options import CLIENT_OPTIONS, admin_metadata

STREAMS = 8
STREAM_LEN = 3_000
FILL_PROMPTS, FILL_LEN = 64, 2_048
RATE = 20.0


@dataclass(frozen=True, slots=True)
class Tail:
    """Times of steps and of the pauses between them, in ms, and the number of snapshots sent meanwhile."""

    steps: list[float]
    pauses: list[float]
    snapshots: int


class Bench:
    """The streams, and the load beside them."""

    def __init__(self, url: str, address: str, session: str, worker_id: str, model: Path) -> None:
        self._client = Client(target(url))
        self._texts = Texts.with_tokenizer(model)
        self._rng = np.random.default_rng(0)
        self._address = address
        self._session = session
        self._worker_id = worker_id
        self._snapshots = 0

    async def fill_cache(self) -> None:
        """Sends prompts one after the other until the pool is full of blocks."""
        for _ in range(FILL_PROMPTS):
            await self._ask(FILL_LEN, 1)

    async def measure(self, seconds: float, *, snapshots: bool, requests: bool) -> Tail:
        """Runs all streams for `seconds` and reads the trace."""
        self._snapshots = 0
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream_on()) for _ in range(STREAMS)]
            await asyncio.sleep(1.0)  # until all decode
            tasks += [group.create_task(self._reconnect(f"passing-{number}")) for number in range(2 * snapshots)]
            if requests:
                tasks.append(group.create_task(self._ask_steadily()))
            await asyncio.sleep(seconds)
            steps = await self._trace(seconds)
            for task in tasks:
                task.cancel()
        decodes = [step.lane != pb.LANE_PREFILL and not step.prefill_tokens and step.decodes > 0 for step in steps]
        pauses = [
            1e3 * (after.start_s - step.start_s) - step.ms
            for step, after, both in zip(steps, steps[1:], np.logical_and(decodes, [*decodes[1:], False]), strict=False)
            if both
        ]
        times = [step.ms for step, decode in zip(steps, decodes, strict=True) if decode]
        return Tail(times, pauses, self._snapshots)

    async def _ask(self, tokens: int, output_len: int) -> None:
        accepted = ("", Failure.EMPTY)  # one random token may be part of a character
        await stream(self._client, self._texts.text(self._rng, tokens), output_len, accepted)

    async def _stream_on(self) -> None:
        while True:
            await self._ask(64, STREAM_LEN)

    async def _ask_steadily(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ask(16, 1))
                await asyncio.sleep(1 / RATE)

    async def _reconnect(self, name: str) -> None:
        """Connects as a router, reads the snapshot of the cache and disconnects, repeatedly."""
        while True:
            wire = await connect(self._session, pb.WorkerMessage, MAX_MESSAGE_BYTES)
            await open_as(Caller("router", name), wire, self._worker_id, ClusterSecret(TOKEN))
            while (message := await wire.receive()) is not None and not message.snapshot.last:
                pass
            self._snapshots += 1
            wire.abort()
            await asyncio.sleep(0.1)

    async def _trace(self, seconds: float) -> list[pb.TracedStep]:
        async with grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS) as channel:
            metadata = admin_metadata(ADMIN_KEY)
            reply = await rpc.AdminStub(channel).Trace(pb.TraceRequest(seconds=seconds), metadata=metadata)
            return list(reply.steps)


async def run(cluster: Cluster, model: Path, seconds: float, rounds: int) -> None:
    """Measures all loads and prints a line for each."""
    (worker,) = cluster.state()["workers"]
    bench = Bench(cluster.url, worker["address"], worker["session"], worker["id"], model)
    await bench.fill_cache()
    pages = cluster.state()["workers"][0]["load"]["pages"]
    print(f"{STREAMS} streams, {pages['cached']:,} cached blocks\n")
    ways = {
        "nothing else": {"snapshots": False, "requests": False},
        "snapshots": {"snapshots": True, "requests": False},
        f"snapshots, {RATE:g} requests/s": {"snapshots": True, "requests": True},
    }
    tails: dict[str, list[Tail]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, disturbances in ways.items():
            tails[name].append(await bench.measure(seconds, **disturbances))
    print("| beside the streams | snapshots/s | steps | step p50 ms | p99 | p99.9 | pause p50 ms | p99 | p99.9 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, some in tails.items():
        steps = [ms for tail in some for ms in tail.steps]
        pauses = [ms for tail in some for ms in tail.pauses]
        figures = [f"{ms:.2f}" for times in (steps, pauses) for ms in np.quantile(times, (0.5, 0.99, 0.999))]
        rate = sum(tail.snapshots for tail in some) / (rounds * seconds)
        print(f"| {name} | {rate:.1f} | {len(steps)} | {' | '.join(figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each load in each round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write(model, **MODEL)
        settings = {"served_model_name": MODEL_NAME, "dtype": "auto", "kv_memory": "256MiB", "prefill": 0}
        with Cluster(model=str(model), **settings) as cluster:
            asyncio.run(run(cluster, model, arguments.seconds, arguments.rounds))


if __name__ == "__main__":
    main()
