"""Requests that crash workers, and requests that only ran beside them."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from cpd.common import stream
from cpd.common.logs import TextFormatter
from cpd.rpc import cpd_pb2 as pb
from router.dispatch import dispatcher
from router.dispatch.attempts import PROBATION_TOKENS
from router.dispatch.convictions import MAX_REMEMBERED, REMEMBERED_S, Convictions
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.dispatch.suspects import Suspects
from tests.router.fake_worker import Answer, FakeWorker, Script

MODEL = "small-model"
REPLY = "the quick brown fox jumps over the lazy dog"
POISON, HARMLESS, OTHER = [7] * 30, [8] * 30, [9] * 30

Crash = Callable[[FakeWorker], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects go only to workers that were heard from since the crash; idle scripted workers send only heartbeats."""
    monkeypatch.setattr(stream, "TICK_S", 0.1)


async def die(worker: FakeWorker) -> None:
    """The process ends without a word."""
    await worker.kill()


async def fail(worker: FakeWorker) -> None:
    """The engine fails."""
    worker.send(pb.WorkerMessage(end=pb.End(reason="the engine failed", failed=True)))


async def stop(worker: FakeWorker) -> None:
    """The worker was told to stop."""
    worker.send(pb.WorkerMessage(end=pb.End(reason="the worker stops")))


async def hang_up(worker: FakeWorker) -> None:
    """The connection ends, but the process lives."""
    for queue in worker._queues:
        queue.put_nowait(None)


def _prompt(submit: pb.Submit) -> list[int]:
    return list(memoryview(submit.tokens[: submit.prompt_len * 4]).cast("i"))


class Workers:
    """Workers that crash when they run POISON, after `outputs` outputs, and answer everything else."""

    def __init__(self, says: Says, crash: Crash, outputs: int = 0) -> None:
        self.all: list[FakeWorker] = []
        self._answer, self._crash, self._outputs = says(REPLY), crash, outputs
        self._crashing: set[asyncio.Task[Any]] = set()

    async def start(self, start_worker: StartWorker, count: int) -> list[FakeWorker]:
        for number in range(count):
            name = f"combined-{number}"
            self.all.append(await start_worker(self.script(name), worker_id=name))
        return self.all

    def script(self, name: str) -> Script:
        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            left = self._outputs
            async for output in self._answer(submit):
                if _prompt(submit) == POISON:
                    if not left:
                        await self._end(next(worker for worker in self.all if worker.id == name))
                    left -= 1
                yield output

        return script

    async def _end(self, worker: FakeWorker) -> None:
        self._crashing.add(asyncio.create_task(self._crash(worker)))
        await asyncio.Event().wait()

    @property
    def tries(self) -> int:
        """How often POISON was sent to a worker."""
        return sum(_prompt(submit) == POISON for worker in self.all for submit in worker.submits)


def _ask(router: Router, prompt: list[int], **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 99, **fields}
    return asyncio.create_task(router.http.post("/v1/completions", json=body))


async def _answered(call: "asyncio.Task[httpx.Response]") -> None:
    response = await call
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, REPLY)


