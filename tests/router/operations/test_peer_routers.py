"""Routers ask each other beyond one machine: with TLS, and only the router that holds the lease."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from cpd.common.membership import Member, lease, members
from cpd.common.tls import base_url, make_certificate, split_address, without_fingerprint
from cpd.common.trust import ClusterSecret
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.secret import SECRET

KEY = "open-sesame"
HEADERS = {"authorization": f"Bearer {KEY}"}
BEYOND: dict[str, Any] = {"host": "0.0.0.0", "advertise_host": "127.0.0.1", "api_key": [KEY]}
"""Settings of a router that other machines reach."""

TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 3}


@contextlib.asynccontextmanager
async def recorded(target: str | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, bytearray]]:
    """A server that keeps what it hears and passes it on to `target`, and the answers back; its address."""
    heard, tasks = bytearray(), set[asyncio.Task[None]]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                heard.extend(data)
                if writer is not None:
                    writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.closing(writer):
            if target is None:
                await copy(reader, None)
                return
            host, port, _ = split_address(target)
            back, onward = await asyncio.open_connection(host, port)
            with contextlib.closing(onward):
                await asyncio.wait(
                    [asyncio.create_task(copy(reader, onward)), asyncio.create_task(copy(back, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def listed(redis: Redis, cluster: str, admin: str) -> AsyncIterator[None]:
    """A lease of a router `other` whose admin port is at this address, signed with the cluster's secret."""
    member = Member("other", "router", "127.0.0.1:1", "h", 1, admin=admin)
    async with lease(redis, cluster, ClusterSecret(SECRET), member, 30, lambda: None):
        yield


async def admin_of(redis: Redis, cluster: str, name: str) -> str:
    (found,) = [one for one in await members(redis, cluster, ClusterSecret(SECRET)) if one.id == name]
    return found.admin


async def answer_of(router: Router, name: str) -> dict[str, Any]:
    """What the router's `/cluster` says of another router, once it knows it."""
    found: list[dict[str, Any]] = []

    async def is_known() -> bool:
        found[:] = [one for one in (await router.cluster())["routers"] if one["id"] == name]
        return bool(found)

    await eventually(is_known)
    return found[0]


async def test_a_recording_between_two_routers_has_no_key_no_question_and_no_answer(
    start_router: StartRouter, start_worker: StartWorker, says: Says, redis: Redis, cluster: str
) -> None:
    worker = await start_worker(says("the fox"))
    first = await start_router(worker, **BEYOND)
    second = await start_router(worker, name="router-b", **BEYOND)
    await second.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "who-asked-what"})
    admin = await admin_of(redis, cluster, "router-b")
    _, _, fingerprint = split_address(admin)
    async with recorded(admin) as (relay, heard):
        named = f"{relay}#{fingerprint.hex()}"
        async with listed(redis, cluster, named):
            assert (await answer_of(first, "other"))["error"] is None
            told = (await first.http.get("/requests/who-asked-what")).json()
    assert len(told["placements"]) == 2, "of router-b, asked directly and over the relay"
    assert len(heard) > 1000
    for said in (KEY, "who-asked-what", "authorization", "placements", "combined-0", ClusterSecret(SECRET).admin_key):
        assert said.encode() not in heard.lower(), said


@pytest.mark.parametrize("with_tls", [True, False])
async def test_an_impostor_at_the_address_of_another_router_hears_no_key(
    start_router: StartRouter, redis: Redis, cluster: str, with_tls: bool
) -> None:
    first = await start_router(**BEYOND)
    context = make_certificate().context if with_tls else None
    async with (
        recorded(None, context) as (address, heard),
        listed(redis, cluster, make_certificate().named_in(address)),
    ):
        error = (await answer_of(first, "other"))["error"]
    assert ("another certificate than its lease says" in error) if with_tls else error
    if with_tls:
        assert not heard
    assert KEY.encode() not in heard


async def test_beyond_one_machine_an_admin_port_answers_over_tls_and_callers_with_a_key(
    start_router: StartRouter, redis: Redis, cluster: str
) -> None:
    router = await start_router(**BEYOND)
    assert (await answer_of(router, "router-a"))["ready"] is False
    admin = await admin_of(redis, cluster, "router-a")
    place = without_fingerprint(admin)
    (group,) = (await router.http.get("/metrics/targets")).json()
    assert group == {"targets": [place], "labels": {"router": "router-a", "__scheme__": "https"}}
    url, verify = base_url(admin)
    async with httpx.AsyncClient(base_url=url, verify=verify, timeout=30) as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/cluster", "/metrics", "/requests/x"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=HEADERS)).status_code != 401
        assert (await client.post("/drain", headers={"authorization": "Bearer wrong"})).status_code == 401
    async with httpx.AsyncClient(timeout=30) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{place}/livez")
    async with httpx.AsyncClient(verify=base_url(make_certificate().named_in(place))[1], timeout=30) as client:
        with pytest.raises(httpx.ConnectError, match="another certificate"):
            await client.get(f"https://{place}/cluster", headers=HEADERS)


async def test_on_loopback_an_admin_port_has_no_tls(start_router: StartRouter, redis: Redis, cluster: str) -> None:
    router = await start_router()
    assert (await answer_of(router, "router-a"))["error"] is None
    admin = await admin_of(redis, cluster, "router-a")
    assert admin == without_fingerprint(admin)
    (group,) = (await router.http.get("/metrics/targets")).json()
    assert group["labels"]["__scheme__"] == "http"
