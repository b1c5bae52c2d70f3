"""Web pages of other sites may use the API if the operator allows it."""

import pytest

from tests.router.conftest import Router, Says, StartRouter, StartWorker

PAGE = "https://app.example"
TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 5}


async def _preflight(router: Router, origin: str, path: str = "/v1/completions") -> dict[str, str]:
    """Headers of the answer to what a browser asks before a page's request."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-api-key,anthropic-version",
    }
    return dict((await router.http.options(path, headers=headers)).headers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_page_of_an_allowed_site_may_send_requests_and_read_responses(
    start_router: StartRouter, start_worker: StartWorker, says: Says, path: str
) -> None:
    router = await start_router(await start_worker(says("Yes.")), allowed_origins=[PAGE, "http://localhost:3000"])
    for origin in (PAGE, "http://localhost:3000"):
        allowed = await _preflight(router, origin, path)
        assert allowed["access-control-allow-origin"] == origin
        assert "POST" in allowed["access-control-allow-methods"]
        headers = allowed["access-control-allow-headers"]
        assert all(name in headers for name in ("authorization", "content-type", "x-api-key", "anthropic-version"))
        assert "access-control-allow-credentials" not in allowed
    answer = await router.http.post("/v1/completions", json=TEXT, headers={"origin": PAGE})
    assert answer.json()["choices"][0]["text"] == "Yes."
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    wrong = await router.http.post("/v1/completions", json={}, headers={"origin": PAGE})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_other_pages_get_no_permission(start_router: StartRouter) -> None:
    router = await start_router(allowed_origins=[PAGE])
    for origin in ("https://evil.example", "http://app.example", "https://app.example.evil", "null"):
        assert "access-control-allow-origin" not in await _preflight(router, origin)
        answer = await router.http.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers


async def test_any_page_may_be_allowed(start_router: StartRouter) -> None:
    router = await start_router(allowed_origins=["*"])
    assert (await _preflight(router, "https://any.example"))["access-control-allow-origin"] == "*"


async def test_by_default_no_page_is_allowed(start_router: StartRouter) -> None:
    router = await start_router()
    answer = await router.http.options("/v1/completions", headers={"origin": PAGE})
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in await _preflight(router, PAGE))


async def test_a_page_still_needs_a_key(start_router: StartRouter) -> None:
    router = await start_router(allowed_origins=[PAGE], api_key=["one"])
    answer = await router.http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer two"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, PAGE)
