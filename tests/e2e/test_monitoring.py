"""Dashboard and alerts ask for what a cluster really tells."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as families

from models import tiny
from tests.deploy.monitoring import ALERTS, PROMETHEUS, metrics_in, queries
from tests.e2e.cluster import START_S, Cluster, eventually
from tests.ports import free_port
from tests.programs import needs_prometheus

pytestmark = pytest.mark.e2e

SHORT, LONG = [7] * 20, [11] * 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name="tiny",
        simulate="h200-qwen3-8b",
        prefill=1,
        combined=2,
        long_prefill_tokens=200,
        kv_memory="1GiB",
    ) as running:
        yield running


def _work(cluster: Cluster) -> None:
    """A request over each route, with prompts that no cache has."""
    for prompt in (SHORT, LONG):
        body = {
            "model": "tiny",
            "prompt": [5 + time.monotonic_ns() % 500, *prompt],
            "max_tokens": 5,
            "ignore_eos": True,
        }
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=START_S).raise_for_status()


def _targets(cluster: Cluster) -> list[str]:
    groups = httpx.get(f"{cluster.url}/metrics/targets").raise_for_status().json()
    return [f"{group['labels']['__scheme__']}://{target}" for group in groups for target in group["targets"]]


def test_all_metrics_exist(cluster: Cluster) -> None:
    _work(cluster)
    eventually(lambda: bool(_targets(cluster)), "the router is listed")
    (target,) = _targets(cluster)
    text = httpx.get(f"{target}/metrics", verify=False).raise_for_status().text
    known = {sample.name for family in families(text) for sample in family.samples}
    known |= {f"{family.name}_total" for family in families(text) if family.type == "counter"}  # without a sample yet
    asked = {
        name for query in (*queries().values(), *(alert["expr"] for alert in ALERTS)) for name in metrics_in(query)
    }
    assert sorted(asked - known) == []
    assert len(asked) > 25


@needs_prometheus
def test_a_real_prometheus_has_an_answer_to_every_query(cluster: Cluster, tmp_path: Path) -> None:
    with _prometheus(cluster, tmp_path) as url:

        def ask(query: str) -> list[object]:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=START_S).json()
            assert answer["status"] == "success", (query, answer)
            found: list[object] = answer["data"]["result"]
            return [one for one in found if one["value"][1] != "NaN"]  # type: ignore[index]

        def without_data() -> list[str]:
            _work(cluster)
            return [name for name, query in queries().items() if not ask(query)]

        eventually(lambda: not without_data(), "every query has data")
        states = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert [rule["name"] for rule in states] == [alert["alert"] for alert in ALERTS]
        assert {rule["health"] for rule in states} <= {"ok", "unknown"}  # unknown: not evaluated yet


@contextmanager
def _prometheus(cluster: Cluster, directory: Path) -> Iterator[str]:
    """A Prometheus with this project's configuration in front of the cluster."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    discovery |= {"url": f"{cluster.url}/metrics/targets", "refresh_interval": "1s"}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address={url.removeprefix('http://')}", "--log.level=warn"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: _is_ready(url), "Prometheus is ready")
        yield url
    finally:
        process.terminate()
        process.wait(START_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
