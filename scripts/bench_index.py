"""Measures the router's prefix index: memory, events and look-ups at full size.

    python -m scripts.bench_index [--workers 1000] [--entries 10000000]

Entries are (block, worker) pairs. Chains have 128 blocks. The mixes:

- unique: every chain is on one worker.
- shared: every chain is on all workers, like system prompts.
- mixed: each worker has one system prompt that all workers have, chains that 2 to 16 workers have (half of the rest),
  and its own chains; chains of sessions begin with the system prompt.

Times are CPU times; the best round counts, because other processes may use the machine.

Then it measures, in wall time, how long a router that starts needs until its index is complete: a router's and a
worker's end of the session in one process, over TCP. In a cluster each has its own.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np

from cpd.common.blocks import Tier, extend_hashes, hash_root
from cpd.common.membership import Member
from cpd.common.policy_settings import PolicySettings
from cpd.common.stream import StreamServer
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.worker_session import WorkerSession
from router.events import Events
from router.placement.learning import Learning
from router.prefix_index.index import PrefixIndex
from worker.async_engine import CacheSnapshot
from worker.session_server import HELLO_BYTES, SessionServer

CHAIN = 128
ROUNDS, LOOKUPS = 40, 200
EVENT_SIZES = (4, 32, 256)
SYNCHRONISED = (10_000, 100_000, 1_000_000)
"""Numbers of blocks in a worker's cache."""

Chain = bytes
"""Short hashes of one chain, 8 bytes each."""


def _chains(rng: np.random.Generator, count: int) -> list[Chain]:
    return [rng.bytes(8 * CHAIN) for _ in range(count)]


