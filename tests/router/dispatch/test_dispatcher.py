"""Refusals, replays and hang-ups, from the client's side and from the workers'."""

import asyncio
import gc
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from cpd.common.blocks import extend_hashes, hash_root, unpack_tokens
from cpd.common.policy_settings import PolicySettings
from cpd.performance.model import Profile
from cpd.rpc import cpd_pb2 as pb
from router.api.respond import CompletionResponse
from router.api.schemas import ChatRequest
from router.dispatch import dispatcher
from router.dispatch.attempts import RoutedRequest
from router.placement.cost_policy import CostPolicy
from router.placement.policy import Placement, Situation
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer, FakeWorker, Script

MODEL = "small-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}
REPLY = "the quick brown fox jumps over the lazy dog"


def _refuses(
    kind: "pb.Refusal.Kind.ValueType", then: Script | None = None, times: int = 1_000, **refusal: Any
) -> Script:
    """Refuses `times` requests, then answers."""
    left = itertools.chain(range(times))

    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        if next(left, None) is not None or then is None:
            yield pb.Refusal(kind=kind, message="no", **{"retry_after_ms": 2_500, **refusal})
            return
        async for answer in then(submit):
            yield answer

    return script


def _gate(after: int) -> tuple[asyncio.Event, Callable[[int], Any]]:
    """Holds an answer back after `after` outputs, until the event is set."""
    opened = asyncio.Event()

    async def wait(count: int) -> None:
        if count >= after:
            await opened.wait()

    return opened, wait


async def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


class TestQueueing:
    """Priority and deadline of a request in a worker's queue."""

    async def test_priorities_are_negated_on_the_wire(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says(REPLY))
        router = await start_router(worker)
        for priority in (-5, 0, 7):
            await _text(await router.http.post("/v1/chat/completions", json=CHAT | {"priority": priority}))
        assert [submit.priority for submit in worker.submits] == [5, 0, -7]
        response = await router.http.post("/v1/chat/completions", json=CHAT | {"priority": 101})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")

    async def test_the_deadline_is_the_rest_of_the_slo(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(_refuses(pb.Refusal.KIND_REROUTE, says(REPLY), times=2))
        router = await start_router(worker, slo_ttft=700)
        await _text(await router.http.post("/v1/chat/completions", json=CHAT))
        first, second, third = (submit.deadline_ms for submit in worker.submits)
        assert 700 >= first >= second >= third >= 1

    async def test_time_in_queue_is_counted_for_the_tenant(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says(REPLY)), api_key=["secret-key"])
        await _text(await router.http.post("/v1/chat/completions", json=CHAT))
        metrics = (await router.http.get("/metrics")).text
        assert re.search(r'cpd_queue_seconds_count\{tenant="key-[0-9a-f]{16}"\} 1.0', metrics)
        assert re.search(r'cpd_tenant_prompt_tokens_total\{tenant="key-[0-9a-f]{16}"\} \d', metrics)
        assert "secret-key" not in metrics


