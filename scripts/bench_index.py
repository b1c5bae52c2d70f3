"""Measures the router's prefix index: memory, events and look-ups at full size.

    python -m scripts.bench_index [--workers 1000] [--entries 10000000]

Entries are (block, worker) pairs. Chains have 128 blocks. The mixes:

- unique: every chain is on one worker.
- shared: every chain is on all workers, like system prompts.
- mixed: each worker has the blocks of one system prompt that all have, of chains that 2 to 16 workers have (half of the
  rest) and of its own ones; chains of sessions begin with the system prompt.

Times are CPU time, in rounds of which the best one counts: others may be at work on the machine.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from cpd.common.blocks import Tier, extend_hashes, hash_root
from router.prefix_index.index import PrefixIndex

CHAIN = 128
ROUNDS, LOOKUPS = 40, 200
EVENT_SIZES = (4, 32, 256)

Chain = bytes
"""Short hashes of one chain, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Result:
    """One mix, measured.

    Attributes:
        entries: (block, worker) pairs that are stored.
        blocks: Different blocks.
        bytes_entry: Resident memory an entry.
        filled: Entries a second while the index was filled, in snapshots of 1,024 blocks.
        events: Stored and evicted blocks a second, by the blocks of an event.
        lookup_us: Median and 99th percentile of the best round.
        named: Workers that a look-up finds, on average.
        forget_ms: Longest piece of clearing up after a worker that is gone, and all of them.
    """

    mix: str
    entries: int
    blocks: int
    bytes_entry: float
    filled: float
    events: dict[int, float]
    lookup_us: tuple[float, float]
    named: float
    forget_ms: tuple[float, float]


def _chains(rng: np.random.Generator, count: int) -> list[Chain]:
    return [rng.bytes(8 * CHAIN) for _ in range(count)]


def _mix(name: str, workers: int, entries: int, rng: np.random.Generator) -> Iterator[tuple[Sequence[int], Chain]]:
    """Chains, and the workers that have them."""
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
            holders = 1 if rng.random() < 0.9 else int(rng.integers(2, 17))
            yield rng.choice(workers, size=min(holders, left), replace=False).tolist(), rng.bytes(8 * CHAIN)
            left -= holders


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _measure(mix: str, workers: int, entries: int) -> Result:
    rng = np.random.default_rng(0)
    names = [f"worker-{number}" for number in range(workers)]
    held: list[list[Chain]] = [[] for _ in names]
    for holders, chain in _mix(mix, workers, entries, rng):
        for number in holders:
            held[number].append(chain)
    system = held[0][0] if mix == "mixed" else b""
    index = PrefixIndex()
    before, fill_s = _resident(), 0.0
    for name, chains in zip(names, held, strict=True):
        snapshot = b"".join(chains)
        index.reset(name)
        started = time.thread_time()
        for start in range(0, len(snapshot), 8 * 1024):
            index.move(name, snapshot[start : start + 8 * 1024], Tier.PAGES)
        fill_s += time.thread_time() - started
    resident = _resident() - before
    stored = sum(map(index.size, names))
    lookups = Lookups(index, held, system)
    median_us, p99_us = lookups.best_round()
    return Result(
        mix=mix,
        entries=stored,
        blocks=len(index),
        bytes_entry=resident / stored,
        filled=stored / fill_s,
        events={size: _events(index, names, held, size) for size in EVENT_SIZES},
        lookup_us=(median_us, p99_us),
        named=statistics.mean(lookups.named),
        forget_ms=_forget(index, names[0]),
    )


class Lookups:
    """Look-ups of chains that a random worker has; sessions begin with the system prompt and go on with their own."""

    def __init__(self, index: PrefixIndex, held: Sequence[Sequence[Chain]], system: bytes) -> None:
        self._index, self._held, self._system = index, held, system
        self._random = random.Random(0)
        self.named: list[int] = []

    def best_round(self) -> tuple[float, float]:
        """Median and 99th percentile in µs, of the round with the least 99th percentile."""
        return min((self._round() for _ in range(ROUNDS)), key=lambda one: one[1])

    def _round(self) -> tuple[float, float]:
        took = []
        for _ in range(LOOKUPS):
            own = self._random.choice(self._random.choice(self._held))
            short = (self._system[: 8 * CHAIN // 4] + own)[: 8 * CHAIN]
            chain = [short[at : at + 8] + bytes(8) for at in range(0, len(short), 8)]
            started = time.thread_time()
            found = self._index.cached_prefixes(chain)
            took.append((time.thread_time() - started) * 1e6)
            self.named.append(len(found.cached))
        cuts = statistics.quantiles(took, n=100)
        return cuts[49], cuts[98]


def _events(index: PrefixIndex, names: Sequence[str], held: Sequence[Sequence[Chain]], size: int) -> float:
    """Blocks a second that are evicted on random workers and stored again, in events of `size` blocks."""
    chosen = random.Random(1)
    best = 0.0
    for _ in range(ROUNDS // 4):
        work = []
        for _ in range(max(1, 8192 // size)):
            number = chosen.randrange(len(names))
            chains = held[number]
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
    """Of the hashes of 128 blocks."""
    tokens = random.Random(0).choices(range(150_000), k=CHAIN * 16)
    root = hash_root(b"model")
    return _best_us(lambda: extend_hashes(root, tokens))


def _best_us(call: Callable[[], object]) -> float:
    took = []
    for _ in range(300):
        started = time.thread_time()
        call()
        took.append(time.thread_time() - started)
    return min(took) * 1e6


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--entries", type=int, default=10_000_000)
    arguments = parser.parse_args()
    sizes = " / ".join(map(str, EVENT_SIZES))
    print(
        f"| mix | entries | blocks | bytes an entry | filled, entries/s | events/s, {sizes} blocks each "
        "| look-up p50, p99 us | workers found | longest piece, all of a forgotten worker's, ms |"
    )
    print("| --- " * 9 + "|")
    for mix in ("unique", "shared", "mixed"):
        # a process of its own, so that its memory is its own
        with get_context("spawn").Pool(1) as pool:
            result = pool.apply(_measure, (mix, arguments.workers, arguments.entries))
        events = " / ".join(f"{rate:,.0f}" for rate in result.events.values())
        print(
            f"| {mix} | {result.entries:,} | {result.blocks:,} | {result.bytes_entry:.0f} | {result.filled:,.0f} "
            f"| {events} | {result.lookup_us[0]:.0f}, {result.lookup_us[1]:.0f} | {result.named:.0f} "
            f"| {result.forget_ms[0]:.1f}, {result.forget_ms[1]:.0f} |",
            flush=True,
        )
    print(f"\nhashes of {CHAIN} blocks: {_hashing_us():.0f} us")


if __name__ == "__main__":
    main()
