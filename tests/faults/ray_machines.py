"""Simulated machines with a Ray node each, which can be lost as a whole. Needs root.

Each has its own network (`tests/faults/network.py`), host name and process ids. The end of its first process kills all
others at once, as the end of a machine does.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from cpd.common.addresses import join_address
from deploy.raydir import make_ray_dir
from deploy.redis import server_program
from deploy.session import OBJECT_STORE_BYTES
from tests.faults.network import Network
from tests.ports import free_port

START_S = 90.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    # Ray notices that a machine is lost after 2 to 4 s; by default after 15 s to a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
_RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


@dataclass(slots=True)
class _Machine:
    address: str
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None


class RayMachines:
    """Machines with a Ray node each, on one network with a Redis server. The first one added is Ray's head.

    Args:
        directory: For logs.
        ipv6: All addresses are IPv6.

    Attributes:
        network: Cuts their links.
        redis_url: The Redis server.
    """

    def __init__(self, directory: Path, *, ipv6: bool = False) -> None:
        self.network = Network(ipv6=ipv6)
        self.redis_url = ""
        self._directory = directory
        self._ray_dirs: list[str] = []
        self._ray_port = free_port()
        self._machines: dict[str, _Machine] = {}

    @property
    def ray_address(self) -> str:
        """Address of Ray's head."""
        head = next(iter(self._machines.values()))
        return join_address(head.address, self._ray_port)

    def host(self, name: str) -> str:
        """Address of a machine."""
        return self._machines[name].address

    def add(self, name: str, *, second_network: bool = False, **resources: float) -> None:
        """Adds a machine and starts Ray there, with these resources.

        Args:
            second_network: It has a second interface, `eth1`, for pages.
        """
        address = self.network.add(name)
        if second_network:
            self.network.add_second_link(name)
        environment = {"UCX_NET_DEVICES": "eth1"} if second_network else {}
        self._machines[name] = _Machine(address, resources, environment)
        self.start(name)

    def start(self, name: str) -> None:
        """Starts Ray on a machine, again after `lose`, and returns when it has started."""
        machine = self._machines[name]
        directory = make_ray_dir()
        self._ray_dirs.append(directory)
        flags = ["--block", f"--node-ip-address={machine.address}", "--num-cpus=0"]
        flags += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={directory}/ray"]
        flags += [f"--resources={json.dumps(machine.resources)}"]
        if name == next(iter(self._machines)):
            flags += ["--head", f"--port={self._ray_port}", "--include-dashboard=false"]
        else:
            flags += [f"--address={self.ray_address}"]
        log = self._directory / f"ray-{name}.log"
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', name]
        with log.open("wb") as output:
            machine.process = subprocess.Popen(
                ["ip", "netns", "exec", self.network.namespace(name), *apart, *named, *_RAY, "start", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **machine.environment},
            )
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (text := log.read_text()):
            assert time.monotonic() < deadline, text
            assert machine.process.poll() is None, text
            time.sleep(0.1)

    def lose(self, name: str) -> None:
        """Kills all processes of a machine at once."""
        process = self._machines[name].process
        if process is not None:
            process.kill()
            process.wait()
            self._machines[name].process = None

    def ended(self, name: str) -> bool:
        """True if Ray has ended on a machine."""
        process = self._machines[name].process
        return process is None or process.poll() is not None

    def command(self, name: str) -> list[str]:
        """Returns what runs a program, given by further arguments, on a machine."""
        process = self._machines[name].process
        assert process is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return ["nsenter", "--target", children[0], "--net", "--uts", "--pid", "--mount"]

    def _close(self) -> None:
        for name in self._machines:
            self.lose(name)
        self.network.stop()
        for directory in self._ray_dirs:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def ray_machines(directory: Path, *, ipv6: bool = False) -> Iterator[RayMachines]:
    """Machines, and Redis, that run while the context is open; `directory` is for logs."""
    machines = RayMachines(directory, ipv6=ipv6)
    machines.network.start()
    host, port = machines.network.host(0), free_port()
    machines.redis_url = f"redis://{join_address(host, port)}"
    flags = ["--bind", host, "--port", str(port), "--save", "", "--protected-mode", "no"]
    redis = subprocess.Popen([server_program(), *flags], stdout=subprocess.DEVNULL)
    try:
        with Redis.from_url(machines.redis_url, retry=Retry(NoBackoff(), retries=0)) as client:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    client.ping()
                    break
                except RedisConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
        yield machines
    finally:
        machines._close()
        redis.send_signal(signal.SIGTERM)
        redis.wait()
