"""What the Helm chart renders, run as Kubernetes would: probes, metrics, and SIGTERM after the preStop hook.

There is no Kubernetes here. Containers are processes of this machine, so each has free ports instead of the chart's.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpd.common.logs import parse_line
from tests.conftest import MakeCheckpoint
from tests.deploy.helm import RELEASE, container, named, render
from tests.deploy.helm import helm as helm
from tests.e2e.client import MODEL, begin, complete
from tests.e2e.cluster import eventually
from tests.ports import free_port
from tests.secret import SECRET

pytestmark = pytest.mark.e2e

CLIENT, OPERATOR = "a-clients-key", "the-operators-key"
SECRETS = {
    "cluster": SECRET,
    "api-keys.yaml": f"- key: {CLIENT}\n  name: team\n- key: {OPERATOR}\n  admin: true\n",
}
OUTPUT = 300
HOST = "127.0.0.1"
PORT_SETTINGS = {"http": "port", "admin": "admin_port", "grpc": "port", "sessions": "session_port"}


class Pod:
    """The container of a pod, as a process.

    Attributes:
        ports: Its ports, by name.
    """

    def __init__(self, manifests: list[dict[str, Any]], component: str, name: str, root: Path, redis_url: str) -> None:
        deployment = named(manifests, "Deployment", f"{RELEASE}-{component}")
        self.name = name
        self.spec = deployment["spec"]["template"]["spec"]
        self.container = container(deployment)
        self.ports = {port["name"]: free_port() for port in self.container["ports"]}
        fields = {"metadata.name": name, "status.podIP": HOST}
        for volume in self.spec["volumes"]:
            directory = root / volume["name"]
            directory.mkdir(exist_ok=True)
            for item in volume.get("secret", {}).get("items", ()):
                file = directory / item["path"]
                file.touch(mode=0o600)
                file.write_text(SECRETS[item["key"]])
        for file, text in named(manifests, "ConfigMap", RELEASE)["data"].items():
            (root / "config" / file).write_text(text.replace("/run/cpd", str(root)))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CPD_")}
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            environment[variable["name"]] = variable.get("value") or (
                fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else redis_url
            )
        for port, number in self.ports.items():
            environment[f"CPD_{PORT_SETTINGS[port].upper()}"] = str(number)
        python, *arguments = self.container["args"]
        assert python == "python"
        self._log = root / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(text.replace("/run/cpd", str(root)) for text in arguments)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def passes(self, probe: str) -> bool:
        """Makes a probe as the kubelet does."""
        assert self.process.poll() is None, self.log
        asked = self.container[probe]
        try:
            if tcp := asked.get("tcpSocket"):
                socket.create_connection((HOST, self.ports[tcp["port"]]), timeout=5).close()
                return True
            http = asked["httpGet"]
            url = f"{http['scheme'].lower()}://{HOST}:{self.ports[http['port']]}{http['path']}"
            return httpx.get(url, verify=False, timeout=asked.get("timeoutSeconds", 1)).is_success
        except (OSError, httpx.TransportError):
            return False

    def end(self) -> int:
        """Ends the process as the kubelet does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    @property
    def log(self) -> str:
        """What the process has logged."""
        return self._log.read_text()


@pytest.fixture
def manifests(helm: Path, checkpoint: MakeCheckpoint) -> list[dict[str, Any]]:
    return render(
        helm,
        image="cpd",
        model={"path": str(checkpoint("qwen3"))},
        drainSeconds=0,
        settings={"lease-s": 2},
        routers={"settings": {"served-model-name": MODEL}},
        workers={"settings": {"dtype": "float32", "kv-memory": "64MiB"}},
        monitoring={"enabled": True},
        autoscaling={"enabled": True},
    )


@pytest.fixture
def pods(manifests: list[dict[str, Any]], tmp_path: Path, redis_url: str) -> Iterator[dict[str, Pod]]:
    components = {"router-a": "router", "combined-a": "combined", "combined-b": "combined", "prefill-a": "prefill"}
    pods = {}
    try:
        for name, component in components.items():
            pods[name] = Pod(manifests, component, name, tmp_path, redis_url)
        for pod in pods.values():
            eventually(partial(pod.passes, "readinessProbe"), f"{pod.name} is ready")
        yield pods
    finally:
        for pod in pods.values():
            pod.process.kill()
            pod.process.wait()


async def test_the_rendered_processes_serve_are_scraped_and_drain(
    pods: dict[str, Pod], manifests: list[dict[str, Any]]
) -> None:
    router = pods["router-a"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert await asyncio.to_thread(router.passes, probe)
    base = f"http://{HOST}:{router.ports['http']}"

    def uses_all() -> bool:
        listed = httpx.get(f"{base}/cluster", headers={"authorization": f"Bearer {OPERATOR}"}).json()["workers"]
        return [worker["state"] for worker in listed] == ["ready"] * 3

    await asyncio.to_thread(eventually, uses_all, "the router uses all workers")
    authorized = {"authorization": f"Bearer {CLIENT}"}
    async with httpx.AsyncClient(base_url=base, headers=authorized, timeout=60) as http:
        assert (await http.post("/v1/completions", headers={"authorization": ""}, json={})).status_code == 401
        assert len((await complete(http, list(range(1, 40)))).token_ids) == 16

        await _check_metrics(router, manifests)

        streams = [await begin(http, [index, *range(1, 100)], max_tokens=OUTPUT) for index in range(1, 5)]
        assert await asyncio.to_thread(pods["combined-a"].end) == 0
        answers = await asyncio.gather(*streams)
        assert [len(answer.token_ids) for answer in answers] == [OUTPUT] * len(streams)

    assert await asyncio.to_thread(router.end) == 0
    for name in ("router-a", "combined-b", "prefill-a"):
        parsed = filter(None, map(parse_line, pods[name].log.splitlines()))
        assert not [line.message for line in parsed if line.severe], "probes leave nothing in the log"


async def _check_metrics(router: Pod, manifests: list[dict[str, Any]]) -> None:
    """Scrapes the router as the PodMonitor says, and looks for what KEDA asks for."""
    (endpoint,) = named(manifests, "PodMonitor", RELEASE)["spec"]["podMetricsEndpoints"]
    url = f"{endpoint['scheme']}://{HOST}:{router.ports[endpoint['port']]}/metrics"
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
    async with httpx.AsyncClient(verify=False) as http:
        assert (await http.get(url, headers={"authorization": f"Bearer {CLIENT}"})).status_code == 403
        text = (await http.get(url, headers={"authorization": f"Bearer {OPERATOR}"})).raise_for_status().text
    for component in ("combined", "prefill"):
        (trigger,) = named(manifests, "ScaledObject", f"{RELEASE}-{component}")["spec"]["triggers"]
        for metric in re.findall(r"cpd_[a-z_]+", trigger["metadata"]["query"]):
            series = [line for line in text.splitlines() if line.startswith(f"{metric}{{")]
            assert [line for line in series if f'role="{component}"' in line], f"{metric} of {component}"
