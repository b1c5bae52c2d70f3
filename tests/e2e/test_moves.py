"""A worker drains under load: its streams go on elsewhere, every token is right, and nothing leaks."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpd.common.process import EXIT_DRAINED
from deploy.drain import drain
from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, begin, client
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

STREAMS, OUTPUT = 8, 900


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def cluster(checkpoint: MakeCheckpoint) -> Iterator[Cluster]:
    settings = {"prefill": 0, "combined": 2, "routers": 1, "kv_checksum": True}
    with Cluster(model=str(checkpoint("qwen3")), served_model_name=MODEL, **settings) as running:
        yield running


async def test_the_streams_of_a_draining_worker_move_and_every_token_is_right(
    cluster: Cluster, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lengths = [30, 100, 200, 400] * (STREAMS // 4)
    prompts = oracle.prompts(lengths, seed=7)
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    async with client(cluster.url) as http:
        streams = await asyncio.gather(
            *(
                begin(http, prompt, max_tokens=OUTPUT, **(sampled if index % 2 else {}))
                for index, prompt in enumerate(prompts)
            )
        )
        with cluster.known():
            await asyncio.to_thread(drain, "default", "combined-0", 0.0)
        await asyncio.to_thread(
            eventually, lambda: cluster.exit_code("combined-0") == EXIT_DRAINED, "the supervisor has seen it"
        )
        answers = await asyncio.gather(*streams)
        metrics = (await http.get("/metrics")).text
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.token_ids) == OUTPUT
        oracle.check(prompt, answer.token_ids, **(sampled if index % 2 else {}))
    moved = re.search(r'cpd_moves_total\{outcome="moved"\} (\S+)', metrics)
    assert moved is not None
    assert float(moved[1]) >= 1
    loads = {one["id"]: one["load"] for one in cluster.state()["workers"]}
    assert loads["combined-1"]["prefix_fetches"].get("completed", 0) >= 1
    await asyncio.to_thread(cluster.wait_until_idle)
