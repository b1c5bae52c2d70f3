"""The prefill worker as a decode worker sees it: prefill requests over real streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cpd.common.blocks import BLOCK_SIZE, blocks_for, pack_tokens
from cpd.common.process import EXIT_DRAINED
from cpd.common.stream import MAX_MESSAGE_BYTES, Stream, connect
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, open_as
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import Request, StepOutput
from kvtransfer.base import Landing, PoolMemory
from kvtransfer.local import LocalNetwork, LocalPeer, LocalTransport
from tests.engine.fakes import expected, make_request, prompt, states_of
from tests.waiting import DEADLINE_S, eventually
from tests.worker.client import Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import FINGERPRINT, MAX_MODEL_LEN, Gate, fake_loader
from worker.async_engine import Update
from worker.wire_format import sampling_to_wire

NUM_PAGES = 64
EPOCH = 77


class Receiver:
    """A decode worker's pool, and its prefill requests."""

    def __init__(self, network: LocalNetwork, worker: Running) -> None:
        self.memory = np.full((NUM_PAGES, BLOCK_SIZE), -7, np.int64)
        pool = PoolMemory(self.memory.ctypes.data, NUM_PAGES, self.memory[0].nbytes)
        self.transport: LocalTransport = network.create(pool, epoch=EPOCH)
        self.wires: list[Stream[pb.WorkerMessage]] = []
        self._worker_id, self._address = worker.id, worker.session

    def request(self) -> "Call":
        return Call(self)

    async def open(self) -> Stream[pb.WorkerMessage]:
        """A stream for prefill requests."""
        wire = await connect(self._address, pb.WorkerMessage, MAX_MESSAGE_BYTES)
        self.wires.append(wire)
        await open_as(Caller("worker", "by hand"), wire, self._worker_id, ClusterSecret(""))
        answer = await wire.receive()
        assert answer is not None
        assert answer.WhichOneof("kind") == "hello"
        return wire

    def start(self, request: Request, **overrides: Any) -> pb.PrefillStart:
        fields: dict[str, Any] = {
            "decode_worker_id": "by hand",
            "fingerprint": FINGERPRINT,
            "tokens": pack_tokens(request.token_ids),
            "request": request.number,
            "prompt_len": request.prompt_len,
            "hash_root": request.hash_root,
            "block_hashes": b"".join(request.block_hashes),
            "sampling": sampling_to_wire(request.params),
            "n": request.n,
            "transport": "local",
            "transport_address": self.transport.address,
        }
        return pb.PrefillStart(**(fields | overrides))

    async def close(self) -> None:
        for wire in self.wires:
            wire.abort()
        await self.transport.close()


class Call:
    """One prefill request, on a new or a reused stream."""

    def __init__(self, receiver: Receiver, wire: Stream[pb.WorkerMessage] | None = None) -> None:
        self.progress: list[int] = []
        self.pages: list[pb.PrefillPages] = []
        self.over = False
        self._receiver = receiver
        self._wire = wire

    async def send(self, **kind: Any) -> None:
        if self._wire is None:
            self._wire = await self._receiver.open()
        self._wire.send(pb.RouterMessage(prefill=pb.PrefillRequest(**kind)))

    async def next(self) -> pb.PrefillEvent | None:
        """The next event that is neither a heartbeat, progress nor pages; None at the end."""
        assert self._wire is not None
        async with asyncio.timeout(20):
            while not self.over and (message := await self._wire.receive()) is not None:
                event = message.prefill
                kind = event.WhichOneof("kind")
                self.over = kind in ("released", "refused")
                match kind:
                    case "progress":
                        self.progress.append(event.progress.computed_tokens)
                    case "pages":
                        self.pages.append(event.pages)
                    case "alive":
                        pass
                    case _:
                        return event
        return None

    async def expect(self, kind: str) -> Any:
        event = await self.next()
        assert event is not None
        assert event.WhichOneof("kind") == kind, event
        return getattr(event, kind)

    def cancel(self) -> None:
        assert self._wire is not None
        self._wire.abort()

    def end(self) -> None:
        assert self._wire is not None
        self._wire.finish()


