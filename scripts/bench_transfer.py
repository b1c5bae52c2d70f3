"""Measures KV page transfers between two processes: `python -m scripts.bench_transfer` from the repository's root.

One process receives, one pushes scattered pages over the transport; a push is timed from the call until both sides
know that every page has arrived. In the same run `ucx_perftest` sends messages of the page's size with the same UCX
settings, for comparison; it polls, so it suffers where cores are scarce. Prints a Markdown table.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import libucx  # type: ignore[import-untyped]
import numpy as np

import kvtransfer
from kvtransfer.base import PoolMemory, Ticket
from kvtransfer.ucx.transport import ucx_options

HOST = "127.0.0.1"
CASES = [
    (16 << 10, 1),
    (16 << 10, 32),
    (16 << 10, 2048),
    (32 << 10, 32),
    (256 << 10, 1),
    (256 << 10, 32),
    (256 << 10, 1024),
    (2_359_296, 1),
    (2_359_296, 32),
    (2_359_296, 112),
]
PERFTEST_PORT = 23_461
PERFTEST_BYTES = 256 << 20


def pool_of(num_pages: int, page_bytes: int, value: int) -> tuple[np.ndarray, PoolMemory]:
    pages = np.full((num_pages, page_bytes), value, np.uint8)
    return pages, PoolMemory(pages.ctypes.data, num_pages, page_bytes)


async def send() -> None:
    """The sending process: for each line of JSON, pushes as told and answers with the milliseconds of each push."""
    stdin = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := await stdin.readline():
        order = json.loads(line)
        _, memory = pool_of(order["num_pages"], order["page_bytes"], 1)
        transport = await kvtransfer.create("ucx", memory, epoch=2, host=HOST)
        peer = await transport.connect(bytes.fromhex(order["address"]))
        for reservation, pages in enumerate(order["pages"]):
            pairs = list(enumerate(random.sample(range(len(pages)), len(pages))))
            await stdin.readline()
            cpu, start = time.process_time(), time.perf_counter()
            await peer.push(Ticket(1, reservation, 1, tuple(pages)), pairs).done()
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            print(json.dumps([took, cpu]), flush=True)
        await transport.close()


@asynccontextmanager
async def sender() -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scripts.bench_transfer", "--send", stdin=pipe, stdout=pipe
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def measure(process: asyncio.subprocess.Process, page_bytes: int, count: int, repeats: int) -> dict[str, float]:
    """Milliseconds and CPU milliseconds (of the sending process) of one push, and bytes per second."""
    assert process.stdin is not None
    assert process.stdout is not None
    num_pages = max(2 * count, 64)
    pages, memory = pool_of(num_pages, page_bytes, 0)
    transport = await kvtransfer.create("ucx", memory, epoch=1, host=HOST)
    chosen = [random.sample(range(num_pages), count) for _ in range(repeats)]
    order: dict[str, Any] = {"address": transport.address.hex(), "num_pages": num_pages, "page_bytes": page_bytes}
    process.stdin.write(json.dumps(order | {"pages": chosen}).encode() + b"\n")
    times, cpus = [], []
    for reservation, landing_pages in enumerate(chosen):
        landing = transport.expect(reservation, 1, landing_pages)
        process.stdin.write(b"go\n")
        await landing.done()
        took, cpu = json.loads(await process.stdout.readline())
        times.append(took * 1e3)
        cpus.append(cpu * 1e3)
        if not (pages[landing_pages] == 1).all():
            raise RuntimeError("a page is wrong")
        pages[landing_pages] = 0
    await transport.close()
    median = statistics.median(times)
    total = count * page_bytes
    return {"median_ms": median, "best_ms": min(times), "cpu_ms": statistics.median(cpus), "mb_s": total / median / 1e3}


def perftest(page_bytes: int) -> float:
    """MB/s that `ucx_perftest` reaches with messages of this size over TCP on the loopback device."""
    root = Path(libucx.__file__).parent
    environment = os.environ | {f"UCX_{name}": value for name, value in ucx_options(HOST).items()}
    environment |= {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(root / "bin" / "ucx_perftest"), "-p", str(PERFTEST_PORT)]
    iterations = max(PERFTEST_BYTES // page_bytes, 20)
    test = [HOST, "-t", "tag_bw", "-s", str(page_bytes), "-n", str(iterations), "-w", str(iterations // 10), "-f"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            return next(_perftest_results(command + test, environment))
        finally:
            server.wait()


def _perftest_results(command: list[str], environment: dict[str, str]) -> Iterator[float]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # until the server listens
        client = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if client.returncode == 0:
            yield float(client.stdout.split()[-3])
        time.sleep(0.1)
    raise RuntimeError(f"ucx_perftest failed: {client.stderr or client.stdout}")


def machine() -> str:
    """The commit and the machine, in words."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f"Commit {commit.stdout.strip()}, {platform.machine()}, {os.cpu_count()} cores, TCP over {HOST}"


async def main(repeats: int) -> None:
    print(f"{machine()}; median of {repeats} pushes a row.\n")
    print("| page | pages | median ms | best ms | MB/s | sender's CPU ms | ucx_perftest tag_bw MB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    references: dict[int, float] = {}
    async with sender() as process:
        for page_bytes, count in CASES:
            if page_bytes not in references:
                references[page_bytes] = await asyncio.to_thread(perftest, page_bytes)
            row = await measure(process, page_bytes, count, repeats)
            print(
                f"| {page_bytes / 1024:g} KiB | {count} | {row['median_ms']:.2f} | {row['best_ms']:.2f} "
                f"| {row['mb_s']:.0f} | {row['cpu_ms']:.2f} | {references[page_bytes]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="pushes a row")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(send() if options.send else main(options.repeats))
