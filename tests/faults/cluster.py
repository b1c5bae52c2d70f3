"""A cluster of real processes, each in its own network namespace, for fault injection."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from deploy.redis import EmbeddedRedis
from tests.faults.fork_server import ForkServer
from tests.faults.network import Network, available
from tests.faults.points import Action, Point
from tests.faults.redis_proxy import RedisProxy
from tests.ports import free_port
from tests.secret import SECRET, secret_file
from tests.worker.processes import ROOT

NAMES = ("prefill-0", "combined-0", "prefill-1", "combined-1", "router-0", "router-1")
MODEL, TOKEN = "test", SECRET
START_S, IDLE_S, TELL_S = 120.0, 60.0, 30.0
RUN_S, PAUSE_S = 0.02, 0.08
"""A throttled process alternates between running and pausing."""


class Process:
    """One process of the cluster. It always starts with the same command, so it comes back at the same address."""

    def __init__(self, start: Callable[[], int], log: Path) -> None:
        self.pid = 0
        self._start = start
        self._log = log
        self._throttle: threading.Thread | None = None
        self._unthrottled = threading.Event()

    @property
    def running(self) -> bool:
        """True while the process exists, stopped or not."""
        return bool(self.pid) and Path(f"/proc/{self.pid}").exists()

    @property
    def retransmits(self) -> bool:
        """True while a TCP connection of its machine retransmits: after a cut, for up to as long as the cut lasted."""
        try:
            connections = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        except (FileNotFoundError, ProcessLookupError):  # it has ended since somebody saw it running
            return False
        return any(int(connection.split()[6], 16) for connection in connections)

    def start(self) -> None:
        """Starts the process, without waiting until it is ready."""
        self.pid = self._start()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if the process is running."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone."""
        self.signal(signal.SIGKILL)
        while self.running:
            time.sleep(0.005)

    def throttle(self) -> None:
        """Lets the process run only a fifth of the time, until `unthrottle`."""
        self._unthrottled.clear()
        self._throttle = threading.Thread(target=self._stop_and_go, daemon=True)
        self._throttle.start()

    def unthrottle(self) -> None:
        """Undoes `throttle`."""
        self._unthrottled.set()
        if self._throttle is not None:
            self._throttle.join()

    def _stop_and_go(self) -> None:
        while not self._unthrottled.is_set():
            self.signal(signal.SIGSTOP)
            self._unthrottled.wait(PAUSE_S)
            self.signal(signal.SIGCONT)
            self._unthrottled.wait(RUN_S)

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:]) if self._log.exists() else ""


