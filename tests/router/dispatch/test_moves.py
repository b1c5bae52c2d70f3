"""Requests that leave a worker that drains, is slow or is full."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from cpd.common import stream
from cpd.common.blocks import unpack_tokens
from cpd.common.policy_settings import PolicySettings
from cpd.rpc import cpd_pb2 as pb
from router.dispatch import dispatcher
from router.dispatch.convictions import Convictions
from router.placement import moves
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.dispatch.suspects import Suspects
from tests.router.fake_worker import Answer, FakeWorker, Script

MODEL = "small-model"
REPLY = "the quick brown fox jumps over the lazy dog"
PROMPT = [7] * 30
AFTER = 4
"""Tokens after which the draining worker's requests stand still."""

Call = asyncio.Task[httpx.Response]


async def _stands_still(count: int) -> None:
    if count >= AFTER:
        await asyncio.Event().wait()


def _refuses(kind: "pb.Refusal.Kind.ValueType") -> Script:
    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        yield pb.Refusal(kind=kind, message="no")

    return script


def _ask(router: Router, prompt: list[int] = PROMPT, **fields: Any) -> Call:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 99, **fields}
    return asyncio.create_task(router.http.post("/v1/completions", json=body))


async def _texts(call: Call) -> list[str]:
    response = await call
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def _drain(worker: FakeWorker) -> None:
    worker.hello.state = pb.STATE_DRAINING
    worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING, moving=True)))


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()


async def _holds(condition: Callable[[], bool]) -> None:
    await eventually(lambda: _is(condition))


async def _stand(router: Router, outputs: int) -> None:
    """Waits until this many outputs have come."""

    async def came() -> bool:
        metrics = (await router.http.get("/metrics")).text
        gaps = next(line for line in metrics.splitlines() if line.startswith("cpd_itl_seconds_count"))
        return float(gaps.split()[-1]) >= outputs

    await eventually(came)


async def _moves(router: Router, outcome: str) -> float:
    metrics = (await router.http.get("/metrics")).text.splitlines()
    lines = [line for line in metrics if line.startswith(f'cpd_moves_total{{outcome="{outcome}"}}')]
    return float(lines[0].split()[-1]) if lines else 0.0


class Draining:
    """A router, a worker with a request that stands still, and another worker."""

    def __init__(self, router: Router, source: FakeWorker, target: FakeWorker, call: Call) -> None:
        self.router, self.source, self.target, self.call = router, source, target, call

    @property
    def name(self) -> pb.Park:
        """The name of the source's first request."""
        return pb.Park(request=self.source.submits[0].request, attempt=self.source.submits[0].attempt)


Start = Callable[..., Any]


@pytest.fixture
def start(start_router: StartRouter, start_worker: StartWorker, says: Says) -> Start:
    """`await start(script, texts, **fields)`: the request's fields; the target has the script."""

    async def start(script: Script | None, texts: tuple[str, ...] = (REPLY,), **fields: Any) -> Draining:
        source = await start_worker(says(*texts, after=_stands_still), worker_id="source")
        router = await start_router(source)
        call = _ask(router, **fields)
        await _stand(router, AFTER - len(texts))
        target = await start_worker(script, worker_id="target")
        await router.knows(target)
        return Draining(router, source, target, call)

    return start


async def test_another_worker_goes_on_with_the_pages_of_the_one_that_drains(
    start: Start, says: Says, tokenizer: Tokenizer
) -> None:
    d = await start(says(REPLY))
    _drain(d.source)
    assert await _texts(d.call) == [REPLY]
    assert d.source.parks == [d.name]
    (submit,) = d.target.submits
    assert unpack_tokens(submit.tokens).tolist() == [*PROMPT, *tokenizer.encode(REPLY).ids[:AFTER]]
    assert (submit.prefix_source.worker_id, submit.prefix_source.blocks) == ("source", 2)
    assert not submit.HasField("resumes")
    assert submit.sampling == d.source.submits[0].sampling
    await _holds(lambda: len(d.source.aborts) > 0)
    assert d.source.aborts == [pb.Abort(request=d.name.request, attempt=d.name.attempt, choices=[0])]
    assert await _moves(d.router, "moved") == 1


async def test_choices_move_by_themselves(start: Start, says: Says) -> None:
    texts = ("the fox jumps over the dog", "a lazy dog jumps over the fox", "you quick brown fox")
    d = await start(says(*texts), texts, n=3)
    _drain(d.source)
    assert await _texts(d.call) == list(texts)
    assert sorted((submit.choice, submit.n) for submit in d.target.submits) == [(0, 1), (1, 1), (2, 1)]
    await _holds(lambda: len(d.source.aborts) == 3)
    assert sorted(abort.choices[0] for abort in d.source.aborts) == [0, 1, 2]
    assert {(abort.request, abort.attempt) for abort in d.source.aborts} == {(d.name.request, d.name.attempt)}