@dataclass
class Setup:
    worker: Running
    view: Client
    receiver: Receiver
    gate: Gate
    transfer_gate: asyncio.Event

    def waits(self, jobs: int) -> bool:
        return self.view.load.waiting == jobs

    def landing(self, request: Request, first_block: int = 0) -> tuple[pb.PrefillLanding, Landing]:
        """Every second page of the receiver, and its landing."""
        pages = list(range(1, 2 * (blocks_for(len(request.token_ids)) - first_block), 2))
        landing = self.receiver.transport.expect(5, 9, pages)
        return pb.PrefillLanding(
            reservation=5, generation=9, epoch=EPOCH, first_block=first_block, pages=pages
        ), landing

    def assert_landed(self, request: Request, landing: pb.PrefillLanding) -> None:
        states = states_of(request.token_ids)[landing.first_block * BLOCK_SIZE :]
        landed = self.receiver.memory[list(landing.pages)].flatten()[: len(states)]
        assert landed.tolist() == states


@asynccontextmanager
async def setup(redis_url: str, **settings: Any) -> AsyncIterator[Setup]:
    gate, transfer_gate, network = Gate(), asyncio.Event(), LocalNetwork()
    transfer_gate.set()
    load = fake_loader(before_step=gate.wait, num_pages=settings.pop("num_pages", 128))
    started = running("prefill", redis_url, load=load, network=network, transfer_gate=transfer_gate, **settings)
    async with started as worker, Client(worker) as view:
        receiver = Receiver(network, worker)
        try:
            yield Setup(worker, view, receiver, gate, transfer_gate)
        finally:
            gate.open()
            transfer_gate.set()
            await receiver.close()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 200, 256])
@pytest.mark.parametrize("n", [1, 3])
async def test_pages_land_bit_for_bit_and_first_tokens_come_before_the_end(redis_url: str, length: int, n: int) -> None:
    request = make_request("a", prompt(length), n=n)
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, landing = s.landing(request)
        await call.send(landing=message)
        first = await call.expect("first_tokens")
        assert [output.token_ids[0] for output in first.outputs] == [
            expected(request, choice, MAX_MODEL_LEN).token_ids[0] for choice in range(n)
        ]
        released = await call.expect("released")
        assert released == pb.PrefillReleased(pages=len(message.pages))
        assert await call.next() is None
        await landing.done()
        s.assert_landed(request, message)
        assert call.progress[-1] == length
        await s.view.balanced()


