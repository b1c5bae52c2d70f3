import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.tenant_limits import TenantLimits
from router.api.tenants import Limits, Tenant
from router.errors import ApiError
from tests import waiting
from tests.router.conftest import Says, StartRouter, StartWorker

TEXT: dict[str, Any] = {"model": "small-model", "prompt": "Hello?", "max_tokens": 3}


def refusal(limits: TenantLimits, tenant: Tenant, now: float) -> ApiError | None:
    try:
        limits.admit(tenant, now)
    except ApiError as error:
        return error
    return None


class TestCalls:
    def test_so_many_are_in_flight(self) -> None:
        limits, tenant = TenantLimits(lambda: 1), Tenant("a", limits=Limits(requests=2))
        first, _ = limits.admit(tenant, 0.0), limits.admit(tenant, 0.0)
        error = refusal(limits, tenant, 1.0)
        assert error is not None
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert refusal(limits, Tenant("b", limits=tenant.limits), 1.0) is None
        first.end(1.0)
        assert refusal(limits, tenant, 1.0) is None

    def test_retry_after_follows_from_how_long_calls_take(self) -> None:
        limits, tenant = TenantLimits(lambda: 1), Tenant("a", limits=Limits(requests=2))
        now = 0.0
        for _ in range(100):
            admission = limits.admit(tenant, now)
            now += 20.0
            admission.end(now)
        for _ in range(2):
            limits.admit(tenant, now)
        error = refusal(limits, tenant, now)
        assert error is not None
        assert error.headers["retry-after"] == "10"  # two calls of 20 s end one every 10 s

    def test_routers_share_them(self) -> None:
        limits, tenant = TenantLimits(lambda: 2), Tenant("a", limits=Limits(requests=3))
        for _ in range(2):
            limits.admit(tenant, 0.0)
        assert refusal(limits, tenant, 0.0) is not None


class TestTokens:
    def test_calls_are_refused_while_tokens_are_owed(self) -> None:
        limits, tenant = TenantLimits(lambda: 1), Tenant("a", limits=Limits(tokens_per_minute=600))
        limits.admit(tenant, 0.0).charge(700)
        error = refusal(limits, tenant, 0.0)
        assert error is not None
        assert (error.status, error.headers["retry-after"]) == (429, "11")  # 101 at 10 a second
        assert refusal(limits, tenant, 9.9) is not None
        assert refusal(limits, tenant, 10.1) is None

    def test_the_bucket_holds_those_of_a_minute(self) -> None:
        limits, tenant = TenantLimits(lambda: 2), Tenant("a", limits=Limits(tokens_per_minute=600))
        limits.admit(tenant, 0.0).charge(10)
        headers = dict(limits.headers(tenant, 1e6))
        assert headers[b"x-ratelimit-limit-tokens"] == b"300"  # one of two routers
        assert headers[b"x-ratelimit-remaining-tokens"] == b"300"
        assert headers[b"x-ratelimit-reset-tokens"] == b"0.000s"


class TestBodies:
    def test_they_count_until_they_are_released(self) -> None:
        limits, tenant = TenantLimits(lambda: 1), Tenant("a", limits=Limits(body_memory=100))
        first, second = limits.admit(tenant, 0.0), limits.admit(tenant, 0.0)
        first.hold(60)
        with pytest.raises(ApiError) as refused:
            second.hold(60)
        assert refused.value.status == 429
        second.end(0.0)
        first.release_body()
        limits.admit(tenant, 0.0).hold(100)


def test_without_limits_there_are_no_headers() -> None:
    limits, tenant = TenantLimits(lambda: 1), Tenant("a")
    limits.admit(tenant, 0.0).charge(1 << 40)
    assert limits.headers(tenant, 0.0) == []
    assert refusal(limits, tenant, 0.0) is None


class TestOverHttp:
    async def test_the_key_file_has_limits_and_responses_show_them(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Path
    ) -> None:
        file = tmp_path / "keys.yaml"
        entries = "[{key: x, name: a, max_requests: 1}, {key: y, max_requests: 0, max_tokens_per_minute: 10}, {key: z}]"
        await asyncio.to_thread(file.write_text, entries)
        opened = asyncio.Event()

        async def gate(count: int) -> None:
            await opened.wait()

        worker = await start_worker(says("the fox", after=gate))
        router = await start_router(worker, api_key=["operator"], api_key_file=file, tenant_requests=7)

        async def post(key: str) -> httpx.Response:
            return await router.http.post("/v1/completions", json=TEXT, headers={"authorization": f"Bearer {key}"})

        first = asyncio.create_task(post("x"))
        await waiting.eventually(lambda: bool(worker.submits))
        refused = await post("x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(refused.headers["retry-after"]) >= 1
        opened.set()
        assert (await first).headers["x-ratelimit-limit-requests"] == "1"
        assert (await post("x")).status_code == 200

        assert (await post("y")).status_code == 200
        while (response := await post("y")).status_code == 200:
            assert response.headers["x-ratelimit-limit-tokens"] == "10"
        assert (response.status_code, response.json()["error"]["type"]) == (429, "tokens")
        assert (await post("z")).headers["x-ratelimit-limit-requests"] == "7"

    async def test_bodies_beyond_the_limit_are_refused(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("the fox")), tenant_body_memory=1000)
        assert (await router.http.post("/v1/completions", json=TEXT)).status_code == 200
        response = await router.http.post("/v1/completions", json=TEXT | {"prompt": "x" * 1000})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await router.http.post("/v1/completions", json=TEXT)).status_code == 200
