"""Measures what open pages cost the streams: `python -m scripts.bench_pages` from the repository's root.

A router serves one combined worker, simulated with a device that takes no time (`--simulate instant`), so that only the
router is in the way. 100 streams run all the time. In every second turn there are 50 pages beside them that show the
cluster: each follows `GET /cluster/live` and asks `GET /session` every 15 s, as a browser does. Every second pair of
turns begins with the pages, so that a machine that gets slower or faster favours neither.

Prints the output tokens a second of both, as the router counts them, and their ratio, the geometric mean over the pairs
of turns with its standard error. It should be at least 0.97. Streams and pages are read by two other processes at low
priority; on a machine with few cores they take part of them all the same.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

import httpx
import numpy as np
import orjson
import uvloop

from models import tiny
from scripts.streams import MODEL_NAME, machine
from tests.e2e.cluster import HOST, Cluster

STREAMS, OUTPUT_TOKENS = 100, 2000
PAGES = 50
SESSION_S = 15.0
START_S = 60.0
RETRY_S = 0.2
"""Time after which an answer is asked for again that an overloaded server refused, in seconds."""

SETTLE_S = 2.0
"""Time after pages have come or gone in which nothing is measured, in seconds."""


def main() -> None:
    """Starts a cluster and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of turns, with and without pages")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each turn")
    arguments = parser.parse_args()
    print(machine())
    with (
        Cluster(
            model=str(tiny.CHECKPOINT), served_model_name=MODEL_NAME, simulate="instant", prefill=0, combined=1
        ) as cluster,
        reading(run_streams, cluster.settings.port),
        reading(run_pages, cluster.settings.port) as show_pages,
    ):
        measured: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(arguments.pairs):
            for pages in (False, True) if pair % 2 == 0 else (True, False):
                (show_pages.set if pages else show_pages.clear)()
                time.sleep(SETTLE_S)
                measured[pages].append(tokens_per_s(cluster.url, arguments.seconds))
    without, beside = np.array(measured[False]), np.array(measured[True])
    logs = np.log(beside / without)
    ratio, error = float(np.exp(logs.mean())), float(logs.std(ddof=1) / len(logs) ** 0.5)
    print(f"{STREAMS} streams: {without.mean():.0f} tokens/s alone, {beside.mean():.0f} beside {PAGES} pages")
    print(f"ratio {ratio:.3f} ± {ratio * error:.3f} (at least 0.97; {len(logs)} pairs of {arguments.seconds:g} s)")


def tokens_per_s(url: str, seconds: float) -> float:
    """Output tokens a second of the router, within this time."""
    started, before = time.perf_counter(), output_tokens(url)
    time.sleep(seconds)
    ended, after = time.perf_counter(), output_tokens(url)
    return (after - before) / (ended - started)


def output_tokens(url: str) -> float:
    """Output tokens of the router so far."""
    found = re.search(r"^cpd_output_tokens_total (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    if found is None:
        raise RuntimeError("the router does not count output tokens")
    return float(found[1])


@contextlib.contextmanager
def reading(run: Callable[[int, Event, Event], None], port: int) -> Iterator[Event]:
    """While the context is open, `run` runs in another process. It gets the port, the event that is yielded, and one to
    set when it begins.

    Raises:
        RuntimeError: The process has ended before; it has printed why.
    """
    context = multiprocessing.get_context("spawn")
    event, begun = context.Event(), context.Event()
    process = context.Process(target=run, args=(port, event, begun), daemon=True)
    process.start()
    try:
        begun.wait(START_S)
        yield event
        if not process.is_alive():
            raise RuntimeError(f"{run.__name__} has failed")
    finally:
        process.kill()
        process.join()


def run_streams(port: int, _: Event, begun: Event) -> None:
    """The process that reads the streams."""
    os.nice(10)
    begun.set()
    uvloop.run(read_streams(port))


async def read_streams(port: int) -> None:
    """Reads STREAMS answers at a time, until the process is ended."""
    body = {"model": MODEL_NAME, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}

    async def ask(number: int) -> None:
        prompt = orjson.dumps(body | {"prompt": f"{number} the cat sat on the mat"})
        while True:
            try:
                await fetch(port, "POST", "/v1/completions", prompt)
            except BusyError:
                await asyncio.sleep(RETRY_S)

    await asyncio.gather(*map(ask, range(STREAMS)))


def run_pages(port: int, shown: Event, begun: Event) -> None:
    """The process of the pages."""
    os.nice(10)
    begun.set()
    uvloop.run(show_pages(port, shown))


async def show_pages(port: int, shown: Event) -> None:
    """Has PAGES pages open while `shown` is set, until the process is ended."""

    async def page() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fetch(port, "GET", "/cluster/live"))
            while True:
                await fetch(port, "GET", "/session")
                await asyncio.sleep(SESSION_S)

    while True:
        await asyncio.to_thread(shown.wait)
        pages = [asyncio.create_task(page()) for _ in range(PAGES)]
        while shown.is_set():
            if failed := next((one for one in pages if one.done()), None):
                failed.result()
            await asyncio.sleep(0.1)
        for one in pages:
            one.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


class BusyError(Exception):
    """The server is overloaded; what was asked may be asked again."""


async def fetch(port: int, method: str, path: str, body: bytes = b"") -> None:
    """Sends a request on a connection of its own and reads the answer to its end.

    Raises:
        BusyError: The server is overloaded.
        RuntimeError: The request was refused for another reason.
    """
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}\r\n".encode() + body)
        status = await reader.readline()
        if b" 503 " in status:
            raise BusyError
        if b" 200 " not in status:
            raise RuntimeError(f"{method} {path}: {status.decode()}")
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


if __name__ == "__main__":
    main()
