"""Clusters on two machines, under a real Ray: with IPv6 addresses only, and with a network of its own for pages.

Needs root.
"""

from pathlib import Path

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

FLAGS = ("--combined=1", "--prefill=1", "--long-prefill-tokens=64")
LONG = 2000


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


async def ask(cluster: RayCluster, oracle: Oracle) -> None:
    """A short prompt is answered on one machine; a long one is computed on the other."""
    cluster.wait_for({"one": 1, "two": 1})
    short, long = oracle.prompts([40, LONG], seed=1)
    async with client(cluster.url) as http:
        for prompt, route in ((short, "local"), (long, "remote")):
            answer = await complete(http, prompt)
            oracle.check(prompt, answer.token_ids)
            assert answer.route == route
    assert {worker["info"]["transport"] for worker in cluster.workers().values()} == {"nixl"}


async def test_machines_that_have_only_ipv6_addresses(
    checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path
) -> None:
    with ray_machines(tmp_path, ipv6=True) as machines:
        machines.add("one", cpd_router=1, cpd_combined=1)
        machines.add("two", cpd_prefill=1)
        with ray_cluster(machines, tmp_path, checkpoint("qwen3"), "--host=::", *FLAGS) as cluster:
            await ask(cluster, oracle)
            assert "prefill-0" in cluster.run("status")


@pytest.mark.faults
async def test_pages_take_a_network_of_their_own(checkpoint: MakeCheckpoint, oracle: Oracle, tmp_path: Path) -> None:
    with ray_machines(tmp_path) as machines:
        machines.add("one", second_network=True, cpd_router=1, cpd_combined=1)
        machines.add("two", second_network=True, cpd_prefill=1)
        with ray_cluster(machines, tmp_path, checkpoint("qwen3"), "--host=0.0.0.0", *FLAGS) as cluster:
            before = [machines.network.sent_bytes("two", name) for name in ("eth0", "eth1")]
            await ask(cluster, oracle)
            (worker,) = (one for one in cluster.workers().values() if one["host"] == "two")
            pages = LONG // worker["info"]["block_size"] * worker["info"]["page_bytes"]
            control, data = (machines.network.sent_bytes("two", name) for name in ("eth0", "eth1"))
            assert data - before[1] > pages
            assert control - before[0] < pages / 10
