"""An operator lets models sleep, wakes and pins them over the public port."""

from collections.abc import AsyncIterator

import httpx
import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.router.conftest import Router, Says, StartRouter, StartWorker
from tests.worker_admin import AdminService, listening

SERVES = pb.Residency(state=pb.Residency.STATE_SERVING)


@pytest.fixture
def admin() -> AdminService:
    """The administration of both workers whose device is shared."""
    return AdminService()


@pytest.fixture
async def router(
    start_router: StartRouter, start_worker: StartWorker, says: Says, admin: AdminService
) -> AsyncIterator[Router]:
    """A router with three workers, of which two share their devices."""
    with listening(admin) as address:
        workers = [
            await start_worker(says("fox"), worker_id=f"combined-{index}", admin=address, residency=SERVES)
            for index in range(2)
        ]
        workers.append(await start_worker(says("fox"), worker_id="prefill-0", kind="prefill"))
        yield await start_router(*workers, served_model_name="small", api_key=["user", "operator"])


async def _post(router: Router, call: str, key: str = "user") -> httpx.Response:
    return await router.http.post(f"/cluster/{call}", headers={"authorization": f"Bearer {key}" if key else ""})


async def test_a_model_stands_for_its_workers_that_can_sleep(router: Router, admin: AdminService) -> None:
    for call in ("sleep", "wake", "pin"):
        answer = await _post(router, f"{call}?name=small")
        assert answer.json() == {"told": ["combined-0", "combined-1"]}
    assert admin.told == ["sleep"] * 2 + ["wake"] * 2 + ["pin"] * 2


async def test_one_worker_is_told_by_its_name(router: Router, admin: AdminService) -> None:
    assert (await _post(router, "pin?name=combined-1&pinned=false")).json() == {"told": ["combined-1"]}
    assert admin.told == ["unpin"]


@pytest.mark.parametrize(
    ("name", "status", "code"), [("prefill-0", 409, "never_sleeps"), ("large", 404, "process_not_found"), ("", 400, "")]
)
async def test_what_can_not_sleep_is_refused(router: Router, name: str, status: int, code: str) -> None:
    answer = await _post(router, f"sleep?name={name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code or "invalid_value")


async def test_a_worker_that_refuses_is_said_and_the_others_are_told(
    start_router: StartRouter, start_worker: StartWorker, says: Says, admin: AdminService
) -> None:
    with listening(admin) as address, listening(None) as older:
        workers = [
            await start_worker(says("fox"), worker_id=name, admin=port, residency=SERVES)
            for name, port in (("combined-0", older), ("combined-1", address))
        ]
        router = await start_router(*workers, served_model_name="small", api_key=["user"])
        answer = await _post(router, "wake?name=small")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "worker combined-0 is of an older version, which can't sleep."
    assert admin.told == ["wake"]


@pytest.mark.parametrize("call", ["sleep?name=small", "wake?name=small", "pin?name=small", "scale?routers=2"])
async def test_only_operators_may(
    start_router: StartRouter, start_worker: StartWorker, says: Says, admin: AdminService, call: str
) -> None:
    with listening(admin) as address:
        worker = await start_worker(says("fox"), admin=address, residency=SERVES)
        router = await start_router(worker, served_model_name="small")  # without keys
        for key in ("", "none"):
            assert (await _post(router, call, key)).status_code == 401
    assert admin.told == []
