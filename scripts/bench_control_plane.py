"""Measures the cost of everything except devices: `python -m scripts.bench_control_plane` from the repository's root.

A router serves four combined and two prefill workers, simulated with devices that take no time (`--simulate instant`).
Everything, and the client, runs on this machine. The best of several passes counts, because other load only makes
figures worse.

1. One request at a time, a prompt of 10 words: latency of the whole answer of 1 and of 32 tokens.
2. 32 at a time, 32 tokens out: requests a second with prompts of 100 and of 2,000 words.
3. Streams, 100 words in, 32 tokens out, 1 and 32 at a time: time to first token, and chunks a second.
4. One stream at a time, a prompt of 500 words, alternately prefilled locally and remotely: the time the remote route
   adds.

With 2 and 3 it prints the CPU time (user and kernel) of a request in each process, and with 3 the tokens per chunk and
the chunks that arrive at the same time. The client shares the cores, so its CPU time limits the figures too.

A word is one token. The client is that of `cpd bench`, in this process.
"""

import argparse
import asyncio
import os
import ssl
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import uvloop

from bench.client.client import Client
from bench.client.connection import Connection
from bench.client.response import PlainBody
from bench.record import Record
from bench.tokens import Texts
from cpd.common.tls_reads import cheap_reads
from models import tiny
from scripts.streams import MODEL_NAME, alternate, check_routes, machine, stream, target, ttft_ms
from tests.e2e.cluster import HOST, Cluster

OUTPUT = 32
AT_ONCE = 32
REMOTE_WORDS = 500
TIMEOUT_S = 30.0


