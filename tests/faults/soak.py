"""`python -m tests.faults.soak --minutes 20`: random faults under load, one after the other.

Everything random follows from --seed. Every answer is held against transformers; once a minute the faults pause, and
every page must be free or cached. Two workers and a router are never killed: their memory must stay flat.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from tests.checkpoints import make_checkpoint
from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.matrix import DEADLINE_S, Fault, Subject, Victims, begin
from tests.faults.points import Action, Point

CLIENTS = 6
ROUND_S = 60.0
AFTER_ERROR_S = 0.2
NEVER_KILLED = ("prefill-1", "combined-1", "router-1")
GROWTH = 1.15
"""So many times the memory after the first rounds is still flat: allocators are lazy."""

INJECTIONS = (
    ("prefill", Point.CONNECT, Action.FAIL),
    ("prefill", Point.PAGE, Action.FAIL),
    ("prefill", Point.PAGE, Action.DROP),
    ("prefill", Point.PAGE, Action.DELAY),
    ("combined", Point.CONNECT, Action.FAIL),
    ("combined", Point.PAGE, Action.FAIL),
    ("combined", Point.PAGE, Action.DROP),
    ("combined", Point.LANDED, Action.FAIL),
    ("combined", Point.LANDED, Action.CORRUPT),
)


class Soak:
    """One run.

    Args:
        rng: For everything.
    """

    def __init__(self, cluster: FaultCluster, oracle: Oracle, rng: random.Random) -> None:
        self._cluster = cluster
        self._oracle = oracle
        self._rng = rng
        self._prefixes = oracle.prompts([160] * 8, rng.randrange(1 << 30))
        self._loaded = asyncio.Event()
        self._busy = 0
        self.ended: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.memory: list[dict[str, int]] = []
        self.fills: dict[str, int] = {}
        self.host: dict[str, int] = {}

    async def run(self, minutes: float) -> None:
        """Returns after that time.

        Raises:
            AssertionError: A token was wrong, a request hung, or a page leaked.
        """
        end = time.monotonic() + 60 * minutes
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._ask(random.Random(self._rng.random()))) for _ in range(CLIENTS)]
            while time.monotonic() < end:
                self._loaded.set()
                pause = min(time.monotonic() + ROUND_S, end)
                while time.monotonic() < pause:
                    await self._harm()
                await self._rest()
                print(f"{max(0.0, end - time.monotonic()):5.0f} s left: {self.report()}", flush=True)
            for task in clients:
                task.cancel()

    def report(self) -> str:
        """Requests by how they ended, faults, and of those that were never killed MiB, and what fills and evicted
        blocks came to."""
        memory = {name: size >> 20 for name, size in self.memory[-1].items()} if self.memory else {}
        done = f"requests {dict(self.ended)}; {self.faults.total()} faults; MiB {memory}"
        return f"{done}; fills {self.fills}; host {self.host}"

    def check_memory(self) -> None:
        """Raises AssertionError if a process has grown."""
        if len(self.memory) < 4:
            return
        for name in NEVER_KILLED:
            sizes = [round_[name] for round_ in self.memory]
            early = max(sizes[: max(2, len(sizes) // 4)])
            assert sizes[-1] <= GROWTH * early, f"{name} has grown from {early >> 20} to {sizes[-1] >> 20} MiB"

    async def _ask(self, rng: random.Random) -> None:
        while True:
            await self._loaded.wait()
            prompt = rng.choice(self._prefixes)[: rng.choice([0, 64, 160])]
            prompt = prompt + self._oracle.prompts([rng.choice([8, 100, 300, 500])], rng.randrange(1 << 30))[0]
            self._busy += 1
            try:
                async with client(self._cluster.urls[rng.choice(list(self._cluster.urls))]) as http:
                    async with asyncio.timeout(2 * DEADLINE_S):
                        answer = await complete(http, prompt, stream=rng.random() < 0.5, max_tokens=30)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (429, 502, 503):
                    raise
                self.ended[str(error)] += 1
                await asyncio.sleep(AFTER_ERROR_S)
            except (TimeoutError, httpx.TimeoutException):
                raise AssertionError("a request hung") from None
            except httpx.TransportError as error:
                self.ended[type(error).__name__] += 1
                await asyncio.sleep(AFTER_ERROR_S)
            else:
                assert len(answer.token_ids) == 30
                await asyncio.to_thread(self._oracle.judge, prompt, answer.token_ids)
                self.ended["right"] += 1
            finally:
                self._busy -= 1

    async def _harm(self) -> None:
        rng, cluster = self._rng, self._cluster
        if rng.random() < 0.25:
            role, point, action = rng.choice(INJECTIONS)
            self.faults[f"{point.value} {action.value}"] += 1
            worker = f"{role}-{rng.randrange(2)}"
            await cluster.order(worker, point, action, rng.randrange(30), 0.05)
            await asyncio.sleep(rng.uniform(1, 3))
            await cluster.release(worker)
            return
        subject = rng.choice(list(Subject))
        fault = rng.choice(list(Fault))
        if cluster.network is None and (fault is Fault.CUT_OFF or subject is Subject.NETWORK):
            return
        number = 0 if fault in (Fault.KILLED, Fault.RESTARTED) else rng.randrange(2)
        victims = Victims(f"prefill-{number}", f"combined-{number}", f"router-{number}")
        self.faults[f"{subject.value} {fault.value}"] += 1
        heal: Callable[[], Awaitable[None]] = await begin(cluster, subject, fault, victims)
        await asyncio.sleep(rng.uniform(0.2, 12.0))
        await heal()
        await asyncio.sleep(rng.uniform(0.0, 3.0))

    async def _rest(self) -> None:
        """No load and no faults: everything must come to rest."""
        self._loaded.clear()
        async with asyncio.timeout(2 * DEADLINE_S):
            while self._busy:  # noqa: ASYNC110 - of all clients
                await asyncio.sleep(0.1)
        await self._cluster.whole()
        await self._cluster.idle()
        workers = (await self._cluster.state())["workers"]
        load = next(one["load"] for one in workers if one["id"] == "combined-1")
        self.fills, self.host = load["fills"], load["host"]["blocks"]
        pids = {name: self._cluster.processes[name].pid for name in NEVER_KILLED}
        self.memory.append({name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()})


async def soak(model: Path, minutes: float, seed: int, transport: str) -> None:
    """Runs it on a new cluster."""
    oracle = Oracle(model)
    async with FaultCluster(model, transport=transport, host_kv_memory="2MiB") as cluster:
        it = Soak(cluster, oracle, random.Random(seed))
        try:
            await it.run(minutes)
            it.check_memory()
        except BaseException:
            cluster.print_logs()
            raise
        finally:
            print(it.report(), dict(it.faults))


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    transport: Annotated[str, typer.Option(help="ucx or nixl.")] = "ucx",
) -> None:
    """Random faults under load; exit code 1 if anything is wrong, hangs or leaks."""
    with tempfile.TemporaryDirectory(prefix="cpd-soak-") as directory:
        asyncio.run(soak(make_checkpoint(Path(directory) / "model", "qwen3"), minutes, seed, transport))


if __name__ == "__main__":
    typer.run(main)
