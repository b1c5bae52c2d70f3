"""A cluster of real processes without Ray: Redis, routers and workers, which tests can kill or stop."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis

from cpd.common.errors import CPDError
from cpd.common.membership import Member, members
from cpd.common.settings import ClusterSettings
from cpd.common.trust import ClusterSecret
from deploy.cluster_status import ask_endpoint, has_workers
from deploy.cores import split_cores, usable_cores
from deploy.endpoint import WILDCARDS, url_of
from deploy.listener import SharedListener
from deploy.process import Supervised
from deploy.processes import ProcessSpec, processes
from deploy.redis import EmbeddedRedis
from deploy.state import ClusterDir, ClusterState
from tests.ports import free_port
from tests.secret import SECRET, secret_file

START_S = 120.0
MAX_STARTS = 10
HOST = "127.0.0.1"
TOKEN = SECRET
ADMIN_KEY = ClusterSecret(TOKEN).admin_key


class Cluster:
    """A cluster that runs while the context is open. Its processes are supervised as under Ray.

    Args:
        code: Source trees of the processes, by name, that run other code than this.
        settings: Settings of `cpd up` (`model=…, prefill=1, …`). The port is chosen.
    """

    def __init__(self, code: Mapping[str, Path] | None = None, /, **settings: Any) -> None:
        given = {"dtype": "float32", "kv_memory": 64 << 20, "log_level": "warning", "lease_s": 2.0, **settings}
        self._directory = Path(tempfile.mkdtemp(prefix="cpd-e2e-", dir="/tmp"))  # sockets need short names
        self._redis = EmbeddedRedis(self._directory / "redis.sock")
        fixed = {"port": free_port(), "redis_url": self._redis.url, "secret_file": secret_file()}
        self.settings = ClusterSettings.load({**given, **fixed})
        self.url = self._url(self.settings.port)
        self._more_urls: list[str] = []
        self._specs = processes(self.settings, self.settings.host)
        self._code = code or {}
        self._supervised: dict[str, Supervised] = {}
        self._superseded: list[Supervised] = []

    def __enter__(self) -> Self:
        self._redis.start()
        workers = [spec.name for spec in self._specs if spec.is_worker]
        cores = dict(zip(workers, split_cores(usable_cores(), len(workers)), strict=True))
        for spec in self._specs:
            self._supervised[spec.name] = self._supervise(spec, cores.get(spec.name, frozenset()))
        try:
            self.wait_until_healthy()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            for name, supervised in self._supervised.items():
                print(f"--- {name}", *supervised.state().lines[-40:], sep="\n")  # pytest shows it if the test fails
        for supervised in (*self._supervised.values(), *self._superseded):
            supervised.stop()
        self._redis.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def redis(self) -> EmbeddedRedis:
        """The cluster's Redis, which a test may stop and start."""
        return self._redis

    def add_router(self, **settings: Any) -> str:
        """Starts another router on a port of its own, with `settings` over the cluster's; returns its URL."""
        port = free_port()
        changed = self.settings.model_copy(update={"routers": 1, "port": port, **settings})
        router = processes(changed, changed.host)[-1]
        name = f"extra-{port}"
        spec = replace(router, name=name, members=(name,), flags={**router.flags, "router_id": name})
        self._specs.append(spec)
        self._supervised[name] = self._supervise(spec, frozenset())
        self._more_urls.append(self._url(port))
        self.wait_until_healthy()
        return self._more_urls[-1]

    def supersede(self, name: str) -> Supervised:
        """Starts the named process once more, beside the running one; returns the supervisor of that one."""
        (spec,) = (spec for spec in self._specs if spec.name == name)
        older = self._supervised[name]
        self._superseded.append(older)
        self._supervised[name] = self._supervise(spec, frozenset())
        return older

    def pid(self, name: str) -> int:
        """Process id of the process with this name (`combined-0`, `prefill-0`, `router-0`; of several
        models `qwen-combined-0`)."""
        pid = self._supervised[name].state().pid
        assert pid is not None, f"{name} is not running"
        return pid

    def starts(self, name: str) -> int:
        """Number of starts of the named process."""
        return self._supervised[name].state().starts

    def exit_code(self, name: str) -> int | None:
        """Exit code with which the named process ended last."""
        return self._supervised[name].state().exit_code

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the named process."""
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> None:
        """Kills the named process and returns when the supervisor has started it again."""
        starts, pid = self._supervised[name].state().starts, self.pid(name)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self._supervised[name].state().starts > starts, f"{name} was started again")

    @contextmanager
    def without(self, *names: str, kill: bool = False) -> Iterator[None]:
        """Ends the named processes while the context is open; afterwards they are started anew.

        Args:
            kill: End them with SIGKILL.
        """
        for name in names:
            if kill:
                self._supervised[name]._stopping.set()  # it is not started again
                self.send(name, signal.SIGKILL)
            self._supervised[name].stop()
        try:
            yield
        finally:
            for spec in self._specs:
                if spec.name in names:
                    self._supervised[spec.name] = self._supervise(spec, frozenset())

    def log(self, name: str) -> list[str]:
        """The last log lines of the named process."""
        return self._supervised[name].state().lines

    def state(self) -> dict[str, Any]:
        """A router's `/cluster`. Asks again while no router answers."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return ask_endpoint(self.url, ADMIN_KEY)
            except CPDError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def wait_until_healthy(self) -> None:
        """Waits until every process runs, holds a lease, and every router has a session with every worker."""
        eventually(self._is_healthy, "the cluster is healthy")

    def wait_until_idle(self) -> dict[str, Any]:
        """Waits until no request is left and every page is free or cached; returns `/cluster`."""
        eventually(self._is_idle, "every page is free or cached")
        return self.state()

    @contextmanager
    def known(self) -> Iterator[None]:
        """Lets commands find the cluster under the name `default`, as if `cpd up` had started it."""
        directory = ClusterDir("default")
        with directory.hold():
            directory.write(self._found_at())
            yield

    def _found_at(self) -> ClusterState:
        return ClusterState("default", 1, self.url, "", ADMIN_KEY, launch="")

    def _supervise(self, spec: ProcessSpec, cores: frozenset[int]) -> Supervised:
        listener = None if spec.is_worker else SharedListener(*spec.listens_on)
        flags = {"advertise_host": HOST} if spec.flags.get("host") in WILDCARDS else {}
        environment = spec.environment()
        if spec.name in self._code:
            environment = runs_code_of(self._code[spec.name], environment)
        return Supervised(spec.name, lambda: spec.command(spec.model, **flags), environment, cores, listener)

    def _url(self, port: int) -> str:
        return url_of(self.settings.host, port, tls=self.settings.tls_cert is not None)

    def _is_healthy(self) -> bool:
        states = {name: supervised.state() for name, supervised in self._supervised.items()}
        for name, state in states.items():
            assert state.error is None, f"{name} does not start: {state.error}"
            assert state.starts < MAX_STARTS, f"{name} keeps dying"
        with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop already
            leases = thread.submit(asyncio.run, self._members()).result()
        pids = {member.id: member.pid for member in leases}
        if not all(spec.has_leases(states[spec.name].pid, pids) for spec in self._specs):
            return False
        expected = {name: pids[name] for spec in self._specs if spec.is_worker for name in spec.members}
        routers = [spec.name for spec in self._specs if not spec.is_worker]
        return has_workers(self._found_at(), expected, routers)

    def _is_idle(self) -> bool:
        workers = self.state()["workers"]
        return all(
            worker["load"]
            and not worker["load"]["running"] + worker["load"]["waiting"]
            and worker["load"]["pages"]["free"] + worker["load"]["pages"]["cached"] == worker["info"]["num_pages"]
            for worker in workers
        )

    async def _members(self) -> list[Member]:
        async with Redis.from_url(self.settings.redis_url) as redis:
            return await members(redis, self.settings.cluster, ClusterSecret(TOKEN))


def runs_code_of(tree: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with which a process imports the packages of this source tree."""
    return {**environment, "PYTHONPATH": str(tree)}


def eventually(condition: Callable[[], bool], what: str, seconds: float = START_S) -> None:
    """Waits until `condition` is true.

    Raises:
        AssertionError: It is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
