"""Streaming requests for measurements, with the client of `cpd bench`."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence

from bench.client.client import Client
from bench.client.target import Target
from bench.record import Record
from bench.settings import RunSettings
from bench.workloads.base import Message

MODEL_NAME = "bench"


def machine() -> str:
    """The commit and the machine, for the heading of a measurement."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return f"commit {commit}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def target(url: str) -> Target:
    """A server that is asked for completions of the model `MODEL_NAME`."""
    return Target.of(RunSettings.load({"url": url, "endpoint": "completions"}), MODEL_NAME)


async def stream(client: Client, prompt: str, output_len: int, accepted: Container[str] = ("",)) -> Record:
    """Sends one request and reads its answer.

    Raises:
        RuntimeError: The request failed, and not with one of the `accepted` errors.
    """
    now_s = time.perf_counter()
    record = Record(0, 0, 0, output_len, now_s, now_s)
    await client.stream(record, [Message("user", prompt)])
    if record.error not in accepted:
        raise RuntimeError(f"{record.error}: {record.detail}")
    return record


async def alternate(
    urls: Mapping[str, str], prompt: Callable[[], str], rounds: int, output_len: int
) -> dict[str, list[Record]]:
    """Sends one request at a time to each URL in turn. Returns the records by the names of the URLs."""
    clients = {name: Client(target(url)) for name, url in urls.items()}
    records: dict[str, list[Record]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, client in clients.items():
            records[name].append(await stream(client, prompt(), output_len))
    for client in clients.values():
        await client.close()
    return records


def check_routes(records: Mapping[str, Sequence[Record]]) -> None:
    """Checks that all requests took the route by which they are named.

    Raises:
        RuntimeError: A request took another route.
    """
    for route, some in records.items():
        if any(record.route != route for record in some):
            raise RuntimeError(f"not all of the {route} requests took that route")


def ttft_ms(records: Sequence[Record]) -> float:
    """Median time to first token, ms."""
    return statistics.median(record.content_s[0] - record.sent_s for record in records) * 1e3
