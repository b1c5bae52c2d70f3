"""Measures what everything but the devices costs: `python -m scripts.bench_control_plane` from the repository's root.

Four combined and two prefill workers are simulated, with devices that take no time (`--simulate instant`), in front of
them a router; all of it, and the client, on this machine. Of several passes the best one counts, because whatever else
runs here only makes figures worse.

1. One request at a time, a prompt of 10 words: the whole answer, of one token and of 32.
2. 32 at a time, 32 tokens out: requests a second with prompts of 100 and of 2,000 words.
3. Streams, 100 words in, 32 tokens out, one and 32 at a time: the time to the first token, and chunks a second.
4. One stream at a time, a prompt of 500 words, in turn prefilled locally and remotely: what the remote route adds.

Beside the figures of 2 and 3 stands the CPU time that a request took in each process, kernel included, and beside
those of 3 how many tokens a chunk carried, and how many chunks came at one time. The client's time limits the figures
like the others': it has the same cores.

A word is one token. The client is `cpd bench`'s, in this process.
"""

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import subprocess
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
from bench.client.target import Target
from bench.record import Record
from bench.settings import RunSettings
from bench.tokens import Texts
from bench.workloads.base import Message
from models import tiny
from tests.e2e.cluster import HOST, Cluster

NAME = "bench"
OUTPUT = 32
AT_ONCE = 32
REMOTE_WORDS = 500
TIMEOUT_S = 30.0


class Cpu:
    """CPU time that requests take, by process.

    Args:
        pids: Processes by name.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._before = self._seconds()

    def each(self, requests: int) -> dict[str, float]:
        """Time of one of so many requests since this object was made, in us."""
        now = self._seconds()
        return {name: (now[name] - self._before[name]) / requests * 1e6 for name in now}

    def _seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def least(costs: Sequence[Mapping[str, float]]) -> str:
    """The least of several passes, for people."""
    return ", ".join(f"{name} {min(cost[name] for cost in costs):,.0f}" for name in costs[0])


class Prompts:
    """Texts that have no block in common."""

    def __init__(self, seed: int) -> None:
        self._texts = Texts.with_tokenizer(tiny.CHECKPOINT)
        self._rng = np.random.default_rng(seed)

    def __call__(self, words: int) -> str:
        return self._texts.text(self._rng, words)


def plain_request(port: int, prompt: str, max_tokens: int) -> bytes:
    """An HTTP request for a completion in one piece."""
    asked = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def plain(port: int, requests: list[bytes], at_once: int) -> tuple[list[float], float]:
    """Latency of each request in s, and of all together."""
    left, latencies = iter(requests), []

    async def use_connection() -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, HOST, port)
        for request in left:
            body, started = PlainBody(), time.perf_counter()
            await connection.exchange(request, body, TIMEOUT_S)
            latencies.append(time.perf_counter() - started)
            if body.status != 200:
                raise RuntimeError(f"{body.status}: {body.data.decode()}")
        connection.abort()

    started = time.perf_counter()
    await asyncio.gather(*(use_connection() for _ in range(at_once)))
    return latencies, time.perf_counter() - started


def target(url: str) -> Target:
    """Where streams come from."""
    return Target.of(RunSettings.load({"url": url, "endpoint": "completions"}), NAME)


async def stream(client: Client, prompt: str) -> Record:
    """One stream of OUTPUT tokens.

    Raises:
        RuntimeError: It failed.
    """
    now_s = time.perf_counter()
    record = Record(0, 0, 0, OUTPUT, now_s, now_s)
    await client.stream(record, [Message("user", prompt)])
    if record.error:
        raise RuntimeError(f"{record.error}: {record.detail}")
    return record


async def streams(url: str, prompts: list[str], at_once: int) -> tuple[list[Record], float]:
    """All streams, and how long they took together in s."""
    client, left, records = Client(target(url)), iter(prompts), []

    async def one_after_another() -> None:
        for prompt in left:
            records.append(await stream(client, prompt))

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    seconds = time.perf_counter() - started
    await client.close()
    return records, seconds


def ttft_ms(records: list[Record]) -> float:
    """Median time to the first token."""
    return statistics.median(record.content_s[0] - record.sent_s for record in records) * 1e3


async def latency(port: int, prompts: Prompts, requests: int, max_tokens: int) -> float:
    """Median of whole answers, one at a time, in ms."""
    latencies, _ = await plain(port, [plain_request(port, prompts(10), max_tokens) for _ in range(requests)], 1)
    return statistics.median(latencies) * 1e3


async def throughput(
    port: int, prompts: Prompts, requests: int, words: int, pids: Mapping[str, int], costs: list[Mapping[str, float]]
) -> float:
    """Requests a second; adds what one cost."""
    bodies = [plain_request(port, prompts(words), OUTPUT) for _ in range(requests)]
    cpu = Cpu(pids)
    _, seconds = await plain(port, bodies, AT_ONCE)
    costs.append(cpu.each(requests))
    return requests / seconds


async def streams_by_route(urls: Mapping[str, str], prompts: Prompts, each: int) -> dict[str, list[Record]]:
    """Streams of REMOTE_WORDS words, one at a time, each route in turn."""
    clients = {route: Client(target(url)) for route, url in urls.items()}
    records: dict[str, list[Record]] = {route: [] for route in clients}
    for route, client in itertools.islice(itertools.cycle(clients.items()), each * len(clients)):
        records[route].append(await stream(client, prompts(REMOTE_WORDS)))
    for client in clients.values():
        await client.close()
    return records


async def remote_extra(urls: Mapping[str, str], prompts: Prompts, pairs: int) -> float:
    """What the remote route adds to the time to the first token, in ms."""
    records = await streams_by_route(urls, prompts, pairs)
    for route in urls:
        if any(record.route != route for record in records[route]):
            raise RuntimeError(f"not all of the {route} requests took that route")
    return ttft_ms(records["remote"]) - ttft_ms(records["local"])


def add_routes(cluster: Cluster) -> dict[str, str]:
    """Starts a router for each route that prompts of REMOTE_WORDS words can take; returns their URLs."""
    thresholds = {"local": REMOTE_WORDS, "remote": REMOTE_WORDS - 1}
    return {route: cluster.add_router(long_prefill_tokens=words) for route, words in thresholds.items()}


async def best(passes: int, choose: Callable[[Iterator[float]], float], once: Callable[[], Awaitable[float]]) -> float:
    """The best of several passes, after one that warms up."""
    await once()
    return choose(iter([await once() for _ in range(passes)]))


async def measure(cluster: Cluster, passes: int, scale: float) -> None:
    """Prints all figures."""
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
        rate = await best(passes, max, partial(throughput, port, prompts, count(3000), words, pids, costs))
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
    # only now: each router has a session with every worker, which tells all of them what it has cached
    urls = add_routes(cluster)
    ms = await best(passes, min, partial(remote_extra, urls, prompts, count(150)))
    print(f"{REMOTE_WORDS} words in: the remote route adds {ms:+.2f} ms to the TTFT (goal 5)")


def simulated(**more: object) -> Cluster:
    """What is measured, with `more` settings."""
    settings = {"served_model_name": NAME, "simulate": "instant", "prefill": 2, "combined": 4, "kv_memory": "1GiB"}
    return Cluster(model=str(tiny.CHECKPOINT), **settings, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3, help="of which the best one is shown")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests a pass")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    with simulated() as cluster:
        uvloop.run(measure(cluster, arguments.passes, arguments.scale))


if __name__ == "__main__":
    main()
