"""`python -m tests.e2e.rolling`: changes a running cluster under streams whose tokens are all checked.

A real `cpd up` in float32 serves 100 streams at a time; a client that never tries again compares each with the answer
that the idle cluster gave. Meanwhile `cpd restart` restarts every process, the routers behind their one port too, and
`cpd scale` adds and removes two workers. Prints a table; ends with code 1 if a stream failed or had a wrong token.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from models import tiny
from tests.e2e.client import MODEL, client, complete

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
PROMPTS = 20
SHORT, LONG = 40, 400
"""Tokens of a prompt; every fourth is long, and goes to a prefill worker."""
STEADY_S = 10.0


@dataclass(slots=True)
class Phase:
    """What happened to the streams during one command.

    Attributes:
        stall_s: Longest wait for the next event of a stream, also for its first one.
    """

    name: str
    answered: int = 0
    wrong: int = 0
    stall_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Load:
    """Streams, so many at a time, for as long as `run` is not cancelled."""

    def __init__(self, url: str, expected: list[list[int]], max_tokens: int) -> None:
        self._url = url
        self._expected = expected
        self._max_tokens = max_tokens
        self.phase = Phase("")

    async def run(self, streams: int) -> None:
        async with client(self._url) as http, asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._ask_for_ever(http, number))

    async def _ask_for_ever(self, http: httpx.AsyncClient, number: int) -> None:
        while True:
            number = (number + 7) % len(self._expected)
            last_s = time.monotonic()

            def event() -> None:
                nonlocal last_s
                now_s = time.monotonic()
                self.phase.stall_s = max(self.phase.stall_s, now_s - last_s)
                last_s = now_s

            try:
                answer = await complete(http, prompt(number), stream=True, on_event=event, max_tokens=self._max_tokens)
            except (httpx.HTTPError, AssertionError) as error:
                self.phase.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
                continue
            self.phase.answered += 1
            self.phase.wrong += answer.token_ids != self._expected[number]


def prompt(number: int) -> list[int]:
    """Token ids of one of the prompts."""
    length = LONG if number % 4 == 0 else SHORT
    return [10 + (31 * number + 7 * place) % 400 for place in range(length)]


def run(
    streams: Annotated[int, typer.Option(help="Streams at a time.")] = 100,
    combined: Annotated[int, typer.Option(min=1, help="Combined workers.")] = 2,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 100,
) -> None:
    """Restart and scale a cluster under load, and check every token."""
    directory = Path(tempfile.mkdtemp(prefix="cpd-rolling-", dir="/tmp"))  # sockets need short names
    environment = {**os.environ, "CPD_RUNTIME_DIR": str(directory / "run"), "XDG_STATE_HOME": str(directory / "state")}

    def cpd(*arguments: str) -> str:
        done = subprocess.run([*PROGRAM, *arguments], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"cpd {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}{_log(environment)}")
        return done.stdout

    counts = {"combined": combined, "prefill": prefill, "routers": routers}
    flags = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
    flags += ["--model", str(tiny.CHECKPOINT), "--served-model-name", MODEL, "--dtype", "float32"]
    flags += ["--kv-memory", "256MiB", "--max-num-seqs", str(2 * streams), "--port", "0", "--log-level", "warning"]
    flags += ["--long-prefill-tokens", "128"]
    started = cpd("up", "--detach", *flags)
    try:
        url = started[started.index("http") :].split()[0]
        phases = asyncio.run(_measure(url, streams, combined, max_tokens, cpd))
    finally:
        cpd("down")
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.write(
        "| command | seconds | answered | failed | wrong | longest stall, s |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    for phase in phases:
        row = [
            phase.name,
            f"{phase.seconds:.0f}",
            phase.answered,
            len(phase.errors),
            phase.wrong,
            f"{phase.stall_s:.2f}",
        ]
        sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")
    for phase in phases:
        for error in sorted(set(phase.errors))[:5]:
            sys.stdout.write(f"{phase.name}: {phase.errors.count(error)} x {error}\n")
    sys.exit(any(phase.errors or phase.wrong for phase in phases))


async def _measure(url: str, streams: int, combined: int, max_tokens: int, cpd: Any) -> list[Phase]:
    async with client(url) as http:
        expected = [
            (await complete(http, prompt(number), stream=True, max_tokens=max_tokens)).token_ids
            for number in range(PROMPTS)
        ]
    load = Load(url, expected, max_tokens)
    running = asyncio.create_task(load.run(streams))
    phases: list[Phase] = []

    async def measure(name: str, *commands: list[str]) -> None:
        load.phase = Phase(name)
        begun_s = time.monotonic()
        for command in commands:
            await asyncio.to_thread(cpd, *command)
        if not commands:
            await asyncio.sleep(STEADY_S)
        load.phase.seconds = time.monotonic() - begun_s
        phases.append(load.phase)

    try:
        await measure("(nothing)")
        await measure("restart", ["restart"])
        await measure("scale up by two", ["scale", "--combined", str(combined + 2)])
        await measure("scale down by two", ["scale", "--combined", str(combined)])
        await measure("(nothing, afterwards)")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return phases


def _log(environment: dict[str, str]) -> str:
    done = subprocess.run([*PROGRAM, "logs"], env=environment, capture_output=True, text=True)
    return "\n".join(done.stdout.splitlines()[-40:])


if __name__ == "__main__":
    typer.run(run)