class TestRefusals:
    async def test_a_full_queue_means_another_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        full = [await start_worker(_refuses(pb.Refusal.KIND_QUEUE_FULL), worker_id=f"full-{i}") for i in range(2)]
        router = await start_router(*full, await start_worker(says(REPLY)))
        for _ in range(6):
            response = await router.http.post("/v1/chat/completions", json=CHAT)
            assert await _text(response) == REPLY
            assert response.headers["x-cpd-decode-worker"] == "combined-0"
        for worker in full:
            assert len({(submit.request, submit.attempt) for submit in worker.submits}) == len(worker.submits)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_only_full_queues_mean_503_before_the_first_byte(
        self, start_router: StartRouter, start_worker: StartWorker, stream: bool
    ) -> None:
        workers = [await start_worker(_refuses(pb.Refusal.KIND_QUEUE_FULL), worker_id=f"full-{i}") for i in range(2)]
        router = await start_router(*workers)
        response = await router.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["code"] == "queue_full"
        assert [len(worker.submits) for worker in workers] == [1, 1]
        assert 'cpd_refusals_total{reason="queue_full"} 2.0' in (await router.http.get("/metrics")).text

    async def test_a_tenant_over_its_share_of_every_queue_gets_429_and_the_earliest_retry_time(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        full = pb.Refusal.KIND_QUEUE_FULL
        workers = [
            await start_worker(_refuses(full, over_share=True, retry_after_ms=ms), worker_id=f"full-{ms}")
            for ms in (9_000, 4_000)
        ]
        router = await start_router(*workers)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (429, "4")
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert 'cpd_refusals_total{reason="over_share"} 2.0' in (await router.http.get("/metrics")).text

    async def test_one_queue_that_is_full_for_all_tenants_means_503(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        full = pb.Refusal.KIND_QUEUE_FULL
        router = await start_router(
            await start_worker(_refuses(full, over_share=True), worker_id="a"),
            await start_worker(_refuses(full, retry_after_ms=1_000), worker_id="b"),
        )
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    async def test_only_the_best_workers_are_tried_if_they_are_full(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        workers = [await start_worker(_refuses(pb.Refusal.KIND_QUEUE_FULL), worker_id=f"full-{i}") for i in range(6)]
        router = await start_router(*workers)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert sum(len(worker.submits) for worker in workers) == dispatcher.MAX_QUEUE_FULL

    async def test_a_request_whose_prefill_failed_does_not_wait_for_full_queues(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        full = _refuses(pb.Refusal.KIND_QUEUE_FULL)
        worker = await start_worker(_refuses(pb.Refusal.KIND_REROUTE, full, times=1))
        router = await start_router(worker)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
        assert len(worker.submits) == 2

    async def test_a_rerouted_request_is_placed_again(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(_refuses(pb.Refusal.KIND_REROUTE, says(REPLY), times=2))
        router = await start_router(worker)
        assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY
        assert [submit.attempt for submit in worker.submits] == [0, 1, 2]

    async def test_a_worker_that_reroutes_everything_is_avoided(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        draining = await start_worker(_refuses(pb.Refusal.KIND_REROUTE), worker_id="draining")
        router = await start_router(draining, await start_worker(says(REPLY)))
        for _ in range(6):
            assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY
        assert all(submit.attempt == 0 for submit in draining.submits)

    async def test_the_last_worker_is_tried_again_after_a_pause(
        self, start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "MAX_WAIT_S", 0.3)
        draining = await start_worker(_refuses(pb.Refusal.KIND_REROUTE))
        router = await start_router(draining)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert len(draining.submits) < 10

    async def test_a_prefill_worker_that_failed_a_request_is_not_offered_again(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        async def fails_the_first(submit: pb.Submit) -> AsyncIterator[Answer]:
            if submit.prefill_candidates:
                first = submit.prefill_candidates[0].worker_id
                yield pb.Refusal(kind=pb.Refusal.KIND_REROUTE, failed_prefill_workers=[first])
            else:
                async for output in says(REPLY)(submit):
                    yield output

        worker = await start_worker(fails_the_first)
        prefill = [await start_worker(worker_id=f"prefill-{i}", kind="prefill") for i in range(2)]
        router = await start_router(worker, *prefill, long_prefill_tokens=0)
        assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY
        assert [len(submit.prefill_candidates) for submit in worker.submits] == [2, 1, 0]

    async def test_a_failure_is_an_error(self, start_router: StartRouter, start_worker: StartWorker) -> None:
        router = await start_router(await start_worker(_refuses(pb.Refusal.KIND_FAILED)))
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")

    async def test_a_request_that_failed_is_tried_on_another_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        bad = await start_worker(_refuses(pb.Refusal.KIND_FAILED), worker_id="bad")
        router = await start_router(bad, await start_worker(says(REPLY)))
        for _ in range(6):
            assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY
        assert all(submit.attempt == 0 for submit in bad.submits)

    async def test_a_request_that_failed_twice_is_not_tried_again(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        workers = [await start_worker(_refuses(pb.Refusal.KIND_FAILED), worker_id=f"bad-{i}") for i in range(4)]
        router = await start_router(*workers)
        assert (await router.http.post("/v1/chat/completions", json=CHAT)).status_code == 500
        assert sum(len(worker.submits) for worker in workers) == 2

    async def test_the_retry_time_is_limited(self, start_router: StartRouter, start_worker: StartWorker) -> None:
        never = _refuses(pb.Refusal.KIND_QUEUE_FULL, retry_after_ms=(1 << 32) - 1)
        router = await start_router(await start_worker(never))
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "600")

    async def test_a_failure_within_a_stream_is_its_last_event(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        begun = asyncio.Event()

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            async for output in says(REPLY)(submit):
                yield output
                break
            await begun.wait()
            yield pb.Refusal(kind=pb.Refusal.KIND_FAILED, message="broken")

        router = await start_router(await start_worker(script))
        async with router.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            begun.set()
            text = (await response.aread()).decode()
        *_, last, rest = text.split("\n\n")
        assert rest == ""
        assert "broken" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "[DONE]" not in text


class TestReplay:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_another_worker_continues_after_the_tokens_so_far(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tokenizer: Tokenizer, stream: bool
    ) -> None:
        _, wait = _gate(after=4)
        workers = [await start_worker(says(REPLY, after=wait), worker_id=f"combined-{i}") for i in range(2)]
        router = await start_router(*workers, long_prefill_tokens=0)
        call = asyncio.create_task(
            router.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": [7] * 30, "max_tokens": 99, "stream": stream}
            )
        )
        await eventually(lambda: _is(lambda: any(worker.submits for worker in workers)))
        lost, other = sorted(workers, key=lambda worker: -len(worker.submits))
        await eventually(lambda: _gaps(router, 3))
        other.script = says(REPLY)
        await lost.kill()
        response = await call
        assert response.status_code == 200
        text = (
            "".join(
                json.loads(event.removeprefix("data: "))["choices"][0]["text"]
                for event in response.text.split("\n\n")[:-2]
            )
            if stream
            else response.json()["choices"][0]["text"]
        )
        assert text == REPLY
        first, second = lost.submits[0], other.submits[0]
        tokens = [*([7] * 30), *tokenizer.encode(REPLY).ids[:4]]
        assert unpack_tokens(second.tokens).tolist() == tokens
        assert (second.prompt_len, second.attempt) == (30, first.attempt + 1)
        assert (second.sampling, second.hash_root) == (first.sampling, first.hash_root)
        hashes = extend_hashes(hash_root(b"model"), tokens)
        assert second.block_hashes == b"".join(hashes)
        assert len(hashes) == 2
        assert "cpd_replays_total 1.0" in (await router.http.get("/metrics")).text

    async def test_choices_with_different_tokens_are_replayed_separately(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tokenizer: Tokenizer
    ) -> None:
        texts = ("the fox jumps", "a lazy dog", "you")
        _, wait = _gate(after=4)
        first = await start_worker(says(*texts, after=wait))
        router = await start_router(first)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT | {"n": 3}))
        await eventually(lambda: _gaps(router, 1))
        second = await start_worker(says(*texts), worker_id="combined-1")
        await router.knows(second)
        await first.kill()
        body = (await call).json()
        assert [choice["message"]["content"] for choice in body["choices"]] == list(texts)
        assert sorted((submit.choice, submit.n) for submit in second.submits) == [(0, 1), (1, 1), (2, 1)]
        ids = [tokenizer.encode(text).ids for text in texts]
        for submit in second.submits:
            emitted = unpack_tokens(submit.tokens)[submit.prompt_len :].tolist()
            assert emitted == ids[submit.choice][: len(emitted)]
            assert emitted

    async def test_a_request_waits_for_a_worker_to_come_back(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        _, wait = _gate(after=2)
        first = await start_worker(says(REPLY, after=wait))
        router = await start_router(first)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: _gaps(router, 1))
        await first.kill()
        await eventually(lambda: _gone(router, "combined-0"))
        assert (await router.http.post("/v1/chat/completions", json=CHAT)).status_code == 503
        assert not call.done()
        await start_worker(says(REPLY), worker_id="combined-1")
        assert await _text(await call) == REPLY

    async def test_it_waits_only_for_a_while(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(dispatcher, "MAX_WAIT_S", 0.2)
        worker = await start_worker()
        router = await start_router(worker)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: _is(lambda: bool(worker.submits)))
        await worker.kill()
        response = await call
        assert response.status_code == 503
        assert "retry-after" in response.headers

    async def test_when_one_choice_finds_no_worker_the_others_end_too(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "MAX_WAIT_S", 0)
        _, wait = _gate(after=4)
        first = await start_worker(says("the fox jumps", "a lazy dog", after=wait))
        router = await start_router(first)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT | {"n": 2}))
        await eventually(lambda: _gaps(router, 1))
        await first.kill()
        assert (await call).status_code == 503
        late = await start_worker(says(REPLY), worker_id="late")
        await router.knows(late)
        assert late.submits == []

    async def test_a_worker_with_another_model_does_not_continue_a_request(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "MAX_WAIT_S", 0.5)
        worker = await start_worker()
        router = await start_router(worker)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: _is(lambda: bool(worker.submits)))
        other = await start_worker(says(REPLY), worker_id="other", hello={"fingerprint": b"other"})
        await worker.kill()
        assert (await call).status_code == 503
        await router.knows(other)
        assert other.submits == []

    async def test_a_request_that_crashes_its_workers_fails(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        workers: list[FakeWorker] = []

        async def deadly(submit: pb.Submit) -> AsyncIterator[Answer]:
            # a choice that was not requested: the session breaks
            yield pb.Output(choice=5, token_ids=[7])

        workers = [await start_worker(deadly, worker_id=f"combined-{i}") for i in range(2)]
        router = await start_router(*workers)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500
        assert "workers were lost" in response.json()["error"]["message"]
        assert sum(len(worker.submits) for worker in workers) == dispatcher.MAX_LOSSES + 1

    async def test_a_replay_goes_to_another_worker_than_the_one_that_was_lost(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        async def ends(submit: pb.Submit) -> AsyncIterator[Answer]:
            flaps.send(pb.WorkerMessage(end=pb.End(reason="back in a moment")))
            await asyncio.Event().wait()
            yield pb.Output()

        prompt = [7] * 64
        cached = b"".join(block[:8] for block in extend_hashes(hash_root(b"model"), prompt))
        flaps = await start_worker(ends, worker_id="flaps", cached=cached)
        router = await start_router(flaps)
        call = asyncio.create_task(
            router.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 99})
        )
        await eventually(lambda: _is(lambda: len(flaps.submits) > 1))  # there was no other worker
        await start_worker(says(REPLY), worker_id="stays")
        response = await call
        assert (response.status_code, response.headers["x-cpd-decode-worker"]) == (200, "stays")

    async def test_late_outputs_of_an_older_attempt_are_dropped(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            if submit.attempt == 0:
                yield pb.Refusal(kind=pb.Refusal.KIND_REROUTE)
            stale = pb.Output(request=submit.request, attempt=0, token_ids=[9])
            worker.send(pb.WorkerMessage(step=pb.StepOutput(outputs=[stale])))
            if submit.attempt == 1:
                async for output in says(REPLY)(submit):
                    yield output

        worker = await start_worker(script)
        router = await start_router(worker)
        assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY


class TestHangUp:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("outputs", [0, 3])
    async def test_the_worker_is_told_to_abort(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, stream: bool, outputs: int
    ) -> None:
        _, wait = _gate(after=outputs)
        worker = await start_worker(says(REPLY, after=wait))
        router = await start_router(worker)
        body = json.dumps(CHAT | {"stream": stream}).encode()
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await eventually(lambda: _is(lambda: bool(worker.submits)))
        if outputs and stream:
            await reader.readuntil(b"quick")
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: _is(lambda: bool(worker.aborts)))
        assert worker.aborts[0] == pb.Abort(request=worker.submits[0].request, attempt=0)
        await eventually(lambda: _counted(router, "client_gone"))
        assert (await router.worker("combined-0") or {})["routers"]["router-a"]["sequences"] == 0

    async def test_a_waiting_request_is_forgotten(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker()
        router = await start_router(worker)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: _is(lambda: bool(worker.submits)))
        await worker.kill()
        await eventually(lambda: _gone(router, "combined-0"))
        call.cancel()
        await eventually(lambda: _counted(router, "client_gone"))
        late = await start_worker(says(REPLY), worker_id="combined-1")
        await router.knows(late)
        assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == REPLY
        assert len(late.submits) == 1


class TestPlacement:
    async def test_equal_workers_share_the_requests_that_run(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        workers = [await start_worker(worker_id=f"combined-{i}") for i in range(3)]
        router = await start_router(*workers)
        calls = [asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT)) for _ in range(9)]
        await eventually(lambda: _is(lambda: sum(len(worker.submits) for worker in workers) == 9))
        assert [len(worker.submits) for worker in workers] == [3, 3, 3]
        for call in calls:
            call.cancel()

    async def test_other_routers_load_counts(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        busy, idle = [await start_worker(says("fox"), worker_id=name) for name in ("busy", "idle")]
        router = await start_router(busy, idle)
        busy.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=3, waiting=2)))
        await eventually(lambda: _load_is(router, "busy", running=3))
        for _ in range(4):
            await router.http.post("/v1/chat/completions", json=CHAT)
        assert (len(busy.submits), len(idle.submits)) == (0, 4)


