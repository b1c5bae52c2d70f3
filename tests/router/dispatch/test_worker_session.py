"""Membership, sessions and messages of workers."""

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from cpd.common import stream
from cpd.common.blocks import Tier, extend_hashes, hash_root, unpack_tokens
from cpd.common.membership import Member, lease, members
from cpd.common.model_digest import model_digest
from cpd.common.policy_settings import PolicySettings
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from deploy.redis import embedded_redis
from kvtransfer.local import LocalNetwork
from router.dispatch import worker_session as sessions
from router.dispatch import workers as all_workers
from router.dispatch.worker_session import Listener, WorkerSession
from router.dispatch.workers import Workers
from router.placement.learning import Learning
from tests.engine.fakes import make_request, prompt
from tests.newer import speak_newer
from tests.router.arbitrary import anything
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer, FakeWorker
from tests.secret import SECRET
from tests.waiting import eventually as until
from tests.worker.client import Client
from tests.worker.cluster import running
from tests.worker.fakes import fake_loader

MODEL = "small-model"
PROMPT = [5] * 64
LONG_PROMPT = [5] * 480
CHAIN = extend_hashes(hash_root(b"model"), LONG_PROMPT)

SIGNED = ClusterSecret(SECRET)


def _short(*blocks: int) -> bytes:
    return b"".join(CHAIN[block][:8] for block in blocks)


