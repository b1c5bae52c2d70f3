"""One worker whose model sleeps and wakes, over a session."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from cpd.common.errors import CheckpointError, ConfigError
from cpd.residency.snapshot import ModelState
from cpd.rpc import cpd_pb2 as pb
from engine.types import Request
from kvtransfer.local import LocalNetwork
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import DEADLINE_S, eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import MAX_MODEL_LEN, FakeModelMemory, Gate, fake_loader
from worker.sleeper import ResidencyError, Sleeper

LONG = 300
"""Tokens of an answer that does not end by itself at the tests' slow pace."""


@dataclass
class One:
    """A worker, a session with it, a gate before its steps, and its memory."""

    worker: Running
    router: Client
    gate: Gate
    memory: FakeModelMemory

    @property
    def sleeper(self) -> Sleeper:
        sleeper = self.worker.worker._sleeper
        assert sleeper is not None
        return sleeper

    async def stream(self, number: int, n: int = 1) -> tuple[Request, Answer]:
        """A request in the middle of its answer."""
        request = make_request(f"stream{number}", prompt(100, number), max_tokens=LONG, n=n, seed=number)
        self.gate.slow()
        answer = await self.router.submit(request, number)
        await eventually(lambda: all(len(answer.tokens.get(choice, ())) > 10 for choice in answer.choices))
        return request, answer

    async def reported(self, state: pb.Residency.State.ValueType) -> None:
        await eventually(lambda: self.router.load.residency.state == state)


@asynccontextmanager
async def one(redis_url: str, **settings: Any) -> AsyncIterator[One]:
    gate, memories = Gate(), list[FakeModelMemory]()
    engine = settings.pop("engine", {})
    load = fake_loader(before_step=gate.wait, on_memory=memories.append, **engine)
    given = {"device_memory": 1 << 30, "staging_memory": 1 << 30, **settings}
    async with (
        running("combined", redis_url, load=load, network=LocalNetwork(), **given) as worker,
        Client(worker) as router,
    ):
        try:
            yield One(worker, router, gate, memories[0])
        finally:
            gate.open()


def check(request: Request, answer: Answer) -> None:
    for choice in answer.choices:
        assert answer.tokens[choice] == expected(request, choice, MAX_MODEL_LEN).token_ids


