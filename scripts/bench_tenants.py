"""Measures what a tenant that floods does to another one: `python -m scripts.bench_tenants` from the repository's root.

A router serves one combined worker, simulated with a device that takes no time (`--simulate instant`), so that only the
router is in the way. One tenant sends one short prompt at a time, first alone, then beside another tenant that does all
of this at once, from another process:

- 200 long prompts at a time, of 20,000 words each
- 8 MiB bodies, four at a time
- 20 streams of long answers that it does not read
- 300 idle connections

The first tenant's time to first token should be at most 3 times as long in the median, and 10 times at the 99th
percentile. The flooding client runs at low priority; on a machine with few cores it takes part of them all the same.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import orjson
import uvloop

from bench.client.connection import Connection
from bench.client.response import PlainBody
from models import tiny
from scripts.streams import MODEL_NAME, machine
from tests.e2e.cluster import HOST, Cluster

LONG, LONG_WORDS = 200, 20_000
LARGE, LARGE_BYTES = 4, (8 << 20) - 4096
UNREAD = 20
IDLE = 300
TIMEOUT_S = 120.0
KEYS = "[{key: good-key, name: good}, {key: bad-key, name: bad}]"


def request(port: int, key: str, prompt: str, max_tokens: int = 1, *, stream: bool = False) -> bytes:
    """An HTTP request for a completion."""
    asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps(asked | {"stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, sent: bytes) -> PlainBody:
    """Sends a request on a connection of its own and waits for the whole answer."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, port)
    body = PlainBody()
    await connection.exchange(sent, body, TIMEOUT_S)
    connection.abort()
    return body


async def for_ever(call: Callable[[], Awaitable[PlainBody]]) -> None:
    """Repeats a call, with a short pause after each refusal."""
    while True:
        if (await call()).status != 200:
            await asyncio.sleep(0.1)


async def flood(port: int, begun: Event) -> None:
    """Does everything that the module says, until the process is ended."""
    rng = np.random.default_rng(1)
    words = np.array(["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "and", "so"])

    def long_prompt() -> bytes:
        return request(port, "bad-key", " ".join(rng.choice(words, LONG_WORDS)))

    large = request(port, "bad-key", "the cat sat " * (LARGE_BYTES // 12))
    idle = [socket.create_connection((HOST, port)) for _ in range(IDLE)]
    for _ in range(UNREAD):
        unread = socket.create_connection((HOST, port))
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.sendall(request(port, "bad-key", "the cat", 2000, stream=True))
        idle.append(unread)
    async with asyncio.TaskGroup() as group:
        for _ in range(LONG):
            group.create_task(for_ever(lambda: ask(port, long_prompt())))
        for _ in range(LARGE):
            group.create_task(for_ever(lambda: ask(port, large)))
        await asyncio.sleep(2.0)
        begun.set()


def run_flood(port: int, begun: Event) -> None:
    """The flooding process. It leaves the cores to the router, as clients on other machines would."""
    os.nice(10)
    uvloop.run(flood(port, begun))


@contextlib.contextmanager
def flooding(port: int) -> Iterator[None]:
    """While the context is open, another process floods the router."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=run_flood, args=(port, begun), daemon=True)
    process.start()
    begun.wait(TIMEOUT_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


async def latencies_ms(port: int, seconds: float) -> np.ndarray:
    """Latencies of short prompts, one at a time, in ms. An answer is one token, so its end is its first token."""
    taken, end, number = list[float](), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        number += 1
        started = time.perf_counter()
        answer = await ask(port, request(port, "good-key", f"{os.getpid()} {number} the cat sat on the mat"))
        taken.append((time.perf_counter() - started) * 1e3)
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.data.decode()}")
        await asyncio.sleep(0.01)
    return np.array(taken)


def main() -> None:
    """Starts a cluster and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each of the two measurements")
    seconds = parser.parse_args().seconds
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.yaml"
        keys.write_text(KEYS)
        with Cluster(
            model=str(tiny.CHECKPOINT),
            served_model_name=MODEL_NAME,
            simulate="instant",
            prefill=0,
            combined=1,
            max_model_len=32_768,
            api_key_file=keys,
        ) as cluster:
            port = cluster.settings.port
            uvloop.run(latencies_ms(port, 2.0))
            alone = uvloop.run(latencies_ms(port, seconds))
            with flooding(port):
                beside = uvloop.run(latencies_ms(port, seconds))
            for name, percentile, most in (("p50", 50, 3), ("p99", 99, 10)):
                one, other = np.percentile(alone, percentile), np.percentile(beside, percentile)
                print(
                    f"TTFT {name}: {one:.1f} ms alone ({len(alone)}), {other:.1f} ms beside the flood ({len(beside)}): "
                    f"{other / one:.1f} times (at most {most})"
                )


if __name__ == "__main__":
    main()