async def _complete(router: Router, prompt: list[int] = PROMPT) -> str:
    """Runs a request and returns the worker that decoded it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    response = await router.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    worker: str = response.headers["x-cpd-decode-worker"]
    return worker


async def _has(router: Router, worker_id: str, **fields: Any) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and fields.items() <= worker.items()


async def _lacks(router: Router, worker_id: str) -> bool:
    return await router.worker(worker_id) is None


async def _predicted(router: Router, *fields: str) -> tuple[Any, ...]:
    """Returns the prediction for a long prompt."""
    response = await router.http.post("/v1/completions", json={"model": MODEL, "prompt": LONG_PROMPT, "max_tokens": 2})
    told = (await router.http.get(f"/requests/{response.headers['x-request-id']}")).json()
    (placement,) = told["placements"]
    return tuple(placement["predicted"][field] for field in fields)


async def _is_loaded(router: Router, worker_id: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and worker["load"] is not None and worker["load"]["waiting_tokens"] > 0


async def _disconnected(router: Router, worker_id: str, reason: str) -> bool:
    """Returns whether the session ended for this reason and the router waits to connect again."""
    worker = await router.worker(worker_id)
    return worker is not None and worker["state"] == "connecting" and worker["reason"] and reason in worker["reason"]


async def _refused(router: Router, worker_id: str, reason: str) -> bool:
    worker = await router.worker(worker_id)
    return worker is not None and worker["state"] == "refused" and reason in worker["reason"]


class TestCache:
    async def test_requests_go_where_their_prefix_is_cached(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        cold = await start_worker(says("fox"), worker_id="cold")
        warm = await start_worker(says("fox"), worker_id="warm", cached=_short(*range(15)))
        router = await start_router(cold, warm)
        assert {await _complete(router, LONG_PROMPT) for _ in range(5)} == {"warm"}
        cold.send(_events(8, added=_short(*range(30))))
        await eventually(lambda: _has(router, "cold", cached_blocks=30))
        assert {await _complete(router, LONG_PROMPT) for _ in range(5)} == {"cold"}
        cold.send(_events(9, removed=_short(1)))
        await eventually(lambda: _has(router, "cold", cached_blocks=29))
        assert {await _complete(router, LONG_PROMPT) for _ in range(5)} == {"warm"}

    async def test_a_worker_gets_a_busy_workers_cache_as_prefix_source(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        async def fetches(submit: pb.Submit) -> AsyncIterator[Answer]:
            prefilled = pb.Prefilled(cached_tokens=464, prefix_worker=submit.prefix_source.worker_id)
            yield pb.Output(token_ids=[5, 5], prefilled=prefilled, finish=pb.FINISH_LENGTH)

        warm = await start_worker(worker_id="warm", cached=_short(*range(29)))
        idle = await start_worker(fetches, worker_id="idle")
        router = await start_router(warm, idle)
        warm.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=9, waiting_tokens=1_000_000)))
        await eventually(lambda: _is_loaded(router, "warm"))
        body = {"model": MODEL, "prompt": LONG_PROMPT, "max_tokens": 2}
        response = await router.http.post("/v1/completions", json=body)
        assert (response.headers["x-cpd-decode-worker"], response.headers["x-cpd-route"]) == ("idle", "local")
        (submit,) = idle.submits
        assert submit.prefix_source == pb.PrefixSource(worker_id="warm", address=warm.address, blocks=29)
        assert 0 < submit.long_prefill_tokens < 480
        told = (await router.http.get(f"/requests/{response.headers['x-request-id']}")).json()
        (placement,) = told["placements"]
        assert placement["predicted"]["prefix_source"] == placement["actual"]["prefix_source"] == "warm"

    async def test_messages_can_come_in_a_batch(self, start_router: StartRouter, start_worker: StartWorker) -> None:
        worker = await start_worker(worker_id="w", cached=_short(0))
        router = await start_router(worker)
        load = pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=3))
        messages = [_events(8, added=_short(1)), _events(9, added=_short(2)), load]
        worker.send(pb.WorkerMessage(batch=pb.Batch(messages=messages)))
        await eventually(lambda: _has(router, "w", cached_blocks=3))
        described = await router.worker("w")
        assert described is not None
        assert described["load"]["running"] == 3

    async def test_blocks_in_host_memory_are_loaded_if_that_is_faster(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        hello = {"host_pages": 60, "host_page_ms": 0.01}
        worker = await start_worker(says("fox"), worker_id="w", cached=_short(*range(20)), hello=hello)
        router = await start_router(worker)
        worker.send(_events(8, added=_short(*range(10, 20)) + os.urandom(8 * 50), tier=pb.TIER_HOST))
        await eventually(lambda: _has(router, "w", state="ready", cached_blocks=70))
        assert await _predicted(router, "uncached_tokens", "host_tokens") == (480 - 320, 160)
        worker.send(_events(9, added=_short(*range(10, 14)), removed=_short(18)))
        await eventually(lambda: _has(router, "w", state="ready", cached_blocks=69))
        assert await _predicted(router, "uncached_tokens", "host_tokens") == (480 - 18 * 16, 64)

    async def test_the_cached_part_decides_between_local_and_remote(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"), cached=_short(0, 1))
        prefill = await start_worker(worker_id="prefill-0", kind="prefill")
        router = await start_router(worker, prefill, long_prefill_tokens=32)
        await _complete(router)
        await _complete(router, [*PROMPT, 6])
        assert [len(submit.prefill_candidates) for submit in worker.submits] == [0, 1]

    async def test_what_a_newer_worker_says_and_this_router_does_not_know_is_ignored(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        says: Says,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        speak_newer(monkeypatch)
        worker = await start_worker(says("fox"), cached=_short(0))
        router = await start_router(worker)
        worker.send(_events(8, added=_short(1)))
        worker.send(pb.WorkerMessage(batch=pb.Batch(messages=[_events(9, added=_short(2))])))
        await eventually(lambda: _has(router, "combined-0", cached_blocks=3))
        assert await _complete(router) == "combined-0"
        assert worker.hellos == ["router-a"]
        assert caplog.text.count("worker combined-0 sends messages that this version does not know") == 1

    async def test_a_gap_in_the_events_means_a_new_session(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"), cached=_short(0))
        router = await start_router(worker)
        worker.cached = _short(0, 1, 2)
        worker.send(_events(9, added=_short(3)))
        await eventually(lambda: _has(router, "combined-0", state="ready", cached_blocks=3))
        assert worker.hellos == ["router-a", "router-a"]


class TestProtocolError:
    """A worker that breaks the protocol loses its session and its requests; other workers are not affected."""

    @pytest.fixture(autouse=True)
    def stay_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sessions, "FIRST_PAUSE_S", 600.0)

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (lambda: _events(8, added=b"odd"), "3 bytes of block hashes"),
            (lambda: _events(8, removed=bytes(8)), "a block hash of zero"),
            (lambda: _events(8, added=_short(1), tier=pb.TIER_UNSPECIFIED), "the tier 0, which does not exist"),
            (lambda: _events(8, added=_short(1), tier=cast(Any, 9)), "the tier 9, which does not exist"),
            (lambda: _load(prefill_ms=-1.0), "prompts of -1.0 ms"),
            (lambda: _load(step_ms=math.nan), "steps of nan ms"),
            (lambda: _load(waiting_tokens=1 << 60), f"it reported {1 << 60} tokens"),
            (lambda: pb.WorkerMessage(snapshot=pb.Snapshot(number=1)), "snapshot came at the wrong time"),
        ],
    )
    async def test_ends_the_session_with_the_worker_that_sent_it(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        says: Says,
        message: Callable[[], pb.WorkerMessage],
        reason: str,
    ) -> None:
        good = await start_worker(says("fox"), worker_id="good", cached=_short(0))
        bad = await start_worker(says("fox"), worker_id="bad", cached=_short(0))
        router = await start_router(good, bad)
        bad.send(message())
        await eventually(lambda: _disconnected(router, "bad", reason))
        assert {await _complete(router) for _ in range(5)} == {"good"}
        assert (good.hellos, bad.hellos) == (["router-a"], ["router-a"])
        assert await _has(router, "good", cached_blocks=1)
        assert await _has(router, "bad", cached_blocks=0)

    async def test_in_a_snapshot_ends_the_session_too(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        good = await start_worker(says("fox"), worker_id="good")
        bad = await start_worker(says("fox"), worker_id="bad", cached=b"odd")
        router = await start_router(good)
        await eventually(lambda: _disconnected(router, "bad", "3 bytes of block hashes"))
        assert await _complete(router) == "good"
        assert bad.submits == []

    async def test_requests_on_the_worker_are_replayed_elsewhere(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        bad = await start_worker(worker_id="bad")
        router = await start_router(bad)
        request = asyncio.create_task(_complete(router))
        await eventually(lambda: _got(bad.submits))
        await router.knows(await start_worker(says("fox"), worker_id="good"))
        bad.send(_events(8, removed=b"odd"))
        assert await request == "good"

    @pytest.mark.parametrize(
        ("output", "reason"),
        [
            (pb.Output(token_ids=[512]), "token id 512, but its vocabulary has 512"),
            (pb.Output(token_ids=[(1 << 32) - 1]), "token id 4294967295"),
            (pb.Output(token_ids=[5, 5, 5]), "more than the 2 tokens that a request asked for"),
            (pb.Output(token_ids=[5, 5]), "did not end a choice with the last of its 2 tokens"),
            (pb.Output(choice=1, token_ids=[5]), "choice 1 of a request that has 1"),
            (
                pb.Output(token_ids=[5], logprobs=[pb.TokenLogprobs()] * 2),
                "it sent 1 tokens and log-probabilities of 2",
            ),
            (pb.Output(token_ids=[5], logprobs=[pb.TokenLogprobs()]), "log-probabilities of 1"),
            (pb.Output(finish=pb.FINISH_LENGTH), "an output without tokens"),
            (pb.Output(token_ids=[5], prefilled=pb.Prefilled(queue_ms=math.nan)), "a queue time of nan ms"),
            (
                pb.Output(token_ids=[5], prefilled=pb.Prefilled(cached_tokens=65)),
                "65 cached tokens of a shorter prompt",
            ),
            (pb.Output(token_ids=[5], prefilled=pb.Prefilled(prefill_worker="a\nb")), "a prefill worker 'a\\nb'"),
        ],
    )
    async def test_in_an_output_ends_the_session_and_another_worker_answers(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, output: pb.Output, reason: str
    ) -> None:
        async def misbehaves(submit: pb.Submit) -> AsyncIterator[Answer]:
            yield output

        bad = await start_worker(misbehaves, worker_id="bad", cached=_short(*range(4)))
        good = await start_worker(says("fox"), worker_id="good")
        router = await start_router(bad, good)
        assert await _complete(router) == "good"
        assert len(bad.submits) == 1
        assert await _disconnected(router, "bad", reason)

    @pytest.mark.parametrize(
        "score",
        [
            pb.TokenLogprobs(logprob=math.nan),
            pb.TokenLogprobs(logprob=-1.0, top_ids=[1, 2], top_logprobs=[-1.0]),
            pb.TokenLogprobs(logprob=-1.0, top_ids=[512], top_logprobs=[-1.0]),
            pb.TokenLogprobs(logprob=-1.0, top_ids=[1], top_logprobs=[math.inf]),
        ],
    )
    async def test_in_log_probabilities_ends_the_session(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, score: pb.TokenLogprobs
    ) -> None:
        async def misbehaves(submit: pb.Submit) -> AsyncIterator[Answer]:
            yield pb.Output(token_ids=[5], logprobs=[score])

        bad = await start_worker(misbehaves, worker_id="bad", cached=_short(*range(4)))
        router = await start_router(bad, await start_worker(says("fox"), worker_id="good"))
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "logprobs": 1}
        response = await router.http.post("/v1/completions", json=body)
        assert (response.status_code, response.headers["x-cpd-decode-worker"]) == (200, "good")
        assert await _disconnected(router, "bad", "it sent log-probabilities")

    @pytest.mark.parametrize("seed", range(4))
    async def test_arbitrary_messages_do_not_disturb_other_workers(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        says: Says,
        seed: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(sessions, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(sessions, "LONGEST_PAUSE_S", 0.01)
        rng = Random(seed)

        async def misbehaves(submit: pb.Submit) -> AsyncIterator[Answer]:
            usual = pb.Output(token_ids=[5], prefilled=pb.Prefilled(queue_ms=1.0)), pb.Refusal()
            yield anything(rng.choice(usual), rng)
            yield pb.Output(token_ids=[5], finish=pb.FINISH_LENGTH)  # in case the router waits for more

        good = await start_worker(says("fox"), worker_id="good", cached=_short(0))
        bad = await start_worker(misbehaves, worker_id="bad", cached=_short(*range(4)))
        router = await start_router(good, bad)
        for _ in range(100):
            bad.send(anything(rng.choice(MESSAGES), rng))
            if rng.random() < 0.2:
                assert await _complete(router) in ("good", "bad")
        assert (await router.http.get("/metrics")).status_code == 200
        assert (await router.worker("good") or {})["state"] == "ready"
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []

    async def test_in_a_later_output_ends_the_session_and_later_outputs_are_ignored(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        async def misbehaves(submit: pb.Submit) -> AsyncIterator[Answer]:
            for token_id in (5, 512, 6):
                yield pb.Output(token_ids=[token_id])

        bad = await start_worker(misbehaves, worker_id="bad", cached=_short(*range(4)))
        good = await start_worker(says("fox"), worker_id="good")
        router = await start_router(bad, good)
        assert await _complete(router) == "bad"  # it computed the first token
        assert await _disconnected(router, "bad", "token id 512, but its vocabulary has 512")
        (submit,) = good.submits
        assert unpack_tokens(submit.tokens)[submit.prompt_len :].tolist() == [5]

    async def test_a_too_large_message_ends_the_session(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "MAX_MESSAGE_BYTES", 10_000)
        good = await start_worker(says("fox"), worker_id="good")
        bad = await start_worker(says("fox"), worker_id="bad")
        router = await start_router(good, bad)
        bad.send(_events(8, added=os.urandom(8 * 2_000)))
        await eventually(lambda: _disconnected(router, "bad", "the limit is 10000"))
        assert await _complete(router) == "good"

    async def test_a_flood_of_cache_events_does_not_delay_requests(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        good = await start_worker(says("fox"), worker_id="good")
        bad = await start_worker(says("fox"), worker_id="bad", hello={"num_pages": 50_000})
        router = await start_router(good, bad)
        bad.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=9, waiting_tokens=1_000_000)))
        await eventually(lambda: _is_loaded(router, "bad"))
        over, hashes = asyncio.Event(), os.urandom(8 * 50_000)

        async def flood() -> None:
            for number in itertools.count(8, 2):
                bad.send(_events(number, added=hashes))
                bad.send(_events(number + 1, removed=hashes))
                if over.is_set():
                    return
                await asyncio.sleep(0.02)

        flooding = asyncio.create_task(flood())
        assert {await _complete(router) for _ in range(10)} == {"good"}
        over.set()
        await flooding
        assert await _has(router, "bad", state="ready", reason=None)

    async def test_a_flood_of_small_messages_does_not_block_the_event_loop(
        self, start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = await start_worker()
        router = await start_router(worker)
        iteration, handled_in = 0, set()

        async def other_work() -> None:
            nonlocal iteration
            while True:
                iteration += 1
                await asyncio.sleep(0)

        working = asyncio.create_task(other_work())
        monkeypatch.setattr(WorkerSession, "_set_state", lambda *arguments: handled_in.add(iteration))
        worker.send(pb.WorkerMessage(batch=pb.Batch(messages=[*[_load()] * 6_400, _load(waiting_tokens=1)])))
        await eventually(lambda: _is_loaded(router, "combined-0"))
        working.cancel()
        assert len(handled_in) >= 100

    @pytest.mark.parametrize("hello", [{"profile": b"{"}, {"decode_shares": [1e-300]}, {"host_page_ms": math.nan}])
    async def test_in_a_hello_ends_the_session_too(
        self, start_router: StartRouter, start_worker: StartWorker, hello: dict[str, Any]
    ) -> None:
        router = await start_router(await start_worker(worker_id="good"))
        await start_worker(worker_id="bad", hello=hello)
        await eventually(lambda: _disconnected(router, "bad", ""))

    async def test_the_router_connects_again_after_the_usual_pause(
        self, start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "FIRST_PAUSE_S", 0.01)
        worker = await start_worker()
        router = await start_router(worker)
        for sessions_before in (1, 2):
            worker.send(_events(8, removed=b"odd"))
            await eventually(lambda count=sessions_before: _has_sessions(worker, count + 1))  # type: ignore[misc]
            await router.knows(worker)


async def _has_sessions(worker: FakeWorker, count: int) -> bool:
    return len(worker.hellos) >= count


MESSAGES = [
    pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, free_pages=100)),
    pb.WorkerMessage(cache=pb.CacheEvents(number=8)),
    pb.WorkerMessage(step=pb.StepOutput(outputs=[pb.Output(token_ids=[5])])),
    pb.WorkerMessage(refusal=pb.Refusal(kind=pb.Refusal.KIND_FAILED)),
    pb.WorkerMessage(snapshot=pb.Snapshot(last=True)),
    pb.WorkerMessage(hello=pb.Hello()),
    pb.WorkerMessage(end=pb.End(reason="it is tired")),
    pb.WorkerMessage(batch=pb.Batch(messages=[pb.WorkerMessage(load=pb.Load())])),
    pb.WorkerMessage(),
]


def _load(**fields: Any) -> pb.WorkerMessage:
    return pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, **fields))


def _events(
    number: int, *, added: bytes = b"", tier: pb.Tier.ValueType = pb.TIER_PAGES, removed: bytes = b""
) -> pb.WorkerMessage:
    events = [pb.CacheEvent(hashes=added, tier=tier)] if added else []
    events += [pb.CacheEvent(hashes=removed, tier=pb.TIER_NONE)] if removed else []
    return pb.WorkerMessage(cache=pb.CacheEvents(number=number, events=events))


class TestRefused:
    async def test_another_secret_is_shown_as_the_reason(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        await start_worker(token="another")
        router = await start_router()
        await eventually(lambda: _told(router, "does not prove the cluster's secret"))

    @pytest.mark.parametrize(
        ("hello", "reason"),
        [
            ({"fingerprint": b"other"}, "another model"),
            ({"block_size": 32}, "blocks of 32 tokens"),
            ({"role": pb.ROLE_PREFILL}, "its Hello ROLE_PREFILL"),
            ({"worker_id": "somebody"}, "is 'somebody'"),
            ({"epoch": 0}, "lacks epoch"),
            ({"num_pages": 0}, "lacks epoch, num_pages"),
            ({"fingerprint": b""}, "lacks epoch"),
            ({"role": 9}, "but its Hello 9"),
            ({"vocab_size": 1}, "its vocabulary has 1 tokens, the other workers' 512"),
            ({"model_digest": b"another model's"}, "config.json, tokenizer or chat template"),
        ],
    )
    async def test_a_worker_that_does_not_fit_is_refused_with_a_reason(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, hello: dict[str, Any], reason: str
    ) -> None:
        router = await start_router(await start_worker(says("fox")))
        odd = await start_worker(worker_id="odd", hello=hello)
        await eventually(lambda: _refused(router, "odd", reason))
        assert {await _complete(router) for _ in range(3)} == {"combined-0"}
        assert odd.submits == []

    @pytest.mark.parametrize("lease_token", ["another", ""])
    async def test_a_fake_worker_in_redis_gets_no_session(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        says: Says,
        lease_token: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        fake = await start_worker(worker_id="fake", token="", lease_token=lease_token)
        router = await start_router(await start_worker(says("fox")))
        assert await _complete(router) == "combined-0"
        assert (await router.worker("fake"), fake.hellos) == (None, [])
        assert caplog.text.count("the lease of b'fake' is ignored: it is not signed with the cluster's secret") == 1

    async def test_a_stray_worker_with_another_model_does_not_lock_out_the_others(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, model_dir: Path
    ) -> None:
        stray = {"model_digest": b"another model's", "fingerprint": b"other"}
        await start_worker(says("fox"), worker_id="stray", hello=stray)
        router = await start_router()
        await eventually(lambda: _refused(router, "stray", "start both with the same --model"))
        await router.knows(await start_worker(says("fox"), hello={"model_digest": model_digest(model_dir)}))
        assert await _complete(router) == "combined-0"

    async def test_another_model_is_accepted_once_all_workers_of_the_last_are_gone(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        old = await start_worker(says("fox"), worker_id="old")
        router = await start_router(old)
        new = await start_worker(says("fox"), worker_id="new", hello={"fingerprint": b"new model"})
        await eventually(lambda: _refused(router, "new", "another model"))
        await old.kill()
        await router.knows(new)
        assert await _complete(router) == "new"


async def _told(router: Router, reason: str) -> bool:
    worker = await router.worker("combined-0")
    return worker is not None and reason in (worker["reason"] or "")


async def test_a_request_goes_to_workers_that_can_take_it(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    long = [await start_worker(says("fox"), worker_id=f"long-{number}") for number in range(2)]
    short = await start_worker(says("fox"), worker_id="short", hello={"max_model_len": 65}, cached=_short(0, 1, 2, 3))
    router = await start_router(*long, short, policy=PolicySettings(name="most-cached"))
    assert (await router.cluster())["max_model_len"] == 512
    assert {await _complete(router) for _ in range(5)} <= {"long-0", "long-1"}
    assert await _complete(router, PROMPT[:63]) == "short"


class TestReady:
    """A router that has just started is not ready before it knows the cached blocks of all workers."""

    async def test_waits_for_the_snapshots_of_all_workers_that_are_there(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        here = await start_worker(says("fox"), worker_id="here")
        warm = await start_worker(says("fox"), worker_id="warm", cached=_short(0, 1))
        warm.snapshot_may_go.clear()
        router = await start_router(here)
        await eventually(lambda: _has(router, "warm", state="syncing"))
        assert (await router.http.get("/readyz")).status_code == 503
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        assert (await router.http.post("/v1/completions", json=body)).status_code == 503
        warm.snapshot_may_go.set()
        await router.knows(warm)
        assert (await router.http.get("/readyz")).status_code == 200
        assert await _complete(router) == "warm"

    async def test_does_not_wait_for_a_worker_that_comes_later(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("fox")))
        late = await start_worker(worker_id="late")
        late.snapshot_may_go.clear()
        await eventually(lambda: _has(router, "late", state="syncing"))
        assert await _complete(router) == "combined-0"
        late.snapshot_may_go.set()

    async def test_does_not_wait_for_a_dead_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        dead = await start_worker(worker_id="dead")
        await dead.kill()
        router = await start_router(await start_worker(says("fox")))
        await eventually(lambda: _is_ready(router))
        assert await _complete(router) == "combined-0"

    async def test_waits_only_for_a_while_for_a_silent_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "SYNC_S", 1.0)
        silent = await start_worker(worker_id="silent")
        silent.snapshot_may_go.clear()
        router = await start_router(await start_worker(says("fox")))
        await eventually(lambda: _is_ready(router))
        assert await _complete(router) == "combined-0"
        silent.snapshot_may_go.set()


async def _is_ready(router: Router) -> bool:
    return (await router.http.get("/readyz")).status_code == 200


class TestMembership:
    async def test_a_proxy_of_the_environment_is_not_used(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        router = await start_router(await start_worker(says("fox")))
        assert await _complete(router)

    async def test_a_worker_that_restarts_under_its_name_is_a_new_one(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        first = await start_worker(says("fox"), cached=_short(0))
        router = await start_router(first)
        await first.kill()
        second = await start_worker(says("fox"))
        await eventually(lambda: _has(router, "combined-0", state="ready", address=second.address, cached_blocks=0))
        assert await _complete(router) == "combined-0"
        assert len(second.submits) == 1

    async def test_a_worker_whose_lease_and_session_are_gone_is_forgotten(
        self, start_router: StartRouter, redis: Redis, cluster: str
    ) -> None:
        router = await start_router()
        async with FakeWorker(redis, cluster=cluster) as worker:
            await router.knows(worker)
        await eventually(lambda: _lacks(router, "combined-0"))

    async def test_a_lease_without_a_process_is_shown_as_connecting(
        self, start_router: StartRouter, redis: Redis, cluster: str
    ) -> None:
        router = await start_router()
        async with lease(
            redis, cluster, SIGNED, Member("ghost", "combined", "", "h", 1, session="127.0.0.1:1"), 5, lambda: None
        ):
            await eventually(lambda: _has(router, "ghost", state="connecting"))
            assert (await router.http.get("/readyz")).status_code == 503

    async def test_a_lease_that_cannot_be_read_is_ignored(
        self, start_router: StartRouter, start_worker: StartWorker, redis: Redis, cluster: str, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("fox")))
        await redis.hset(f"cpd:{cluster}:leases", "bad", '{"id": "bad", "kind": "combined"}')
        later = await start_worker(says("fox"), worker_id="combined-1")
        await eventually(lambda: _has(router, later.id, state="ready"))
        assert await _complete(router)

    async def test_a_draining_worker_gets_no_new_requests(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        draining = await start_worker(says("fox"), worker_id="draining", cached=_short(0, 1, 2))
        router = await start_router(draining, await start_worker(says("fox")))
        draining.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))
        await eventually(lambda: _has(router, "draining", state="draining"))
        assert {await _complete(router) for _ in range(3)} == {"combined-0"}

    async def test_a_worker_that_is_silent_is_lost(
        self,
        start_router: StartRouter,
        start_worker: StartWorker,
        redis: Redis,
        cluster: str,
        says: Says,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(stream, "TICK_S", 0.2)
        async with silenceable(redis, cluster) as (worker, silence):
            router = await start_router(worker)
            call = asyncio.create_task(_complete(router))
            await eventually(lambda: _got(worker.submits))
            await start_worker(says("fox"), worker_id="combined-1")
            silence.set()
            assert await call == "combined-1"

    async def test_requests_are_served_while_redis_is_down(
        self, start_router: StartRouter, says: Says, tmp_path: Path, cluster: str
    ) -> None:
        with embedded_redis(tmp_path / "r") as server:
            async with Redis.from_url(server.url) as client, FakeWorker(client, says("fox"), cluster=cluster) as worker:
                router = await start_router(worker, redis_url=server.url)
                assert (await router.cluster())["redis"] == {"ok": True, "error": None}
                server.stop()
                await eventually(lambda: _redis_is(router, False))
                assert await _complete(router) == "combined-0"
                assert (await router.http.get("/readyz")).status_code == 200
                server.start()
                await eventually(lambda: _redis_is(router, True))
                assert await _complete(router) == "combined-0"

    async def test_routers_see_each_other(self, start_router: StartRouter, cluster: str, redis: Redis) -> None:
        router = await start_router()
        async with lease(redis, cluster, SIGNED, Member("router-b", "router", "127.0.0.1:2", "h", 1), 5, lambda: None):
            await eventually(lambda: _routers_are(router, ["router-a", "router-b"]))
        await eventually(lambda: _routers_are(router, ["router-a"]))


@contextlib.asynccontextmanager
async def silenceable(redis: Redis, cluster: str) -> AsyncIterator[tuple[FakeWorker, asyncio.Event]]:
    """A worker behind a connection that drops all data once the event is set."""
    silence = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65_536):
                if not silence.is_set():
                    writer.write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = worker.session.split(":")
        there, to = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, to), pump(there, writer), return_exceptions=True)

    async with FakeWorker(redis, cluster="nobody's") as worker:
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        member = Member(worker.id, "combined", address, "h", 1, session=address)
        async with server, lease(redis, cluster, SIGNED, member, 5, lambda: None):
            yield worker, silence


async def _got(submits: list[pb.Submit]) -> bool:
    return bool(submits)


async def _redis_is(router: Router, ok: bool) -> bool:
    return bool((await router.cluster())["redis"]["ok"] is ok)


async def _routers_are(router: Router, ids: list[str]) -> bool:
    return [member["id"] for member in (await router.cluster())["routers"]] == ids


async def test_the_cluster_shows_what_a_worker_reports(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker(
        hello={
            "epoch": 77,
            "page_bytes": 4096,
            "token_budget": 256,
            "colocate": "auto",
            "transport_reason": "it was quicker",
            "device": "GPU, kernels of somebody",
        }
    )
    router = await start_router(worker)
    load = pb.Load(
        state=pb.STATE_READY,
        running=1,
        waiting=2,
        waiting_tokens=3,
        free_pages=4,
        cached_pages=5,
        used_pages=6,
        reserved_pages=7,
        quarantined_pages=8,
        preemptions=9,
        prefill_tokens=10,
        decode_tokens=11,
        cached_tokens=12,
        remote_prefills={"completed": 13, "failed": 1},
        prefix_fetches={"served": 14},
        transfer_failures={"silent": 1},
        host_pages=100,
        host_offloaded_pages=60,
        host_blocks={"offloaded": 70, "evicted": 10},
        decodes=1,
        prefill_ms=2.5,
        overdue_ms=0.5,
        step_ms=7.5,
        slowdown=1.25,
    )
    worker.send(pb.WorkerMessage(load=load))
    expected = {
        "running": 1,
        "waiting": 2,
        "waiting_tokens": 3,
        "decodes": 1,
        "prefill_ms": 2.5,
        "overdue_ms": 0.5,
        "step_ms": 7.5,
        "slowdown": 1.25,
        "pages": {"free": 4, "cached": 5, "used": 6, "reserved": 7, "quarantined": 8},
        "preemptions": 9,
        "prefill_tokens": 10,
        "decode_tokens": 11,
        "cached_tokens": 12,
        "remote_prefills": {"completed": 13, "failed": 1},
        "prefix_fetches": {"served": 14},
        "transfer_failures": {"silent": 1},
        "host": {"pages": 100, "offloaded": 60, "blocks": {"offloaded": 70, "evicted": 10}},
    }
    await eventually(lambda: _has(router, "combined-0", load=expected))
    shown = await router.worker("combined-0") or {}
    assert (shown["role"], shown["address"], shown["state"]) == ("combined", worker.address, "ready")
    assert (shown["info"]["token_budget"], shown["info"]["colocate"]) == (256, "auto")
    assert (shown["info"]["transport"], shown["info"]["transport_reason"]) == ("ucx", "it was quicker")
    assert shown["info"]["device"] == "GPU, kernels of somebody"
    assert (shown["info"]["epoch"], shown["info"]["page_bytes"], shown["info"]["num_pages"]) == (77, 4096, 100)
    text = (await router.http.get("/metrics")).text
    assert 'cpd_worker_pages{role="combined",router="router-a",state="quarantined",worker="combined-0"} 8.0' in text
    labels = 'role="combined",router="router-a",worker="combined-0"'
    assert f'cpd_worker_remote_prefills_total{{outcome="completed",{labels}}} 13.0' in text
    assert f'cpd_worker_prefix_fetches_total{{outcome="served",{labels}}} 14.0' in text
    assert f'cpd_worker_transfer_failures_total{{reason="silent",{labels}}} 1.0' in text
    assert f"cpd_worker_host_pages{{{labels}}} 100.0" in text
    assert f"cpd_worker_host_offloaded_pages{{{labels}}} 60.0" in text
    assert f'cpd_worker_host_blocks_total{{event="offloaded",{labels}}} 70.0' in text


async def test_a_worker_without_a_session_has_no_metrics_of_its_load(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, decode_tokens=11)))
    labels = 'role="combined",router="router-a",worker="combined-0"'

    async def counted() -> bool:
        line = f'cpd_worker_tokens_total{{phase="decode",{labels}}} 11.0'
        return line in (await router.http.get("/metrics")).text

    await eventually(counted)
    monkeypatch.setattr(sessions, "FIRST_PAUSE_S", 60.0)
    worker.send(pb.WorkerMessage(end=pb.End(reason="it stops")))
    await eventually(lambda: _disconnected(router, worker.id, "it stops"))
    text = (await router.http.get("/metrics")).text
    assert f"cpd_worker_live{{{labels}}} 0.0" in text
    assert "cpd_worker_tokens_total{" not in text
    assert "cpd_worker_running{" not in text


async def test_requests_avoid_a_silent_worker(
    monkeypatch: pytest.MonkeyPatch, start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    silent = await start_worker(says("fox"), worker_id="silent", cached=_short(*range(15)))
    talks = await start_worker(says("fox"), worker_id="talks")
    router = await start_router(silent, talks)

    assert await _complete(router, LONG_PROMPT) == "silent"
    monkeypatch.setattr(all_workers, "SILENT_S", 0.5)

    async def avoids_silent() -> bool:
        await asyncio.sleep(0.6)  # the other worker stays silent
        talks.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, free_pages=100)))
        return await _complete(router, LONG_PROMPT) == "talks"

    await eventually(avoids_silent)
    talks.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))
    await eventually(lambda: _has(router, "talks", state="draining"))
    assert await _complete(router) == "silent"  # the only worker left


@pytest.mark.parametrize(("drains", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_only_the_end_of_a_worker_that_did_not_drain_is_a_warning(
    start_router: StartRouter,
    start_worker: StartWorker,
    says: Says,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    drains: bool,
    level: int,
) -> None:
    worker = await start_worker(says("fox"))
    router = await start_router(worker)
    caplog.set_level(logging.INFO, sessions.__name__)
    monkeypatch.setattr(sessions, "FIRST_PAUSE_S", 1.0)  # the worker is gone when the router connects again
    if drains:
        worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_DRAINING)))
        await eventually(lambda: _has(router, worker.id, state="draining"))
    worker.send(pb.WorkerMessage(end=pb.End(reason="it stops")))
    await eventually(lambda: _disconnected(router, worker.id, "it stops"))
    await worker.kill()
    await eventually(lambda: _disconnected(router, worker.id, "it can't be reached"))
    ends = [record.levelno for record in caplog.records if "no session with" in record.message]
    assert ends == [level, level]


async def test_many_workers_come_and_go(start_router: StartRouter, redis: Redis, cluster: str, says: Says) -> None:
    router = await start_router()

    async def live(number: int) -> None:
        async with FakeWorker(redis, says("fox"), cluster=cluster, worker_id=f"w{number}", cached=_short(0)) as worker:
            await router.knows(worker)

    await asyncio.gather(*(live(number) for number in range(12)))
    await eventually(lambda: _empty(router))


async def test_lost_workers_leave_no_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(session: WorkerSession, listener: Listener) -> None:  # instead of 5,000 real connections
        session._index.reset(session.id)
        session._index.move(session.id, CHAIN[0][:8] + os.urandom(8 * 10), Tier.PAGES)
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerSession, "run", connected)
    learning, listener = Learning(PolicySettings(), 2000.0), cast(Listener, _Nobody())
    workers = Workers("router-a", ClusterSecret("secret"), itl_ms=0.0, learning=learning)
    for start in range(0, 5_000, 100):
        names = [f"w{number}" for number in range(start, start + 200)]
        await workers.follow({name: Member(name, "combined", "127.0.0.1:1", "h", 1, 1) for name in names}, listener)
        await asyncio.sleep(0)
        assert len(workers.sessions) == 200
        assert len(workers.index.cached_prefixes(CHAIN).cached) == 200
    await workers.follow({}, listener)
    while workers.index.sweep():
        pass
    assert (list(workers.sessions), workers._tasks, len(workers.index)) == ([], {}, 0)
    assert not workers.ready
    assert not workers._awaited


async def _empty(router: Router) -> bool:
    return not (await router.cluster())["workers"]


class _Nobody:
    """Ignores all events."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