async def test_first_tokens_are_sent_before_the_last_pages_even_if_the_event_loop_is_late(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        service, engine, loop = s.worker.worker._service, s.worker.worker._engine, asyncio.get_running_loop()
        report = engine._report

        async def take_last() -> None:
            service.update(Update(StepOutput(), None, 0, None))

        def report_late(engine: Engine, output: StepOutput | None) -> None:
            asyncio.run_coroutine_threadsafe(take_last(), loop).result(DEADLINE_S)
            report(engine, output)

        monkeypatch.setattr(engine, "_report", report_late)
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, landing = s.landing(request)
        await call.send(landing=message)
        await call.expect("first_tokens")
        assert call.progress[-1] < len(request.token_ids)
        await call.expect("released")
        await landing.done()
        s.assert_landed(request, message)


async def test_only_blocks_that_the_caller_lacks_are_sent(redis_url: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, landing = s.landing(request, first_block=7)
        await call.send(landing=message)
        await call.expect("first_tokens")
        assert (await call.expect("released")).pages == 13 - 7
        await landing.done()
        s.assert_landed(request, message)


async def test_pages_leave_after_each_chunk_while_the_next_one_computes(redis_url: str) -> None:
    request = make_request("a", prompt(250))
    async with setup(redis_url) as s:
        s.gate.close()
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, landing = s.landing(request)
        await call.send(landing=message)
        await eventually(lambda: s.gate.held)
        s.gate.open_once()
        await eventually(lambda: (s.receiver.memory[list(message.pages[:4])] != -7).all() and s.gate.held)
        assert (s.receiver.memory[list(message.pages[4:])] == -7).all()
        s.gate.open()
        await call.expect("first_tokens")
        await call.expect("released")
        await landing.done()


async def test_in_a_small_pool_computing_waits_for_the_landing(redis_url: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url, num_pages=32) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        waiting = asyncio.create_task(call.next())
        await eventually(lambda: len(call.progress) >= 2)
        assert s.view.load.used_pages == 0
        message, landing = s.landing(request)
        await call.send(landing=message)
        first = await waiting
        assert first is not None
        assert first.WhichOneof("kind") == "first_tokens"
        await landing.done()
        s.assert_landed(request, message)


async def test_a_cached_prompt_is_sent_from_the_cache(redis_url: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        for _ in range(2):
            call = s.receiver.request()
            await call.send(start=s.receiver.start(request))
            await call.expect("ready")
            message, landing = s.landing(request)
            await call.send(landing=message)
            first = await call.expect("first_tokens")
            await call.expect("released")
            await landing.done()
            s.assert_landed(request, message)
            s.receiver.memory[:] = -7
        assert first.cached_tokens == 192
        assert call.progress[-1] == 200


async def test_a_prompt_that_is_computed_twice_is_sent_once(redis_url: str) -> None:
    """Two long prompts in a pool for one and a half: the newer one is preempted and starts again."""
    async with setup(redis_url, num_pages=24, max_num_seqs=4) as s:
        requests = [make_request(f"r{i}", prompt(250, 3 * i)) for i in range(3)]
        calls = []
        for i, request in enumerate(requests):
            call = s.receiver.request()
            await call.send(start=s.receiver.start(request, decode_worker_id=f"d{i}"))
            await call.expect("ready")
            calls.append(call)
        landings = []
        for i, call in enumerate(calls):
            pages = list(range(20 * i, 20 * i + 16))
            landings.append(s.receiver.transport.expect(i, 1, pages))
            await call.send(landing=pb.PrefillLanding(reservation=i, generation=1, epoch=EPOCH, pages=pages))
        for i, (call, request) in enumerate(zip(calls, requests, strict=True)):
            await call.expect("first_tokens")
            assert (await call.expect("released")) == pb.PrefillReleased(pages=16)
            await landings[i].done()
            s.assert_landed(request, pb.PrefillLanding(pages=list(range(20 * i, 20 * i + 16))))
        await s.view.balanced()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"fingerprint": b"other"}, "differ in weights"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"tokens": pack_tokens([10**6])}, "vocabulary"),
    ],
)
async def test_invalid_requests_are_refused_with_the_reason(
    redis_url: str, overrides: dict[str, Any], named: str
) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(make_request("a", prompt(1)), **overrides))
        assert named in (await call.expect("refused")).message
        assert await call.next() is None


@pytest.mark.parametrize(
    "overrides", [{"transport_address": b"nowhere"}, {"transport": "pigeon", "common_address": b"nowhere"}]
)
async def test_a_pool_that_cannot_be_reached_is_a_failed_transfer(redis_url: str, overrides: dict[str, Any]) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(make_request("a", prompt(100)), **overrides))
        assert "nobody answers" in (await call.expect("released")).error
        await s.view.balanced()


async def test_a_landing_that_does_not_fit_is_refused(redis_url: str) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(make_request("a", prompt(100))))
        await call.expect("ready")
        await call.expect("first_tokens")
        await call.send(landing=pb.PrefillLanding(epoch=EPOCH, pages=[1, 2, 3]))
        assert "3 pages" in (await call.expect("released")).error
        await s.view.balanced()


