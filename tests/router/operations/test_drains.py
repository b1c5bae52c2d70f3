"""An operator drains a worker or router over the public port."""

from pathlib import Path

import httpx
import pytest

from cpd.common.trust import ClusterSecret
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.secret import SECRET

KEYS = """
- key: user
- key: operator
  admin: true
"""


@pytest.fixture
async def pair(
    start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Path
) -> tuple[Router, Router]:
    """Two routers that know of each other, with one worker."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    settings = {"api_key": ["plain"], "api_key_file": tmp_path / "keys.yaml"}
    worker = await start_worker(says("fox"))
    routers = await start_router(worker, **settings), await start_router(worker, name="router-b", **settings)

    async def know_each_other() -> bool:
        return all([len((await router.cluster())["routers"]) == 2 for router in routers])

    await eventually(know_each_other)
    return routers


async def _drain(router: Router, name: str, key: str = "operator") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}" if key else ""}
    return await router.http.post(f"/cluster/drain?name={name}", headers=headers)


async def _drains(router: Router) -> bool:
    return (await router.http.get("/readyz")).status_code == 503


@pytest.mark.parametrize("name", ["router-a", "router-b"])
async def test_any_router_drains_whichever_is_asked(pair: tuple[Router, Router], name: str) -> None:
    asked, other = pair
    assert (await _drain(asked, name)).json() == {"status": "draining"}
    draining, stays = (asked, other) if name == "router-a" else (other, asked)
    await eventually(lambda: _drains(draining))
    assert not await _drains(stays)


async def test_only_operators_may(pair: tuple[Router, Router]) -> None:
    router, _ = pair
    for key, status in (("user", 403), ("wrong", 401), ("", 401)):
        assert (await _drain(router, "router-a", key)).status_code == status
    assert not await _drains(router)


async def test_without_keys_the_clusters_admin_key_is_needed(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(await start_worker())
    await router.own_lease()
    for key in ("", "none"):
        assert (await _drain(router, "router-a", key)).status_code == 401
    assert (await _drain(router, "router-a", ClusterSecret(SECRET).admin_key)).status_code == 200


async def test_an_unknown_name_is_refused(pair: tuple[Router, Router]) -> None:
    answer = await _drain(pair[0], "combined-7")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "process_not_found")
    assert (await pair[0].http.post("/cluster/drain", headers={"authorization": "Bearer operator"})).status_code == 400


async def test_a_worker_that_does_not_answer_is_said(pair: tuple[Router, Router]) -> None:
    answer = await _drain(pair[0], "combined-0")  # it has no port for administration
    assert answer.status_code == 503
    assert "combined-0" in answer.json()["error"]["message"]
