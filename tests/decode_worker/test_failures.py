"""Prefill workers that refuse, hang or end: the request continues on another worker, or is rerouted."""

import time

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.decode_worker.pair import Stage, assert_right, pair, reached, silent_server
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.cluster import running
from tests.worker.fakes import MAX_MODEL_LEN


async def test_the_next_candidate_takes_over(redis_url: str) -> None:
    request = make_request("a", prompt(200), max_tokens=20)
    async with pair(redis_url) as p:
        dead = pb.PrefillCandidate(worker_id="dead", address="127.0.0.1:1")
        answer = await p.submit(request, 1, candidates=[dead, p.prefill.candidate])
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].prefill_worker == p.prefill.worker.id
        await p.balanced()
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1, "failed": 1})


async def test_without_another_candidate_the_request_is_rerouted(redis_url: str) -> None:
    async with pair(redis_url) as p:
        dead = pb.PrefillCandidate(worker_id="dead", address="127.0.0.1:1")
        answer = await p.submit(make_request("a", prompt(200)), 1, candidates=[dead])
        await p.router.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
        assert "dead" in answer.refusal.message
        assert list(answer.refusal.failed_prefill_workers) == ["dead"]
        await p.balanced()
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"failed": 1, "rerouted": 1})


async def test_other_weights_are_refused_with_a_clear_message(redis_url: str) -> None:
    async with pair(redis_url, prefill={"fingerprint": b"another model"}) as p:
        answer = await p.submit(make_request("a", prompt(200)), 1)
        await p.router.done(answer)
        assert answer.refusal is not None
        assert "differ in weights" in answer.refusal.message
        await p.balanced()


async def test_a_hanging_prefill_worker_is_given_up(redis_url: str) -> None:
    async with pair(redis_url, prefill_progress_s=0.5) as p, silent_server() as address:
        silent = pb.PrefillCandidate(worker_id="silent", address=address)
        answer = await p.submit(make_request("a", prompt(200)), 1, candidates=[silent])
        await p.router.done(answer)
        assert answer.refusal is not None
        assert "no progress" in answer.refusal.message


