"""Two machines under a real Ray, one of which is lost: all its processes at once, or its link. Needs root.

No stream fails. Ray starts the lost workers on the other machine if it has room, otherwise the cluster goes on without
them. When the machine comes back, it is used again.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeCheckpoint
from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.network import available
from tests.faults.ray_cluster import RayCluster, ray_cluster
from tests.faults.ray_machines import ray_machines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not available(), reason="simulated machines take root: network namespaces"),
]

CLIENTS, MAX_TOKENS = 4, 600


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@contextmanager
def running(directory: Path, model: Path, room: int) -> Iterator[RayCluster]:
    """Two workers on two machines with room for `room` workers each; the router is on machine `one`, with `cpd up`."""
    with ray_machines(directory) as machines:
        machines.add("one", cpd_router=1, cpd_combined=room)
        machines.add("two", cpd_combined=room)
        flags = ("--host=0.0.0.0", "--combined=2", "--prefill=0")
        with ray_cluster(machines, directory, model, *flags) as cluster:
            cluster.wait_for({"one": 1, "two": 1})
            yield cluster


async def under_streams(cluster: RayCluster, oracle: Oracle, happens: Callable[[], None]) -> None:
    """Streams run, one client's after the other, while something happens. None fails, and every token is right."""
    prompts = oracle.prompts([40] * CLIENTS, seed=1)
    ended = asyncio.Event()

    async def ask(http: httpx.AsyncClient, prompt: list[int]) -> None:
        expected = await complete(http, prompt, max_tokens=MAX_TOKENS)
        oracle.check(prompt, expected.token_ids)
        while not ended.is_set():
            answer = await complete(http, prompt, stream=True, max_tokens=MAX_TOKENS)
            assert answer.token_ids == expected.token_ids

    async with client(cluster.url) as http, asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(ask(http, prompt))
        try:
            await asyncio.to_thread(happens)
        finally:
            ended.set()


def both_run(cluster: RayCluster) -> bool:
    """True if two workers have streams."""
    return len([worker for worker in cluster.workers().values() if worker["load"]["running"]]) >= 2


async def test_the_other_machine_takes_over_and_the_lost_one_is_used_again(
    checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path
) -> None:
    with running(tmp_path, checkpoint("qwen3"), room=2) as cluster:

        def lose_and_return() -> None:
            cluster.wait_until(lambda: both_run(cluster), "both have streams")
            cluster.machines.lose("two")
            cluster.wait_for({"one": 2})
            cluster.wait_until(lambda: "runs again, on one" in cluster.said(), "cpd up says it")
            cluster.machines.start("two")
            cluster.wait_for({"one": 1, "two": 1})

        await under_streams(cluster, oracle, lose_and_return)
        assert cluster.said().count("two was lost; it starts on one") <= 1  # 0: Ray is quicker than `SILENT_S`
        assert cluster.said().count("runs again, on one") == 1


@pytest.mark.faults
async def test_without_room_the_cluster_goes_on_with_fewer_until_the_machine_is_back(
    checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path
) -> None:
    with running(tmp_path, checkpoint("qwen3"), room=1) as cluster:
        there = next(name for name, worker in cluster.workers().items() if worker["host"] == "two")
        reason = "two is lost, and no other machine has room (1 cpd_combined)"

        def lose_and_return() -> None:
            cluster.wait_until(lambda: both_run(cluster), "both have streams")
            cluster.machines.lose("two")
            cluster.wait_until(lambda: f"{there}: {reason}" in cluster.said(), "cpd up says it")
            cluster.wait_until(lambda: reason in cluster.run("status"), "cpd status says it")
            cluster.wait_for({"one": 1})
            cluster.machines.start("two")
            cluster.wait_for({"one": 1, "two": 1})

        await under_streams(cluster, oracle, lose_and_return)
        assert there in cluster.workers()
        cluster.wait_until(lambda: f"{there} runs again, on two" in cluster.said(), "cpd up says it")
        cluster.wait_until(lambda: reason not in cluster.run("status"), "cpd status does not show it any more")
        assert cluster.said().count(reason) == 1


@pytest.mark.faults
async def test_a_machine_that_is_cut_off_is_replaced_and_used_again_when_its_ray_is_started_again(
    checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path
) -> None:
    with running(tmp_path, checkpoint("qwen3"), room=2) as cluster:

        def cut_off_and_return() -> None:
            cluster.wait_until(lambda: both_run(cluster), "both have streams")
            cluster.machines.network.disconnect("two")
            cluster.wait_for({"one": 2})
            cluster.machines.network.reconnect("two")
            cluster.wait_until(lambda: cluster.machines.ended("two"), "Ray ends on the machine that was cut off")
            cluster.machines.start("two")
            cluster.wait_for({"one": 1, "two": 1})

        await under_streams(cluster, oracle, cut_off_and_return)


@pytest.mark.faults
def test_a_lost_worker_can_be_scaled_away(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with running(tmp_path, checkpoint("qwen3"), room=1) as cluster:
        cluster.machines.lose("two")
        cluster.wait_until(lambda: "no other machine has room" in cluster.said(), "cpd up says it")
        cluster.run("scale", "--combined", "1")
        cluster.wait_for({"one": 1})
        cluster.wait_until(lambda: "lost" not in cluster.run("status"), "cpd status does not show it any more")


@pytest.mark.faults
async def test_a_lost_router_and_prefill_worker_start_on_the_other_machine_while_a_planner_acts(
    checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path
) -> None:
    with ray_machines(tmp_path) as machines:
        machines.add("one", cpd_router=2, cpd_combined=2, cpd_prefill=1)
        machines.add("two", cpd_router=2, cpd_prefill=1)
        # The router that comes back to its machine must let streams end: other routers can't take them.
        flags = ("--host=0.0.0.0", "--combined=2", "--prefill=2", "--routers=2", "--planner=act", "--drain-s=30")
        with ray_cluster(machines, tmp_path, checkpoint("qwen3"), *flags) as cluster:
            cluster.wait_for({"one": 3, "two": 1})
            cluster.wait_until(lambda: cluster.routers() == {"one": 1, "two": 1}, "a router on each machine")

            def lose_and_return() -> None:
                cluster.wait_until(lambda: both_run(cluster), "both have streams")
                machines.lose("two")
                cluster.wait_until(lambda: cluster.routers() == {"one": 2}, "the router runs on the other machine")
                cluster.wait_for({"one": 3})
                machines.start("two")
                cluster.wait_until(lambda: cluster.routers() == {"one": 1, "two": 1}, "a router on each machine")
                cluster.wait_for({"one": 3, "two": 1})

            await under_streams(cluster, oracle, lose_and_return)
            cluster.wait_until(lambda: "of 4 workers prefill" in cluster.run("plan"), "the planner counts all workers")
