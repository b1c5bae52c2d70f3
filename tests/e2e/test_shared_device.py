"""Two models on a device with memory for one: both answer, streams go on where they were, and people may decide."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.model_commands import pin, sleep, wake
from tests.conftest import MakeCheckpoint
from tests.e2e.client import begin, client, complete
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

FAMILIES = {"first": "qwen3", "second": "llama3"}
LONG = 600


@pytest.fixture(scope="module")
def oracles(checkpoint: MakeCheckpoint) -> dict[str, Oracle]:
    return {name: Oracle(checkpoint(family)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def cluster(checkpoint: MakeCheckpoint) -> Iterator[Cluster]:
    models = [{"name": name, "model": str(checkpoint(family))} for name, family in FAMILIES.items()]
    shared: dict[str, Any] = {"device_memory": 80 << 20, "fairness": {"min_runtime": 0.5, "max_wait_time": 0.5}}
    with Cluster(models=models, kv_memory=64 << 20, sleep={"drain_timeout": 0.5}, **shared) as running:
        yield running


@pytest.fixture
def known(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Commands find the cluster."""
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path))
    with cluster.known():
        yield


def states(cluster: Cluster) -> dict[str, str]:
    return {model["name"]: model["state"] for model in cluster.state()["models"]}


async def test_streams_are_parked_and_go_on_while_both_models_are_asked_by_turns(
    cluster: Cluster, oracles: dict[str, Oracle]
) -> None:
    prompts = {name: oracle.prompts([20, 40], seed=1) for name, oracle in oracles.items()}
    async with client(cluster.url) as http:
        streams = {}
        for name in FAMILIES:  # the second one displaces the first
            streams[name] = await begin(http, prompts[name][0], model=name, max_tokens=LONG)
        for name in FAMILIES:
            answer = await complete(http, prompts[name][1], model=name)
            oracles[name].check(prompts[name][1], answer.token_ids)
        for name, stream in streams.items():
            answer = await stream
            assert len(answer.token_ids) == LONG
            oracles[name].check(prompts[name][0], answer.token_ids)
        metrics = (await http.get("/metrics")).text
    wakes = [line for line in metrics.splitlines() if line.startswith("cpd_worker_wakes_total")]
    assert all(float(line.split()[-1]) >= 1 for line in wakes)
    assert len(wakes) == len(FAMILIES)
    await asyncio.to_thread(cluster.wait_until_idle)


@pytest.mark.usefixtures("known")
async def test_people_may_decide_which_model_is_awake(cluster: Cluster, oracles: dict[str, Oracle]) -> None:
    def told(command: Any, name: str, **options: Any) -> None:
        command("default", name, **options)

    await asyncio.to_thread(told, wake, "first")
    await asyncio.to_thread(eventually, lambda: states(cluster) == {"first": "serving", "second": "asleep"}, "a wake")
    await asyncio.to_thread(told, sleep, "first")
    await asyncio.to_thread(eventually, lambda: set(states(cluster).values()) == {"asleep"}, "a sleep")
    await asyncio.to_thread(told, wake, "second")
    await asyncio.to_thread(told, pin, "second", pinned=True)
    await asyncio.to_thread(eventually, lambda: states(cluster)["second"] == "serving", "another wake")
    (prompt,) = oracles["first"].prompts([20], seed=2)
    body = {"model": "first", "prompt": prompt, "max_tokens": 1}
    async with client(cluster.url) as http:
        refused = await http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "wake_failed")
        assert "second" in refused.json()["error"]["message"]
        await asyncio.to_thread(told, pin, "second", pinned=False)
        answer = await complete(http, prompt, model="first")
    oracles["first"].check(prompt, answer.token_ids)
