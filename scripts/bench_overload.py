"""Measures what overload does to the requests that are served: `python -m scripts.bench_overload` from the repository's
root. `--profile` and `--seconds` are 120 s of a simulated H200 unless given.

A router serves one combined worker, simulated (`--simulate`), with `--max-wait-s` at half of the TTFT target.

1. Capacity: requests a second in a closed loop that keeps the worker busy.
2. Goodput (answers whose first token came within the target, a second) in an open loop at 0.9 of the capacity.
3. The same at 10 times the capacity: also the share of the served within the target, the memory of the router and the
   worker over time, and the figures that they must meet.
4. The load ends: what `Retry-After` said last, and when a new request really got its first token.

Prompts are token ids with no block in common, so that neither tokenizing nor a cache limits anything.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from bench.client.connection import Connection
from bench.client.response import PlainBody
from models import tiny
from scripts.streams import MODEL_NAME, machine
from tests.e2e.cluster import HOST, Cluster

PROMPT, OUTPUT = 6_000, 2
SLO_S = 2.0
BUSY = 4
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Outcome:
    """The answers of one load. Latencies in s."""

    seconds: float
    served: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)

    @property
    def within(self) -> int:
        """Answers within the target."""
        return sum(latency <= SLO_S for latency in self.served)

    @property
    def goodput(self) -> float:
        """Answers within the target a second."""
        return self.within / self.seconds

    def __str__(self) -> str:
        served = sorted(self.served)
        p50, p99 = statistics.median(served), served[int(len(served) * 0.99)]
        return (
            f"{len(served)} served ({len(served) / self.seconds:.1f} /s), {len(self.retry_after)} refused; "
            f"{self.within / len(served):.1%} of the served within {SLO_S:g} s, goodput {self.goodput:.2f} /s; "
            f"latency p50 {p50:.2f} s, p99 {p99:.2f} s"
        )


class Answer(PlainBody):
    """An answer, and when to try again."""

    retry_after = 0

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Takes the status and the headers."""
        super().head(status, headers)
        self.retry_after = int(headers.get(b"retry-after", 0))


class Load:
    """Sends requests to a router. An answer has so few tokens that its end stands for its first token."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._idle: list[Connection] = []

    def request(self) -> bytes:
        """A request with a prompt that no other has."""
        start = [self._rng.randrange(5, 2000) for _ in range(16)]
        prompt = start * (PROMPT // len(start))
        asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        body = orjson.dumps(asked)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{self._port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, outcome: Outcome) -> Answer:
        """Sends one request and notes how it went."""
        request = self.request()
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, self._port)
        body, started = Answer(), time.perf_counter()
        await connection.exchange(request, body, TIMEOUT_S)
        self._idle.append(connection)
        if body.status == 200:
            outcome.served.append(time.perf_counter() - started)
        elif body.status in (429, 503):
            outcome.retry_after.append(body.retry_after)
        else:
            raise RuntimeError(f"{body.status}: {body.data.decode()}")
        return body

    async def closed(self, seconds: float) -> Outcome:
        """BUSY requests at a time."""
        outcome, end = Outcome(seconds), time.perf_counter() + seconds

        async def one_after_another() -> None:
            while time.perf_counter() < end:
                if (await self.send(outcome)).status != 200:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(one_after_another() for _ in range(BUSY)))
        return outcome

    async def open(self, rate: float, seconds: float) -> Outcome:
        """Requests at random times, `rate` a second."""
        outcome, begun = Outcome(seconds), time.perf_counter()
        due, running = begun, set[asyncio.Task[Answer]]()
        while (due := due + self._rng.expovariate(rate)) < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.add(asyncio.create_task(self.send(outcome)))
        await asyncio.gather(*running)
        return outcome


async def recovery(load: Load) -> tuple[int, float]:
    """What `Retry-After` said at the end of a load, and the time until a request got its answer, in s."""
    started, said = time.perf_counter(), 0
    while True:
        outcome = Outcome(1.0)
        await load.send(outcome)
        if outcome.served:
            return said, time.perf_counter() - started
        said = said or outcome.retry_after[0]
        await asyncio.sleep(0.1)


async def watch_memory(pids: dict[str, int], rows: list[dict[str, float]]) -> None:
    """Appends the resident memory of the processes, in MiB, every second."""
    while True:
        rows.append({name: _resident_mib(pid) for name, pid in pids.items()})
        await asyncio.sleep(1.0)


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


async def measure(port: int, pids: dict[str, int], seconds: float) -> None:
    """Makes all measurements and prints them."""
    load = Load(port, seed=1)
    await load.closed(3.0)
    busy = await load.closed(min(20.0, seconds))
    capacity = len(busy.served) / busy.seconds
    print(f"capacity: {capacity:.2f} requests/s of {PROMPT} tokens")
    usual = await load.open(0.9 * capacity, min(60.0, seconds))
    print(f"at 0.9 of it: {usual}")
    rows: list[dict[str, float]] = []
    watching = asyncio.create_task(watch_memory(pids, rows))
    flood = asyncio.create_task(load.open(10 * capacity, seconds))
    await asyncio.sleep(seconds)
    said, took = await recovery(load)
    outcome = await flood
    watching.cancel()
    print(f"at 10 times:  {outcome}")
    print(f"goodput at 10 times / at 0.9: {outcome.goodput / usual.goodput:.2f} (at least 0.9)")
    p50 = statistics.median(outcome.retry_after or [0])
    print(
        f"Retry-After: p50 {p50:g} s; at the end {said} s, and it took {took:.1f} s: {said / took:.1f} times (0.5 to 2)"
    )
    eighth = max(1, len(rows) // 8)
    for name in pids:
        most = [max(row[name] for row in rows[start : start + eighth]) for start in range(0, 8 * eighth, eighth)]
        print(f"memory of {name}, most in each eighth of the time, MiB: {', '.join(f'{mib:.0f}' for mib in most)}")


def main() -> None:
    """Starts a cluster and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h200-qwen3-8b", help="profile of the simulated device")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the overload")
    parser.add_argument("--max-wait-s", type=float, default=SLO_S / 2, help="as of `cpd up`")
    arguments = parser.parse_args()
    print(machine())
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL_NAME,
        simulate=arguments.profile,
        prefill=0,
        combined=1,
        kv_memory="32GiB",
        slo_ttft=SLO_S * 1e3,
        max_wait_s=arguments.max_wait_s,
        log_level="warning",
    ) as cluster:
        pids = {name: cluster.pid(name) for name in ("router-0", "simulated")}
        uvloop.run(measure(cluster.settings.port, pids, arguments.seconds))


if __name__ == "__main__":
    main()
