import asyncio

import httpx
import pytest

from router.api.client_limit import ClientLimit
from router.errors import ApiError
from tests import waiting
from tests.router.conftest import StartRouter, StartWorker

PROXIES = ["10.0.0.0/8", "::1"]


def test_a_client_has_so_many_connections() -> None:
    limit = ClientLimit(2)
    limit.open("a")
    limit.open("a")
    with pytest.raises(ApiError) as refused:
        limit.open("a")
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    limit.open("b")
    limit.close("a")
    limit.open("a")


def test_without_a_limit_any_number_is_open() -> None:
    limit = ClientLimit(0)
    for _ in range(5000):
        limit.open("a")


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("10.1.2.3", None),
        ("::1", None),
        ("", None),
        ("testclient", None),
    ],
)
def test_a_client_is_known_by_its_address(peer: str, client: str | None) -> None:
    assert ClientLimit(1, PROXIES).client(peer) == client


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("10.0.0.1", b"192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", b"198.51.100.7, 192.0.2.1", "192.0.2.1"),  # the first one may be invented
        ("10.0.0.1", b"192.0.2.1, 10.0.0.2", "192.0.2.1"),
        ("10.0.0.1", b"192.0.2.1:1234", "192.0.2.1"),
        ("10.0.0.1", b"[2001:db8::1]:1234", "2001:db8::/64"),
        ("10.0.0.1", b"unknown", None),
        ("10.0.0.1", b"10.0.0.2", None),
        ("10.0.0.1", b"", None),
        ("192.0.2.9", b"192.0.2.1", None),  # not a proxy
    ],
)
def test_only_a_trusted_proxy_names_other_clients(peer: str, header: bytes, client: str | None) -> None:
    assert ClientLimit(1, PROXIES).forwarded_client(peer, [(b"x-forwarded-for", header)]) == client


def test_each_proxy_may_add_a_header_of_its_own() -> None:
    headers = [(b"x-forwarded-for", name) for name in (b"198.51.100.7", b"192.0.2.1", b"10.0.0.2")]
    assert ClientLimit(1, PROXIES).forwarded_client("10.0.0.1", headers) == "192.0.2.1"


async def test_behind_a_trusted_proxy_requests_in_progress_count(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_connections_per_client=1, trusted_proxies=["127.0.0.0/8"])

    async def post(client: str) -> httpx.Response:
        body = {"model": "small-model", "prompt": "x"}
        return await router.http.post("/v1/completions", json=body, headers={"x-forwarded-for": client})

    first = asyncio.create_task(post("192.0.2.1"))
    await waiting.eventually(lambda: len(worker.submits) == 1)
    refused = await post("192.0.2.1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    second = asyncio.create_task(post("192.0.2.2"))
    await waiting.eventually(lambda: len(worker.submits) == 2)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