class TestStreams:
    @pytest.mark.parametrize("host_pages", [0, 64])
    @pytest.mark.parametrize("n", [1, 3])
    async def test_they_stop_and_go_on_after_their_last_token(self, redis_url: str, host_pages: int, n: int) -> None:
        async with one(redis_url, engine={"host_pages": host_pages}) as o:
            streams = [await o.stream(number, n) for number in range(2)]
            for _ in range(2):
                assert await o.sleeper.sleep() == 0
                await o.reported(pb.Residency.STATE_ASLEEP)
                lengths = [len(answer.tokens[0]) for _, answer in streams]
                await eventually(lambda: o.router.load.free_pages == o.router.hello.num_pages)
                assert (o.router.load.running, o.router.load.waiting) == (0, 2 * n)
                assert await o.sleeper.wake() > 0
                await o.reported(pb.Residency.STATE_SERVING)
                for (_, answer), length in zip(streams, lengths, strict=True):
                    await eventually(lambda: len(answer.tokens[0]) > length + 5)  # noqa: B023
            o.gate.open()
            for request, answer in streams:
                await o.router.done(answer)
                check(request, answer)
            await o.router.balanced()

    async def test_requests_that_come_meanwhile_wait_for_the_wake(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            await o.sleeper.sleep()
            request = make_request("a", prompt(50), max_tokens=20)
            answer = await o.router.submit(request, 1)
            await eventually(lambda: o.router.load.waiting == 1)
            assert not answer.started
            await o.sleeper.wake()
            await o.router.done(answer)
            check(request, answer)

    async def test_they_can_be_aborted_while_the_model_sleeps(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            await o.stream(1)
            await o.sleeper.sleep()
            await o.router.submit(make_request("a", prompt(50)), 2)
            await o.router.abort(1)
            await o.router.abort(2)
            await eventually(lambda: o.router.load.waiting == 0)
            await o.sleeper.wake()
            await o.router.balanced()

    @pytest.mark.parametrize("given_up", [True, False])
    async def test_only_one_that_was_given_up_is_still_worth_the_wake(self, redis_url: str, given_up: bool) -> None:
        async with one(redis_url) as o:
            await o.sleeper.sleep()
            await o.router.submit(make_request("a", prompt(50)), 1)
            await eventually(lambda: o.router.load.waiting == 1)
            residency = o.worker.worker._residency
            assert residency is not None
            with patch.object(residency, "request_given_up") as told:
                await o.router.abort(1, given_up=given_up)
                await eventually(lambda: o.router.load.waiting == 0)
            assert told.called == given_up
            await o.sleeper.wake()

    async def test_they_can_be_moved_away_while_the_model_sleeps(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            _, answer = await o.stream(1)
            await o.sleeper.sleep()
            await o.router.park(1)
            await o.router.done(answer)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_PARKED
            await o.router.abort(1)
            await o.sleeper.wake()
            await o.router.balanced()

    async def test_one_that_is_parked_for_another_worker_does_not_keep_the_memory(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            _, answer = await o.stream(1)
            await o.router.park(1)
            await o.router.done(answer)
            await o.sleeper.sleep()
            await eventually(lambda: o.router.load.free_pages == o.router.hello.num_pages)
            await o.sleeper.wake()
            await o.router.abort(1)
            await o.router.balanced()


class TestDrain:
    async def test_new_requests_wait_and_streams_go_on(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            request, answer = await o.stream(1)
            o.sleeper.drain()
            await o.reported(pb.Residency.STATE_DRAINING)
            new = make_request("new", prompt(50), max_tokens=20)
            waits = await o.router.submit(new, 2)
            o.gate.open()
            await o.router.done(answer)
            check(request, answer)
            assert not waits.started
            await eventually(lambda: o.sleeper.facts(time.monotonic()).running == 0)
            assert o.sleeper.facts(time.monotonic()).waiting == 1
            await o.sleeper.sleep()
            await o.sleeper.wake()
            await o.router.done(waits)
            check(new, waits)

    async def test_it_can_be_called_off(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            o.sleeper.drain()
            answer = await o.router.submit(make_request("a", prompt(50)), 1)
            await eventually(lambda: o.router.load.waiting == 1)
            o.sleeper.undrain()
            await o.router.done(answer)
            await o.reported(pb.Residency.STATE_SERVING)


class TestWake:
    async def test_one_that_fails_is_rolled_back_and_may_be_tried_again(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            request, answer = await o.stream(1)
            await o.sleeper.sleep()
            for error in (CheckpointError("the checkpoint is gone"), ConfigError("there is no memory")):
                o.memory.error = error
                with pytest.raises(type(error), match=str(error)):
                    await o.sleeper.wake()
                assert o.sleeper.state is ModelState.ASLEEP
                assert o.memory.resident_bytes() == 0
            o.gate.open()
            await o.sleeper.wake()
            await o.router.done(answer)
            check(request, answer)

    async def test_a_transport_that_does_not_open_makes_it_fail(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with one(redis_url) as o:
            await o.sleeper.sleep()

            async def fails(*_: Any, **__: Any) -> None:
                raise OSError("no more files")

            with monkeypatch.context() as patch:
                patch.setattr(o.worker.worker._transport, "_open", fails)
                with pytest.raises(ResidencyError, match="no more files"):
                    await o.sleeper.wake()
            assert o.memory.resident_bytes() == 0
            await o.sleeper.wake()
            await o.router.balanced()

    async def test_the_pool_has_a_new_epoch_and_address(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            before, transport = o.router.hello.epoch, o.worker.worker._transport
            address = transport.address
            await o.sleeper.sleep()
            await o.sleeper.wake()
            async with Client(o.worker, router_id="another") as late:
                assert late.hello.epoch == transport.epoch != before
            assert transport.address != address

    async def test_pages_for_which_there_is_no_memory_yet_are_reserved(
        self, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with one(redis_url) as o:
            await o.sleeper.sleep()
            o.memory.full = True
            assert await o.sleeper.wake() == o.memory.num_bytes
            assert "the system has no memory for all KV pages: Cannot allocate memory" in caplog.text


class TestStaging:
    async def test_the_copy_is_made_and_dropped(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            await o.sleeper.stage()
            assert o.sleeper.facts(time.monotonic()).staged_bytes > 0
            o.sleeper.unstage()
            await eventually(lambda: o.sleeper.facts(time.monotonic()).staged_bytes == 0)
            o.memory.error = ConfigError("there is no memory")
            with pytest.raises(ConfigError, match="there is no memory"):
                await o.sleeper.stage()
            assert o.sleeper.state is ModelState.SERVING


class TestOrder:
    async def test_a_change_that_does_not_fit_the_state_is_refused(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            with pytest.raises(ResidencyError, match="the model is serving"):
                await o.sleeper.wake()
            with pytest.raises(ResidencyError, match="the model is serving"):
                o.sleeper.undrain()
            await o.sleeper.sleep()
            with pytest.raises(ResidencyError, match="the model is asleep"):
                await o.sleeper.sleep()
            with pytest.raises(ResidencyError, match="the model is asleep"):
                o.sleeper.drain()


class TestFacts:
    async def test_they_tell_who_runs_and_who_waits(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            idle = o.sleeper.facts(time.monotonic())
            assert (idle.waiting, idle.running, idle.resumed, idle.drain_s, idle.arrivals_per_s) == (0, 0, 0, 0.0, 0.0)
            before = time.monotonic()
            await o.stream(1)
            busy = o.sleeper.facts(time.monotonic())
            assert (busy.waiting, busy.running, busy.resumed) == (0, 1, 0)
            assert busy.last_access >= before
            assert busy.arrivals_per_s == pytest.approx(1 / 60, rel=0.2)
            await eventually(lambda: o.sleeper.facts(time.monotonic()).drain_s > 0)
            await o.sleeper.sleep()
            asleep = o.sleeper.facts(time.monotonic())
            assert (asleep.waiting, asleep.running, asleep.drain_s) == (1, 0, 0.0)
            await o.sleeper.wake()
            await eventually(lambda: o.sleeper.facts(time.monotonic()).resumed == 1)

    async def test_deadlines_are_those_of_first_tokens_then_of_the_next_ones(self, redis_url: str) -> None:
        async with one(redis_url, slo_itl=100.0) as o:
            await o.sleeper.sleep()
            now = time.monotonic()
            late = await o.router.submit(make_request("late", prompt(50), max_tokens=LONG), 1, deadline_ms=50_000)
            soon = await o.router.submit(make_request("soon", prompt(50, 1), max_tokens=LONG), 2, deadline_ms=20_000)
            await eventually(lambda: len(o.sleeper.facts(time.monotonic()).deadlines) == 2)
            due_s = [due - now for due in o.sleeper.facts(time.monotonic()).deadlines]
            assert due_s == pytest.approx([20, 50], abs=5)
            o.gate.slow()
            await o.sleeper.wake()
            await eventually(lambda: min(len(answer.tokens.get(0, ())) for answer in (late, soon)) >= 10)
            assert now + 1 < o.sleeper.facts(time.monotonic()).deadlines[0] < now + 20


class TestEnd:
    @pytest.mark.parametrize("exit_code", [0, 77])
    async def test_a_drain_while_the_model_sleeps_sends_requests_back_at_once(
        self, redis_url: str, exit_code: int
    ) -> None:
        async with one(redis_url) as o:
            _, stream = await o.stream(1)
            await o.sleeper.sleep()
            waits = await o.router.submit(make_request("a", prompt(50)), 2)
            await eventually(lambda: o.router.load.waiting == 2)
            o.worker.worker.lifecycle.drain("test", exit_code, timeout_s=10 * DEADLINE_S)
            assert await asyncio.wait_for(asyncio.shield(o.worker.task), DEADLINE_S) == exit_code
            for answer in (stream, waits):
                assert answer.refusal is not None
                assert answer.refusal.kind == pb.Refusal.KIND_REROUTE

    async def test_a_stop_while_the_model_sleeps(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            await o.sleeper.sleep()
            assert await o.worker.stop() == 0


class TestByHand:
    async def test_sleep_wake_and_pin(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            request, answer = await o.stream(1)
            await o.router.administer("Sleep")
            await o.reported(pb.Residency.STATE_DRAINING)
            await o.router.administer("Sleep")
            o.gate.open()
            await o.router.done(answer)
            check(request, answer)
            await o.reported(pb.Residency.STATE_ASLEEP)
            await o.router.administer("Pin", pinned=True)
            await eventually(lambda: o.router.load.residency.pinned)
            waits = await o.router.submit(make_request("a", prompt(50)), 2)
            await o.router.administer("Wake")
            await o.reported(pb.Residency.STATE_SERVING)
            await o.router.done(waits)
            await o.router.administer("Pin")
            await eventually(lambda: not o.router.load.residency.pinned)

    async def test_a_wake_that_fails_is_tried_once_more(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            await o.router.administer("Sleep")
            await o.reported(pb.Residency.STATE_ASLEEP)
            o.memory.error = CheckpointError("the staged copy is damaged")
            await o.router.administer("Wake")
            await eventually(lambda: o.memory.error is None)
            await o.reported(pb.Residency.STATE_SERVING)

    async def test_a_worker_that_shares_its_device_keeps_its_role(self, redis_url: str) -> None:
        async with one(redis_url) as o:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await o.router.administer("SetRole", role=pb.ROLE_PREFILL)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "--device-memory" in str(refused.value.details())
            assert o.router.load.role == pb.ROLE_COMBINED

    async def test_a_worker_that_keeps_its_memory_refuses(self, redis_url: str) -> None:
        async with running("combined", redis_url, network=LocalNetwork()) as w, Client(w) as router:
            for what in ("Sleep", "Wake", "Pin"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await router.administer(what)
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "--device-memory" in str(refused.value.details())
            assert not router.load.HasField("residency")
