"""`python -m tests.e2e.rolling`: changes a running cluster under streams whose tokens are all checked.

A real `cpd up` in float32 serves 100 streams at a time; a client that never tries again compares each with the answer
that the idle cluster gave. Meanwhile `cpd restart` restarts every process, the routers behind their one port too, `cpd
scale` adds and removes two workers, `cpd drain` moves the streams of the busiest worker, a router gets SIGTERM, and
roles change back and forth. Prints a table; ends with code 1 if a stream failed or had a wrong token, or if none moved.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from deploy.state import ClusterDir
from models import tiny
from tests.e2e.client import MODEL, client, complete
from worker.admin_calls import set_role

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
PROMPTS = 20
SHORT, LONG = 40, 400
"""Tokens of a prompt; every fourth is long, and goes to a prefill worker."""
STEADY_S = 10.0
DRAIN_S = 1.0
"""Time that the drained worker has before its streams move: most of its streams last longer."""
READY_S = 120.0
CHANGES, CHANGE_S = 10, 30.0
"""Number of changes of roles, and seconds between them. Each changes a combined and a prefill worker, or them back."""

Cpd = Callable[..., str]
"""Runs a command, and returns what it prints."""


@dataclass(slots=True)
class Phase:
    """What happened to the streams during one command.

    Attributes:
        lengths_s: How long each answered stream took.
        wait_s: Longest wait for the first event of a stream.
        stall_s: Longest wait for a later one.
        gaps_s: For each answered stream, its longest wait for a later event.
    """

    name: str
    lengths_s: list[float] = field(default_factory=list)
    wrong: int = 0
    wait_s: float = 0.0
    stall_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Measured(NamedTuple):
    """Results, times in seconds.

    Attributes:
        moved: Longest gap of each stream that moved.
        first_s: Time from the command until a worker that became combined gave its first answer.
        probes_s: Time that each request of one token took until then, on any worker, one at a time.
    """

    phases: list[Phase]
    moved: list[float]
    first_s: list[float]
    probes_s: list[float]


class Load:
    """Streams, so many at a time, for as long as `run` is not cancelled.

    Args:
        expected: The right answers to the prompts; shorter answers are their beginnings.

    Attributes:
        max_tokens: Tokens of each answer that is asked for from now on.
        moved: Longest gap of each stream that moved, in seconds; counted while `looks` is true.
        looks: Ask the cluster after each stream whether it moved.
    """

    def __init__(self, url: str, expected: list[list[int]], max_tokens: int) -> None:
        self._url = url
        self._expected = expected
        self.max_tokens = max_tokens
        self._ids = itertools.count()
        self.phase = Phase("")
        self.moved: list[float] = []
        self.looks = False

    async def run(self, streams: int) -> None:
        async with client(self._url) as http, asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._ask_for_ever(http, number))

    async def _ask_for_ever(self, http: httpx.AsyncClient, number: int) -> None:
        while True:
            number = (number + 7) % len(self._expected)
            name = f"rolling-{next(self._ids)}"
            max_tokens = self.max_tokens
            begun_s = last_s = time.monotonic()
            gap_s, events = 0.0, 0

            def event() -> None:
                nonlocal last_s, gap_s, events
                now_s = time.monotonic()
                if events:
                    gap_s = max(gap_s, now_s - last_s)
                    self.phase.stall_s = max(self.phase.stall_s, now_s - last_s)
                else:
                    self.phase.wait_s = max(self.phase.wait_s, now_s - last_s)
                last_s, events = now_s, events + 1

            try:
                answer = await complete(
                    http,
                    prompt(number),
                    stream=True,
                    headers={"x-request-id": name},
                    on_event=event,
                    max_tokens=max_tokens,
                )
            except (httpx.HTTPError, AssertionError) as error:
                self.phase.errors.append(f"{type(error).__name__} after {events} events: {error}")
                await asyncio.sleep(0.2)
                continue
            self.phase.lengths_s.append(last_s - begun_s)
            self.phase.gaps_s.append(gap_s)
            self.phase.wrong += answer.token_ids != self._expected[number][:max_tokens]
            if self.looks and await self._has_moved(http, name):
                self.moved.append(gap_s)

    @staticmethod
    async def _has_moved(http: httpx.AsyncClient, name: str) -> bool:
        answer = await http.get(f"/requests/{name}")
        if answer.is_error:  # a router that was too busy to answer the other one
            return False
        return any(one["outcome"].startswith("parked") for one in answer.json()["placements"])


def _first_answer(url: str, name: str, address: str, key: str, seed: int) -> tuple[float, list[float]]:
    """Makes a worker combined and asks for one token after another until it answers, in a process without other work.

    Args:
        seed: Of the prompts, so that no worker has any of them cached.

    Returns:
        Seconds from the command to the worker's first token, and from each question to its token.
    """

    async def ask() -> tuple[float, list[float]]:
        asked_s: list[float] = []
        random = Random(seed)
        async with client(url) as http, asyncio.timeout(READY_S):
            await http.get("/health")  # HTTP and gRPC are set up before the clock runs
            await asyncio.to_thread(set_role, name, address, key, "prefill")  # its role already
            begun_s = time.monotonic()
            await asyncio.to_thread(set_role, name, address, key, "combined")
            while True:
                unseen = [random.randrange(10, 410) for _ in range(SHORT)]
                since_s = time.monotonic()
                answer = await complete(http, unseen, stream=True, max_tokens=1)
                now_s = time.monotonic()
                asked_s.append(now_s - since_s)
                if answer.worker == name:
                    return now_s - begun_s, asked_s

    return asyncio.run(ask())


def prompt(number: int) -> list[int]:
    """Token ids of one of the prompts."""
    length = LONG if number % 4 == 0 else SHORT
    return [10 + (31 * number + 7 * place) % 400 for place in range(length)]


def run(
    streams: Annotated[int, typer.Option(help="Streams at a time.")] = 100,
    combined: Annotated[int, typer.Option(min=1, help="Combined workers.")] = 2,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 300,
    router_max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer while a router gets SIGTERM: enough for 20 s.")
    ] = 700,
    only_roles: Annotated[bool, typer.Option(help="Only change roles.")] = False,
    policy: Annotated[
        str, typer.Option(help="Placement policy; with round-robin a new combined worker is tried at once.")
    ] = "cost",
) -> None:
    """Restart and scale a cluster under load, and check every token."""
    directory = Path(tempfile.mkdtemp(prefix="cpd-rolling-", dir="/tmp"))  # sockets need short names
    os.environ |= {"CPD_RUNTIME_DIR": str(directory / "run"), "XDG_STATE_HOME": str(directory / "state")}
    environment = dict(os.environ)

    def cpd(*arguments: str) -> str:
        done = subprocess.run([*PROGRAM, *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"cpd {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}{_log(environment)}")
        return done.stdout

    counts = {"combined": combined, "prefill": prefill, "routers": routers}
    flags = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
    flags += ["--model", str(tiny.CHECKPOINT), "--served-model-name", MODEL, "--dtype", "float32"]
    flags += ["--kv-memory", "384MiB", "--max-num-seqs", str(2 * streams), "--port", "0", "--log-level", "warning"]
    flags += ["--long-prefill-tokens", "128", "--drain-s", "60", "--policy", policy]
    started = cpd("up", "--detach", *flags)
    try:
        url = started[started.index("http") :].split()[0]
        measured = asyncio.run(
            _measure(url, streams, combined, prefill, routers, max_tokens, router_max_tokens, only_roles, cpd)
        )
    finally:
        cpd("down")
        shutil.rmtree(directory, ignore_errors=True)
    _print(measured.phases, measured.moved)
    if measured.first_s:
        sys.stdout.write(f"first answer of a worker that became combined: {_ms(measured.first_s)} after the command\n")
        sys.stdout.write(f"one token from any worker meanwhile: {_ms(measured.probes_s)}\n")
    sys.exit(any(phase.errors or phase.wrong for phase in measured.phases) or not measured.moved)


def _print(phases: Iterable[Phase], moved: list[float]) -> None:
    columns = ["command", "seconds", "streams", "failed", "wrong", "median length, s", "longest TTFT, s"]
    columns += ["longest stall, s", "median of each stream's longest stall, s"]
    rows = [
        [
            phase.name,
            f"{phase.seconds:.0f}",
            str(len(phase.lengths_s)),
            str(len(phase.errors)),
            str(phase.wrong),
            f"{_median(phase.lengths_s):.1f}",
            f"{phase.wait_s:.2f}",
            f"{phase.stall_s:.2f}",
            f"{_median(phase.gaps_s):.2f}",
        ]
        for phase in phases
    ]
    for row in (columns, ["---"] * len(columns), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    if moved:
        sys.stdout.write(
            f"{len(moved)} streams moved; longest stall of each: median {statistics.median(moved):.2f} s, longest"
            f" {max(moved):.2f} s\n"
        )
    for phase in phases:
        for error in sorted(set(phase.errors))[:5]:
            sys.stdout.write(f"{phase.name}: {phase.errors.count(error)} x {error}\n")


def _ms(times_s: list[float]) -> str:
    return f"median {statistics.median(times_s) * 1e3:.0f} ms, longest {max(times_s) * 1e3:.0f} ms"


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


async def _measure(
    url: str,
    streams: int,
    combined: int,
    prefill: int,
    routers: int,
    max_tokens: int,
    router_max_tokens: int,
    only_roles: bool,
    cpd: Cpd,
) -> Measured:
    async with client(url) as http:
        expected = [
            (await complete(http, prompt(number), max_tokens=max(max_tokens, router_max_tokens))).token_ids
            for number in range(PROMPTS)
        ]
    load = Load(url, expected, max_tokens)
    phases: list[Phase] = []

    async def measure(name: str, *steps: Callable[[], Awaitable[object]]) -> None:
        load.phase = Phase(name)
        begun_s = time.monotonic()
        for step in steps:
            await step()
        load.phase.seconds = time.monotonic() - begun_s
        phases.append(load.phase)

    def command(*arguments: str) -> Callable[[], Awaitable[str]]:
        return lambda: asyncio.to_thread(cpd, *arguments)

    async def status() -> dict[str, list[dict[str, Any]]]:
        parsed: dict[str, list[dict[str, Any]]] = json.loads(await command("status", "--json")())
        return parsed

    async def drain() -> None:
        load.looks = True
        combined = [one for one in (await status())["workers"] if one["role"] == "combined"]
        busiest = max(combined, key=lambda one: int(one["load"]["running"]))
        await command("drain", busiest["id"], "--timeout", str(DRAIN_S))()

    async def terminate_router() -> None:
        old = (await status())["routers"][0]
        os.kill(old["pid"], signal.SIGTERM)
        async with asyncio.timeout(READY_S):
            while old["pid"] in {one["pid"] for one in (await status())["routers"]}:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.5)
            while len((await status())["routers"]) < routers:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.5)

    async def longer_streams() -> None:
        while len(load.phase.lengths_s) < streams:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.1)

    first_s: list[float] = []
    probes_s: list[float] = []

    async def change_roles() -> None:
        load.looks = True
        workers = {one["id"]: one["address"] for one in (await status())["workers"]}
        one, other = (next(name for name in workers if name.startswith(role)) for role in ("combined", "prefill"))
        state = ClusterDir("default").read()
        assert state is not None
        key = state.admin_key
        for number in range(CHANGES):
            now_combined, now_prefill = (other, one) if number % 2 == 0 else (one, other)
            began_s = time.monotonic()
            first = apart.submit(_first_answer, url, now_combined, workers[now_combined], key, number)
            found_s, asked_s = await asyncio.wrap_future(first)
            first_s.append(found_s)
            probes_s.extend(asked_s)
            await asyncio.to_thread(set_role, now_prefill, workers[now_prefill], key, "prefill")
            await asyncio.sleep(max(0.0, CHANGE_S - (time.monotonic() - began_s)))
        load.looks = False

    def steady() -> Awaitable[None]:
        return asyncio.sleep(STEADY_S)

    more, as_before = (("scale", "--combined", str(number)) for number in (combined + 2, combined))

    async def change_everything() -> None:
        await measure("(nothing)", steady)
        if prefill:
            await measure(f"{CHANGES} changes of the roles of two workers", change_roles)
        if only_roles:
            return
        await measure("`cpd restart`", command("restart"))
        await measure("`cpd scale`, two workers more", command(*more))
        await measure("`cpd scale`, two workers fewer", command(*as_before))
        await measure(f"`cpd drain --timeout {DRAIN_S:g}` of the busiest combined worker", drain)
        await measure("`cpd scale`, back to the number of before", command(*as_before))
        load.looks = False
        await measure("(nothing)", steady)
        load.max_tokens = router_max_tokens
        await measure("(longer streams begin)", longer_streams)
        await measure("SIGTERM to a router", terminate_router)
        load.max_tokens = max_tokens
        await measure("(nothing)", longer_streams)

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as apart:
        apart.submit(time.monotonic).result()  # imports this module
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.run(streams))
            await change_everything()
            running.cancel()
    return Measured(phases, load.moved, first_s, probes_s)


def _log(environment: dict[str, str]) -> str:
    done = subprocess.run([*PROGRAM, "logs"], env=environment, capture_output=True, text=True)
    return "\n".join(done.stdout.splitlines()[-40:])


if __name__ == "__main__":
    typer.run(run)