class Cpu:
    """Measures the CPU time of requests in some processes, given by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._before = self._seconds()

    def each(self, requests: int) -> dict[str, float]:
        """CPU time per request since this object was made, in us."""
        now = self._seconds()
        return {name: (now[name] - self._before[name]) / requests * 1e6 for name in now}

    def _seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def least(costs: Sequence[Mapping[str, float]]) -> str:
    """Formats the least cost of several passes."""
    return ", ".join(f"{name} {min(cost[name] for cost in costs):,.0f}" for name in costs[0])


class Prompts:
    """Makes texts that have no block in common."""

    def __init__(self, seed: int) -> None:
        self._texts = Texts.with_tokenizer(tiny.CHECKPOINT)
        self._rng = np.random.default_rng(seed)

    def __call__(self, words: int) -> str:
        return self._texts.text(self._rng, words)


def plain_request(port: int, prompt: str, max_tokens: int) -> bytes:
    """An HTTP request for a completion that is not streamed."""
    asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def plain(
    port: int, requests: list[bytes], at_once: int, tls: ssl.SSLContext | None = None
) -> tuple[list[float], float]:
    """Latency of each request, and the time of all together, in s. Connecting does not count."""
    left, latencies = iter(requests), []
    loop = asyncio.get_running_loop()
    connections = [Connection() for _ in range(at_once)]
    for connection in connections:
        reader = partial(cheap_reads, connection, tls=tls is not None)
        await loop.create_connection(reader, HOST, port, ssl=tls)
        # after its first answer the server's side of the connection is complete, too
        await connection.exchange(f"GET /livez HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(), PlainBody(), TIMEOUT_S)

    async def use(connection: Connection) -> None:
        for request in left:
            body, started = PlainBody(), time.perf_counter()
            await connection.exchange(request, body, TIMEOUT_S)
            latencies.append(time.perf_counter() - started)
            if body.status != 200:
                raise RuntimeError(f"{body.status}: {body.data.decode()}")
        connection.abort()

    started = time.perf_counter()
    await asyncio.gather(*map(use, connections))
    return latencies, time.perf_counter() - started


async def streams(url: str, prompts: list[str], at_once: int) -> tuple[list[Record], float]:
    """The records of all streams, and the time of all together, in s. Connecting does not count."""
    client, left, records = Client(target(url)), iter(prompts), []

    async def one_after_another() -> None:
        for prompt in left:
            records.append(await stream(client, prompt, OUTPUT))

    await asyncio.gather(*(stream(client, "connect", 1) for _ in range(at_once)))
    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    seconds = time.perf_counter() - started
    await client.close()
    return records, seconds


async def latency(port: int, prompts: Prompts, requests: int, max_tokens: int) -> float:
    """Median latency of whole answers, one at a time, in ms."""
    bodies = [plain_request(port, prompts(10), max_tokens) for _ in range(requests)]
    latencies, _ = await plain(port, bodies, 1)
    return statistics.median(latencies) * 1e3


async def throughput(
    port: int,
    prompts: Prompts,
    requests: int,
    words: int,
    pids: Mapping[str, int],
    costs: list[Mapping[str, float]],
) -> float:
    """Requests a second. Appends the CPU time of a request to `costs`."""
    bodies = [plain_request(port, prompts(words), OUTPUT) for _ in range(requests)]
    cpu = Cpu(pids)
    _, seconds = await plain(port, bodies, AT_ONCE)
    costs.append(cpu.each(requests))
    return requests / seconds


async def remote_extra(urls: Mapping[str, str], prompts: Prompts, pairs: int) -> float:
    """Time that the remote route adds to the time to first token, in ms."""
    records = await alternate(urls, partial(prompts, REMOTE_WORDS), pairs, OUTPUT)
    check_routes(records)
    return ttft_ms(records["remote"]) - ttft_ms(records["local"])


def add_routes(cluster: Cluster) -> dict[str, str]:
    """Starts a router for each route of prompts of REMOTE_WORDS words. Returns their URLs."""
    thresholds = {"local": REMOTE_WORDS, "remote": REMOTE_WORDS - 1}
    return {route: cluster.add_router(long_prefill_tokens=words) for route, words in thresholds.items()}


async def best(passes: int, choose: Callable[[Iterator[float]], float], once: Callable[[], Awaitable[float]]) -> float:
    """The best of several passes after a warm-up pass."""
    await once()
    return choose(iter([await once() for _ in range(passes)]))


async def measure(cluster: Cluster, passes: int, scale: float) -> None:
    """Measures and prints all figures."""
    prompts = Prompts(int(time.time()))
    url, port = cluster.url, cluster.settings.port
    pids = {"router": cluster.pid("router-0"), "workers": cluster.pid("simulated"), "client": os.getpid()}

    def count(requests: int) -> int:
        return max(AT_ONCE, int(requests * scale))

    for max_tokens, goal in ((1, 1.0), (OUTPUT, 2.1)):
        ms = await best(passes, min, partial(latency, port, prompts, count(300), max_tokens))
        print(f"1 at a time, 10 words in, {max_tokens:2} tokens out: p50 {ms:.2f} ms (goal {goal})", flush=True)
    for words, goal in ((100, 1060), (2000, 800)):
        costs: list[Mapping[str, float]] = []
        once = partial(throughput, port, prompts, count(3000), words, pids, costs)
        rate = await best(passes, max, once)
        print(f"{AT_ONCE} at a time, {words:4} words in, {OUTPUT} out: {rate:.0f} requests/s (goal {goal})")
        print(f"   CPU us a request: {least(costs)}", flush=True)
    for at_once, requests, goal in ((1, 300, 2.5), (AT_ONCE, 2000, 6.0)):
        times, rates, costs = [], [], []
        for _ in range(1 + passes):
            texts = [prompts(100) for _ in range(count(requests))]
            cpu = Cpu(pids)
            records, seconds = await streams(url, texts, at_once)
            costs.append(cpu.each(len(texts)))
            times.append(ttft_ms(records))
            chunks = sum(len(record.content_s) for record in records)
            rates.append(chunks / seconds)
        arrivals = sum(len(set(record.content_s)) for record in records)
        print(f"{at_once:2} streams: TTFT p50 {min(times[1:]):.2f} ms (goal {goal}), {max(rates[1:]):.0f} chunks/s")
        print(f"   {OUTPUT * len(records) / chunks:.1f} tokens a chunk, {chunks / arrivals:.1f} chunks at one time")
        print(f"   CPU us a request: {least(costs[1:])}", flush=True)
    # last, because every worker reports its cache to each router
    urls = add_routes(cluster)
    ms = await best(passes, min, partial(remote_extra, urls, prompts, count(150)))
    print(f"{REMOTE_WORDS} words in: the remote route adds {ms:+.2f} ms to the TTFT (goal 5)")


def simulated(**more: object) -> Cluster:
    """The measured cluster, with `more` settings."""
    settings = {"simulate": "instant", "prefill": 2, "combined": 4, "kv_memory": "1GiB"}
    return Cluster(model=str(tiny.CHECKPOINT), served_model_name=MODEL_NAME, **settings, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3, help="passes of each load; the best counts")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of requests in a pass")
    arguments = parser.parse_args()
    print(machine())
    with simulated() as cluster:
        uvloop.run(measure(cluster, arguments.passes, arguments.scale))


if __name__ == "__main__":
    main()
