"""Workers that change their roles while they run."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cpd.rpc import cpd_pb2 as pb
from router.dispatch import dispatcher
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer

MODEL = "small-model"
PROMPT = [7] * 30
REPLY = "the quick brown fox jumps over the lazy dog"
AFTER = 4


async def _stands_still(count: int) -> None:
    if count >= AFTER:
        await asyncio.Event().wait()


async def _ask(router: Router, max_tokens: int = 4) -> httpx.Response:
    return await router.http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens})


async def _has_role(router: Router, worker_id: str, role: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and worker["role"] == role


async def test_requests_follow_the_role(start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
    one, other = await start_worker(says("fox"), worker_id="one"), await start_worker(says("fox"), worker_id="other")
    router = await start_router(one, other)
    one.become(pb.ROLE_PREFILL)
    other.become(pb.ROLE_COMBINED)
    await eventually(lambda: _has_role(router, "one", "prefill"))
    for _ in range(4):
        assert (await _ask(router)).status_code == 200
    assert not one.submits
    assert 'role="prefill",router="router-a",worker="one"' in (await router.http.get("/metrics")).text
    one.become(pb.ROLE_COMBINED)
    other.become(pb.ROLE_PREFILL)
    await eventually(lambda: _has_role(router, "other", "prefill"))
    assert (await _ask(router)).status_code == 200
    assert len(one.submits) == 1


async def test_prefill_workers_answer_while_no_combined_worker_is_live(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    worker = await start_worker(says("fox"), worker_id="one", kind="prefill")
    router = await start_router()
    await router.knows(worker)
    assert (await _ask(router)).status_code == 503  # it does not say that it takes requests: it is older
    worker.become(pb.ROLE_PREFILL)

    async def answers() -> bool:
        return (await _ask(router)).status_code == 200

    await eventually(answers)
    assert (await router.http.get("/readyz")).status_code == 200


async def test_a_stream_moves_when_its_worker_becomes_a_prefill_worker(
    start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MOVE_S", 60.0)
    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    call = asyncio.create_task(_ask(router, 99))

    async def stands() -> bool:
        metrics = (await router.http.get("/metrics")).text.splitlines()
        return any(
            line.startswith("cpd_itl_seconds_count") and float(line.split()[-1]) >= AFTER - 1 for line in metrics
        )

    await eventually(stands)
    source.become(pb.ROLE_PREFILL)
    await eventually(lambda: _has_role(router, "source", "prefill"))
    assert not source.parks  # nobody else would take it
    target = await start_worker(says(REPLY), worker_id="target")
    await router.knows(target)
    source.become(pb.ROLE_PREFILL)
    response = await call
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == REPLY
    assert len(source.parks) == 1
    assert target.submits[0].prefix_source.worker_id == "source"


async def test_a_stream_that_nobody_takes_stays_on_its_prefill_worker(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    async def full(submit: pb.Submit) -> AsyncIterator[Answer]:
        yield pb.Refusal(kind=pb.Refusal.KIND_QUEUE_FULL, message="no")

    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    call = asyncio.create_task(_ask(router, 99))

    async def submitted() -> bool:
        return bool(source.submits)

    await eventually(submitted)
    target = await start_worker(full, worker_id="target")
    await router.knows(target)
    source.script = says(REPLY)
    source.become(pb.ROLE_PREFILL)

    async def resumed() -> bool:
        source.become(pb.ROLE_PREFILL)  # until the first token has come the request is only placed again
        return any(submit.HasField("resumes") for submit in source.submits)

    await eventually(resumed)
    response = await call
    assert response.json()["choices"][0]["text"] == REPLY
