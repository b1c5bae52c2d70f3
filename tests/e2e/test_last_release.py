"""Processes of the last release and of this code serve one cluster together, as they do during an upgrade.

`last_release.txt` names the release's commit. The cluster has a router, a combined and a prefill worker of each;
requests take every way through them, and streams move between the two combined workers with their pages.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, begin, client, complete
from tests.e2e.cluster import START_S, Cluster, runs_code_of
from tests.e2e.oracle import Oracle

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LAST_RELEASE = (Path(__file__).parent / "last_release.txt").read_text().strip()
OLD, NEW = 0, 1
"""Number in the names of the processes."""
LONG = 64
STREAMS, STREAM_TOKENS = 8, 400


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the last release."""
    git = ["git", "-C", str(ROOT)]
    if shutil.which("git") is None or subprocess.run([*git, "cat-file", "-e", f"{LAST_RELEASE}^{{commit}}"]).returncode:
        pytest.skip(f"the last release, commit {LAST_RELEASE}, is not here: clone the whole history")
    tree = tmp_path_factory.mktemp("release")
    archive = subprocess.run([*git, "archive", LAST_RELEASE], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    where = [sys.executable, "-P", "-c", "import router; print(router.__file__)"]
    imported = subprocess.run(where, env=runs_code_of(tree, os.environ), capture_output=True, text=True, check=True)
    assert Path(imported.stdout.strip()).is_relative_to(tree)
    return tree


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


class Mixed:
    """A cluster with processes of both versions, and the URL of the router of each."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.urls = {"old": cluster.url, "new": cluster.add_router()}


@pytest.fixture(scope="module")
def mixed(release: Path, checkpoint: MakeCheckpoint) -> Iterator[Mixed]:
    code = {f"{role}-{OLD}": release for role in ("combined", "prefill", "router")}
    with Cluster(
        code,
        model=str(checkpoint("qwen3")),
        served_model_name=MODEL,
        combined=2,
        prefill=2,
        routers=1,
        long_prefill_tokens=LONG,
        policy="round-robin",
        drain_s=0.0,
        kv_checksum=True,
    ) as cluster:
        yield Mixed(cluster)


@pytest.mark.parametrize("router", ["old", "new"])
async def test_requests_take_every_way_through_old_and_new_workers(mixed: Mixed, oracle: Oracle, router: str) -> None:
    ways = {(f"combined-{decode}", f"prefill-{prefill}") for decode in (OLD, NEW) for prefill in (OLD, NEW)}
    deadline = time.monotonic() + START_S
    seed = {"old": 0, "new": 100}[router]
    async with client(mixed.urls[router]) as http:
        while ways:
            assert time.monotonic() < deadline, f"no request went to {ways}"
            seed += 1
            (prompt,) = oracle.prompts([LONG + 36 + seed], seed=seed)
            name = f"{router}-{seed}"
            answer = await complete(http, prompt, stream=seed % 2 == 1, headers={"x-request-id": name})
            oracle.check(prompt, answer.token_ids)
            assert (len(answer.token_ids), answer.route) == (16, "remote")
            (placement,) = (await http.get(f"/requests/{name}")).json()["placements"]
            ways.discard((placement["predicted"]["decode"], placement["actual"]["prefill"]))


@pytest.mark.parametrize("router", ["old", "new"])
@pytest.mark.parametrize("source", [OLD, NEW])
async def test_streams_move_with_their_pages_between_old_and_new_workers(
    mixed: Mixed, oracle: Oracle, router: str, source: int
) -> None:
    cluster, target, leaving = mixed.cluster, f"combined-{1 - source}", f"combined-{source}"
    lengths = [30, 100, 200, 400] * (STREAMS // 4)
    prompts = oracle.prompts(lengths, seed={"old": 200, "new": 300}[router] + source)
    before = _fetches(cluster, target)
    async with client(mixed.urls[router]) as http:
        moved_before = await _moved(http)
        streams = await asyncio.gather(*(begin(http, prompt, max_tokens=STREAM_TOKENS) for prompt in prompts))
        cluster.send(leaving, signal.SIGTERM)
        for prompt, answer in zip(prompts, await asyncio.gather(*streams), strict=True):
            oracle.check(prompt, answer.token_ids)
            assert len(answer.token_ids) == STREAM_TOKENS
        assert await _moved(http) > moved_before
    assert _fetches(cluster, target) > before
    await asyncio.to_thread(cluster.wait_until_healthy)


def _fetches(cluster: Cluster, worker: str) -> int:
    (load,) = (one["load"] for one in cluster.state()["workers"] if one["id"] == worker)
    return int((load or {}).get("prefix_fetches", {}).get("completed", 0))


async def _moved(http: httpx.AsyncClient) -> float:
    found = re.search(r'cpd_moves_total\{outcome="moved"\} (\S+)', (await http.get("/metrics")).text)
    return float(found[1]) if found else 0.0