async def test_a_silent_prefill_worker_is_given_up_sooner(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setattr("decode_worker.remote_prefill.SILENT_S", 0.3)
    async with pair(redis_url, prefill_progress_s=60) as p, silent_server() as address:
        silent = pb.PrefillCandidate(worker_id="silent", address=address)
        answer = await p.submit(make_request("a", prompt(200)), 1, candidates=[silent])
        await p.router.done(answer)
        assert answer.refusal is not None
        assert "no message for 0.3 s (CONNECTING)" in answer.refusal.message
        await eventually(lambda: dict(p.router.load.transfer_failures) == {"silent": 1})


async def test_a_decode_worker_that_was_stopped_itself_gives_no_prefill_worker_up(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.setattr("decode_worker.remote_prefill.SILENT_S", 1.0)
    monkeypatch.setattr("worker.prefill_server.HEARTBEAT_S", 0.1)
    request = make_request("a", prompt(200), max_tokens=20)
    async with pair(redis_url) as p:
        p.transfer_gate.clear()
        answer = await p.submit(request, 1)
        await eventually(lambda: answer.started)
        time.sleep(2.0)  # noqa: ASYNC251 - stops the whole process
        p.transfer_gate.set()
        await p.router.done(answer)
        assert_right(request, answer)


async def test_a_hanging_engine_is_given_up_although_its_process_runs(redis_url: str) -> None:
    async with pair(redis_url, prefill_progress_s=1.5) as p:
        p.prefill_gate.close()
        answer = await p.submit(make_request("a", prompt(200)), 1)
        await p.router.done(answer)
        assert answer.refusal is not None
        assert "no progress" in answer.refusal.message
        p.prefill_gate.open()
        await p.balanced()


async def test_a_long_step_with_progress_is_not_given_up(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    """A step may take long while it makes progress: here one layer for each heartbeat."""
    monkeypatch.setattr("worker.prefill_server.HEARTBEAT_S", 0.05)
    layers = 0

    def progress() -> int:
        nonlocal layers
        layers += 1
        return layers

    request = make_request("a", prompt(200), max_tokens=20)
    async with pair(redis_url, prefill={"progress": progress}, prefill_progress_s=2.0) as p:
        p.prefill_gate.close()
        answer = await p.submit(request, 1)
        await eventually(lambda: p.prefill_gate.held)
        await eventually(lambda: layers > 3.0 / 0.05)  # 3 s of heartbeats, longer than the time limit
        p.prefill_gate.open()
        await p.router.done(answer)
        assert_right(request, answer)
        await p.balanced()


async def test_a_queued_remote_prefill_is_not_given_up(redis_url: str) -> None:
    """Deadlines measure progress: while the queue advances, no job in it times out."""
    requests = [make_request(f"r{i}", prompt(900, i), max_tokens=2) for i in range(12)]
    async with pair(redis_url, prefill_progress_s=3.0, decode={"num_pages": 70}) as p:
        p.prefill_gate.slow()  # the last one waits longer than the limit without progress
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(request, answer)
        await eventually(lambda: p.router.load.remote_prefills["completed"] == 12)


async def test_after_a_full_queue_the_next_candidate_is_tried(redis_url: str) -> None:
    async with pair(redis_url, max_queue_tokens=400) as p:
        p.prefill_gate.close()
        answers = [await p.submit(make_request(f"r{i}", prompt(300, i), max_tokens=3), i) for i in range(6)]
        await eventually(lambda: any(answer.refusal for answer in answers))
        p.prefill_gate.open()
        await p.router.done(*answers)
        assert {a.refusal.kind for a in answers if a.refusal} == {pb.Refusal.KIND_REROUTE}
        assert any(answer.finish for answer in answers)
        await p.balanced()


@pytest.mark.parametrize("n", [1, 3])
async def test_first_tokens_of_a_failed_remote_prefill_are_kept(redis_url: str, n: int) -> None:
    """The prefill worker ends after its first tokens. They have been sent, so the answer must continue from them."""
    request = make_request("a", prompt(207), max_tokens=20, n=n)
    async with pair(redis_url) as p:
        p.transfer_gate.clear()
        answer = await p.submit(request, 1)
        await eventually(lambda: len(answer.tokens) == n)
        await p.prefill.stop()
        await p.router.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
        for choice in range(n):
            assert answer.tokens[choice] == expected(request, choice, MAX_MODEL_LEN).token_ids[:1]
        await p.router.balanced()


async def test_the_next_candidate_continues_after_the_first_token_of_the_last_one(redis_url: str) -> None:
    request = make_request("a", prompt(207), max_tokens=20)
    async with pair(redis_url) as p, running("prefill", redis_url, network=p.network) as second:
        p.transfer_gate.clear()
        answer = await p.submit(request, 1, candidates=[p.prefill.candidate, second.candidate])
        await eventually(lambda: answer.started)
        await p.prefill.stop()
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].prefill_worker == p.prefill.worker.id
        await p.router.balanced()
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1, "failed": 1})


@pytest.mark.parametrize("n", [1, 3])
async def test_a_short_rest_is_computed_here(redis_url: str, n: int) -> None:
    """While the job waits in the prefill worker's queue, another request computes the prefix."""
    async with reached(redis_url, Stage.QUEUED, n, num_pages=256) as (p, answer):
        await p.router.done(await p.router.submit(make_request("b", prompt(290)), 3))
        await p.prefill.stop()
        await p.router.done(answer)
        assert_right(make_request("a", prompt(300), max_tokens=20, n=n), answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=288)
        await p.router.balanced()
        await eventually(lambda: p.router.load.remote_prefills["local_fallback"] == 1)


async def test_a_request_that_waits_for_a_failed_remote_prefill_continues_on_its_own(redis_url: str) -> None:
    """Its first tokens stay right, whether the request continues here or is rerouted."""
    request, other = make_request("a", prompt(207), max_tokens=20, n=3), make_request("b", prompt(200))
    async with pair(redis_url) as p:
        p.transfer_gate.clear()
        first = await p.submit(request, 1)
        await eventually(lambda: len(first.tokens) == 3)
        second = await p.router.submit(other, 2)
        await eventually(lambda: p.router.load.waiting == 2)
        await p.prefill.stop()
        await p.router.done(first, second)
        assert_right(other, second)
        for choice in range(3):
            want = expected(request, choice, MAX_MODEL_LEN).token_ids
            assert first.tokens[choice] == (want[:1] if first.refusal else want)
        await p.router.balanced()


@pytest.mark.parametrize("stage", [Stage.RESERVING, Stage.LANDED])
async def test_an_unexpected_error_leaks_no_pages(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, stage: Stage
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with reached(redis_url, stage) as (p, answer):
        monkeypatch.setattr("decode_worker.remote_prefill.first_outputs_from_wire", fail)
        p.prefill_gate.open()
        await p.router.done(answer)
        assert answer.refusal is not None
        assert "a bug" in answer.refusal.message
        p.transfer_gate.set()
        await p.balanced()