async def _gaps(router: Router, count: int) -> bool:
    """Returns whether this many tokens after a first one have reached the router."""
    text = (await router.http.get("/metrics")).text
    line = next(line for line in text.splitlines() if line.startswith("cpd_itl_seconds_count"))
    return float(line.split()[1]) >= count


async def _gone(router: Router, worker_id: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is None or worker["state"] == "connecting"


async def _counted(router: Router, outcome: str) -> bool:
    return f'cpd_requests_total{{outcome="{outcome}"' in (await router.http.get("/metrics")).text


async def _load_is(router: Router, worker_id: str, **load: int) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and worker["load"] is not None and load.items() <= worker["load"].items()


class TestPolicy:
    """The setting `policy`."""

    async def test_workers_take_turns(self, start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
        workers = [await start_worker(says(name), worker_id=name) for name in ("fox", "dog")]
        router = await start_router(*workers, policy=PolicySettings(name="round-robin"))
        answers = [await _text(await router.http.post("/v1/chat/completions", json=CHAT)) for _ in range(4)]
        assert answers == ["dog", "fox", "dog", "fox"]

    async def test_a_policy_that_fails_is_a_500_and_the_router_goes_on(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        policy = PolicySettings(name="tests.router.dispatch.test_dispatcher:FailsTwice")
        router = await start_router(await start_worker(says("fox")), policy=policy)
        for _ in range(2):
            response = await router.http.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.json()["error"]["message"]) == (500, "The placement policy failed.")
        assert await _text(await router.http.post("/v1/chat/completions", json=CHAT)) == "fox"

    async def test_a_policy_that_fails_at_a_replay_fails_the_request(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        opened, wait = _gate(3)
        policy = PolicySettings(name="tests.router.dispatch.test_dispatcher:FailsLater")
        first = await start_worker(says(REPLY, after=wait), worker_id="a")
        router = await start_router(first, await start_worker(says(REPLY), worker_id="b"), policy=policy)
        asked = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: _is(lambda: bool(first.submits)))
        await first.kill()
        response = await asked
        opened.set()
        assert (response.status_code, response.json()["error"]["message"]) == (500, "The placement policy failed.")

    async def test_predictions_are_trusted_at_first(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("fox")))
        assert (await router.cluster())["trusted"] is True
        assert "\ncpd_policy_fallback 0.0\n" in (await router.http.get("/metrics")).text


class FailsTwice:
    """A policy with a mistake."""

    def __init__(self, settings: PolicySettings) -> None:
        self._policy = CostPolicy(settings)
        self._left = 2

    def place(self, seen: Situation) -> Placement:
        """Fails at first."""
        self._left -= 1
        if self._left >= 0:
            raise ZeroDivisionError
        return self._policy.place(seen)


class FailsLater:
    """A policy that can't place a request again."""

    def __init__(self, settings: PolicySettings) -> None:
        self._policy = CostPolicy(settings)
        self._placed = False

    def place(self, seen: Situation) -> Placement:
        """Places one request, on the first worker."""
        if self._placed:
            raise ZeroDivisionError
        self._placed = True
        return self._policy.place(replace(seen, combined=[one for one in seen.combined if one.worker_id == "a"]))


class TestWaiting:
    async def test_a_request_that_would_wait_too_long_is_refused_before_it_is_sent(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        profile = Profile.load("h200-qwen3-8b").model_dump_json(by_alias=True).encode()
        worker = await start_worker(says(REPLY), hello={"profile": profile})
        router = await start_router(worker, max_wait_s=5.0)
        worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=9, waiting=9, prefill_ms=42_000)))

        async def is_refused() -> bool:
            response = await router.http.post("/v1/chat/completions", json=CHAT)
            if response.status_code == 200:
                return False  # the report has not come yet
            assert (response.status_code, response.json()["error"]["code"]) == (503, "wait_too_long")
            assert 21 <= int(response.headers["retry-after"]) <= 84
            return True

        await eventually(is_refused)

    async def test_a_request_that_has_waited_too_long_is_given_up(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker()
        router = await start_router(worker, max_wait_s=0.1)
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "wait_too_long")
        assert int(response.headers["retry-after"]) >= 1
        await eventually(lambda: _is(lambda: len(worker.aborts) == 1))

    async def test_a_request_that_has_begun_is_not_given_up(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        opened, gate = _gate(1)
        worker = await start_worker(says(REPLY, after=gate))
        router = await start_router(worker, max_wait_s=0.1)
        call = asyncio.create_task(router.http.post("/v1/chat/completions", json=CHAT))
        given_up = await router.http.post("/v1/chat/completions", json=CHAT | {"model": MODEL, "max_tokens": 1})
        assert given_up.status_code == 200
        await asyncio.sleep(0.3)  # three times as long as it may wait
        opened.set()
        assert await _text(await call) == REPLY

    async def test_a_client_says_how_long_a_first_token_is_of_use(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        worker = await start_worker()
        router = await start_router(worker)
        response = await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout-ms": "100"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "wait_too_long")
        assert 1 <= worker.submits[0].deadline_ms <= 100
        await eventually(lambda: _is(lambda: len(worker.aborts) == 1))

    @pytest.mark.parametrize("refuses", [True, False])
    async def test_a_request_that_failed_is_freed_at_once(
        self, start_router: StartRouter, start_worker: StartWorker, refuses: bool
    ) -> None:
        """Garbage collections are rare, so under overload prompts would pile up until the next one."""
        worker = await start_worker(_refuses(pb.Refusal.KIND_QUEUE_FULL) if refuses else None)
        router = await start_router(worker, max_wait_s=0.1)
        gc.collect()
        gc.disable()
        try:
            response = await router.http.post("/v1/chat/completions", json=CHAT)
            assert response.json()["error"]["code"] == ("queue_full" if refuses else "wait_too_long")
            kinds = {ChatRequest, RoutedRequest, CompletionResponse}
            await eventually(lambda: _is(lambda: not any(type(one) in kinds for one in gc.get_objects())))
        finally:
            gc.enable()

    @pytest.mark.parametrize("sent", ["", "0", "-1", "1.5", "1e3", "9999999999", "soon"])
    async def test_a_deadline_that_is_no_number_is_refused(self, start_router: StartRouter, sent: str) -> None:
        router = await start_router()
        response = await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-timeout-ms": sent})
        assert response.status_code == 400
        assert "x-request-timeout-ms" in response.json()["error"]["message"]