async def test_computing_does_not_wait_for_the_landing(redis_url: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        first = await call.expect("first_tokens")
        assert first.outputs[0].token_ids == expected(request, 0, MAX_MODEL_LEN).token_ids[:1]
        await eventually(lambda: s.view.load.used_pages == 13)
        message, landing = s.landing(request, first_block=5)
        await call.send(landing=message)
        assert (await call.expect("released")).pages == 13 - 5
        await landing.done()
        s.assert_landed(request, message)
        await s.view.balanced()


@pytest.mark.parametrize("wrong", ["epoch", "generation", "reservation"])
async def test_a_landing_that_is_not_current_is_refused_and_nothing_is_written(redis_url: str, wrong: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, _ = s.landing(request)
        setattr(message, wrong, 6)
        await call.send(landing=message)
        event = await call.next()
        if event is not None and event.WhichOneof("kind") == "first_tokens":
            event = await call.next()
        assert event is not None
        assert event.released.error
        assert event.released.pages == 0
        assert (s.receiver.memory == -7).all()
        await s.view.balanced()


async def test_a_landing_that_names_a_page_twice_ends_only_its_request(redis_url: str) -> None:
    request = make_request("a", prompt(40))
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        await call.send(landing=pb.PrefillLanding(reservation=5, generation=9, epoch=EPOCH, pages=[1, 1, 1]))
        while (event := await call.next()) is not None:
            last = event
        assert last.released.error
        await s.view.balanced()


@pytest.mark.parametrize("how", ["cancel", "end", "break", "landing twice"])
@pytest.mark.parametrize("state", ["queued", "computing", "computed", "pushing"])
async def test_a_request_can_be_ended_in_every_state(redis_url: str, state: str, how: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        if state in ("queued", "computing"):
            s.gate.close()
        if state == "queued":
            ahead = s.receiver.request()
            await ahead.send(start=s.receiver.start(make_request("ahead", prompt(300, 5)), decode_worker_id="other"))
            await ahead.expect("ready")
            pages = list(range(40, 40 + 19))
            s.receiver.transport.expect(6, 1, pages)
            await ahead.send(landing=pb.PrefillLanding(reservation=6, generation=1, epoch=EPOCH, pages=pages))
            await eventually(lambda: s.gate.held)
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        message, landing = s.landing(request)
        if state != "queued":
            await call.expect("ready")
        if state == "pushing":
            s.transfer_gate.clear()
        if state in ("computing", "pushing"):
            await call.send(landing=message)
        if state == "computing":
            await eventually(lambda: s.gate.held)
        if state == "pushing":
            await call.expect("first_tokens")
        match how:
            case "cancel":
                await call.send(cancel=pb.PrefillCancel())
            case "end":
                call.end()
            case "break":
                call.cancel()
            case "landing twice":
                await call.send(landing=message)
                await call.send(landing=message)
        landing.revoke()
        s.gate.open()
        if how in ("cancel", "landing twice"):
            while (event := await call.next()) is not None:
                last = event
            assert last.WhichOneof("kind") == "released"
            all_pushed = how == "landing twice" and last.released.pages == len(message.pages)  # before the second one
            assert last.released.error or all_pushed
        await s.view.balanced()
        assert (s.receiver.memory[list(message.pages)] == -7).all() or state in ("computing", "computed")


async def test_an_unreachable_pool_delays_no_other_request(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    connect_to = LocalTransport.connect

    async def connect(self: LocalTransport, address: bytes, page_bytes: int | None = None) -> LocalPeer:
        if address == b"silent":
            await asyncio.Event().wait()
        return await connect_to(self, address, page_bytes)

    monkeypatch.setattr(LocalTransport, "connect", connect)
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        silent = s.receiver.request()
        start = s.receiver.start(make_request("b", prompt(900)), decode_worker_id="silent", transport_address=b"silent")
        await silent.send(start=start)
        await eventually(lambda: s.worker.worker._service.prefill.busy)
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        message, landing = s.landing(request)
        await call.send(landing=message)
        await call.expect("first_tokens")
        await call.expect("released")
        await landing.done()
        silent.cancel()
        await eventually(lambda: dict(s.view.load.remote_prefills) == {"completed": 1, "cancelled": 1})
        await s.view.balanced()


async def test_an_unexpected_error_ends_one_request_and_leaks_no_pages(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("prefill_worker.prefill_job.PrefillJob._land", fail)
    async with setup(redis_url) as s:
        s.gate.close()
        call = s.receiver.request()
        await call.send(start=s.receiver.start(make_request("a", prompt(200))))
        await call.expect("ready")
        for _ in range(2):
            await eventually(lambda: s.gate.held)
            s.gate.open_once()
        await eventually(lambda: s.gate.held)
        await call.send(landing=pb.PrefillLanding())
        assert await call.next() is None
        s.gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await s.worker.worker._engine.poll(lambda engine: engine.stats().pages.used == 0 or None)


async def test_waiting_requests_get_progress(redis_url: str) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(make_request("a", prompt(100))))
        await call.expect("ready")
        waiting = asyncio.create_task(call.next())
        await eventually(lambda: len(call.progress) >= 2)
        waiting.cancel()


async def test_the_queue_and_its_bound_show_in_the_load(redis_url: str) -> None:
    async with setup(redis_url, max_queue_tokens=300) as s:
        calls = [s.receiver.request() for _ in range(3)]
        for i, call in enumerate(calls):
            await call.send(start=s.receiver.start(replace(make_request(f"r{i}", prompt(200, i)), number=10 + i)))
            await eventually(partial(s.waits, min(i, 1)))
        assert (await calls[2].expect("refused")).queue_full
        assert s.view.load.waiting_tokens == 200
        await eventually(lambda: list(s.view.load.awaiting_first_token) in ([10], [11]))  # either may have come first


async def test_a_request_must_begin_with_start(redis_url: str) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(landing=pb.PrefillLanding())
        assert await call.next() is None
        assert not call.over


async def test_a_stream_carries_one_request_after_the_other(redis_url: str) -> None:
    """A message that crosses the end of a request does not affect the next one."""
    async with setup(redis_url) as s:
        wire = await s.receiver.open()
        for salt in range(3):
            request = make_request("a", prompt(100, salt))
            call = Call(s.receiver, wire)
            await call.send(start=s.receiver.start(request))
            await call.expect("ready")
            message, landing = s.landing(request)
            await call.send(landing=message)
            await call.expect("first_tokens")
            assert await call.expect("released") == pb.PrefillReleased(pages=len(message.pages))
            await call.send(landing=pb.PrefillLanding(epoch=EPOCH, pages=[1, 2, 3]))
            await call.send(cancel=pb.PrefillCancel())
            await landing.done()
            s.assert_landed(request, message)
            refused = Call(s.receiver, wire)
            await refused.send(start=s.receiver.start(request, fingerprint=b"another"))
            await refused.send(cancel=pb.PrefillCancel())
            await refused.expect("refused")
        await s.view.balanced()


async def test_a_start_within_a_request_ends_it(redis_url: str) -> None:
    async with setup(redis_url) as s:
        call = s.receiver.request()
        for _ in range(2):
            await call.send(start=s.receiver.start(make_request("a", prompt(100))))
        while (event := await call.next()) is not None:
            last = event
        assert "'start'" in last.released.error
        await s.view.balanced()


async def test_a_draining_worker_finishes_its_jobs_and_accepts_no_new_ones(redis_url: str) -> None:
    request = make_request("a", prompt(200))
    async with setup(redis_url) as s:
        call = s.receiver.request()
        await call.send(start=s.receiver.start(request))
        await call.expect("ready")
        await s.view.drain()
        other = s.receiver.request()
        await other.send(start=s.receiver.start(request))
        assert "drains" in (await other.expect("refused")).message
        message, landing = s.landing(request)
        await call.send(landing=message)
        await call.expect("first_tokens")
        await call.expect("released")
        await landing.done()
        assert await asyncio.wait_for(s.worker.task, 20) == EXIT_DRAINED


async def test_after_the_time_of_a_drain_waiting_jobs_end_and_those_under_way_are_finished(redis_url: str) -> None:
    async with setup(redis_url) as s:
        s.gate.close()
        requests = [make_request(f"r{i}", prompt(200, i)) for i in range(2)]
        first, second = s.receiver.request(), s.receiver.request()
        await first.send(start=s.receiver.start(requests[0]))
        await first.expect("ready")
        await second.send(start=s.receiver.start(requests[1]))
        await eventually(partial(s.waits, 1))
        s.worker.worker.lifecycle.drain("test", timeout_s=0)
        assert "drains" in (await second.expect("released")).error
        s.gate.open()
        message, landing = s.landing(requests[0])
        await first.send(landing=message)
        await first.expect("first_tokens")
        assert not (await first.expect("released")).error
        await landing.done()
        assert await asyncio.wait_for(s.worker.task, 20) == 0
