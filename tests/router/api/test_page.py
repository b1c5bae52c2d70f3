"""The page's files are served to everybody and load nothing from elsewhere; what a key may do is told to its holder."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import router.page
from tests.router.conftest import Router, Says, StartRouter, StartWorker

STATIC = Path(router.page.__file__).parent / "static"
KEYS = """
- key: user
  name: search-team
  models: [small-model]
- key: operator
  admin: true
"""


@pytest.fixture
async def with_keys(start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Path) -> Router:
    """A router with keys, and one worker."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    worker = await start_worker(says("fox"))
    return await start_router(worker, api_key=["plain"], api_key_file=tmp_path / "keys.yaml")


async def _get(router: Router, path: str, key: str = "", **headers: str) -> httpx.Response:
    sent = headers | ({"authorization": f"Bearer {key}"} if key else {})
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        return await client.get(path, headers=sent)


async def _linked(router: Router) -> dict[str, httpx.Response]:
    """The page's start and every file that it or another file refers to, by path, asked for without a key."""
    found: dict[str, httpx.Response] = {}
    paths = ["/"]
    while paths:
        path = paths.pop()
        if path in found:
            continue
        found[path] = response = await _get(router, path)
        assert response.status_code == 200, path
        paths += [f"/{name}" for name in re.findall(r'(?:href|src)="(page/[\w.]+)"', response.text) if path == "/"]
        paths += [f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', response.text)]
    return found


async def test_all_files_are_reached_without_a_key(with_keys: Router) -> None:
    files = await _linked(with_keys)
    assert {path.rpartition("/")[2] or "index.html" for path in files} == {file.name for file in STATIC.iterdir()}
    types = {path: response.headers["content-type"] for path, response in files.items()}
    assert types["/"] == "text/html; charset=utf-8"
    assert types["/page/app.js"] == "text/javascript; charset=utf-8"
    assert types["/page/style.css"] == "text/css; charset=utf-8"
    assert types["/page/icon.svg"] == "image/svg+xml"


async def test_no_file_allows_inline_code_or_another_host(with_keys: Router) -> None:
    for path, response in (await _linked(with_keys)).items():
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["frame-ancestors"] == "'none'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", response.text
        )
        assert not re.findall(r"<script(?! type=\"module\" src=)|<style| style=| on\w+=\"", response.text), path


async def test_an_unchanged_file_is_not_sent_again(with_keys: Router) -> None:
    first = await _get(with_keys, "/page/app.js")
    again = await _get(with_keys, "/page/app.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    changed = await _get(with_keys, "/page/app.js", **{"if-none-match": '"other"'})
    assert changed.content == first.content


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/", "/page", "/page/__init__.py", "/page/%2e%2e/cluster", "/page/x/y"]
)
async def test_other_paths_do_not_exist(with_keys: Router, path: str) -> None:
    assert (await _get(with_keys, path, "plain")).status_code == 404


async def test_behind_the_pages_prefix_nothing_is_open(with_keys: Router) -> None:
    for path in ("/page/../cluster", "/page/%2e%2e/cluster", "/page/..%2fcluster", "/page/x/../../cluster"):
        answer = await _get(with_keys, path)
        assert answer.status_code in (401, 404), path
        assert "workers" not in answer.text


async def test_the_page_is_told_whether_there_are_keys(with_keys: Router, start_router: StartRouter) -> None:
    without = await start_router(name="router-b")
    assert 'data-keys="yes"' in (await _get(with_keys, "/")).text
    assert 'data-keys="no"' in (await _get(without, "/")).text


async def test_the_page_is_refused_for_a_host_that_is_not_allowed(start_router: StartRouter) -> None:
    router = await start_router()
    for path in ("/", "/page/app.js", "/session"):
        assert (await _get(router, path, host="evil.example")).status_code == 421


async def test_an_admin_port_has_no_page(start_router: StartRouter) -> None:
    router = await start_router()
    own = await router.own_lease()
    async with httpx.AsyncClient(base_url=f"http://{own['admin']}", timeout=30) as client:
        for path in ("/", "/page/app.js", "/session", "/cluster/live"):
            assert (await client.get(path)).status_code == 404


class TestSession:
    async def test_tells_what_a_key_may_do(self, with_keys: Router) -> None:
        seen: dict[str, dict[str, Any]] = {}
        for key in ("user", "operator", "plain"):
            seen[key] = (await _get(with_keys, "/session", key)).raise_for_status().json()
            assert seen[key]["keys"] is True
            assert [(one["name"], one["ready"]) for one in seen[key]["models"]] == [("small-model", True)]
        assert seen["user"]["tenant"] == "search-team"
        assert {key: (one["admin"], one["operator"]) for key, one in seen.items()} == {
            "user": (False, False),
            "operator": (True, True),
            "plain": (True, True),
        }

    async def test_needs_a_key(self, with_keys: Router) -> None:
        assert (await _get(with_keys, "/session")).status_code == 401
        assert (await _get(with_keys, "/session", "wrong")).status_code == 401

    async def test_without_keys_everybody_sees_the_cluster_and_nobody_drains(self, start_router: StartRouter) -> None:
        router = await start_router()
        told = (await _get(router, "/session")).json()
        assert (told["keys"], told["admin"], told["operator"], told["tenant"]) == (False, True, False, "")
        assert [one["ready"] for one in told["models"]] == [False]
        assert (told["router"], told["version"]) == ("router-a", (await router.http.get("/version")).json()["version"])
