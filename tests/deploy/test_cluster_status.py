import asyncio
import contextlib
import os
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import orjson
import pytest
from redis.asyncio import Redis

from cpd.common.errors import CPDError
from cpd.common.membership import Member, lease
from cpd.common.tls import make_certificate
from cpd.common.trust import ClusterSecret
from deploy.cluster_status import has_workers, read_cluster
from deploy.endpoint import pick_port, url_of
from deploy.state import ClusterState
from tests.secret import SECRET, secret_file


class Handler(BaseHTTPRequestHandler):
    """A router's `/cluster` for callers with the key."""

    document: ClassVar[dict[str, Any]] = {}
    heard: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.heard.append(f"{self.path} {self.headers['authorization']}")
        body = orjson.dumps(self.document)
        wrong = self.path == "/cluster" and self.headers["authorization"] != "Bearer key"
        self.send_response(401 if wrong else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(
    document: dict[str, Any], heard: list[str] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A router that answers with this document; `host:port`."""
    handler = type("Handler", (Handler,), {"document": document, "heard": [] if heard is None else heard})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def seen_by(*routers: str, workers: dict[str, int] | None = None) -> dict[str, Any]:
    """What the first of the routers says of the workers, which it can use."""
    known = [
        {"id": name, "pid": pid, "routers": {routers[0]: {"state": "ready"}}} for name, pid in (workers or {}).items()
    ]
    return {"ready": True, "trusted": True, "workers": known, "routers": [{"id": name} for name in routers]}


def found_at(url: str, admin_key: str = "key", **more: str) -> ClusterState:
    return ClusterState("c", os.getpid(), url, ray_dir="", admin_key=admin_key, launch="1", **more)


# ---- a router on this machine ----


@pytest.fixture
def state() -> Iterator[ClusterState]:
    here = {"r": {"state": "ready"}, "s": {"state": "ready"}}
    half = {"r": {"state": "ready"}, "s": {"state": "syncing"}}
    workers = [{"id": "a", "pid": 1, "routers": here}, {"id": "b", "pid": 2, "routers": half}]
    with served({"workers": workers}) as address:
        yield found_at(f"http://{address}")


def test_the_cluster_is_read_with_the_key(state: ClusterState) -> None:
    assert [worker["id"] for worker in read_cluster(state)["workers"]] == ["a", "b"]
    with pytest.raises(CPDError, match="401"):
        read_cluster(found_at(state.url, ""))


def test_proxy_variables_are_ignored(state: ClusterState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert read_cluster(state)["workers"]


def test_a_cluster_is_ready_when_all_routers_can_use_all_workers(state: ClusterState) -> None:
    assert has_workers(state, {"a": 1}, ["r", "s"])
    assert has_workers(state, {"a": 1, "b": 2}, ["r"])
    assert not has_workers(state, {"a": 1, "b": 2}, ["r", "s"])
    assert not has_workers(state, {"a": 1}, ["r", "s", "t"])
    assert not has_workers(state, {"a": 2}, ["r"])
    assert not has_workers(state, {"a": 1, "c": 3}, ["r"])
    assert not has_workers(found_at(state.url, "wrong"), {"a": 1}, ["r"])


def test_an_endpoint_that_does_not_answer_is_an_error() -> None:
    url = url_of("127.0.0.1", pick_port("127.0.0.1", 0))
    assert not has_workers(found_at(url), {}, [])
    with pytest.raises(CPDError, match=f"{url} does not answer: .*refused"):
        read_cluster(found_at(url))


# ---- routers on other machines only ----


@contextlib.contextmanager
def listed(redis_url: str, cluster: str, **admins: str) -> Iterator[ClusterState]:
    """Leases of routers with these admin ports; the cluster as its launcher describes it."""

    async def hold(begun: threading.Event, ended: threading.Event) -> None:
        async with Redis.from_url(redis_url) as redis, contextlib.AsyncExitStack() as stack:
            for name, admin in admins.items():
                member = Member(name, "router", "elsewhere:1", "elsewhere", 1, admin=admin)
                held = lease(redis, cluster, ClusterSecret(SECRET), member, 30, lambda: None)
                await stack.enter_async_context(held)
                while not (await redis.hexists(f"cpd:{cluster}:leases", name)):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            begun.set()
            await asyncio.to_thread(ended.wait)

    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(hold(begun, ended)))
    thread.start()
    try:
        assert begun.wait(30)
        yield ClusterState(
            cluster, os.getpid(), "http://elsewhere:1", "", "key", "1", redis_url, str(secret_file(SECRET))
        )
    finally:
        ended.set()
        thread.join()


def test_routers_on_other_machines_are_asked_at_their_admin_ports(redis_url: str) -> None:
    first, second = make_certificate(), make_certificate()
    with (
        served(seen_by("r", "s", workers={"a": 1}), tls=first.context) as r,
        served(seen_by("s", "r", workers={"a": 1, "b": 2}), tls=second.context) as s,
        listed(redis_url, "asked", r=first.named_in(r), s=second.named_in(s)) as state,
    ):
        assert has_workers(state, {"a": 1}, ["r", "s"])
        assert has_workers(state, {"b": 2}, ["s"])
        assert not has_workers(state, {"b": 2}, ["r"])
        assert {router["id"]: router["ready"] for router in read_cluster(state)["routers"]} == {"r": True, "s": True}


def test_an_impostor_at_the_address_of_a_router_hears_no_key(redis_url: str) -> None:
    heard: list[str] = []
    with (
        served(seen_by("r"), heard, make_certificate().context) as address,
        listed(redis_url, "impostor", r=make_certificate().named_in(address)) as state,
        pytest.raises(CPDError, match=r"no router answers: r: .*another certificate than its lease says"),
    ):
        read_cluster(state)
    assert heard == []


def test_without_routers_or_redis_the_error_says_so(redis_url: str) -> None:
    with listed(redis_url, "empty") as state, pytest.raises(CPDError, match="no router runs"):
        read_cluster(state)
    away = found_at("http://elsewhere:1", redis_url="redis://127.0.0.1:9", secret_file=str(secret_file(SECRET)))
    with pytest.raises(CPDError, match=r"Redis at .*127\.0\.0\.1:9 does not answer"):
        read_cluster(away)
