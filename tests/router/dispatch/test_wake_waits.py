"""Requests for models that sleep: how they wait, what their clients see, and where streams go."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam

from cpd.rpc import cpd_pb2 as pb
from router.api import respond
from router.dispatch.attempts import Attempt, RoutedRequest
from router.dispatch.wake_waits import WakeWaits
from router.dispatch.worker_session import WorkerSession
from router.placement.candidate import ASSUMED_WAKE_MS
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer, FakeWorker, Script

MODEL = "small-model"
REPLY = "the quick brown fox jumps over the lazy dog"
TEXT: dict[str, Any] = {"model": MODEL, "prompt": [7] * 30, "max_tokens": 99}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello?"}]
AFTER = 4
"""Tokens after which a stream stands still."""

SERVING, ASLEEP = pb.Residency.STATE_SERVING, pb.Residency.STATE_ASLEEP
WAKING, DRAINING = pb.Residency.STATE_WAKING, pb.Residency.STATE_DRAINING
SLEEPS = pb.Residency(state=ASLEEP)
SERVES = pb.Residency(state=SERVING)

Call = asyncio.Task[httpx.Response]


class Sleeper:
    """The script of a worker that sleeps: it answers what came meanwhile once `awake` is set."""

    def __init__(self, script: Script) -> None:
        self.awake = asyncio.Event()
        self._script = script

    async def __call__(self, submit: pb.Submit) -> AsyncIterator[Answer]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.awake.wait()
        async for answer in self._script(submit):
            if isinstance(answer, pb.Output) and answer.HasField("prefilled"):
                answer.prefilled.queue_ms = (loop.time() - began) * 1e3
            yield answer


def _refuses(kind: "pb.Refusal.Kind.ValueType", **fields: Any) -> Script:
    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        yield pb.Refusal(kind=kind, **fields)

    return script


def _still() -> tuple[asyncio.Event, Callable[[int], Awaitable[None]]]:
    """An event, and what lets only the first tokens go before it is set."""
    opened = asyncio.Event()

    async def gate(count: int) -> None:
        if count >= AFTER:
            await opened.wait()

    return opened, gate


def _ask(router: Router, **fields: Any) -> Call:
    return asyncio.create_task(router.http.post("/v1/completions", json=TEXT | fields))


async def _text(call: Call) -> str:
    response = await call
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def _holds(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


async def _is(router: Router, worker: FakeWorker, state: str) -> None:
    """Waits until the router knows the state of a worker's model."""

    async def known() -> bool:
        shown = await router.worker(worker.id)
        return shown is not None and (shown["residency"] or {}).get("state") == state

    await eventually(known)


async def _placement(router: Router, response: httpx.Response) -> dict[str, Any]:
    answer = await router.http.get(f"/requests/{response.headers['x-request-id']}")
    placement: dict[str, Any] = answer.json()["placements"][-1]
    return placement


async def _metric(router: Router, line: str) -> float | None:
    """The value of the first series whose line begins so."""
    lines = (await router.http.get("/metrics")).text.splitlines()
    return next((float(one.split()[-1]) for one in lines if one.startswith(line)), None)


class TestWaiting:
    async def test_a_request_for_a_sleeping_model_waits_and_its_response_says_how_long(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        script = Sleeper(says(REPLY))
        worker = await start_worker(script, residency=SLEEPS)
        router = await start_router(worker)
        call = _ask(router)
        await _holds(lambda: len(worker.submits) == 1)
        worker.reside(WAKING, 20.0)
        await _is(router, worker, "waking")
        worker.reside(SERVING)
        await _is(router, worker, "serving")
        script.awake.set()
        assert await _text(call) == REPLY
        response = call.result()
        waited_ms = int(response.headers["x-cpd-wake-ms"])
        placement = await _placement(router, response)
        assert placement["predicted"]["cost"]["wake_ms"] == ASSUMED_WAKE_MS
        assert 0 < placement["actual"]["wake_ms"] <= placement["actual"]["queue_ms"]
        assert waited_ms == round(placement["actual"]["wake_ms"])
        assert await _metric(router, "cpd_wake_wait_seconds_count") == 1
        await _holds(lambda: any(record.name == "router.access" for record in caplog.records))
        [line] = [record.__dict__["fields"] for record in caplog.records if record.name == "router.access"]
        assert 0 < line["wake_ms"] <= line["queue_ms"]

    async def test_the_wait_for_a_wake_teaches_nothing_about_the_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY))
        worker = await start_worker(script, residency=SLEEPS)
        router = await start_router(worker)
        call = _ask(router)
        await _holds(lambda: len(worker.submits) == 1)
        worker.reside(SERVING)
        script.awake.set()
        await _text(call)
        assert await _metric(router, "cpd_worker_ttft_seconds_count") == 0
        await _text(_ask(router))
        assert await _metric(router, "cpd_worker_ttft_seconds_count") == 1

    async def test_without_a_wait_nothing_says_so(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says(REPLY), residency=SERVES))
        call = _ask(router)
        await _text(call)
        assert "x-cpd-wake-ms" not in call.result().headers
        placement = await _placement(router, call.result())
        assert placement["actual"]["wake_ms"] == placement["predicted"]["cost"]["wake_ms"] == 0
        assert await _metric(router, "cpd_wake_wait_seconds_count") is None

    async def test_a_prompt_also_waits_for_a_prefill_worker_that_sleeps(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY, prefill_worker="prefill-0"))
        prefill = await start_worker(worker_id="prefill-0", kind="prefill", residency=SLEEPS)
        worker = await start_worker(script, residency=SERVES)
        router = await start_router(worker, prefill, policy={"name": "round-robin"}, long_prefill_tokens=1)
        call = _ask(router)
        await _holds(lambda: len(worker.submits) == 1)
        prefill.reside(SERVING)
        await _is(router, prefill, "serving")
        script.awake.set()
        assert await _text(call) == REPLY
        assert (await _placement(router, call.result()))["actual"]["wake_ms"] > 0


