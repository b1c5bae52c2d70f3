"""`python -m tests.faults.soak --minutes 20`: random faults under load, one after another.

All random choices follow from --seed. Every answer is checked against transformers. Once a minute load and faults
pause, and every page must be free or cached. Two workers and a router are never killed: their memory must not grow.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from tests.checkpoints import make_checkpoint
from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.matrix import DEADLINE_S, Fault, Handlers, Subject, inject
from tests.faults.points import Action, Point

CLIENTS = 6
ROUND_S = 60.0
AFTER_ERROR_S = 0.2
NEVER_KILLED = ("prefill-1", "combined-1", "router-1")
GROWTH = 1.15
"""How far memory may grow over its size in the first rounds, as a factor: allocators return it late."""

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
        rng: Source of all random choices.
    """

    def __init__(self, cluster: FaultCluster, oracle: Oracle, rng: random.Random) -> None:
        self._cluster = cluster
        self._oracle = oracle
        self._rng = rng
        self._prefixes = oracle.prompts([160] * 8, rng.randrange(1 << 30))
        self._loaded = asyncio.Event()
        self._in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.memory: list[dict[str, int]] = []
        self.prefills: dict[str, int] = {}
        self.host: dict[str, int] = {}

    async def run(self, minutes: float) -> None:
        """Runs for this long.

        Raises:
            AssertionError: A token was wrong, a request hung, or a page leaked.
        """
        end = time.monotonic() + 60 * minutes
        async with asyncio.TaskGroup() as group:
            clients = [
                group.create_task(self._send_requests(random.Random(self._rng.random()))) for _ in range(CLIENTS)
            ]
            while time.monotonic() < end:
                self._loaded.set()
                pause = min(time.monotonic() + ROUND_S, end)
                while time.monotonic() < pause:
                    await self._inject_one()
                await self._pause_and_check()
                print(f"{max(0.0, end - time.monotonic()):5.0f} s left: {self.report()}", flush=True)
            for task in clients:
                task.cancel()

    def report(self) -> str:
        """Requests by outcome, the number of faults, memory of NEVER_KILLED, and prefill and host memory counters."""
        memory = {name: size >> 20 for name, size in self.memory[-1].items()} if self.memory else {}
        done = f"requests {dict(self.outcomes)}; {self.faults.total()} faults; MiB {memory}"
        return f"{done}; remote prefills {self.prefills}; host {self.host}"

    def check_memory(self) -> None:
        """Raises AssertionError if the memory of a process in NEVER_KILLED has grown."""
        if len(self.memory) < 4:
            return
        for name in NEVER_KILLED:
            sizes = [round_[name] for round_ in self.memory]
            early = max(sizes[: max(2, len(sizes) // 4)])
            assert sizes[-1] <= GROWTH * early, f"{name} has grown from {early >> 20} to {sizes[-1] >> 20} MiB"

    async def _send_requests(self, rng: random.Random) -> None:
        while True:
            await self._loaded.wait()
            prompt = rng.choice(self._prefixes)[: rng.choice([0, 64, 160])]
            prompt = prompt + self._oracle.prompts([rng.choice([8, 100, 300, 500])], rng.randrange(1 << 30))[0]
            self._in_flight += 1
            try:
                async with client(self._cluster.urls[rng.choice(list(self._cluster.urls))]) as http:
                    async with asyncio.timeout(2 * DEADLINE_S):
                        answer = await complete(http, prompt, stream=rng.random() < 0.5, max_tokens=30)
            except httpx.HTTPStatusError as error:
                caught_twice = "request_crashes_workers" in str(error)  # by chance: its replay's worker was killed, too
                if error.response.status_code not in (429, 502, 503) and not caught_twice:
                    raise
                self.outcomes[str(error)] += 1
                await asyncio.sleep(AFTER_ERROR_S)
            except (TimeoutError, httpx.TimeoutException):
                raise AssertionError("a request hung") from None
            except httpx.TransportError as error:
                self.outcomes[type(error).__name__] += 1
                await asyncio.sleep(AFTER_ERROR_S)
            else:
                assert len(answer.token_ids) == 30
                await asyncio.to_thread(self._oracle.check, prompt, answer.token_ids)
                self.outcomes["right"] += 1
            finally:
                self._in_flight -= 1

    async def _inject_one(self) -> None:
        rng, cluster = self._rng, self._cluster
        if rng.random() < 0.25:
            role, point, action = rng.choice(INJECTIONS)
            self.faults[f"{point.value} {action.value}"] += 1
            worker = f"{role}-{rng.randrange(2)}"
            await cluster.arm(worker, point, action, rng.randrange(30), 0.05)
            await asyncio.sleep(rng.uniform(1, 3))
            await cluster.disarm(worker)
            return
        subject = rng.choice(list(Subject))
        fault = rng.choice(list(Fault))
        if cluster.network is None and (fault is Fault.CUT_OFF or subject is Subject.NETWORK):
            return
        number = 0 if fault in (Fault.KILLED, Fault.RESTARTED) else rng.randrange(2)
        handlers = Handlers(f"prefill-{number}", f"combined-{number}", f"router-{number}")
        self.faults[f"{subject.value} {fault.value}"] += 1
        end_fault = await inject(cluster, subject, fault, handlers)
        await asyncio.sleep(rng.uniform(0.2, 12.0))
        await end_fault()
        await asyncio.sleep(rng.uniform(0.0, 3.0))

    async def _pause_and_check(self) -> None:
        """Pauses the load; every request must end and every page become free or cached."""
        self._loaded.clear()
        async with asyncio.timeout(2 * DEADLINE_S):
            while self._in_flight:  # noqa: ASYNC110 - counted by all clients
                await asyncio.sleep(0.1)
        await self._cluster.wait_until_healthy()
        await self._cluster.wait_until_idle()
        workers = (await self._cluster.state())["workers"]
        load = next(one["load"] for one in workers if one["id"] == "combined-1")
        self.prefills, self.host = load["remote_prefills"], load["host"]["blocks"]
        pids = {name: self._cluster.processes[name].pid for name in NEVER_KILLED}
        self.memory.append({name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()})


async def soak(model: Path, minutes: float, seed: int, transport: str) -> None:
    """Runs the soak test on a new cluster."""
    oracle = Oracle(model)
    async with FaultCluster(model, transport=transport, host_kv_memory="2MiB") as cluster:
        run = Soak(cluster, oracle, random.Random(seed))
        try:
            await run.run(minutes)
            run.check_memory()
        except BaseException:
            cluster.print_logs()
            raise
        finally:
            print(run.report(), dict(run.faults))


def main(
    minutes: Annotated[float, typer.Option(help="How long to run.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    transport: Annotated[str, typer.Option(help="auto, nixl or ucx.")] = "auto",
) -> None:
    """Random faults under load; exit code 1 if anything is wrong, hangs or leaks."""
    with tempfile.TemporaryDirectory(prefix="cpd-soak-") as directory:
        asyncio.run(soak(make_checkpoint(Path(directory) / "model", "qwen3"), minutes, seed, transport))


if __name__ == "__main__":
    typer.run(main)
