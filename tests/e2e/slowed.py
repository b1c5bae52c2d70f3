"""`python -m tests.e2e.slowed`: what moving streams away from a worker does that becomes half as fast under load.

Real workers in float32 (`slowable_worker.py`) serve a constant number of streams; each is compared with the answer that
the idle cluster gave. Each round starts a cluster that moves streams and one that does not, and makes a worker slow a
moment after the streams have begun. Prints a table; ends with code 1 if a token was wrong, a stream failed, or one
moved twice within ten seconds.
"""

import asyncio
import itertools
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from cpd.common.policy_settings import PolicySettings
from deploy.process import Supervised
from deploy.processes import ProcessSpec
from models import tiny
from tests.e2e.client import MODEL, client, complete
from tests.e2e.cluster import Cluster, runs_code_of
from tests.e2e.rolling import PROMPTS, prompt

SLOW = "combined-0"
FAST_S = 3.0
"""Time in each round before the worker becomes slow."""
SETTLED_S = 3.0
"""Time after that from which gaps count as settled."""
REST_S = 10.0


class SlowableCluster(Cluster):
    """A cluster whose workers can be slowed down."""

    def _supervise(self, spec: ProcessSpec, cores: frozenset[int]) -> Supervised:
        if not spec.is_worker:
            return super()._supervise(spec, cores)
        command = spec.command(spec.model)
        command[command.index("decode_worker")] = "tests.e2e.slowable_worker"
        environment = runs_code_of(Path(__file__).parents[2], spec.environment())  # the worker's module is a test's
        return Supervised(spec.name, lambda: command, environment, frozenset())


@dataclass
class Arm:
    """What the streams saw, with moves or without.

    Attributes:
        gaps_s: Gaps between tokens while a worker is slow: of its streams and of others, at any time and once settled.
        moved: Number of streams that moved.
        twice: Number of streams that moved twice within REST_S.
    """

    gaps_s: dict[tuple[bool, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    streams: int = 0
    moved: int = 0
    twice: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """Streams through the cluster's router."""

    def __init__(self, url: str, expected: Sequence[Sequence[int]], arm: Arm) -> None:
        self._url, self._expected, self._arm = url, expected, arm
        self._names = itertools.count()
        self.slow_at = float("inf")

    async def run(self, streams: int, seconds: float) -> None:
        """Keeps this many streams running for a time, and waits for the last ones."""
        end_s = time.monotonic() + seconds
        async with client(self._url) as http, asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._ask_until(end_s, http, number))

    async def _ask_until(self, end_s: float, http: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < end_s:
            number = (number + 7) % len(self._expected)
            await self._ask(http, number, f"slowed-{next(self._names)}")

    async def _ask(self, http: httpx.AsyncClient, number: int, name: str) -> None:
        arm, times_s = self._arm, []
        expected = self._expected[number]
        try:
            answer = await complete(
                http,
                prompt(number),
                stream=True,
                headers={"x-request-id": name},
                on_event=lambda: times_s.append(time.monotonic()),
                max_tokens=len(expected),
            )
        except (httpx.HTTPError, AssertionError) as error:
            arm.errors.append(f"{type(error).__name__}: {error}")
            return
        arm.streams += 1
        arm.wrong += answer.token_ids != expected
        placements = (await http.get(f"/requests/{name}")).json()["placements"]
        left_s, at_s = [], 0.0
        for one in placements[:-1]:
            actual = one["actual"]
            at_s += 1e-3 * (actual["ttft_ms"] + (actual["itl_ms"] or 0.0) * (actual["outputs"] - 1)) if actual else 0.0
            if one["outcome"].startswith("parked"):
                left_s.append(at_s)
        arm.moved += bool(left_s)
        arm.twice += any(later - earlier < REST_S for earlier, later in itertools.pairwise(left_s))
        decodes = [one["predicted"]["decode"] for one in placements]
        of_slow = SLOW in decodes
        for before_s, now_s in itertools.pairwise(times_s[:-1]):  # the last event is the end
            if before_s >= self.slow_at:
                arm.gaps_s[of_slow, before_s >= self.slow_at + SETTLED_S].append(now_s - before_s)


async def _measure(cluster: Cluster, arm: Arm, streams: int, tokens: int, seconds: float) -> None:
    async with client(cluster.url) as http:
        asked = [complete(http, prompt(number), max_tokens=tokens) for number in range(PROMPTS)]
        expected = [answer.token_ids for answer in await asyncio.gather(*asked)]
    load = Load(cluster.url, expected, arm)
    running = asyncio.create_task(load.run(streams, FAST_S + seconds))
    await asyncio.sleep(FAST_S)
    cluster.send(SLOW, signal.SIGUSR1)
    load.slow_at = time.monotonic()
    await running


def run(
    streams: Annotated[int, typer.Option(help="Streams at a time.")] = 24,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 400,
    workers: Annotated[int, typer.Option(help="Combined workers.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds in each round for which a worker is slow.")] = 40.0,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 2,
) -> None:
    """Slow a worker down under load, with moves and without."""
    arms = {"with moves": Arm(), "without": Arm()}
    settings: dict[str, Any] = {"prefill": 0, "combined": workers, "routers": 1, "colocate": "mixed"}
    for number in range(rounds):
        for name in sorted(arms, reverse=bool(number % 2)):
            settings["policy"] = PolicySettings(moves=name == "with moves")
            with SlowableCluster(model=str(tiny.CHECKPOINT), served_model_name=MODEL, **settings) as cluster:
                asyncio.run(_measure(cluster, arms[name], streams, tokens, seconds))
    _print(arms)
    sys.exit(any(arm.errors or arm.wrong or arm.twice for arm in arms.values()))


def _print(arms: dict[str, Arm]) -> None:
    columns = ["", "streams", "failed", "wrong", "moved", f"moved twice within {REST_S:g} s"]
    columns += ["ITL p50, p99, of streams of the slow worker, ms", "of others", "p99 settled, of the slow worker"]
    columns += ["of others"]
    rows = [
        [
            name,
            *map(str, (arm.streams, len(arm.errors), arm.wrong, arm.moved, arm.twice)),
            *(_shown(arm.gaps_s[slow, False] + arm.gaps_s[slow, True]) for slow in (True, False)),
            *(_shown(arm.gaps_s[slow, True]) for slow in (True, False)),
        ]
        for name, arm in arms.items()
    ]
    for row in (columns, ["---"] * len(columns), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    for arm in arms.values():
        for error in sorted(set(arm.errors))[:5]:
            sys.stdout.write(f"{arm.errors.count(error)} x {error}\n")


def _shown(gaps_s: list[float]) -> str:
    if len(gaps_s) < 100:
        return f"{len(gaps_s)} gaps"
    p50, p99 = statistics.median(gaps_s), statistics.quantiles(gaps_s, n=100)[98]
    return f"{p50 * 1e3:.1f}, {p99 * 1e3:.1f} ({len(gaps_s)} gaps)"


if __name__ == "__main__":
    typer.run(run)