async def test_a_router_that_starts_again_under_load_has_the_exact_index(redis_url: str) -> None:
    requests = [make_request(f"r{number}", prompt(200 + number, number % 8), max_tokens=8) for number in range(48)]
    hashes = {block_hash for request in requests for block_hash in request.block_hashes}
    load = fake_loader(num_pages=96, host_pages=32)  # room for a few of the prompts
    async with running("combined", redis_url, network=LocalNetwork(), load=load) as worker, Client(worker) as client:
        async with Redis.from_url(redis_url) as redis:
            (member,) = await members(redis, worker.worker._settings.cluster, ClusterSecret(""))

        async def started(router_id: str) -> Workers:
            learning = Learning(PolicySettings(), 2000.0)
            workers = Workers(router_id, ClusterSecret(""), itl_ms=50.0, learning=learning)
            await workers.follow({member.id: member}, cast(Listener, _Nobody()))
            return workers

        stays, restarts = await started("stays"), await started("restarts")
        for number, request in enumerate(requests[:24]):
            await client.submit(request, number)
        await until(lambda: all(router.index.size(worker.id) > 32 for router in (stays, restarts)))
        await restarts._close(worker.id, cast(Listener, _Nobody()))
        restarts = await started("restarts")
        for answer in [await client.submit(request, number) for number, request in enumerate(requests[24:], 24)]:
            await client.done(answer)
        await client.balanced()
        async with asyncio.timeout(10):
            while True:  # blocks may still be on their way to host memory
                snapshot = (await worker.worker._engine.snapshot()).hashes
                truth = {block_hash: tier for tier in (Tier.HOST, Tier.PAGES) for block_hash in snapshot[tier]}
                if _known(stays, worker.id, hashes) == _known(restarts, worker.id, hashes) == truth:
                    break
                await asyncio.sleep(0.02)
        assert 0 < len(truth) < len(hashes)
        assert stays.index.size(worker.id) == restarts.index.size(worker.id) == len(truth)
        for router in (stays, restarts):
            await router._close(worker.id, cast(Listener, _Nobody()))


