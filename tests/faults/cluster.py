"""A cluster of real processes, each on a machine of its own, to which everything can happen."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from deploy.endpoint import pick_port
from deploy.redis import EmbeddedRedis
from tests.faults.network import Network, available
from tests.faults.nursery import Nursery
from tests.faults.points import Action, Point
from tests.faults.redis_proxy import RedisProxy
from tests.worker.processes import ROOT

NAMES = ("prefill-0", "combined-0", "prefill-1", "combined-1", "router-0", "router-1")
MODEL, TOKEN = "test", "internal"
START_S, IDLE_S = 120.0, 30.0
RUNS_S, RESTS_S = 0.02, 0.08
"""A slow process runs and rests that long in turn."""


class Process:
    """One process of the cluster: always the same command, so that it comes back at the same address."""

    def __init__(self, start: Callable[[], int], log: Path) -> None:
        self.pid = 0
        self._start = start
        self._log = log
        self._throttle: threading.Thread | None = None
        self._fast = threading.Event()

    @property
    def running(self) -> bool:
        """Whether it lives, stopped or not."""
        return bool(self.pid) and Path(f"/proc/{self.pid}").exists()

    @property
    def resends(self) -> bool:
        """Whether a connection of its machine still sends something again: after a cut, for up to as long again."""
        connections = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        return any(int(connection.split()[6], 16) for connection in connections)

    def start(self) -> None:
        """Returns before it is ready."""
        self.pid = self._start()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it runs."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        while self.running:
            time.sleep(0.005)

    def slow(self) -> None:
        """It gets a part of the time only, until `fast`."""
        self._fast.clear()
        self._throttle = threading.Thread(target=self._stop_and_go, daemon=True)
        self._throttle.start()

    def fast(self) -> None:
        """Undoes `slow`."""
        self._fast.set()
        if self._throttle is not None:
            self._throttle.join()

    def _stop_and_go(self) -> None:
        while not self._fast.is_set():
            self.signal(signal.SIGSTOP)
            self._fast.wait(RESTS_S)
            self.signal(signal.SIGCONT)
            self._fast.wait(RUNS_S)

    def log_tail(self) -> str:
        """Its last lines."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:]) if self._log.exists() else ""


