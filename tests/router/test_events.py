"""What happens to workers is remembered for people."""

import asyncio
from collections.abc import AsyncIterator

from cpd.rpc import cpd_pb2 as pb
from router.events import MAX_EVENTS, Events
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer

TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 3}


def test_the_oldest_are_dropped_first() -> None:
    events = Events()
    for number in range(MAX_EVENTS + 2):
        events.add("joined", f"worker-{number}", "")
    latest = events.latest()
    assert len(latest) == MAX_EVENTS
    assert (latest[0]["worker"], latest[-1]["worker"]) == ("worker-2", f"worker-{MAX_EVENTS + 1}")
    assert [event["at"] for event in latest] == sorted(event["at"] for event in latest)


async def _kinds(router: Router, worker: str) -> list[tuple[str, int]]:
    events = (await router.cluster())["events"]
    return [(event["kind"], event["requests"]) for event in events if event["worker"] == worker]


async def test_a_workers_life_is_told(start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
    worker = await start_worker(says("fox"))
    router = await start_router(worker)
    worker.become(pb.ROLE_PREFILL)

    async def changed() -> bool:
        return len(await _kinds(router, worker.id)) == 2

    await eventually(changed)
    worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))
    for _ in range(2):  # it is said once
        worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))

    async def drains() -> bool:
        return ("drains", 0) in await _kinds(router, worker.id)

    await eventually(drains)
    worker.send(pb.WorkerMessage(end=pb.End(reason="drained")))

    async def left() -> bool:
        return ("left", 0) in await _kinds(router, worker.id)

    await eventually(left)
    assert [kind for kind, _ in await _kinds(router, worker.id)][:4] == ["joined", "role", "drains", "left"]


async def test_a_crash_says_how_many_requests_it_met(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    started = asyncio.Event()

    async def hangs(submit: pb.Submit) -> AsyncIterator[Answer]:
        started.set()
        await asyncio.Event().wait()
        yield pb.Output()

    dies = await start_worker(hangs, worker_id="dies")
    router = await start_router(dies)
    calls = [asyncio.create_task(router.http.post("/v1/completions", json=TEXT)) for _ in range(2)]
    await started.wait()

    async def both() -> bool:
        return len(dies.submits) == 2

    await eventually(both)
    assert (await router.cluster())["waiting"] == [
        {"decode": "dies", "prefill": "", "prefix_source": "", "requests": 2}
    ]
    stays = await start_worker(says("fox"), worker_id="stays")
    await router.knows(stays)
    await dies.kill()
    assert [(await call).status_code for call in calls] == [200, 200]
    assert ("crashed", 2) in await _kinds(router, "dies")
    assert (await router.cluster())["waiting"] == []
