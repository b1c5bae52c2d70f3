"""`cpd up` in a Ray cluster that is running already, for instance one of several machines."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from deploy.raydir import clear_ray_dir, make_ray_dir
from tests.ports import free_port

pytestmark = pytest.mark.e2e

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]


@pytest.fixture
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node, with room for a worker and a router."""
    directory, port = make_ray_dir(), free_port()
    flags = [f"--port={port}", f"--temp-dir={directory}/ray", "--num-cpus=2", "--include-dashboard=false"]
    with subprocess.Popen(
        [*RAY, "start", "--head", "--block", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as ray:
        assert ray.stdout is not None
        try:
            assert any("Ray runtime started" in line for line in ray.stdout)
            yield f"127.0.0.1:{port}"
        finally:
            ray.terminate()
    clear_ray_dir(directory)


def test_workers_on_the_first_node_can_be_reached_from_nodes_that_join_later(ray_address: str, tmp_path: Path) -> None:
    environment = {**os.environ, "CPD_RUNTIME_DIR": str(tmp_path / "run"), "XDG_STATE_HOME": str(tmp_path)}
    flags = ["--port=0", "--host=0.0.0.0", "--simulate=instant", "--prefill=1", "--log-level=warning"]
    flags += ["--long-prefill-tokens=64"]
    with subprocess.Popen(
        [*PROGRAM, "up", "--ray-address", ray_address, *flags], stdout=subprocess.PIPE, env=environment, text=True
    ) as up:
        assert up.stdout is not None
        try:
            serving = up.stdout.readline()
            _, model, _, url = serving.split()[:4]
            body = {"model": model, "prompt": "long " * 1000, "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
            status = subprocess.run([*PROGRAM, "status", "--json"], capture_output=True, env=environment, check=True)
            trace = subprocess.run([*PROGRAM, "trace"], capture_output=True, env=environment, check=True)
        finally:
            up.terminate()
    for worker in orjson.loads(status.stdout)["workers"]:
        assert worker["state"] == "ready"
        assert not worker["address"].startswith("127.")
        assert "#" in worker["session"], "the session has no TLS"
        assert "#" in worker["address"], "gRPC has no TLS"
    assert b"prefill_tokens" in trace.stdout  # over gRPC with TLS
    assert answer.headers["x-cpd-route"] == "remote"  # from worker to worker with TLS, too
