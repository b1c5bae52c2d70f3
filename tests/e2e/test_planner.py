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
import orjson
import pytest

from cpd.common.errors import CPDError
from cpd.performance.model import Profile
from deploy.plan import show_plan
from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, Answer, client, complete
from tests.e2e.cluster import Cluster, eventually
from tests.e2e.oracle import Oracle
from tests.secret import secret_file

pytestmark = pytest.mark.e2e

PROGRAM = [sys.executable, "-P", "-m", "deploy.planner"]
SLOWER = 20.0
LONG, CLIENTS = 1500, 4


def _slow_profile(path: Path) -> Path:
    """Writes the profile of a device on which a long prompt takes a second."""
    profile = orjson.loads(Profile.load("h200-qwen3-8b").model_dump_json(by_alias=True))
    for share in profile["shares"]:
        for cost in (share["decode"], share["prefill"]):
            for name, value in cost.items():
                if name == "tokens_ms":
                    cost[name] = [SLOWER * ms for ms in value]
                elif name.endswith("_ms"):
                    cost[name] = SLOWER * value
    path.write_bytes(orjson.dumps(profile))
    return path


@pytest.fixture
def cluster(checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path))
    settings = {"prefill": 0, "combined": 3, "policy": "round-robin", "long_prefill_tokens": 64}
    profile = str(_slow_profile(tmp_path / "slow.json"))
    with (
        Cluster(model=str(checkpoint("qwen3")), served_model_name=MODEL, profile=profile, **settings) as running,
        running.known(),
    ):
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


async def test_long_prompts_make_combined_workers_prefill_workers(
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
    assert asked[-1][1].route == "remote"
    for prompt, answer in asked[::-10]:
        oracle.check(prompt, answer.token_ids)

    # what the planner says, and where
    (change,) = cluster.state()["plan"]["changes"]
    names, count = change["workers"], change["after"]
    assert _prefill_workers(cluster.state()) == sorted(names)
    show_plan("default", False)
    shown = capsys.readouterr().out
    assert f"{count} of 3 workers prefill" in shown
    assert f"0 to {count} ({', '.join(names)}): " in shown
    assert "The planner changes roles." in shown
    log = await asyncio.to_thread(planner.read_text)
    assert f"The planner makes {', '.join(names)} " in log
    assert f'cpd_planner_prefill_workers{{which="present"}} {count}.0' in metrics
    assert "cpd_planner_changes_total 1.0" in metrics

    # a worker that is started again has its first role, until the planner notices
    await asyncio.to_thread(cluster.kill, names[0])
    await until(lambda: names[0] not in _prefill_workers(cluster.state()), f"{names[0]} is lost")
    await until(lambda: names[0] in _prefill_workers(cluster.state()), f"{names[0]} prefills again")
    assert cluster.state()["plan"]["changes_total"] == 1


async def test_a_cluster_without_planner_says_so(cluster: Cluster) -> None:
    with pytest.raises(CPDError, match="has no planner: start it with --planner advise"):
        await asyncio.to_thread(show_plan, "default", False)
