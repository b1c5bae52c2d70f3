"""A real `cpd up` on simulated machines (`tests/faults/ray_machines.py`)."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cpd.common.addresses import join_address
from tests.e2e.client import MODEL
from tests.e2e.cluster import eventually
from tests.faults.ray_machines import RayMachines
from tests.secret import secret_file

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
CHANGE_S = 180.0


@dataclass(slots=True)
class RayCluster:
    """A running cluster.

    Attributes:
        machines: Its machines; `cpd up` runs on `one`.
        url: Its endpoint.
    """

    machines: RayMachines
    directory: Path
    url: str = ""

    def said(self) -> str:
        """What `cpd up` has said."""
        return (self.directory / "errors").read_text()

    def run(self, *arguments: str) -> str:
        """Runs a `cpd` command on machine `one`; returns its output."""
        done = subprocess.run(
            [*self.machines.command("one"), *PROGRAM, *arguments],
            capture_output=True,
            text=True,
            env=_environment(self.directory),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def routers(self) -> dict[str, int]:
        """The number of ready routers on each machine."""
        listed = httpx.get(f"{self.url}/cluster", timeout=10).raise_for_status().json()["routers"]
        return dict(Counter(router["host"] for router in listed if router["ready"]))

    def workers(self) -> dict[str, dict[str, Any]]:
        """The workers that the router uses, by name."""
        listed = httpx.get(f"{self.url}/cluster", timeout=10).raise_for_status().json()["workers"]
        return {worker["id"]: worker for worker in listed if worker["state"] == "ready"}

    def wait_for(self, workers: Mapping[str, int]) -> None:
        """Waits until each machine has this number of workers."""

        def on() -> Counter[str]:
            return Counter(worker["host"] for worker in self.workers().values())

        eventually(lambda: on() == workers, f"workers on {workers}", CHANGE_S)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition is true."""
        eventually(condition, what, CHANGE_S)


@contextmanager
def ray_cluster(machines: RayMachines, directory: Path, model: Path, *flags: str) -> Iterator[RayCluster]:
    """Runs `cpd up` on machine `one` while the context is open.

    Args:
        directory: For its files.
        flags: Settings of `cpd up`.
    """
    given = [f"--ray-address={machines.ray_address}", f"--redis-url={machines.redis_url}"]
    given += [f"--secret-file={secret_file()}", f"--model={model}", f"--served-model-name={MODEL}"]
    given += ["--dtype=float32", "--kv-memory=64MiB", "--drain-s=1"]
    with (
        (directory / "errors").open("w") as errors,
        subprocess.Popen(
            [*machines.command("one"), *PROGRAM, "up", *given, *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(directory),
        ) as up,
    ):
        cluster = RayCluster(machines, directory)
        try:
            assert up.stdout is not None
            serving = up.stdout.readline()
            assert serving.startswith("Serving"), cluster.said()
            port = int(serving.split()[3].rpartition(":")[2])
            cluster.url = f"http://{join_address(machines.host('one'), port)}"
            yield cluster
        except BaseException:
            print(cluster.said())  # pytest shows it
            raise
        finally:
            up.terminate()


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "CPD_RUNTIME_DIR": str(directory / "cpd"),
        "XDG_STATE_HOME": str(directory / "state"),
        "COLUMNS": "160",
    }
