"""Measures KV page transfers between two processes: `python -m scripts.bench_transfer` from the repository's root.

One process receives, one pushes scattered pages over the transport; a push is timed from the call until both sides
know that every page has arrived. Before each row `ucx_perftest` says what UCX reaches at best: for `ucx` messages of
the page's size with the same settings (`tag_bw`), for `nixl` one-sided writes of 256 MiB through shared memory
(`ucp_put_bw`). It polls on both sides, so it suffers where cores are scarce. Prints a Markdown table.
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
KIB = 1 << 10
CASES = {
    "ucx": [
        (16 * KIB, 1),
        (16 * KIB, 32),
        (16 * KIB, 2048),
        (32 * KIB, 32),
        (256 * KIB, 1),
        (256 * KIB, 32),
        (256 * KIB, 1024),
        (2304 * KIB, 1),
        (2304 * KIB, 32),
        (2304 * KIB, 112),
    ],
    "nixl": [
        (16 * KIB, 1),
        (16 * KIB, 32),
        (16 * KIB, 2048),
        (256 * KIB, 1),
        (256 * KIB, 32),
        (256 * KIB, 2048),
        (2304 * KIB, 1),
        (2304 * KIB, 32),
        (2304 * KIB, 2048),
    ],
}
"""Bytes of a page, and pages of a push."""
SENDERS_BYTES = 1 << 30  # larger than any cache; a push of more reads pages again
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
        transport = await kvtransfer.create(order["transport"], memory, epoch=2, host=HOST)
        peer = await transport.connect(bytes.fromhex(order["address"]))
        for reservation, pages in enumerate(order["pages"]):
            own = random.choices(range(order["num_pages"]), k=len(pages))
            pairs = list(zip(own, random.sample(range(len(pages)), len(pages)), strict=True))
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


async def measure(
    process: asyncio.subprocess.Process, name: str, page_bytes: int, count: int, repeats: int
) -> dict[str, float]:
    """Milliseconds and CPU milliseconds (of the sending process) of one push, and bytes per second."""
    assert process.stdin is not None
    assert process.stdout is not None
    num_pages = max(count + count // 8, 64)
    pages, memory = pool_of(num_pages, page_bytes, 0)
    transport = await kvtransfer.create(name, memory, epoch=1, host=HOST)
    chosen = [random.sample(range(num_pages), count) for _ in range(repeats)]
    order: dict[str, Any] = {"transport": name, "address": transport.address.hex(), "page_bytes": page_bytes}
    order["num_pages"] = min(num_pages, SENDERS_BYTES // page_bytes)
    process.stdin.write(json.dumps(order | {"pages": chosen}).encode() + b"\n")
    times, cpus = [], []
    for reservation, landing_pages in enumerate(chosen):
        landing = transport.expect(reservation, 1, landing_pages)
        process.stdin.write(b"go\n")
        await landing.done()
        took, cpu = json.loads(await process.stdout.readline())
        times.append(took * 1e3)
        cpus.append(cpu * 1e3)
        for page in landing_pages:
            if not (pages[page] == 1).all():
                raise RuntimeError("a page is wrong")
            pages[page] = 0
    await transport.close()
    median, best = statistics.median(times), min(times)
    megabytes = count * page_bytes / 1e3
    return {
        "median_ms": median,
        "best_ms": best,
        "cpu_ms": statistics.median(cpus),
        "mb_s": megabytes / median,
        "best_mb_s": megabytes / best,
    }


def perftest(name: str, page_bytes: int) -> float:
    """MB/s that `ucx_perftest` reaches: see the module."""
    root = Path(libucx.__file__).parent
    if name == "ucx":
        settings = ucx_options(HOST)
        iterations = max(PERFTEST_BYTES // page_bytes, 20)
        test = ["-t", "tag_bw", "-s", str(page_bytes), "-n", str(iterations), "-w", str(iterations // 10)]
    else:
        settings = {"TLS": "sm"}
        test = ["-t", "ucp_put_bw", "-s", str(PERFTEST_BYTES), "-n", "16", "-w", "2"]
    environment = os.environ | {f"UCX_{option}": value for option, value in settings.items()}
    environment |= {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(root / "bin" / "ucx_perftest"), "-p", str(PERFTEST_PORT)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            return next(_perftest_results([*command, HOST, *test, "-f"], environment))
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
    return f"Commit {commit.stdout.strip()}, {platform.machine()}, {os.cpu_count()} cores"


async def main(name: str, repeats: int) -> None:
    print(
        f"{machine()}; {name} over {HOST}; median of {repeats} pushes a row; % of the best that ucx_perftest reached.\n"
    )
    print("| page | pages | median ms | best ms | MB/s | best MB/s | % | sender's CPU ms | ucx_perftest MB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    async with sender() as process:
        for page_bytes, count in CASES[name]:
            reference = max([await asyncio.to_thread(perftest, name, page_bytes) for _ in range(3)])
            row = await measure(process, name, page_bytes, count, repeats)
            print(
                f"| {page_bytes / 1024:g} KiB | {count} | {row['median_ms']:.2f} | {row['best_ms']:.2f} "
                f"| {row['mb_s']:.0f} | {row['best_mb_s']:.0f} | {100 * row['best_mb_s'] / reference:.0f} "
                f"| {row['cpu_ms']:.2f} | {reference:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=list(CASES), default="ucx", help="what to measure")
    parser.add_argument("--repeats", type=int, default=15, help="pushes a row")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(send() if options.send else main(options.transport, options.repeats))
