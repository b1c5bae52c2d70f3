"""Workers of one process that share a device, with a real Redis."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cpd.common.errors import CheckpointError, ConfigError
from cpd.common.process_identity import ProcessIdentity
from cpd.residency.ledger import Look
from cpd.residency.record import Owner, Record
from cpd.residency.snapshot import ModelState
from cpd.residency.turn import Turn
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.cpd.residency.world import entry
from tests.waiting import DEADLINE_S, eventually
from tests.worker.residents import Memory, SharingWorker
from worker import residency

TOTAL = 10
_numbers = count()

MakeWorker = Callable[..., SharingWorker]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    retry = Retry(NoBackoff(), 0)
    async with Redis.from_url(server.url, socket_timeout=0.7, socket_connect_timeout=0.7, retry=retry) as client:
        yield client


@pytest.fixture
async def make(redis: Redis) -> AsyncIterator[MakeWorker]:
    """Makes workers on one device, whose record is there."""
    memory, made = Memory(TOTAL), list[SharingWorker]()

    def worker(size: int, **given: Any) -> SharingWorker:
        one = SharingWorker(next(_numbers), size, memory, redis, "c", **given)
        made.append(one)
        return one

    await worker(0).ledger.start(TOTAL)
    yield worker
    for one in made:
        await one.residency.close()
        assert not one.broken


async def record_of(one: SharingWorker) -> Record:
    look = await one.ledger.look()
    assert look.record is not None
    return look.record


async def reserves(one: SharingWorker, num_bytes: int) -> None:
    """Returns when that much memory of the device is reserved. A worker that is asleep tells the ledger after that."""
    async with asyncio.timeout(DEADLINE_S):
        while (await record_of(one)).reserved_bytes != num_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def pins(one: SharingWorker, pinned: bool) -> None:
    """Pins a model, or ends that; returns when the others can see it."""
    one.residency.pin(pinned)
    async with asyncio.timeout(DEADLINE_S):
        while (one.name in (await record_of(one)).pins) != pinned:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_worker_starts_in_its_turn_and_serves(make: MakeWorker) -> None:
    a, b = make(4), make(4)
    await asyncio.gather(a.start(), b.start())
    assert a.is_serving
    assert b.is_serving
    record = await record_of(a)
    assert record.reserved_bytes == 8
    assert not record.intents


async def test_models_that_do_not_fit_together_take_turns_at_the_start(
    make: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [make(6, min_runtime_s=30.0) for _ in range(3)]
    with caplog.at_level(logging.INFO):
        await asyncio.gather(*(one.start() for one in workers))
    assert "waiting for its turn to load; on the device: w" in caplog.text
    assert sum(one.is_serving for one in workers) <= 1
    await eventually(lambda: sum(one.state == "asleep" for one in workers) == 2)
    await reserves(workers[0], 6)


async def test_a_request_wakes_its_model_and_displaces_another(make: MakeWorker) -> None:
    a, b = make(6), make(6)
    await a.start()
    await b.start()
    assert (a.state, b.state) == ("asleep", "serving")
    a.request()
    await eventually(lambda: a.residency.report().serves_in_s > 0)
    await a.becomes("serving")
    assert b.state == "asleep"
    assert b.resident.log == ["drain", "sleep"]
    assert a.resident.log[-1] == "wake"
    await eventually(lambda: a.residency.report().waited_s > 0)
    report = a.residency.report()
    assert (report.wakes, report.serves_in_s, a.resident.running) == (1, 0, 1)
    assert report.took_s["lock"] > 0
    assert report.took_s["copy"] == 0.5  # as long for its sleep as for its wake


async def test_running_requests_are_parked_after_the_drain_and_go_on_after_the_next_wake(make: MakeWorker) -> None:
    a, b = make(6), make(6)
    await b.start()
    await a.start()
    a.request()
    b.request()
    await b.becomes("serving")
    assert a.resident.waiting == 1
    b.resident.running = 0
    await a.becomes("serving")
    assert a.resident.running == 1


async def test_nobody_is_displaced_for_one_that_is_not_wanted_any_more(make: MakeWorker) -> None:
    a, b = make(6), make(6, drain_timeout_s=60.0)
    await a.start()
    await b.start()
    b.request()
    a.request()
    await b.becomes("draining")
    a.resident.waiting = 0
    await b.becomes("serving")
    assert b.resident.log == ["drain", "undrain"]
    assert a.state == "asleep"


async def test_a_request_that_was_given_up_still_wakes_its_model(make: MakeWorker) -> None:
    a, b = make(6), make(6, drain_timeout_s=60.0)
    await a.start()
    await b.start()
    b.request()
    a.request()
    await b.becomes("draining")
    a.resident.waiting = 0
    a.residency.request_given_up()
    b.resident.running = 0
    await a.becomes("serving")


async def test_an_idle_model_sleeps_by_itself(make: MakeWorker) -> None:
    a = make(6, idle_timeout_s=0.2)
    await a.start()
    await a.becomes("asleep")
    await reserves(a, 0)


async def test_a_wake_that_fails_is_tried_once_more_and_those_that_wait_are_served(make: MakeWorker) -> None:
    a, b = make(6), make(6)
    await a.start()
    await b.start()
    a.resident.fails = [CheckpointError("the staged copy of the weights is damaged")]
    a.request()
    await a.becomes("serving")
    assert a.failed == []
    assert a.resident.running == 1
    assert a.residency.report().wakes == 1


async def test_a_wake_that_fails_again_fails_those_that_wait_and_the_next_ones_at_once(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "AGAIN_S", 0.05)
    a, b = make(6), make(6)
    await a.start()
    await b.start()
    a.resident.fails = [CheckpointError(f"model.safetensors is missing {time}") for time in ("once", "twice")]
    a.request()
    await eventually(lambda: bool(a.failed))
    assert a.failed == ["model.safetensors is missing twice"]
    assert 0 < a.retry_after_s <= residency.REST_S
    await eventually(lambda: a.state == "asleep")
    b.request()
    await b.becomes("serving")
    b.resident.running = 0
    wakes, sleeps = a.resident.log.count("wake"), b.resident.log.count("sleep")
    a.request()
    await eventually(lambda: a.resident.waiting == 0)
    assert a.failed == ["model.safetensors is missing twice"] * 2
    assert (a.resident.log.count("wake"), b.resident.log.count("sleep")) == (wakes, sleeps)  # nobody was displaced
    a.residency.wake()
    await a.becomes("serving")


async def test_after_a_while_the_next_request_tries_to_wake_the_model_again(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "AGAIN_S", 0.0)
    monkeypatch.setattr(residency, "REST_S", 0.0)
    a, b = make(6), make(6)
    await a.start()
    await b.start()
    a.resident.fails = [CheckpointError("model.safetensors is missing")] * 2
    a.request()
    await eventually(lambda: bool(a.failed))
    a.request()
    await a.becomes("serving")


async def test_a_wake_beside_pinned_models_fails_with_a_sentence(make: MakeWorker) -> None:
    a, b = make(6), make(6)
    await a.start()
    await b.start()
    await pins(b, True)
    a.request()
    await eventually(lambda: bool(a.failed))
    assert "does not fit beside popular or pinned models, which nobody may displace" in a.failed[0]
    await pins(b, False)
    a.request()
    await a.becomes("serving")


async def test_while_a_model_sleeps_and_nobody_waits_looks_are_rare(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def noted(one: residency.Residency, look: Look, taken: Turn) -> float:
        pauses.append(pause_s(one, look, taken))
        return pauses[-1]

    pause_s = residency.Residency._pause_s
    monkeypatch.setattr(residency.Residency, "_pause_s", noted)
    a = make(6, min_runtime_s=60.0)
    await a.start()
    a.residency.sleep()
    await a.becomes("asleep")
    pauses.clear()
    await eventually(lambda: residency.LOOK_S in pauses)


async def test_a_model_sleeps_and_wakes_by_hand(make: MakeWorker) -> None:
    a = make(6, min_runtime_s=60.0)
    await a.start()
    a.residency.sleep()
    await a.becomes("asleep")
    a.residency.wake()
    await a.becomes("serving")
    assert a.resident.log == ["drain", "sleep", "wake"]


async def test_a_model_that_can_never_fit_is_refused_before_it_is_loaded(make: MakeWorker) -> None:
    a = make(TOTAL + 1)
    with pytest.raises(ConfigError, match=r"can never be awake: it takes .* GiB, and the device has"):
        await a.residency.take_turn()


async def test_a_model_that_turns_out_to_be_too_large_is_refused_and_known_the_next_time(make: MakeWorker) -> None:
    a = make(TOTAL + 1, expected=4)
    await a.residency.take_turn()
    with pytest.raises(ConfigError, match=r"can never be awake"):
        await a.residency.begin(a.resident, TOTAL + 1)
    assert TOTAL + 1 in (await record_of(a)).measured.values()


async def test_both_roles_of_one_model_are_refused(make: MakeWorker) -> None:
    a, b = make(4, model="m"), make(4, model="m", role="prefill")
    await a.start()
    with pytest.raises(ConfigError, match="both roles of one model"):
        await b.residency.take_turn()
    assert len((await record_of(a)).entries) == 1


async def test_memory_that_a_dead_process_had_reserved_is_given_on(
    make: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    a = make(6)
    own = ProcessIdentity.own()
    gone = Owner.of(replace(own, started=own.started - 1))
    dead = replace(entry(99, 8, state=ModelState.WAKING), id="dead", owner=gone)
    await a.ledger.change(lambda look: Record(TOTAL, entries=(dead,)))
    with caplog.at_level(logging.INFO):
        await a.start()
    assert "dead is gone: what it had reserved is free" in caplog.text


async def test_the_weights_are_staged_once_within_the_budget_and_the_oldest_are_dropped(make: MakeWorker) -> None:
    a, b, c = (make(4, staging=4) for _ in range(3))
    await a.start()
    await eventually(lambda: a.resident.staged == 2)
    await b.start()
    await eventually(lambda: b.resident.staged == 2)
    assert a.resident.log == ["stage"]
    a.resident.last_access -= 60
    await c.start()
    await eventually(lambda: "unstage" in a.resident.log)
    assert (b.resident.staged, c.resident.staged) == (2, 2)


async def test_without_redis_those_awake_serve_on_and_nobody_else_wakes(
    make: MakeWorker, server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make(6, max_wait_time_s=0.5), make(6, drain_timeout_s=60.0)
    await a.start()
    await b.start()
    b.request()
    a.request()
    await b.becomes("draining")
    with caplog.at_level(logging.INFO):
        server.stop()
        await eventually(lambda: b.resident.log[-1] == "undrain")
        b.resident.running = 0
        await asyncio.sleep(1)
        assert (a.resident.log[-1], b.resident.log[-1]) == ("sleep", "undrain")
        server.start()
        await a.becomes("serving")
    assert b.state == "asleep"
    assert caplog.text.count("Redis does not answer, so no model sleeps or wakes") == 2  # each once
    assert caplog.text.count("Redis answers again") == 2


async def test_after_redis_was_emptied_all_write_themselves_back_before_anybody_wakes(
    make: MakeWorker, redis: Redis
) -> None:
    a, b, c = make(4), make(4), make(8)
    await c.start()
    await a.start()
    await b.start()
    assert c.state == "asleep"
    c.request()
    await eventually(lambda: c.residency.report().serves_in_s > 0)
    await redis.flushall()
    await c.becomes("serving")  # Memory checks that a and b have slept before
    assert (a.state, b.state) == ("asleep", "asleep")
    record = await record_of(c)
    assert record.reserved_bytes == 8
    assert len(record.entries) == 3


async def test_a_worker_that_stops_keeps_what_it_holds_and_waits_no_longer(make: MakeWorker) -> None:
    a, b = make(6), make(6)
    await a.start()
    waiting = asyncio.create_task(b.residency.take_turn())
    a.residency.pin(True)
    await eventually(lambda: a.residency.report().pinned)
    await b.residency.close()
    waiting.cancel()
    await a.residency.close()
    record = await record_of(a)
    assert [one.id for one in record.entries] == [a.name]
    assert (record.reserved_bytes, record.intents) == (6, ())


async def test_the_next_model_is_staged_while_its_victim_drains(make: MakeWorker) -> None:
    a, b = (make(6, predicted=True, staging=10, drain_timeout_s=60.0, max_wait_time_s=0.5) for _ in range(2))
    await a.start()
    await b.start()
    await a.becomes("asleep")
    a.resident.staged = 0
    a.resident.log.clear()
    b.request()
    a.request()
    await eventually(lambda: "stage" in a.resident.log)
    assert b.state in ("serving", "draining")
    b.resident.running = 0
    await a.becomes("serving")
    assert a.resident.log[:2] == ["stage", "wake"]


async def test_weights_that_were_dropped_for_another_model_that_waits_are_not_staged_again_before_the_wake(
    make: MakeWorker,
) -> None:
    workers = [make(4, predicted=True, staging=3, drain_timeout_s=60.0, max_wait_time_s=0.5) for _ in range(4)]
    for one in workers:
        await one.start()
    await eventually(lambda: sum(one.state == "asleep" for one in workers) == 2)
    awake = [one for one in workers if one.is_serving]
    first, second = (one for one in workers if not one.is_serving)
    for one in workers:
        one.resident.staged = 0
        one.resident.log.clear()
    for one in (*awake, first):
        one.request()
    await eventually(lambda: "stage" in first.resident.log)
    second.request()
    await eventually(lambda: "unstage" in first.resident.log)
    await asyncio.sleep(0.5)
    assert first.resident.log == ["stage", "unstage"]
    for one in awake:
        one.resident.running = 0
    await first.becomes("serving")
    await second.becomes("serving")