class FaultCluster:
    """Two routers, two prefill workers, two combined workers and Redis.

    Without the right to make namespaces all of them are on one machine, and no link can be cut.

    Attributes:
        network: None there.
        redis: Reached by the others through `proxy`.
    """

    def __init__(
        self, model: Path, *, transport: str = "ucx", fill_progress_s: float = 4.0, host_kv_memory: str = "0"
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cpd-faults-", dir="/tmp"))  # sockets need short names
        self.network = Network() if available() else None
        self.redis = EmbeddedRedis(self.directory / "redis.sock")
        self.proxy = RedisProxy(self.directory / "proxy.sock", self.directory / "redis.sock")
        self.processes: dict[str, Process] = {}
        self._nursery = Nursery(ROOT)
        self.urls: dict[str, str] = {}
        self._model = model
        self._worker_flags = {
            "dtype": "float32",
            "kv-memory": "8MiB",
            "host-kv-memory": host_kv_memory,
            "token-budget": 64,
            "colocate": "mixed",
            "transport": transport,
            "lease-s": 2,
            "fill-progress-s": fill_progress_s,
        }

    @property
    def workers(self) -> list[str]:
        return [name for name in self.processes if not name.startswith("router")]

    async def __aenter__(self) -> Self:
        if self.network is not None:
            self.network.start()
        self.redis.start()
        self.proxy.start()
        try:
            for number, name in enumerate(NAMES):
                self._add(name, core=number % (os.cpu_count() or 1))
            await self.whole()
        except BaseException:
            self.print_logs()
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.fast()
            process.kill()
        self._nursery.close()
        self.proxy.stop()
        self.redis.stop()
        if self.network is not None:
            self.network.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def print_logs(self) -> None:
        """pytest shows them with a failure."""
        for name, process in self.processes.items():
            print(f"--- {name}", process.log_tail(), sep="\n")

    def _add(self, name: str, core: int) -> None:
        host = self.network.add(name) if self.network is not None else "127.0.0.1"
        port = pick_port("127.0.0.1", 0)
        flags: dict[str, Any] = {
            "model": self._model,
            "cluster": "faults",
            "redis-url": self.proxy.url,
            "host": host,
            "port": port,
            "log-level": "info",
        }
        if name.startswith("router"):
            program, arguments = "router.__main__", []
            flags |= {"router-id": name, "served-model-name": MODEL, "long-prefill-tokens": 64}
            self.urls[name] = f"http://{host}:{port}"
        else:
            role, _, _ = name.partition("-")
            program, arguments = "tests.faults.worker", [role, str(self._socket(name)), "--kv-checksum"]
            flags |= {"worker-id": name, **self._worker_flags}
        for flag, value in {**flags, "cluster-token": TOKEN}.items():
            arguments += [f"--{flag}", str(value)]
        log = self.directory / f"{name}.log"
        namespace = self.network.namespace(name) if self.network is not None else ""
        start = partial(self._nursery.start, program, arguments, namespace=namespace, log=log, core=core)
        self.processes[name] = Process(start, log)
        self.processes[name].start()

    # ---- orders ----

    async def order(self, worker: str, point: Point, action: Action, k: int = 0, value: float = 0.0) -> None:
        """See `tests.faults.points.Points.order`."""
        await self._tell(worker, {"order": point.value, "action": action.value, "k": k, "value": value})

    async def reached(self, worker: str) -> bool:
        """Whether something that was ordered happens."""
        return bool((await self._tell(worker, {}))["reached"])

    async def used(self, worker: str) -> bool:
        """Whether the worker has come to any point since all orders were taken back."""
        return bool((await self._tell(worker, {}))["used"])

    async def release(self, worker: str) -> None:
        """Takes all orders back."""
        await self._tell(worker, {"release": True})

    async def _tell(self, worker: str, order: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_unix_connection(self._socket(worker))
            try:
                writer.write(json.dumps(order).encode() + b"\n")
                answer: dict[str, Any] = json.loads(await reader.readline())
            finally:
                writer.transport.abort()
        return answer

    def _socket(self, worker: str) -> Path:
        return self.directory / f"{worker}.sock"

    # ---- what it says ----

    async def state(self, router: str = "router-1") -> dict[str, Any]:
        """A router's `/cluster`; empty if it does not answer."""
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(base_url=self.urls[router], timeout=2) as http:
                response = await http.get("/cluster")
                if response.is_success:
                    state: dict[str, Any] = response.json()
                    return state
        return {}

    async def whole(self) -> None:
        """Returns when every process runs, and every router has a live session with every worker's process."""

        async def is_whole(router: str) -> bool:
            for process in self.processes.values():
                if not process.running:
                    process.start()
            workers = (await self.state(router)).get("workers", [])
            # The answer is of both routers: what a worker is to this one stands there by its name.
            seen = [(worker, worker["routers"].get(router, {})) for worker in workers]
            ready = {worker["id"]: worker["pid"] for worker, own in seen if own.get("state") == "ready"}
            return ready == {name: self.processes[name].pid for name in self.workers}

        for router in self.urls:
            await self._until(lambda router=router: is_whole(router), START_S, "the cluster is whole")

    async def busy(self, role: str) -> list[str]:
        """The workers of a role that have requests, as far as they have reported."""
        workers = (await self.state()).get("workers", [])
        loads = {one["id"]: one["load"] for one in workers if one["role"] == role and one["load"]}
        return [name for name, load in loads.items() if load["running"] + load["waiting"]]

    async def idle(self) -> None:
        """Returns when no request is left anywhere, also on the network, and every page is free or cached."""

        async def is_idle() -> bool:
            if self.network is not None and any(process.resends for process in self.processes.values()):
                return False
            workers = (await self.state()).get("workers", [])
            return len(workers) == len(self.workers) and all(
                worker["load"]
                and not worker["load"]["running"] + worker["load"]["waiting"]
                and worker["load"]["pages"]["free"] + worker["load"]["pages"]["cached"] == worker["info"]["num_pages"]
                for worker in workers
            )

        await self._until(is_idle, IDLE_S, "every page is free or cached")

    async def _until(self, condition: Any, seconds: float, what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not await condition():  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(0.1)
        except TimeoutError:
            workers = (await self.state()).get("workers", [])
            shown = {one["id"]: (one["state"], one["reason"], one["load"] and one["load"]["pages"]) for one in workers}
            raise AssertionError(f"not within {seconds:g} s: {what}; {shown}") from None
