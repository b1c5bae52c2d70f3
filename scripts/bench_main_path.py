"""Measures the main path over HTTP: `python -m scripts.bench_main_path` from the repository's root.

1. Throughput: one combined worker with all cores; 512 tokens in, 128 out, streams at concurrency 16.
2. The remote route: a prefill and a combined worker with half of the cores each; one 512-token prompt at a time,
   alternately prefilled locally and remotely, so that both see the same machine.

The model has 4 layers, hidden size 256, 4 heads, 2 KV heads, a vocabulary of 4,096 and random bfloat16 weights. The
client is this process: it only stamps what arrives, and looks into it when the run is over.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from models.tiny.make import write
from tests.e2e.cluster import Cluster

INPUT_LEN, OUTPUT_LEN, CONCURRENCY = 512, 128, 16
VOCAB_SIZE = 4096
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
}
PAIRS = 40
END = b"\r\n0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A kept-alive connection that stamps what arrives."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))
        if data.endswith(END):
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error or ConnectionError("the server closed the connection"))

    async def request(self, transport: asyncio.Transport, head: bytes, prompt: Sequence[int]) -> "Timing":
        """Streams one completion."""
        body = json.dumps(
            {
                "model": "bench",
                "prompt": list(prompt),
                "max_tokens": OUTPUT_LEN,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        self.arrivals, self.ended = [], asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        transport.write(head % len(body) + body)
        await self.ended
        return Timing(sent, self.arrivals)


@dataclass(frozen=True, slots=True)
class Timing:
    """One stream: when it was asked for, and what came when."""

    sent: float
    arrivals: list[tuple[float, bytes]]

    def content_times(self) -> list[float]:
        """When each content chunk came.

        Raises:
            RuntimeError: The answer is no complete stream.
        """
        times = []
        for at, data in self.arrivals:
            times += [at] * (data.count(b'"text":"') - data.count(b'"text":""'))
        whole = b"".join(data for _, data in self.arrivals)
        if b"data: [DONE]" not in whole or b'"completion_tokens":%d' % OUTPUT_LEN not in whole:
            raise RuntimeError(f"not a complete stream: {whole[:300]!r} … {whole[-300:]!r}")
        return times

    @property
    def route(self) -> str:
        """Where the prompt was prefilled."""
        head = self.arrivals[0][1].lower()
        return "remote" if b"x-cpd-route: remote" in head else "local"


async def connect(url: str) -> tuple[Connection, asyncio.Transport, bytes]:
    """A connection, and the head of its requests."""
    parts = urlsplit(url)
    transport, connection = await asyncio.get_running_loop().create_connection(
        Connection, str(parts.hostname), parts.port or 80
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    return connection, transport, head.encode() + b"Content-Length: %d\r\n\r\n"


def random_prompt(rng: random.Random) -> list[int]:
    """A prompt that nobody has cached."""
    return [rng.randrange(300, VOCAB_SIZE) for _ in range(INPUT_LEN)]


async def closed_loop(url: str, requests: int, rng: random.Random) -> tuple[list[Timing], float]:
    """Timings of `requests` streams, CONCURRENCY at a time, and how long they took together, in seconds."""
    prompts = [random_prompt(rng) for _ in range(requests)]
    timings = []

    async def user() -> None:
        connection, transport, head = await connect(url)
        while prompts:
            timings.append(await connection.request(transport, head, prompts.pop()))
        transport.close()

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(CONCURRENCY)))
    return timings, time.perf_counter() - began


async def alternate(urls: Sequence[str], rng: random.Random) -> list[list[Timing]]:
    """PAIRS streams of each URL, one at a time, in turn."""
    connections = [await connect(url) for url in urls]
    timings: list[list[Timing]] = [[] for _ in urls]
    for _ in range(PAIRS):
        for index, (connection, transport, head) in enumerate(connections):
            timings[index].append(await connection.request(transport, head, random_prompt(rng)))
    for _, transport, _ in connections:
        transport.close()
    return timings


def percentile(values: Sequence[float], percent: int) -> float:
    """With linear interpolation."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def report_throughput(timings: Sequence[Timing], seconds: float) -> str:
    """One table row."""
    chunks = [timing.content_times() for timing in timings]
    ttft = [times[0] - timing.sent for timing, times in zip(timings, chunks, strict=True)]
    gaps = [after - before for times in chunks for before, after in pairwise(times)]
    return (
        f"{len(timings) * OUTPUT_LEN / seconds:7.0f} tok/s   TTFT p50 {percentile(ttft, 50) * 1e3:6.1f} ms   "
        f"ITL p50 {percentile(gaps, 50) * 1e3:5.1f} ms   ITL p99 {percentile(gaps, 99) * 1e3:5.1f} ms"
    )


def measure_throughput(model: Path, repeats: int, requests: int) -> None:
    """Prints throughput and latency of one combined worker."""
    with Cluster(model=str(model), served_model_name="bench", prefill=0, dtype="auto", kv_memory="256MiB") as cluster:
        rng = random.Random(0)
        asyncio.run(closed_loop(cluster.url, 2 * CONCURRENCY, rng))
        for _ in range(repeats):
            cpu = time.process_time()
            timings, seconds = asyncio.run(closed_loop(cluster.url, requests, rng))
            share = (time.process_time() - cpu) / seconds
            print(report_throughput(timings, seconds), f"  (client: {share:.0%} of a core)")


def measure_remote(model: Path) -> None:
    """Prints what the remote route adds."""
    settings = {"served_model_name": "bench", "dtype": "auto", "kv_memory": "256MiB", "prefill": 1, "combined": 1}
    with Cluster(model=str(model), long_prefill_tokens=INPUT_LEN - 1, **settings) as cluster:
        local_url = cluster.add_router(long_prefill_tokens=INPUT_LEN)
        rng = random.Random(1)
        asyncio.run(alternate([local_url, cluster.url], rng))  # warms both up
        local, remote = asyncio.run(alternate([local_url, cluster.url], rng))
    ttft, gap = {}, {}
    for route, timings in (("local", local), ("remote", remote)):
        if any(timing.route != route for timing in timings):
            raise RuntimeError(f"not all of the {route} requests took that route")
        times = [timing.content_times() for timing in timings]
        ttft[route] = statistics.median(one[0] - timing.sent for one, timing in zip(times, timings, strict=True)) * 1e3
        gap[route] = statistics.median(one[1] - one[0] for one in times) * 1e3
        print(f"{route:6}   TTFT p50 {ttft[route]:6.1f} ms   first gap p50 {gap[route]:5.1f} ms")
    print(
        f"remote adds {ttft['remote'] - ttft['local']:+.1f} ms to TTFT (target < 10)"
        f" and {gap['remote'] - gap['local']:+.1f} ms to the first gap (target < 40)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="throughput runs")
    parser.add_argument("--requests", type=int, default=128, help="requests a throughput run")
    parser.add_argument("--only", choices=["throughput", "remote"], help="leave the other part out")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write(model, **MODEL)
        if arguments.only != "remote":
            measure_throughput(model, arguments.repeats, arguments.requests)
        if arguments.only != "throughput":
            measure_remote(model)


if __name__ == "__main__":
    main()