def _mix(name: str, workers: int, entries: int, rng: np.random.Generator) -> Iterator[tuple[Sequence[int], Chain]]:
    """Chains, each with the workers that have it."""
    chains = entries // CHAIN
    if name == "unique":
        for number, chain in enumerate(_chains(rng, chains)):
            yield [number % workers], chain
    elif name == "shared":
        for chain in _chains(rng, chains // workers):
            yield range(workers), chain
    else:
        yield range(workers), rng.bytes(8 * CHAIN)
        left = chains - workers
        while left > 0:
            copies = 1 if rng.random() < 0.9 else int(rng.integers(2, 17))
            yield rng.choice(workers, size=min(copies, left), replace=False).tolist(), rng.bytes(8 * CHAIN)
            left -= copies


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _measure(mix: str, workers: int, entries: int) -> str:
    """Measures one mix. Returns its row of the table."""
    rng = np.random.default_rng(0)
    names = [f"worker-{number}" for number in range(workers)]
    cached: list[list[Chain]] = [[] for _ in names]
    for numbers, chain in _mix(mix, workers, entries, rng):
        for number in numbers:
            cached[number].append(chain)
    system = cached[0][0] if mix == "mixed" else b""
    index = PrefixIndex()
    before, fill_s = _resident(), 0.0
    for name, chains in zip(names, cached, strict=True):
        snapshot = b"".join(chains)
        index.reset(name)
        started = time.thread_time()
        for start in range(0, len(snapshot), 8 * 1024):
            index.move(name, snapshot[start : start + 8 * 1024], Tier.PAGES)
        fill_s += time.thread_time() - started
    resident = _resident() - before
    stored = sum(map(index.size, names))
    lookups = Lookups(index, cached, system)
    median_us, p99_us = lookups.best_round()
    blocks = len(index)
    events = " / ".join(f"{_events(index, names, cached, size):,.0f}" for size in EVENT_SIZES)
    longest_ms, total_ms = _forget(index, names[0])
    return (
        f"| {mix} | {stored:,} | {blocks:,} | {resident / stored:.0f} | {stored / fill_s:,.0f} | {events} "
        f"| {median_us:.0f}, {p99_us:.0f} | {statistics.mean(lookups.found):.0f} | {longest_ms:.1f}, {total_ms:.0f} |"
    )


class Lookups:
    """Look-ups of chains that a random worker has. Sessions begin with the system prompt."""

    def __init__(self, index: PrefixIndex, cached: Sequence[Sequence[Chain]], system: bytes) -> None:
        self._index, self._cached, self._system = index, cached, system
        self._random = random.Random(0)
        self.found: list[int] = []

    def best_round(self) -> tuple[float, float]:
        """Median and 99th percentile, in us, of the round with the least 99th percentile."""
        return min((self._round() for _ in range(ROUNDS)), key=lambda one: one[1])

    def _round(self) -> tuple[float, float]:
        took = []
        for _ in range(LOOKUPS):
            own = self._random.choice(self._random.choice(self._cached))
            short = (self._system[: 8 * CHAIN // 4] + own)[: 8 * CHAIN]
            chain = [short[at : at + 8] + bytes(8) for at in range(0, len(short), 8)]
            started = time.thread_time()
            found = self._index.cached_prefixes(chain)
            took.append((time.thread_time() - started) * 1e6)
            self.found.append(len(found.cached))
        cuts = statistics.quantiles(took, n=100)
        return cuts[49], cuts[98]


def _events(index: PrefixIndex, names: Sequence[str], cached: Sequence[Sequence[Chain]], size: int) -> float:
    """Blocks per second that are evicted on random workers and stored again, in events of `size` blocks."""
    chosen = random.Random(1)
    best = 0.0
    for _ in range(ROUNDS // 4):
        work = []
        for _ in range(max(1, 8192 // size)):
            number = chosen.randrange(len(names))
            chains = cached[number]
            at = chosen.randrange(len(chains) - size // CHAIN)
            work.append((names[number], b"".join(chains[at : at + -(-size // CHAIN)])[: 8 * size]))
        started = time.thread_time()
        for name, hashes in work:
            index.move(name, hashes, Tier.NONE)
            index.move(name, hashes, Tier.PAGES)
        best = max(best, 2 * size * len(work) / (time.thread_time() - started))
    return best


def _forget(index: PrefixIndex, name: str) -> tuple[float, float]:
    index.forget(name)
    pieces = []
    more = True
    while more:
        started = time.thread_time()
        more = index.sweep()
        pieces.append((time.thread_time() - started) * 1e3)
    return max(pieces), sum(pieces)


def _hashing_us() -> float:
    """Time to hash 128 blocks."""
    tokens = random.Random(0).choices(range(150_000), k=CHAIN * 16)
    root = hash_root(b"model")
    took = []
    for _ in range(300):
        started = time.thread_time()
        extend_hashes(root, tokens)
        took.append(time.thread_time() - started)
    return min(took) * 1e6


class _Stub:
    """An engine with a full cache, and a router that ignores all events."""

    def __init__(self, blocks: int) -> None:
        hashes = [random.randbytes(16) for _ in range(blocks)]
        self._cached = CacheSnapshot(0, {Tier.PAGES: hashes, Tier.HOST: []})
        self.synchronised = asyncio.Event()

    async def snapshot(self) -> CacheSnapshot:
        return self._cached

    def ready(self, session: WorkerSession) -> None:
        self.synchronised.set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


async def _synchronise(blocks: int) -> float:
    """Returns the seconds from a router's start until it has the index of a worker with this many cached blocks."""
    stub, secret, index = _Stub(blocks), ClusterSecret("secret"), PrefixIndex()
    sessions = SessionServer(
        worker_id="w",
        hello=lambda: pb.Hello(worker_id="w", role=pb.ROLE_COMBINED, state=pb.STATE_READY),
        load=lambda: pb.Load(state=pb.STATE_READY),
        engine=cast(Any, stub),
        handler=cast(Any, stub),
        serve_worker=cast(Any, stub),
        secret=secret,
    )
    server = StreamServer(pb.RouterMessage, HELLO_BYTES, sessions.serve)
    port = await server.start("127.0.0.1", 0)
    session = WorkerSession(
        Member("w", "combined", "", "h", 1, 1, session=f"127.0.0.1:{port}"),
        router_id="r",
        secret=secret,
        index=index,
        itl_ms=50.0,
        learning=Learning(PolicySettings(), 2000.0),
        events=Events(),
        admit=lambda member, hello: None,
        on_hello=lambda: None,
    )
    began = time.perf_counter()
    task = asyncio.create_task(session.run(cast(Any, stub)))
    await stub.synchronised.wait()
    took_s = time.perf_counter() - began
    assert index.size("w") == blocks
    task.cancel()
    await asyncio.wait([task])
    await server.close()
    return took_s


def main() -> None:
    """Measures all mixes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1_000, help="number of workers")
    parser.add_argument("--entries", type=int, default=10_000_000, help="number of (block, worker) pairs")
    arguments = parser.parse_args()
    sizes = " / ".join(map(str, EVENT_SIZES))
    print(
        f"| mix | entries | blocks | bytes an entry | filled, entries/s | events/s, {sizes} blocks each "
        "| look-up p50, p99 us | workers found | removing a worker, longest step and total, ms |"
    )
    print("| --- " * 9 + "|")
    for mix in ("unique", "shared", "mixed"):
        # a separate process, to measure its memory
        with get_context("spawn").Pool(1) as pool:
            print(pool.apply(_measure, (mix, arguments.workers, arguments.entries)), flush=True)
    print(f"\nhashes of {CHAIN} blocks: {_hashing_us():.0f} us")
    print("\n| cached blocks | index complete after, s |\n| --- | --- |")
    for blocks in SYNCHRONISED:
        print(f"| {blocks:,} | {min(asyncio.run(_synchronise(blocks)) for _ in range(3)):.2f} |", flush=True)


if __name__ == "__main__":
    main()
