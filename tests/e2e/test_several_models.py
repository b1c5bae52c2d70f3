"""Two models in one cluster: each answers with its own weights, and neither notices what happens to the other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cpd.common.errors import CPDError
from deploy.role import change_role
from tests.conftest import MakeCheckpoint
from tests.e2e.client import Answer, begin, client, complete, complete_all
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

NAMES = ("first", "second")
LONG = 64


@pytest.fixture(scope="module")
def directories(checkpoint: MakeCheckpoint) -> dict[str, Path]:
    """Two checkpoints that differ in nothing but their weights: their text files have one digest."""
    return {name: checkpoint("qwen3", seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def oracles(directories: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(directory) for name, directory in directories.items()}


@pytest.fixture(scope="module")
def cluster(directories: dict[str, Path]) -> Iterator[Cluster]:
    models = [
        {"name": name, "aliases": [f"org/{name}"], "model": str(directory), "prefill": 1}
        for name, directory in directories.items()
    ]
    with Cluster(models=models, long_prefill_tokens=LONG, policy="round-robin", kv_checksum=True) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy_and_idle_afterwards(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_healthy()
    cluster.wait_until_idle()


async def test_each_model_answers_with_its_own_tokens_locally_and_remotely(
    cluster: Cluster, oracles: dict[str, Oracle]
) -> None:
    prompts = oracles["first"].prompts([10, 30, 100, 200], seed=1)
    answers: dict[str, list[Answer]] = {}
    for name, oracle in oracles.items():
        answers[name] = await complete_all(cluster.url, prompts, 2, model=f"org/{name}")
        for prompt, answer in zip(prompts, answers[name], strict=True):
            oracle.check(prompt, answer.token_ids)
            assert answer.worker == f"{name}-combined-0"
        assert [answer.route for answer in answers[name]] == ["local", "local", "remote", "remote"]
    assert [one.token_ids for one in answers["first"]] != [one.token_ids for one in answers["second"]]


async def test_a_killed_worker_of_one_model_leaves_the_streams_of_the_other_alone(
    cluster: Cluster, oracles: dict[str, Oracle]
) -> None:
    prompts = oracles["first"].prompts([20, 30, 40], seed=2)
    pid = cluster.pid("second-combined-0")
    async with client(cluster.url) as http:
        streams = {
            name: [await begin(http, prompt, model=name, max_tokens=300) for prompt in prompts] for name in NAMES
        }
        await asyncio.to_thread(cluster.kill, "first-combined-0")
        for name, oracle in oracles.items():
            for prompt, answer in zip(prompts, await asyncio.gather(*streams[name]), strict=True):
                assert len(answer.token_ids) == 300
                oracle.check(prompt, answer.token_ids)
        metrics = (await http.get("/metrics")).text
    assert (cluster.pid("second-combined-0"), cluster.starts("second-combined-0")) == (pid, 1)
    assert 'cpd_replays_total{model="second"} 0.0' in metrics.splitlines()


async def test_the_last_combined_worker_of_a_model_keeps_its_role(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path))
    with cluster.known(), pytest.raises(CPDError, match="is the last combined worker that is ready for first"):
        await asyncio.to_thread(change_role, "default", "first-combined-0", "prefill")


async def test_a_model_without_workers_says_so_and_the_other_goes_on(
    cluster: Cluster, oracles: dict[str, Oracle]
) -> None:
    (prompt,) = oracles["first"].prompts([20], seed=3)
    with cluster.without("second-combined-0", "second-prefill-0"):

        def unavailable() -> bool:
            body = {"model": "second", "prompt": prompt, "max_tokens": 1}
            return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90).status_code == 503

        await asyncio.to_thread(eventually, unavailable, "no worker serves the second model")
        async with client(cluster.url) as http:
            assert (await http.get("/readyz")).status_code == 200
            answer = await complete(http, prompt, model="first")
        oracles["first"].check(prompt, answer.token_ids)
