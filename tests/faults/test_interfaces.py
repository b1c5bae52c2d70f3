"""Machines with IPv6 addresses only, and machines with a second network for pages, under a real Ray. Needs root."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL
from tests.faults.network import available
from tests.faults.ray_cluster import RayCluster, ray_cluster
from tests.faults.ray_machines import ray_machines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.faults,
    pytest.mark.skipif(not available(), reason="simulated machines take root: network namespaces"),
]

PROMPT_TOKENS = 500


def prefill_remotely(cluster: RayCluster) -> None:
    """Sends a prompt that the prefill worker computes for the combined one."""
    body = {"model": MODEL, "prompt": [10 + place % 100 for place in range(PROMPT_TOKENS)], "max_tokens": 4}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert answer.headers["x-cpd-route"] == "remote"


def test_machines_with_ipv6_addresses_only_form_a_cluster(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with ray_machines(tmp_path, ipv6=True) as machines:
        machines.add("one", cpd_router=1, cpd_combined=1)
        machines.add("two", cpd_prefill=1)
        flags = ("--host=::", "--combined=1", "--prefill=1", "--long-prefill-tokens=64")
        with ray_cluster(machines, tmp_path, checkpoint("qwen3"), *flags) as cluster:
            prefill_remotely(cluster)
            assert all(worker["session"].startswith("[fd00:") for worker in cluster.workers().values())


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
def test_pages_go_over_the_network_that_is_named_for_them(
    checkpoint: MakeCheckpoint, tmp_path: Path, transport: str
) -> None:
    with ray_machines(tmp_path, environment={"UCX_NET_DEVICES": "eth1"}) as machines:
        machines.add("one", cpd_router=1, cpd_combined=1)
        machines.add("two", cpd_prefill=1)
        for name in ("one", "two"):
            machines.network.add_second_link(name)
        flags = (
            "--host=0.0.0.0",
            "--combined=1",
            "--prefill=1",
            "--long-prefill-tokens=64",
            f"--transport={transport}",
        )
        with ray_cluster(machines, tmp_path, checkpoint("qwen3"), *flags) as cluster:
            before = [machines.network.received_bytes("one", name) for name in ("eth0", "eth1")]
            prefill_remotely(cluster)
            after = [machines.network.received_bytes("one", name) for name in ("eth0", "eth1")]
            page_bytes = cluster.workers()["combined-0"]["info"]["page_bytes"]
    control, pages = (now - then for now, then in zip(after, before, strict=True))
    assert pages > PROMPT_TOKENS // 16 * page_bytes > control