class TestStreams:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(respond, "COMMENT_S", 0.02)

    async def test_the_clients_of_openai_ignore_the_comments(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY))
        worker = await start_worker(script, residency=SLEEPS)
        router = await start_router(worker)
        # the call returns with the head of the response, which comes with the first comment
        stream = await router.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert not script.awake.is_set()
        worker.reside(SERVING)
        script.awake.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == REPLY

    async def test_comments_come_before_the_route_is_known(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY))
        worker = await start_worker(script, residency=SLEEPS)
        router = await start_router(worker)
        async with router.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "x-request-id" in response.headers
            assert "x-cpd-route" not in response.headers
            lines = response.aiter_lines()
            for _ in range(3):
                assert (await anext(lines), await anext(lines)) == (": waiting", "")
            script.awake.set()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"

    async def test_a_stream_whose_worker_goes_to_sleep_gets_comments_until_it_goes_on(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        opened, gate = _still()
        worker = await start_worker(says(REPLY, after=gate), residency=SERVES)
        router = await start_router(worker)
        body = TEXT | {"stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["x-cpd-decode-worker"] == worker.id
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            worker.reside(DRAINING)
            worker.reside(ASLEEP)
            while seen[-1] != ": waiting":
                seen.append(await anext(lines))
            worker.reside(SERVING)
            opened.set()
            seen += [line async for line in lines]
        texts = [line for line in seen if line.startswith("data: {")]
        assert len(texts) > AFTER
        assert seen[-2] == "data: [DONE]"

    async def test_a_stream_that_stands_still_on_a_worker_that_is_awake_gets_comments_too(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        opened, gate = _still()
        router = await start_router(await start_worker(says(REPLY, after=gate), residency=SERVES))
        async with router.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            while seen[-3:] != [": waiting", "", ": waiting"]:
                seen.append(await anext(lines))
            opened.set()
            seen += [line async for line in lines]
        assert len([line for line in seen if line.startswith("data: {")]) > AFTER
        assert seen[-2] == "data: [DONE]"

    async def test_a_failure_after_the_first_comment_is_the_streams_last_event(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        script = Sleeper(_refuses(pb.Refusal.KIND_FAILED, message="its checkpoint has vanished"))
        worker = await start_worker(script, residency=SLEEPS)
        router = await start_router(worker)
        async with router.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
            script.awake.set()
            events = [line async for line in response.aiter_lines() if line.startswith("data")]
        assert len(events) == 1
        assert "wake_failed" in events[0]
        assert "its checkpoint has vanished" in events[0]

    async def test_a_response_that_fails_then_has_begun_for_the_official_client(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        script = Sleeper(_refuses(pb.Refusal.KIND_FAILED, message="its checkpoint has vanished"))
        router = await start_router(await start_worker(script, residency=SLEEPS))
        async with router.client.responses.stream(model=MODEL, input="Hello?") as stream:
            script.awake.set()
            events: list[Any] = [event async for event in stream]
        assert [event.type for event in events] == ["response.created", "response.failed"]
        assert [event.response.status for event in events] == ["in_progress", "failed"]

    async def test_a_client_that_hangs_up_meanwhile_frees_its_request(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(Sleeper(says(REPLY)), residency=SLEEPS)
        router = await start_router(worker)
        async with router.http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
            assert await anext(response.aiter_lines()) == ": waiting"
        await _holds(lambda: len(worker.aborts) == 1)


class TestLimits:
    async def test_a_request_that_no_promise_keeps_is_given_up(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker(residency=SLEEPS)
        router = await start_router(worker, max_wait_s=0.1)
        response = await _ask(router)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "wait_too_long")
        assert error["message"].startswith("The model was not awake after ")
        assert response.headers["retry-after"] == str(round(ASSUMED_WAKE_MS / 1e3))

    async def test_a_client_whose_own_limit_is_shorter_than_the_promise_is_told_when_to_come_back(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker(residency=pb.Residency(state=WAKING, serves_in_s=40.0))
        router = await start_router(worker)
        headers = {"x-request-timeout-ms": "100"}
        response = await router.http.post("/v1/completions", json=TEXT, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "wait_too_long")
        assert 10 < int(response.headers["retry-after"]) <= 40
        assert len(worker.submits) == 1  # it may have been served: a promise is an upper bound
        await _holds(lambda: len(worker.aborts) == 1)
        assert worker.aborts[0].given_up  # so the wake goes on

    async def test_a_promise_that_is_longer_than_anybody_may_wait_refuses_nobody(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY))
        worker = await start_worker(script, residency=pb.Residency(state=ASLEEP, serves_in_s=600.0))
        router = await start_router(worker, max_wait_s=0.1)
        call = _ask(router)
        await _holds(lambda: len(worker.submits) == 1)
        await asyncio.sleep(0.3)  # three times as long as it may wait otherwise
        assert not call.done()
        worker.reside(SERVING)
        script.awake.set()
        assert await _text(call) == REPLY

    async def test_a_full_queue_of_a_sleeping_worker_is_free_after_the_wake(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        script = _refuses(pb.Refusal.KIND_QUEUE_FULL, retry_after_ms=7_000)
        worker = await start_worker(script, residency=pb.Residency(state=ASLEEP, serves_in_s=40.0))
        router = await start_router(worker)
        response = await _ask(router)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert 17 < int(response.headers["retry-after"]) <= 47

    async def test_a_wake_that_fails_is_told_with_its_reason(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        reason = "big does not fit beside chat, which is popular"
        script = _refuses(pb.Refusal.KIND_FAILED, message=reason, retry_after_ms=9_000)
        router = await start_router(await start_worker(script, residency=SLEEPS))
        response = await _ask(router)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "wake_failed")
        assert error["message"] == f"The model could not be woken: {reason}"
        assert response.headers["retry-after"] == "9"

    async def test_a_stream_whose_model_can_not_wake_goes_on_elsewhere(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        fails = asyncio.Event()

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            count = 0
            async for answer in says(REPLY)(submit):
                if count == AFTER:
                    await fails.wait()
                    yield pb.Refusal(kind=pb.Refusal.KIND_FAILED, message="its checkpoint has vanished")
                    return
                count += 1
                yield answer

        source = await start_worker(script, worker_id="source", residency=SERVES)
        router = await start_router(source)
        call = _ask(router)
        await eventually(lambda: _stands(router))
        source.reside(ASLEEP)
        await _is(router, source, "asleep")
        other = await start_worker(says(REPLY), worker_id="other", residency=SERVES)
        await router.knows(other)
        fails.set()
        assert await _text(call) == REPLY
        assert len(other.submits) == 1

    async def test_after_a_wake_that_failed_another_worker_answers(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        fails = _refuses(pb.Refusal.KIND_FAILED, message="its checkpoint has vanished")
        broken = await start_worker(fails, worker_id="broken", residency=pb.Residency(state=WAKING, serves_in_s=0.1))
        other = await start_worker(says(REPLY), worker_id="other", residency=SLEEPS)
        router = await start_router(broken, other)
        assert await _text(_ask(router)) == REPLY
        assert (len(broken.submits), len(other.submits)) == (1, 1)


class TestExpiry:
    """When a request is given up, on a loop whose time does not matter."""

    @staticmethod
    def _worker(state: str, serves_at: float = float("inf")) -> WorkerSession:
        candidate = SimpleNamespace(serving=state == "serving", serves_at=serves_at)
        return cast(WorkerSession, SimpleNamespace(residency=state, worker_load=SimpleNamespace(candidate=candidate)))

    @staticmethod
    def _attempt(worker: WorkerSession) -> Attempt:
        request = RoutedRequest("", "", b"", b"", b"", [], pb.Sampling(), [], cast(Any, None), 0, received=0.0)
        attempt = Attempt(1, request, {0}, session=worker, prefill_session=worker)
        assert worker.worker_load is not None
        candidate = worker.worker_load.candidate
        placement = SimpleNamespace(decode=candidate, prompt_worker=candidate)
        attempt.decision = cast(Any, SimpleNamespace(wake_s=0.0, placement=placement))
        return attempt

    @staticmethod
    def _expires_at(attempt: Attempt) -> float:
        assert attempt.request.expiry is not None
        return attempt.request.expiry.when()

    async def test_it_is_later_by_the_promised_wait_and_by_no_later_promise(self) -> None:
        now = asyncio.get_running_loop().time()
        worker = self._worker("asleep")
        attempt = self._attempt(worker)
        waits = WakeWaits(lambda _: None)
        waits.placed(attempt)
        waits.limit(attempt, now + 60)
        assert self._expires_at(attempt) == now + 60
        assert worker.worker_load is not None
        for promised in (now + 30, now + 500):
            worker.worker_load.candidate.serves_at = promised
            waits.reported(worker, [attempt])
            assert self._expires_at(attempt) == pytest.approx(now + 60 + 30, abs=1)

    async def test_a_wake_before_its_time_counts_as_long_as_it_took(self) -> None:
        now = asyncio.get_running_loop().time()
        worker = self._worker("waking", now + 500)
        attempt = self._attempt(worker)
        waits = WakeWaits(lambda _: None)
        waits.placed(attempt)
        waits.limit(attempt, now + 60)
        assert self._expires_at(attempt) == pytest.approx(now + 560, abs=1)
        cast(Any, worker).residency = "serving"
        waits.reported(worker, [attempt])
        assert attempt.waits_since is None
        assert self._expires_at(attempt) == pytest.approx(now + 60, abs=20)

    async def test_the_clients_own_limit_is_never_later(self) -> None:
        now = asyncio.get_running_loop().time()
        attempt = self._attempt(self._worker("waking", now + 500))
        attempt.request.needed_at = now + 10
        waits = WakeWaits(lambda _: None)
        waits.placed(attempt)
        waits.limit(attempt, now + 60)
        assert self._expires_at(attempt) == now + 10

    async def test_streams_wait_once_their_worker_sleeps_and_prompts_once_it_drains(self) -> None:
        worker = self._worker("serving")
        stream, prompt = self._attempt(worker), self._attempt(worker)
        stream.prefill_session = None
        waits = WakeWaits(lambda _: None)
        for attempt in (stream, prompt):
            waits.placed(attempt)
        for state, which in (("serving", []), ("draining", [prompt]), ("asleep", [stream, prompt]), ("serving", [])):
            cast(Any, worker).residency = state
            waits.reported(worker, [stream, prompt])
            assert [one for one in (stream, prompt) if one.waits_since is not None] == which

    async def test_a_prompt_whose_token_comes_while_its_worker_drains_has_not_waited(self) -> None:
        worker = self._worker("draining")
        attempt = self._attempt(worker)
        waits = WakeWaits(lambda _: None)
        waits.placed(attempt)
        waits.end(attempt)
        assert attempt.decision is not None
        assert attempt.decision.wake_s == 0


class TestMoves:
    async def test_streams_of_a_draining_model_go_on_where_it_serves(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        _, gate = _still()
        source = await start_worker(says(REPLY, after=gate), worker_id="source", residency=SERVES)
        router = await start_router(source)
        call = _ask(router)
        await eventually(lambda: _stands(router))
        target = await start_worker(says(REPLY), worker_id="target", residency=SERVES)
        await router.knows(target)
        source.reside(DRAINING)
        assert await _text(call) == REPLY
        assert [park.request for park in source.parks] == [source.submits[0].request]
        assert target.submits[0].prefix_source.worker_id == "source"
        assert await _metric(router, 'cpd_moves_total{outcome="moved"}') == 1

    async def test_they_stay_where_no_other_worker_serves(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        opened, gate = _still()
        source = await start_worker(says(REPLY, after=gate), worker_id="source", residency=SERVES)
        router = await start_router(source)
        call = _ask(router)
        await eventually(lambda: _stands(router))
        asleep = await start_worker(says(REPLY), worker_id="asleep", residency=SLEEPS)
        await router.knows(asleep)
        source.reside(DRAINING)
        await _is(router, source, "draining")
        opened.set()
        assert await _text(call) == REPLY
        assert (source.parks, asleep.submits) == ([], [])

    async def test_one_that_the_others_refuse_goes_back_although_its_worker_takes_requests(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        _, gate = _still()
        source = await start_worker(says(REPLY, after=gate), worker_id="source", residency=SERVES)
        router = await start_router(source)
        call = _ask(router)
        await eventually(lambda: _stands(router))
        full = await start_worker(_refuses(pb.Refusal.KIND_QUEUE_FULL), worker_id="full", residency=SERVES)
        await router.knows(full)
        source.script = says(REPLY)
        source.reside(DRAINING)
        assert await _text(call) == REPLY
        assert source.submits[1].HasField("resumes")
        assert len(full.submits) == 1

    async def test_prompts_keep_their_place_in_the_queue(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        script = Sleeper(says(REPLY))
        source = await start_worker(script, worker_id="source", residency=SERVES)
        router = await start_router(source)
        call = _ask(router)
        await _holds(lambda: len(source.submits) == 1)
        target = await start_worker(says(REPLY), worker_id="target", residency=SERVES)
        await router.knows(target)
        source.reside(DRAINING)
        await _is(router, source, "draining")
        assert source.parks == []
        script.awake.set()  # from its first token on it may move, too
        assert await _text(call) == REPLY

    async def test_new_requests_go_where_the_model_serves(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        workers = {
            name: await start_worker(says(REPLY), worker_id=name, residency=pb.Residency(state=state))
            for name, state in (("a", ASLEEP), ("b", SERVING), ("c", DRAINING))
        }
        router = await start_router(*workers.values())
        for _ in range(4):
            assert await _text(_ask(router)) == REPLY
        assert {name: len(worker.submits) for name, worker in workers.items()} == {"a": 0, "b": 4, "c": 0}


async def _stands(router: Router) -> bool:
    """True once the stream has AFTER tokens."""
    return await _metric(router, "cpd_itl_seconds_count") == AFTER - 1


class TestShown:
    async def test_the_state_of_a_model_is_that_of_its_best_worker(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        one = await start_worker(worker_id="one", residency=SLEEPS)
        other = await start_worker(worker_id="other", residency=SLEEPS)
        router = await start_router(one, other)

        async def shown() -> tuple[str | None, str | None]:
            listed = (await router.client.models.list()).data[0]
            cluster = (await router.cluster())["models"][0]
            assert getattr(listed, "max_model_len", None) == 512
            return getattr(listed, "state", None), cluster["state"]

        assert await shown() == ("asleep", "asleep")
        for state, name, best in (
            (DRAINING, "draining", "draining"),
            (WAKING, "waking", "waking"),
            (SERVING, "serving", "serving"),
        ):
            one.reside(state)
            await _is(router, one, name)
            assert await shown() == (best, best)
            lines = (await router.http.get("/metrics")).text.splitlines()
            assert f'cpd_model_state{{router="router-a",state="{best}"}} 1.0' in lines
            assert sum(line.startswith("cpd_model_state{") and line.endswith(" 1.0") for line in lines) == 1
            labels = f'role="combined",router="router-a",state="{name}",worker="one"'
            assert f"cpd_worker_residency{{{labels}}} 1.0" in lines

    async def test_a_worker_of_a_shared_device_shows_promise_and_pin(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker(residency=pb.Residency(state=WAKING, serves_in_s=3.5, pinned=True))
        router = await start_router(worker)
        residency = (await router.worker(worker.id) or {})["residency"]
        since = residency.pop("since")
        assert residency == {"state": "waking", "serves_in_s": 3.5, "pinned": True}
        worker.reside(WAKING, 2.5)
        worker.reside(SERVING)
        await _is(router, worker, "serving")
        assert (await router.worker(worker.id) or {})["residency"]["since"] >= since

    async def test_a_worker_with_a_device_of_its_own_always_serves(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker()
        router = await start_router(worker)
        assert (await router.worker(worker.id) or {})["residency"] is None
        assert (await router.cluster())["models"][0]["state"] == "serving"
        metrics = (await router.http.get("/metrics")).text
        assert "cpd_model_state" not in metrics
        assert "cpd_worker_residency" not in metrics

    async def test_without_a_worker_a_model_has_no_state(self, start_router: StartRouter) -> None:
        router = await start_router()
        assert (await router.http.get("/v1/models")).json()["data"][0]["state"] is None

    async def test_a_promise_that_is_no_time_ends_the_session(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker(residency=SERVES)
        router = await start_router(worker)
        worker.residency = None  # of the next session
        worker.send(pb.WorkerMessage(load=pb.Load(residency=pb.Residency(state=ASLEEP, serves_in_s=float("nan")))))
        await _holds(lambda: len(worker.hellos) >= 2)
        await router.knows(worker)