def _known(router: Workers, worker_id: str, hashes: set[bytes]) -> dict[bytes, Tier]:
    """Returns which of these blocks the worker has according to the router's index, and in which tier."""
    known = {}
    for block_hash in hashes:
        found = router.index.cached_prefixes([block_hash])
        if worker_id in found.cached:
            known[block_hash] = Tier.HOST if found.in_pages.get(worker_id) == 0 else Tier.PAGES
    return known


async def test_workers_on_a_shared_device_have_metrics_of_their_own(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    assert "cpd_gpu_cas_conflicts" not in (await router.http.get("/metrics")).text
    took_s = {"copy": 0.5, "lock": 4.0}
    residency = pb.Residency(state=pb.Residency.STATE_DRAINING, wakes=3, waited_s=4.5, cas_conflicts=6, took_s=took_s)
    worker.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=1, residency=residency)))
    labels = 'role="combined",router="router-a",worker="combined-0"'
    wanted = f"cpd_worker_wakes_total{{{labels}}} 3.0"

    async def shown() -> bool:
        return wanted in (await router.http.get("/metrics")).text

    await eventually(shown)
    text = (await router.http.get("/metrics")).text
    assert 'cpd_worker_residency{role="combined",router="router-a",state="draining",worker="combined-0"} 1.0' in text
    assert 'cpd_worker_residency{role="combined",router="router-a",state="serving",worker="combined-0"} 0.0' in text
    assert f"cpd_worker_wake_wait_seconds_total{{{labels}}} 4.5" in text
    assert f"cpd_gpu_cas_conflicts_total{{{labels}}} 6.0" in text
    for part, seconds in took_s.items():
        part_labels = labels.replace("role", f'part="{part}",role', 1)
        assert f"cpd_worker_residency_seconds_total{{{part_labels}}} {seconds}" in text
