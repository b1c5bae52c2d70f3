"""A planner changes the roles of a running cluster as its load demands, and gives a restarted worker its role back."""

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpd.common.errors import CPDError
from deploy.plan import show_plan
from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, Answer, client, complete
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle
from tests.secret import secret_file

pytestmark = pytest.mark.e2e

PROGRAM = [sys.executable, "-P", "-m", "deploy.planner"]
LONG, CLIENTS = 600, 4


@pytest.fixture
def cluster(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path))
    settings = {"prefill": 2, "combined": 1, "policy": "round-robin", "long_prefill_tokens": 64}
    with Cluster(model=str(checkpoint("qwen3")), served_model_name=MODEL, **settings) as running, running.known():
        yield running


@pytest.fixture
def planner(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Runs a planner; returns the file with its log."""
    flags = ["--redis-url", cluster.settings.redis_url, "--secret-file", str(secret_file()), "--planner", "act"]
    log = tmp_path / "planner.log"
    with log.open("wb") as file, subprocess.Popen([*PROGRAM, *flags], stdout=file, stderr=file) as process:
        try:
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, log.read_text()


def _prefill_workers(state: dict[str, Any]) -> list[str]:
    return [one["id"] for one in state["workers"] if one["role"] == "prefill"]


async def test_prefill_workers_that_gain_nothing_become_combined_workers(
    checkpoint: MakeCheckpoint, cluster: Cluster, planner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = Oracle(checkpoint("qwen3"))
    prompts = itertools.cycle(oracle.prompts([LONG] * 400, seed=21))
    asked: list[tuple[list[int], Answer]] = []

    async def until(condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(eventually, condition, what)

    async def ask(http: httpx.AsyncClient, ended: asyncio.Event) -> None:
        while not ended.is_set():
            prompt = next(prompts)
            asked.append((prompt, await complete(http, prompt)))

    await until(lambda: cluster.state()["plan"] is not None, "the planner plans")
    ended = asyncio.Event()
    async with client(cluster.url) as http, asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(ask(http, ended))
        await until(lambda: cluster.state()["plan"]["changes_total"] == 1, "a role changes")
        ended.set()
    async with client(cluster.url) as http:
        last = next(prompts)
        asked.append((last, await complete(http, last)))
        metrics = (await http.get("/metrics")).text
    assert asked[0][1].route == "remote"
    assert asked[-1][1].route == "local"
    for prompt, answer in asked[::-10]:
        oracle.check(prompt, answer.token_ids)

    # what the planner says, and where
    (change,) = cluster.state()["plan"]["changes"]
    assert sorted(change["workers"]) == ["prefill-0", "prefill-1"]
    assert not _prefill_workers(cluster.state())
    show_plan("default", False)
    shown = capsys.readouterr().out
    assert "The planner changes roles." in shown
    assert "0 of 3 workers prefill, they stay" in shown
    assert f"2 to 0 ({', '.join(change['workers'])}): " in shown
    log = await asyncio.to_thread(planner.read_text)
    assert f"The planner makes {', '.join(change['workers'])} combined workers: 0 of 3 prefill now" in log
    assert 'cpd_planner_prefill_workers{which="present"} 0.0' in metrics
    assert "cpd_planner_changes_total 1.0" in metrics

    # a worker that is started again has its first role, until the planner notices
    await asyncio.to_thread(cluster.kill, "prefill-0")
    again = "prefill-0 has restarted; the planner makes it a combined worker again"
    await until(lambda: again in planner.read_text(), "the planner gives it its role back")
    await until(lambda: not _prefill_workers(cluster.state()), "the router knows it")
    assert cluster.state()["plan"]["changes_total"] == 1


async def test_a_cluster_without_planner_says_so(cluster: Cluster) -> None:
    with pytest.raises(CPDError, match="has no planner: start it with --planner advise"):
        await asyncio.to_thread(show_plan, "default", False)