class FaultCluster:
    """Two routers, two prefill workers, two combined workers and Redis; subclasses may have other workers.

    Each has a network namespace of its own if this process may create them; otherwise no link can be cut.

    Attributes:
        network: The namespaces; None without that right.
        redis: The Redis server, which the processes reach through `proxy`.
        no_answer: The last reason why a router did not say its state.
    """

    names: Sequence[str] = NAMES

    def __init__(
        self, model: Path, *, transport: str = "ucx", prefill_progress_s: float = 4.0, host_kv_memory: str = "0"
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cpd-faults-", dir="/tmp"))  # sockets need short names
        self.network = Network() if available() else None
        self.redis = EmbeddedRedis(self.directory / "redis.sock")
        self.proxy = RedisProxy(self.directory / "proxy.sock", self.directory / "redis.sock")
        self.processes: dict[str, Process] = {}
        self._fork_server = ForkServer(ROOT)
        self.urls: dict[str, str] = {}
        self.no_answer = ""
        self._model = model
        self._worker_flags = {
            "dtype": "float32",
            "kv-memory": "8MiB",
            "host-kv-memory": host_kv_memory,
            "token-budget": 64,
            "colocate": "mixed",
            "transport": transport,
            "lease-s": 2,
            "drain-s": 0,
            "prefill-progress-s": prefill_progress_s,
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
            for number, name in enumerate(self.names):
                self._add(name, core=number % (os.cpu_count() or 1))
            await self.wait_until_healthy()
        except BaseException:
            self.print_logs()
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.unthrottle()
            process.kill()
        self._fork_server.close()
        self.proxy.stop()
        self.redis.stop()
        if self.network is not None:
            self.network.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def print_logs(self) -> None:
        """Prints the end of every log; pytest shows it if the test fails."""
        for name, process in self.processes.items():
            print(f"--- {name}", process.log_tail(), sep="\n")

    def router_flags(self) -> dict[str, Any]:
        """The settings of routers that say what is served."""
        return {"model": self._model, "served-model-name": MODEL}

    def worker_flags(self, name: str) -> dict[str, Any]:
        """The settings of a worker that are not about its address."""
        return {"model": self._model, **self._worker_flags}

    def _add(self, name: str, core: int) -> None:
        """Adds a process, which has the same addresses whenever it is started."""
        host = self.network.add(name) if self.network is not None else "127.0.0.1"
        port = free_port()
        flags: dict[str, Any] = {
            "cluster": "faults",
            "redis-url": self.proxy.url,
            "host": host,
            "port": port,
            "log-level": "info",
        }
        if name.startswith("router"):
            program, arguments = "router.__main__", []
            flags |= {"router-id": name, "long-prefill-tokens": 64, "admin-port": free_port(), **self.router_flags()}
            self.urls[name] = f"http://{host}:{port}"
        else:
            role, _, _ = name.partition("-")
            program, arguments = "tests.faults.worker", [role, str(self._socket(name)), "--kv-checksum"]
            flags |= {"worker-id": name, "session-port": free_port(), **self.worker_flags(name)}
        for flag, value in {**flags, "secret-file": secret_file()}.items():
            arguments += [f"--{flag}", str(value)]
        log = self.directory / f"{name}.log"
        namespace = self.network.namespace(name) if self.network is not None else ""
        start = partial(self._fork_server.start, program, arguments, namespace=namespace, log=log, core=core)
        self.processes[name] = Process(start, log)
        self.processes[name].start()

    # ---- injection points ----

    async def arm(self, worker: str, point: Point, action: Action, k: int = 0, delay_s: float = 0.0) -> None:
        """Arms an injection point of a worker: see `tests.faults.points.InjectionPoints.arm`."""
        await self._tell(worker, {"arm": point.value, "action": action.value, "k": k, "delay_s": delay_s})

    async def triggered(self, worker: str, *points: Point) -> bool:
        """True if an action at one of these injection points of the worker has begun, or at any if none is named."""
        triggered = (await self._tell(worker, {}))["triggered"]
        return any(point.value in triggered for point in points or Point)

    async def any_reached(self, worker: str) -> bool:
        """True if the worker has reached an injection point, armed or not, since all were disarmed."""
        return bool((await self._tell(worker, {}))["any_reached"])

    async def disarm(self, *workers: str, patience_s: float = TELL_S) -> None:
        """Disarms all injection points of these workers, or of all workers.

        Gives up on a worker after `patience_s`: one that is stopped does not answer, and one that is killed has none.
        """

        async def disarm(worker: str) -> None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._tell(worker, {"disarm": True})

        await asyncio.gather(*map(disarm, workers or self.workers))

    async def _tell(self, worker: str, command: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(TELL_S):
            reader, writer = await asyncio.open_unix_connection(self._socket(worker))
            try:
                writer.write(json.dumps(command).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.transport.abort()
        if not line:
            raise ConnectionResetError(f"{worker} ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _socket(self, worker: str) -> Path:
        return self.directory / f"{worker}.sock"

    # ---- state ----

    async def state(self, router: str = "router-1") -> dict[str, Any]:
        """A router's `/cluster`; empty if it does not answer, and then `no_answer` says why."""
        try:
            async with httpx.AsyncClient(base_url=self.urls[router], timeout=2) as http:
                response = await http.get("/cluster")
                if response.is_success:
                    state: dict[str, Any] = response.json()
                    return state
                self.no_answer = f"{router}: {response.status_code} {response.text}"
        except httpx.HTTPError as error:
            self.no_answer = f"{router}: {error!r}"
        return {}

    async def wait_until_healthy(self) -> None:
        """Waits until every process runs and every router has a session with every worker. Starts dead processes."""

        async def is_healthy(router: str) -> bool:
            for process in self.processes.values():
                if not process.running:
                    process.start()
            workers = (await self.state(router)).get("workers", [])
            # `/cluster` merges the views of all routers; this takes the view of the one that was asked.
            views = [(worker, worker["routers"].get(router, {})) for worker in workers]
            ready = {worker["id"]: worker["pid"] for worker, view in views if view.get("state") == "ready"}
            return ready == {name: self.processes[name].pid for name in self.workers}

        for router in self.urls:
            await self._wait_until(partial(is_healthy, router), START_S, "the cluster is healthy")

    async def busy_workers(self, role: str) -> list[str]:
        """The workers of a role whose last report shows requests."""
        workers = (await self.state()).get("workers", [])
        loads = {one["id"]: one["load"] for one in workers if one["role"] == role and one["load"]}
        return [name for name, load in loads.items() if load["running"] + load["waiting"]]

    async def wait_until_idle(self, ended: Collection[str] = ()) -> None:
        """Waits until no request is left, no connection retransmits, and every page is free or cached.

        Args:
            ended: Workers that drain: they may have ended instead.
        """

        async def is_idle() -> bool:
            running = [process for process in self.processes.values() if process.running]
            if self.network is not None and any(process.retransmits for process in running):
                return False
            idle = {
                worker["id"]
                for worker in (await self.state()).get("workers", [])
                if worker["load"]
                and not worker["load"]["running"] + worker["load"]["waiting"]
                and worker["load"]["pages"]["free"] + worker["load"]["pages"]["cached"] == worker["info"]["num_pages"]
            }
            gone = {name for name in ended if not self.processes[name].running}
            return idle | gone == set(self.workers)

        await self._wait_until(is_idle, IDLE_S, "every page is free or cached")

    async def _wait_until(self, condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not await condition():  # noqa: ASYNC110 - polls other processes
                    await asyncio.sleep(0.1)
        except TimeoutError:
            workers = (await self.state()).get("workers", [])
            shown = {one["id"]: (one["state"], one["reason"], one["load"] and one["load"]["pages"]) for one in workers}
            raise AssertionError(f"not within {seconds:g} s: {what}; {shown or self.no_answer}") from None