async def _metric(router: Router, name: str) -> float:
    lines = (await router.http.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


async def _runs(worker: FakeWorker, count: int) -> bool:
    return len(worker.submits) >= count


class TestConviction:
    @pytest.mark.parametrize("crash", [die, fail])
    async def test_a_request_that_crashed_two_workers_is_not_given_to_a_third(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        says: Says,
        caplog: pytest.LogCaptureFixture,
        crash: Crash,
    ) -> None:
        workers = Workers(says, crash)
        router = await start_router(*await workers.start(start_worker, 4))
        with caplog.at_level(logging.WARNING):
            response = await _ask(router, POISON)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (500, "server_error")
        assert error["code"] == "request_crashes_workers"
        assert response.headers["x-should-retry"] == "false"
        assert workers.tries == 2
        assert await _metric(router, "cpd_convictions_total") == 1
        (record,) = [record for record in caplog.records if "given up" in record.getMessage()]
        line = TextFormatter("router").format(record)
        crashed = [worker.id for worker in workers.all if worker.submits]
        assert response.headers["x-request-id"] in line
        assert [worker.id for worker in workers.all if worker.id in line] == crashed

    async def test_its_retry_is_refused_at_once_and_other_requests_are_not(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        workers = Workers(says, die)
        router = await start_router(*await workers.start(start_worker, 3))
        await _ask(router, POISON)
        response = await _ask(router, POISON)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "request_crashes_workers")
        assert workers.tries == 2
        await _answered(_ask(router, HARMLESS))
        assert await _metric(router, "cpd_convictions_total") == 1

    async def test_the_seed_does_not_make_it_another_request_but_sampling_and_tenant_do(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        workers = Workers(says, die)
        router = await start_router(*await workers.start(start_worker, 3), api_key=["one", "two"])
        await _ask(router, POISON, seed=1)
        assert (await _ask(router, POISON, seed=2)).status_code == 500
        harmless = says(REPLY)
        for worker in workers.all:
            worker.script = harmless
        await _answered(_ask(router, POISON, temperature=0.5))
        body = {"model": MODEL, "prompt": POISON, "max_tokens": 99}
        headers = {"authorization": "Bearer two"}
        assert (await router.http.post("/v1/completions", json=body, headers=headers)).status_code == 200

    @pytest.mark.parametrize("n", [1, 3])
    async def test_a_stream_that_has_begun_ends_with_the_error(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, n: int
    ) -> None:
        workers = Workers(says, die, outputs=PROBATION_TOKENS - 1)
        router = await start_router(*await workers.start(start_worker, 4))
        response = await _ask(router, POISON, stream=True, n=n)
        *_, last, rest = response.text.split("\n\n")
        assert (response.status_code, rest) == (200, "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_crashes_workers"
        assert "[DONE]" not in response.text
        assert workers.tries == 2

    async def test_a_second_one_like_it_that_waits_fails_too(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        first = await start_worker(worker_id="first")
        router = await start_router(first)
        calls = [_ask(router, POISON) for _ in range(2)]
        await eventually(lambda: _runs(first, 2))
        workers = Workers(says, die)
        await router.knows(*await workers.start(start_worker, 1))
        await first.kill()
        for call in calls:
            assert (await call).json()["error"]["code"] == "request_crashes_workers"
        assert workers.tries == 1

    async def test_a_crashed_prefill_worker_counts(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        prefill = await start_worker(worker_id="prefill-0", kind="prefill")
        decode = await start_worker()
        router = await start_router(decode, prefill, long_prefill_tokens=0)
        call = _ask(router, POISON)
        await eventually(lambda: _runs(decode, 1))
        assert decode.submits[0].prefill_candidates
        await prefill.kill()
        await eventually(lambda: _is_away(router, "prefill-0"))
        await asyncio.sleep(dispatcher.TOGETHER_S)
        decode.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=3)))
        await eventually(lambda: _runs_there(router, decode, 3))
        await decode.kill()
        assert (await call).json()["error"]["code"] == "request_crashes_workers"


class TestInnocence:
    async def test_requests_beside_it_are_answered(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        first = await start_worker(worker_id="first")
        router = await start_router(first)
        calls = [_ask(router, [20 + number] * 30) for number in range(6)]
        poison = _ask(router, POISON)
        await eventually(lambda: _runs(first, 7))
        workers = Workers(says, die)
        await router.knows(*await workers.start(start_worker, 3))
        await first.kill()
        assert (await poison).json()["error"]["code"] == "request_crashes_workers"
        for call in calls:
            await _answered(call)
        assert workers.tries == 1
        assert await _metric(router, "cpd_convictions_total") == 1

    async def test_a_worker_runs_one_suspect_at_a_time(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        suspects = Suspects(says, REPLY)

        first = await start_worker(worker_id="first")
        router = await start_router(first)
        calls = [_ask(router, [20 + number] * 30) for number in range(5)]
        await eventually(lambda: _runs(first, 5))
        await router.knows(await start_worker(suspects.script, worker_id="second"))
        await first.kill()
        for call in calls:
            await _answered(call)
        assert suspects.most == 1

    async def test_suspects_that_waited_long_run_together_and_none_is_convicted(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "MAX_WAIT_S", 1.0)
        first = await start_worker(worker_id="first")
        router = await start_router(first)
        calls = [_ask(router, prompt) for prompt in (HARMLESS, OTHER)]
        await eventually(lambda: _runs(first, 2))
        second = await start_worker(worker_id="second")
        await router.knows(second)
        await first.kill()
        await eventually(lambda: _runs(second, 2))
        await router.knows(await start_worker(says(REPLY), worker_id="third"))
        await second.kill()
        for call in calls:
            await _answered(call)

    @pytest.mark.parametrize("end", [stop, hang_up])
    async def test_a_worker_that_stops_or_lives_has_not_crashed(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, end: Crash
    ) -> None:
        workers = Workers(says, end)
        router = await start_router(*await workers.start(start_worker, 3))
        call = _ask(router, POISON)
        await eventually(lambda: _is(lambda: workers.tries >= 3))
        for worker in workers.all:
            worker.script = says(REPLY)
        await _answered(call)

    async def test_a_request_that_went_on_after_the_crash_is_no_suspect(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        workers = Workers(says, die, outputs=PROBATION_TOKENS)
        router = await start_router(*await workers.start(start_worker, 4))
        await _answered(_ask(router, POISON))
        assert workers.tries > 2

    async def test_workers_that_die_together_do_not_convict(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "TICK_S", 60.0)  # no heartbeats: nothing is heard of a worker that may be dead
        first = await start_worker(worker_id="first")
        router = await start_router(first)
        call = _ask(router, HARMLESS)
        await eventually(lambda: _runs(first, 1))
        second = await start_worker(worker_id="second")
        await router.knows(second)
        await first.kill()
        await eventually(lambda: _is_away(router, "first"))
        await second.kill()
        later = await start_worker(says(REPLY), worker_id="later")
        await router.knows(later)
        later.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY)))
        await _answered(call)
        assert second.submits == []

    async def test_workers_for_prefill_and_decode_that_die_together_do_not_convict(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stream, "TICK_S", 60.0)
        prefill = await start_worker(worker_id="prefill-0", kind="prefill")
        decode = await start_worker()
        router = await start_router(decode, prefill, long_prefill_tokens=0)
        call = _ask(router, HARMLESS)
        await eventually(lambda: _runs(decode, 1))
        await prefill.kill()
        await eventually(lambda: _is_away(router, "prefill-0"))
        await decode.kill()
        await router.knows(await start_worker(says(REPLY), worker_id="later"))
        await _answered(call)


class TestConvictions:
    def test_a_request_is_remembered_for_a_while(self) -> None:
        convictions = Convictions()
        assert not convictions
        convictions.add(b"a", 5.0)
        assert convictions
        assert convictions.includes(b"a", 4.0 + REMEMBERED_S)
        assert not convictions.includes(b"a", 5.0 + REMEMBERED_S)
        assert not convictions.includes(b"b", 5.0)

    def test_only_so_many_are_remembered(self) -> None:
        convictions = Convictions()
        for number in range(MAX_REMEMBERED + 1):
            convictions.add(b"%d" % number, 0.0)
        assert not convictions.includes(b"0", 0.0)
        assert convictions.includes(b"%d" % MAX_REMEMBERED, 0.0)


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


async def _runs_there(router: Router, worker: FakeWorker, running: int) -> bool:
    """True if the router has the worker's report of that many running requests."""
    known = await router.worker(worker.id)
    return known is not None and known["load"]["running"] == running


async def _is_away(router: Router, worker_id: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is None or worker["state"] == "connecting"
