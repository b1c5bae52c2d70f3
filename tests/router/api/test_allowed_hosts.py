"""Which `Host` headers a router accepts, over real connections."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from tests.router.conftest import Router, Says, StartRouter, StartWorker
from tests.waiting import DEADLINE_S

EVIL = "evil.example"
OPEN_PATHS = ("/livez", "/readyz", "/docs", "/openapi.json")
TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 50}


async def status(router: Router, host: str, path: str = "/v1/models") -> int:
    """The status of the response to a request for this host."""
    return (await router.http.get(path, headers={"host": host})).status_code


async def test_without_keys_loopback_answers_for_its_own_names_only(start_router: StartRouter) -> None:
    router = await start_router()
    for name in ("localhost", "LocalHost", "127.0.0.1", "[::1]"):
        for host in (name, f"{name}:8000", f"{name}:80"):
            assert await status(router, host) == 200, host
    for name in (
        EVIL,
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example.localhost",
        "::1",
        "127x0.0.1",
    ):
        for host in (name, f"{name}:8000"):
            assert await status(router, host) == 421, host
    assert await status(router, "localhost:8000.evil.example") == 421


async def test_the_error_names_the_host_and_the_setting(start_router: StartRouter) -> None:
    router = await start_router()
    response = await router.http.get("/v1/models", headers={"host": "llm.example:8000"})
    error: dict[str, Any] = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "host_not_allowed")
    assert "'llm.example:8000'" in error["message"]
    assert "--allowed-hosts" in error["message"]
    assert "x-request-id" in response.headers


async def test_a_refused_request_reaches_no_worker(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    worker = await start_worker(says("fox"))
    router = await start_router(worker)
    response = await router.http.post("/v1/completions", json=TEXT, headers={"host": EVIL})
    assert response.status_code == 421
    assert not worker.submits
    assert (await router.http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_every_route_that_shows_something_of_the_cluster_is_protected(start_router: StartRouter) -> None:
    router = await start_router()
    async with asyncio.timeout(DEADLINE_S):
        while not (routers := (await router.cluster())["routers"]):  # noqa: ASYNC110 - until it has read its own lease
            await asyncio.sleep(0.05)
    (one,) = routers
    async with httpx.AsyncClient(base_url=f"http://{one['admin']}", timeout=30) as admin:
        for http in (router.http, admin):
            for path in ("/metrics", "/metrics/targets", "/cluster", "/requests/x", "/nowhere"):
                assert (await http.get(path, headers={"host": EVIL})).status_code == 421, path
                assert (await http.get(path)).status_code != 421, path
            for path in OPEN_PATHS:
                assert (await http.get(path, headers={"host": EVIL})).status_code in (200, 503), path


@pytest.mark.parametrize("settings", [{"api_key": ["one"]}, {"host": "0.0.0.0"}, {"allowed_hosts": ["*"]}], ids=str)
async def test_any_host_is_allowed_with_keys_on_other_interfaces_or_if_told_so(
    start_router: StartRouter, settings: dict[str, Any]
) -> None:
    router = await start_router(**settings)
    assert await status(router, EVIL) == 200


@pytest.mark.parametrize("more", [{}, {"api_key": ["one"]}, {"host": "0.0.0.0"}], ids=str)
async def test_given_hosts_are_allowed_beside_its_own_names(start_router: StartRouter, more: dict[str, Any]) -> None:
    router = await start_router(allowed_hosts=["llm.example", "10.0.0.5", "[fe80::1]"], **more)
    for host in ("llm.example", "LLM.example:443", "10.0.0.5:8000", "[fe80::1]:8000", "localhost"):
        assert await status(router, host) == 200, host
    for host in (EVIL, "sub.llm.example", "llmxexample"):
        assert await status(router, host) == 421, host


async def test_the_advertised_address_is_allowed(start_router: StartRouter) -> None:
    router = await start_router(advertise_host="router.internal")
    assert await status(router, "router.internal:8000") == 200
    assert await status(router, EVIL) == 421


@pytest.mark.parametrize(("path", "expected"), [("/v1/models", b"421"), ("/livez", b"200")])
async def test_a_request_without_a_host(start_router: StartRouter, path: str, expected: bytes) -> None:
    router = await start_router()
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 " + expected)