async def test_without_another_worker_it_stays_until_there_is_one(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    call = _ask(router)
    await _stand(router, AFTER - 1)
    _drain(source)
    await eventually(lambda: _draining(router))
    target = await start_worker(says(REPLY), worker_id="target")
    await router.knows(target)
    assert source.parks == []
    _drain(source)  # its next report
    assert await _texts(call) == [REPLY]
    assert len(source.parks) == len(target.submits) == 1


async def _draining(router: Router) -> bool:
    worker = await router.worker("source")
    return worker is not None and worker["state"] == "draining"


@pytest.mark.parametrize("kind", [pb.Refusal.KIND_QUEUE_FULL, pb.Refusal.KIND_REROUTE, pb.Refusal.KIND_FAILED])
async def test_refused_by_the_others_it_goes_on_where_it_is_parked(
    start: Start, says: Says, kind: "pb.Refusal.Kind.ValueType"
) -> None:
    d = await start(_refuses(kind))
    d.source.script = says(REPLY)
    _drain(d.source)
    assert await _texts(d.call) == [REPLY]
    _, again = d.source.submits
    assert again.resumes == d.name
    assert not again.HasField("prefix_source")
    assert not again.prefill_candidates
    assert d.source.aborts == []
    assert await _moves(d.router, "returned") == 1


async def test_when_the_target_dies_before_its_first_token_it_goes_on_where_it_is_parked(
    start: Start, says: Says
) -> None:
    d = await start(None)
    d.source.script = says(REPLY)
    _drain(d.source)
    await _holds(lambda: len(d.target.submits) == 1)
    await d.target.kill()
    assert await _texts(d.call) == [REPLY]
    assert d.source.submits[1].resumes == d.name


async def test_a_target_that_is_slow_to_start_counts_as_one_that_refused(
    start: Start, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MOVE_S", 0.1)
    d = await start(None)
    d.source.script = says(REPLY)
    _drain(d.source)
    assert await _texts(d.call) == [REPLY]
    assert d.source.submits[1].resumes == d.name
    (submit,) = d.target.submits
    await _holds(lambda: len(d.target.aborts) == 1)
    assert d.target.aborts == [pb.Abort(request=submit.request, attempt=submit.attempt)]


async def test_one_that_came_back_stays_for_a_while(start: Start, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "STAY_S", 0.5)
    d = await start(_refuses(pb.Refusal.KIND_QUEUE_FULL))
    _drain(d.source)
    await _holds(lambda: len(d.source.submits) == 2)
    returned = asyncio.get_running_loop().time()
    d.target.script = says(REPLY)
    while not d.call.done():
        _drain(d.source)
        await asyncio.sleep(0.01)
    assert await _texts(d.call) == [REPLY]
    assert asyncio.get_running_loop().time() - returned >= 0.4
    assert len(d.source.parks) == 2
    assert d.source.parks[1].attempt == d.source.submits[1].attempt


async def test_when_the_draining_worker_dies_the_target_goes_on(start: Start, says: Says) -> None:
    opened = asyncio.Event()

    async def wait(count: int) -> None:
        await opened.wait()

    d = await start(says(REPLY, after=wait))
    _drain(d.source)
    await _holds(lambda: len(d.target.submits) == 1)
    await d.source.kill()
    await eventually(lambda: _gone(d.router))
    opened.set()
    assert await _texts(d.call) == [REPLY]
    assert len(d.target.submits) == 1


async def _gone(router: Router) -> bool:
    worker = await router.worker("source")
    return worker is None or worker["state"] == "connecting"


async def test_a_client_that_hangs_up_frees_the_pages(start: Start) -> None:
    d = await start(None)
    _drain(d.source)
    await _holds(lambda: len(d.target.submits) == 1)
    d.call.cancel()
    await _holds(lambda: len(d.source.aborts) == len(d.target.aborts) == 1)
    assert d.source.aborts[0].request == d.name.request


async def test_only_a_few_move_at_a_time_and_each_start_lets_the_next_one_go(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    opened = asyncio.Event()

    async def wait(count: int) -> None:
        await opened.wait()

    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    many = 2 * dispatcher.MAX_MOVES + 1
    calls = [_ask(router, [number] * 30) for number in range(1, many + 1)]
    await _stand(router, many * (AFTER - 1))
    target = await start_worker(says(REPLY, after=wait), worker_id="target")
    await router.knows(target)
    _drain(source)
    await _holds(lambda: len(target.submits) == dispatcher.MAX_MOVES)
    _drain(source)
    assert len(source.parks) == dispatcher.MAX_MOVES
    opened.set()
    for call in calls:
        assert await _texts(call) == [REPLY]
    await _holds(lambda: len(source.aborts) == many)


async def test_suspects_go_back_one_after_the_other(
    start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "TICK_S", 0.1)  # suspects go only to workers that were heard from since the crash
    suspects = Suspects(says, REPLY)

    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    calls = [_ask(router, [number] * 30) for number in range(1, dispatcher.MAX_MOVES + 1)]
    await _stand(router, len(calls) * (AFTER - 1))
    target = await start_worker(worker_id="target")
    await router.knows(target)
    _drain(source)
    await _holds(lambda: len(target.submits) == len(calls))
    source.script = suspects.script
    await target.kill()
    for call in calls:
        assert await _texts(call) == [REPLY]
    assert suspects.most == 1


def _slow(worker: FakeWorker) -> None:
    """Reports one stream, and steps that take three times as long as predicted."""
    load = pb.Load(state=pb.STATE_READY, running=1, decodes=1, decode_context=34, slowdown=3.0, free_pages=100)
    worker.send(pb.WorkerMessage(load=load))


def _full(worker: FakeWorker) -> None:
    """Reports one stream, and no page for its next block."""
    load = pb.Load(state=pb.STATE_READY, running=1, decodes=1, decode_context=34, used_pages=100)
    worker.send(pb.WorkerMessage(load=load))


async def _placements(router: Router, request_id: str) -> list[dict[str, Any]]:
    placements: list[dict[str, Any]] = (await router.http.get(f"/requests/{request_id}")).json()["placements"]
    return placements


@pytest.mark.parametrize(("report", "reason"), [(_slow, "slow"), (_full, "full")], ids=["slow", "full"])
async def test_a_stream_leaves_a_slow_or_full_worker_and_the_request_shows_why(
    start: Start, says: Says, tokenizer: Tokenizer, report: Callable[[FakeWorker], None], reason: str
) -> None:
    d = await start(says(REPLY))
    while not d.call.done():
        report(d.source)
        await asyncio.sleep(0.02)
    assert await _texts(d.call) == [REPLY]
    assert d.source.parks == [d.name]
    (submit,) = d.target.submits
    assert unpack_tokens(submit.tokens).tolist() == [*PROMPT, *tokenizer.encode(REPLY).ids[:AFTER]]
    assert submit.prefix_source.worker_id == "source"
    await _holds(lambda: len(d.source.aborts) > 0)
    assert await _moves(d.router, "moved") == 1
    parked, finished = await _placements(d.router, d.call.result().headers["x-request-id"])
    assert parked["outcome"].startswith(f"parked, to move to target: its worker is {reason}")
    assert finished["outcome"] == "finished"


async def test_a_stream_of_a_slow_worker_goes_back_if_the_one_that_was_chosen_refuses(
    start: Start, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)
    d = await start(_refuses(pb.Refusal.KIND_QUEUE_FULL))
    d.source.script = says(REPLY)
    _slow(d.source)
    assert await _texts(d.call) == [REPLY]
    assert d.source.submits[1].resumes == d.name
    assert d.source.aborts == []
    assert await _moves(d.router, "returned") == 1


async def test_a_stream_that_has_moved_rests(
    start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)
    monkeypatch.setattr(dispatcher, "REST_S", 0.5)
    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source)
    call = _ask(router)
    await _stand(router, AFTER - 1)
    moved_at = 0.0

    async def one_more(count: int) -> None:
        nonlocal moved_at
        if count:
            await asyncio.Event().wait()
        moved_at = asyncio.get_running_loop().time()

    target = await start_worker(says(REPLY, after=one_more), worker_id="target")
    await router.knows(target)
    _slow(source)
    await _holds(lambda: moved_at > 0)
    source.script = says(REPLY)
    source.become(pb.ROLE_COMBINED)  # without streams
    while not call.done():
        _slow(target)
        await asyncio.sleep(0.01)
    assert await _texts(call) == [REPLY]
    assert len(source.parks) == len(target.parks) == 1
    assert asyncio.get_running_loop().time() - moved_at >= 0.5


async def test_a_policy_without_moves_leaves_streams_where_they_are(
    start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.0)
    source = await start_worker(says(REPLY, after=_stands_still), worker_id="source")
    router = await start_router(source, policy=PolicySettings(moves=False))
    call = _ask(router)
    await _stand(router, AFTER - 1)
    target = await start_worker(says(REPLY), worker_id="target")
    await router.knows(target)
    _slow(source)
    _slow(source)
    _drain(source)  # it moves only because of this
    assert await _texts(call) == [REPLY]
    parked, _ = await _placements(router, call.result().headers["x-request-id"])
    assert parked["outcome"] == "parked, to move"


async def test_choices_of_a_request_that_fails_while_it_moves_are_not_kept_parked(
    start: Start, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    def includes(convictions: Convictions, digest: bytes, now: float) -> bool:
        return bool(d.source.parks)  # one like it has crashed workers meanwhile

    texts = ("the fox jumps over the dog", "a lazy dog jumps over the fox", "you quick brown fox")
    d = await start(says(*texts), texts, n=3)
    monkeypatch.setattr(Convictions, "__bool__", lambda convictions: True)
    monkeypatch.setattr(Convictions, "includes", includes)
    _drain(d.source)
    assert (await d.call).status_code == 500
    await _holds(lambda: sorted(choice for abort in d.source.aborts for choice in abort.choices) == [0, 1, 2])
