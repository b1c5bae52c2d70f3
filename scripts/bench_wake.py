"""Times how a model goes to sleep and wakes: `python -m scripts.bench_wake` from the repository's root; two minutes.

One worker with a real engine and session serves a model with random weights in bfloat16. In each round it goes to sleep
without requests, copies as many bytes as its weights have in the plainest way (the same pieces and threads, into memory
that is as new to the process, in huge pages, without checksums), and wakes from the staged copy. Then it goes to sleep
with streams in the middle of their answers, and wakes from the checkpoint, which the system still has in its cache.

Resident memory is that of this process, which also runs the router's side and the measurements. The staged copy is not
in it: the system counts that as shared memory (`RssShmem`).
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cpd.common.blocks import extend_hashes, hash_root
from deploy.redis import embedded_redis
from engine.execution.cpu.lanes import own_cores
from engine.execution.cpu.model_memory import PIECE_BYTES
from engine.execution.cpu.system_memory import own
from engine.types import Request, SamplingParams
from kvtransfer.local import LocalNetwork
from models.tiny.make import write
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import running
from worker.engine_loader import load_engine
from worker.sleeper import POOL, Sleeper

MODEL = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
}
LAYER_BYTES = 2 * 2048 * (32 * 128 + 16 * 128 + 3 * 6144)
STREAMS = 4


class PlainCopy:
    """Copies bytes with several threads."""

    def __init__(self, num_bytes: int) -> None:
        self._source = own(num_bytes)
        self._source[:] = 1
        self._threads = ThreadPoolExecutor(own_cores())

    def seconds(self) -> float:
        """Times a copy into new memory."""
        target = own(len(self._source))
        starts = iter(range(0, len(self._source), PIECE_BYTES))

        def copy() -> None:
            for start in starts:
                target[start : start + PIECE_BYTES] = self._source[start : start + PIECE_BYTES]

        begin_s = time.perf_counter()
        for one in [self._threads.submit(copy) for _ in range(own_cores())]:
            one.result()
        return time.perf_counter() - begin_s


def resident_mib() -> float:
    """Resident memory of this process, without shared memory."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[kind].split()[0]) for kind in ("RssAnon", "RssFile")) / 1024


async def begin_streams(router: Client, first: int) -> list[Answer]:
    """Streams in the middle of their answers."""
    rng, answers = np.random.default_rng(first), []
    for number in range(first, first + STREAMS):
        tokens = rng.integers(0, MODEL["vocab_size"], 48).tolist()
        root = hash_root(b"bench")
        params = SamplingParams(temperature=0.0, max_tokens=1000)
        request = Request(str(number), tokens, len(tokens), params, root, extend_hashes(root, tokens))
        answers.append(await router.submit(request, number))
    await eventually(lambda: all(len(answer.tokens.get(0, ())) > 2 for answer in answers))
    return answers


async def timed(change: str, sleeper: Sleeper, parts: dict[str, list[float]]) -> float:
    """Makes a change of the model's state; notes its parts. Returns its seconds, for a wake until the model serves."""
    begin_s = time.perf_counter()
    await getattr(sleeper, change)()
    took_s = time.perf_counter() - begin_s
    for part, seconds in sleeper.took_s.items():
        parts.setdefault(part, []).append(seconds)
    return took_s - sleeper.took_s.get(POOL, 0.0)


def ms(seconds: Sequence[float]) -> str:
    """Median and range."""
    median, least, most = (1e3 * one for one in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:8.1f} ms ({least:.1f} to {most:.1f})"


def show(title: str, total: Sequence[float], parts: dict[str, list[float]]) -> None:
    """Prints a change and its parts."""
    print(f"{title:<28}{ms(total)}")
    for part, seconds in parts.items():
        print(f"    {part:<24}{ms(seconds)}")


async def main(weights: float, pool: float, rounds: int) -> None:
    """Measures and prints.

    Args:
        weights, pool: Sizes in GiB.
    """
    layers = max(1, round(weights * 2**30 / LAYER_BYTES))
    with tempfile.TemporaryDirectory() as folder, embedded_redis(Path(folder) / "r") as redis:
        model = Path(folder) / "model"
        writer = get_context("spawn").Process(target=write, args=(model,), kwargs=MODEL | {"num_hidden_layers": layers})
        writer.start()  # its memory would stay with this process
        writer.join()
        settings: dict[str, Any] = {
            "model": str(model),
            "device": "cpu",
            "dtype": "bfloat16",
            "kv_memory": int(pool * 2**30),
        }
        before_mib = resident_mib()
        started = running(
            "combined",
            redis.url,
            load=load_engine,
            network=LocalNetwork(),
            device_memory=1 << 40,
            staging_memory=1 << 40,
            max_model_len=4096,
            **settings,
        )
        async with started as worker, Client(worker) as router:
            sleeper = worker.worker._sleeper
            assert sleeper is not None
            memory = worker.worker._loaded.model_memory
            assert memory is not None
            await sleeper.stage()
            size = memory.staged_bytes
            awake_mib = resident_mib()
            times: dict[str, list[float]] = {"plain": [], "sleep": [], "wake": [], "park": [], "read": []}
            sleep_parts: dict[str, list[float]] = {}
            wake_parts: dict[str, list[float]] = {}
            park_parts: dict[str, list[float]] = {}
            read_parts: dict[str, list[float]] = {}
            times["sleep"].append(await timed("sleep", sleeper, sleep_parts))
            asleep_mib = resident_mib()
            plain = PlainCopy(size)
            for number in range(rounds):
                if number:
                    times["sleep"].append(await timed("sleep", sleeper, sleep_parts))
                times["plain"].append(plain.seconds())
                times["wake"].append(await timed("wake", sleeper, wake_parts))
            del plain
            for number in range(max(2, rounds // 3)):
                await begin_streams(router, 10 * number)
                times["park"].append(await timed("sleep", sleeper, park_parts))
                sleeper.unstage()
                for stream in range(10 * number, 10 * number + STREAMS):
                    await router.abort(stream)
                times["read"].append(await timed("wake", sleeper, read_parts))
    print(f"{own_cores()} of {os.cpu_count()} cores; weights of {size / 2**30:.2f} GiB, pool of {pool:.2f} GiB")
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    show("sleep, without requests", times["sleep"], sleep_parts)
    show(f"sleep, with {STREAMS} streams", times["park"], park_parts)
    print(f"{'plain copy':<28}{ms(times['plain'])}, {size / statistics.median(times['plain']) / 1e9:.1f} GB/s")
    show("wake, staged", times["wake"], wake_parts)
    show("wake, from the checkpoint", times["read"], read_parts)
    plain_s = statistics.median(times["plain"])
    for what, seconds in (("weights copied and verified", wake_parts["copy"]), ("whole wake", times["wake"])):
        print(f"{what}: {plain_s / statistics.median(seconds):.2f} of the speed of a plain copy")
    print(
        f"resident memory: {before_mib:.0f} MiB before the start, {awake_mib:.0f} awake, {asleep_mib:.0f} asleep "
        f"({asleep_mib / awake_mib:.1%}); not counted: the staged copy, {size / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=float, default=2.0, help="about this many GiB of weights")
    parser.add_argument("--pool", type=float, default=1.0, help="GiB of KV pages")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of sleep and wake")
    given = parser.parse_args()
    asyncio.run(main(given.weights, given.pool, given.rounds))
