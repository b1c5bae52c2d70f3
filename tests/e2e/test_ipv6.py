"""A cluster whose processes listen on an IPv6 address: sessions, prefills, pages, HTTP, gRPC, admin ports, commands."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from deploy.drain import drain
from deploy.remote import status
from deploy.trace import trace
from models import tiny
from tests.e2e.client import MODEL
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"combined": 2, "prefill": 1, "routers": 2, "long_prefill_tokens": 64}
    with Cluster(host="::1", model=str(tiny.CHECKPOINT), served_model_name=MODEL, **settings) as running:
        yield running


def test_clients_reach_it_by_its_address(cluster: Cluster) -> None:
    assert cluster.url.startswith("http://[::1]:")
    chat = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none").chat.completions
    answer = chat.create(model=MODEL, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_another_name_is_refused_as_on_any_loopback_address(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/v1/models", headers={"host": "evil.example:80"}).status_code == 421


def test_prompts_are_prefilled_by_the_other_worker(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "long " * 200, "max_tokens": 4}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert answer.headers["x-cpd-route"] == "remote"
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_routers_and_workers_advertise_addresses_that_others_can_parse(cluster: Cluster) -> None:
    state = cluster.state()
    addresses = [worker[name] for worker in state["workers"] for name in ("address", "session")]
    addresses += [router[name] for router in state["routers"] for name in ("address", "admin")]
    assert all(address.startswith("[::1]:") for address in addresses)
    assert not any(router.get("error") for router in state["routers"]), "the routers do not reach each other"


def test_the_commands_reach_workers_and_routers(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "run"))
    with cluster.known():
        status("default", as_json=False)
        assert "at http://[::1]:" in capsys.readouterr().out
        trace("default", "", 600.0, chrome=False)
        assert '"worker":"prefill-0"' in capsys.readouterr().out  # it has computed a prompt
        for name in ("combined-1", "router-1"):
            drain("default", name, 30.0)
            assert f"{name} has ended" in capsys.readouterr().out
