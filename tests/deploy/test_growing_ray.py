"""`cpd up` and `cpd scale` in a Ray that starts and ends nodes by itself.

Ray's own autoscaler runs, with the roles of `deploy/ray/cluster.yaml`. Its nodes are processes of this machine.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.raydir import clear_ray_dir, make_ray_dir
from deploy.redis import server_program
from tests.e2e.cluster import eventually
from tests.ports import free_port
from tests.secret import secret_file

pytestmark = pytest.mark.e2e

FILE = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "cluster.yaml"
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
HEAD = "f" * 51 + "00000"
"""Ray's name of the first node of this machine."""
NODES = "import json, ray; ray.init({address!r}, log_to_driver=False); print(json.dumps(ray.nodes()))"


def test_the_file_for_ray_up_is_valid() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(FILE.read_text()))
    validate_config(config)


class Machine:
    """Where the test's processes run.

    Attributes:
        ray: Address of Ray's head.
        redis_url: A Redis that other machines could reach.
        environment: That of all commands.
    """

    def __init__(self, ray: str, redis_url: str, environment: Mapping[str, str]) -> None:
        self.ray = ray
        self.redis_url = redis_url
        self.environment = environment

    def cpd(self, *arguments: str) -> str:
        """Runs a `cpd` command."""
        ran = subprocess.run([*PROGRAM, *arguments], env=self.environment, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def nodes(self) -> list[str]:
        """The types of the nodes that run, by their roles' resources."""
        program = NODES.format(address=self.ray)
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        alive = [node["Resources"] for node in json.loads(ran.stdout.splitlines()[-1]) if node["Alive"]]
        roles = ("cpd_router", "cpd_combined", "cpd_prefill")
        return sorted(role for resources in alive for role in roles if role in resources)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    address = socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; asks for this machine's address
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("needs an address other than 127.0.0.1")
    directory, port, redis_port = make_ray_dir(), free_port(), free_port()
    config = tmp_path / "autoscaling.json"
    config.write_text(json.dumps(_autoscaling(f"{address}:{port}")))
    environment = {
        **os.environ,
        "CPD_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_STATE_HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    resources = json.dumps(yaml.safe_load(FILE.read_text())["available_node_types"]["head"]["resources"])
    flags = [f"--port={port}", f"--temp-dir={directory}/ray", "--num-cpus=0", "--include-dashboard=false"]
    flags += [f"--node-ip-address={address}", f"--autoscaling-config={config}", f"--resources={resources}"]
    redis = [server_program(), "--port", str(redis_port), "--bind", address, "--requirepass", "password", "--save", ""]
    with (
        subprocess.Popen(redis, cwd=tmp_path, stdout=subprocess.DEVNULL) as redis_server,
        subprocess.Popen(
            [*RAY, "start", "--head", "--block", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as ray,
    ):
        assert ray.stdout is not None
        try:
            lines = []
            for line in ray.stdout:
                lines.append(line)
                if "Ray runtime started" in line:
                    break
            assert "Ray runtime started" in lines[-1], lines
            yield Machine(f"{address}:{port}", f"redis://:password@{address}:{redis_port}", environment)
        finally:
            ray.terminate()
            redis_server.terminate()
    clear_ray_dir(directory)


def _autoscaling(address: str) -> dict[str, Any]:
    """Returns the configuration of `deploy/ray/cluster.yaml` for nodes on this machine, without GPUs."""
    from ray.autoscaler._private.util import prepare_config

    config: dict[str, Any] = prepare_config(yaml.safe_load(FILE.read_text()))
    types = config["available_node_types"]
    config["head_node_type"] = "ray.head.default"  # the one that nodes of this machine know
    types["ray.head.default"] = types.pop("head")
    for node_type in types.values():
        node_type["resources"].pop("GPU", None)
        node_type["resources"] |= {"CPU": 0, "object_store_memory": 80 << 20}
        node_type["node_config"] = {}
    config["provider"] = {
        "type": "fake_multinode",
        "gcs_address": address,
        "head_node_id": HEAD,
        "use_node_id_as_ip": True,  # all nodes have one address
        "disable_node_updaters": True,  # nothing is installed
    }
    config["idle_timeout_minutes"] = 0.2
    config["file_mounts"] = {}
    return config


def test_nodes_come_when_processes_need_them_and_go_when_they_do_not(machine: Machine, tmp_path: Path) -> None:
    assert machine.nodes() == ["cpd_router"]
    flags = ["--ray-address", machine.ray, "--secret-file", str(secret_file()), "--host=0.0.0.0", "--port=0"]
    flags += ["--dtype=float32", "--kv-memory=64MiB", "--log-level=warning", "--drain-s=0"]
    environment = {**machine.environment, "CPD_REDIS_URL": machine.redis_url}
    with subprocess.Popen([*PROGRAM, "up", *flags], stdout=subprocess.PIPE, env=environment, text=True) as up:
        assert up.stdout is not None
        try:
            _, model, _, url = up.stdout.readline().split()[:4]
            body = {"model": model, "prompt": "hello", "max_tokens": 4}
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
            eventually(lambda: machine.nodes() == ["cpd_combined", "cpd_prefill", "cpd_router"], "a node for each role")

            machine.cpd("scale", "--combined", "2")
            # Ray may start one node too many, which goes again
            two = ["cpd_combined", "cpd_combined", "cpd_prefill", "cpd_router"]
            eventually(lambda: machine.nodes() == two, "two combined nodes")

            machine.cpd("scale", "--combined", "1", "--prefill", "0")
            eventually(lambda: machine.nodes() == ["cpd_combined", "cpd_router"], "idle nodes have gone")
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        finally:
            up.terminate()
