import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from cpd.common.blocks import Tier
from cpd.common.errors import QueueFullError
from engine.batch import Batch
from engine.engine import Engine
from engine.types import Output, StepOutput
from tests.engine.fakes import FakeRunner, FakeStep, engine_of, expected, follow, make_engine, make_request, prompt
from tests.waiting import eventually
from worker.async_engine import EngineDiedError, EngineThread, Update


class RunningEngine:
    """An engine thread that records its results."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.updates: list[Update] = []
        self.hooks: list[StepOutput | None] = []
        self.failures: list[BaseException] = []
        self.after_pass: Callable[[Engine, StepOutput | None], None] = lambda engine, output: None
        self.thread = EngineThread(build, on_failure=self.failures.append)
        self.thread.attach(self._after_pass, self.updates.append)

    def _after_pass(self, engine: Engine, output: StepOutput | None) -> None:
        self.hooks.append(output)
        self.after_pass(engine, output)

    @property
    def outputs(self) -> list[Output]:
        return [output for update in self.updates if update.output for output in update.output.outputs]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


@asynccontextmanager
async def running(engine: Engine | None = None) -> AsyncIterator[RunningEngine]:
    made = engine or make_engine()[0]
    b = RunningEngine(lambda: made)
    await b.thread.start()
    try:
        yield b
    finally:
        await b.thread.close()


async def test_requests_are_computed_and_their_tokens_arrive_in_order() -> None:
    engine, _ = make_engine()
    requests = [make_request(f"r{i}", prompt(30, i), max_tokens=20) for i in range(5)]
    async with running(engine) as b:
        for request in requests:
            await b.thread.call(partial(Engine.add, request=request))
        await eventually(lambda: sum(output.finish is not None for output in b.outputs) == 5)
        for request in requests:
            assert b.tokens(request.id) == expected(request, 0, engine.max_model_len).token_ids
    assert b.failures == []


async def test_the_engine_is_built_and_used_on_its_own_thread_only() -> None:
    threads: set[str] = set()

    def build() -> Engine:
        threads.add(threading.current_thread().name)
        return make_engine()[0]

    b = RunningEngine(build)
    b.after_pass = lambda engine, output: threads.add(threading.current_thread().name)
    await b.thread.start()
    assert await b.thread.call(lambda engine: threading.current_thread().name) == "engine"
    await b.thread.close()
    assert threads == {"engine"}


async def test_start_raises_what_build_raises() -> None:
    def build() -> Engine:
        raise ValueError("no such model")

    b = RunningEngine(build)
    with pytest.raises(ValueError, match="no such model"):
        await b.thread.start()
    with pytest.raises(EngineDiedError):
        await b.thread.call(lambda engine: None)
    await b.thread.close()


async def test_an_error_in_a_call_goes_only_to_its_caller() -> None:
    async with running() as b:
        with pytest.raises(ValueError, match="never"):
            await b.thread.call(lambda engine: _raise(ValueError("never")))
        assert await b.thread.call(lambda engine: 7) == 7
        assert b.failures == []


async def test_an_error_in_a_call_is_freed_at_once() -> None:
    """Garbage collections are rare, so under overload refused requests would pile up until the next one."""

    def refuse(engine: Engine) -> None:
        raise QueueFullError("full", 1.0)

    async with running() as b:
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(QueueFullError):
                await b.thread.call(refuse)
            await eventually(lambda: not any(type(one) is QueueFullError for one in gc.get_objects()))
        finally:
            gc.enable()


async def test_calls_run_in_order_even_if_awaited_late() -> None:
    order: list[int] = []
    async with running() as b:
        futures = [b.thread.call(partial(_append, order, i)) for i in range(10)]
        b.thread.post(lambda engine: order.append(10))
        await b.thread.call(lambda engine: order.append(11))
        assert order == list(range(12))
        assert all(future.done() for future in futures)


class BrokenRunner(FakeRunner):
    def begin(self, batch: Batch) -> FakeStep:
        raise RuntimeError("device lost")


async def test_a_failing_step_is_reported_and_nothing_hangs() -> None:
    runner = BrokenRunner(64)
    engine = engine_of(runner)
    async with running(engine) as b:
        never = b.thread.poll(_not_yet)
        await b.thread.call(lambda engine: engine.add(make_request("a", prompt(20))))
        await eventually(lambda: bool(b.failures))
        assert "device lost" in str(b.failures[0])
        with pytest.raises(EngineDiedError):
            await never
        with pytest.raises(EngineDiedError):
            await b.thread.call(lambda engine: None)


@pytest.mark.parametrize("where", ["after_pass", "post"])
async def test_an_error_without_a_caller_is_the_engines_failure(where: str) -> None:
    async with running() as b:
        if where == "after_pass":
            b.after_pass = lambda engine, output: _raise(KeyError("lost"))
            b.thread.nudge()
        else:
            b.thread.post(lambda engine: _raise(KeyError("lost")))
        await eventually(lambda: bool(b.failures))


async def test_a_failing_listener_is_reported() -> None:
    async with running() as b:
        b.thread.attach(b._after_pass, lambda update: _raise(KeyError("bug")))
        await b.thread.call(lambda engine: engine.add(make_request("a", prompt(20), max_tokens=1)))
        await eventually(lambda: bool(b.failures))


async def test_a_poll_is_tried_again_when_the_engine_changed_or_after_a_nudge() -> None:
    tries: list[int] = []
    wanted = threading.Event()

    def fn(engine: Engine) -> str | None:
        tries.append(1)
        return "now" if wanted.is_set() else None

    async with running() as b:
        result = b.thread.poll(fn)
        for number in range(3):
            before = len(tries)
            await _serve(b, f"r{number}", number)
            assert len(tries) > before
        assert not result.done()
        wanted.set()
        b.thread.nudge()
        assert await result == "now"
        before = len(tries)
        await _serve(b, "r3", 3)
        assert len(tries) == before


async def test_a_poll_is_not_tried_again_while_the_engine_is_unchanged() -> None:
    tries: list[int] = []
    async with running() as b:
        b.thread.poll(lambda engine: tries.append(1))
        for _ in range(2):
            await b.thread.call(lambda engine: None)
        before = len(tries)
        for _ in range(20):
            await b.thread.call(lambda engine: None)
        assert len(tries) == before


async def test_a_poll_that_raises_ends() -> None:
    async with running() as b:
        with pytest.raises(ValueError, match="never fits"):
            await b.thread.poll(lambda engine: _raise(ValueError("never fits")))
        assert b.failures == []


async def test_waiting_polls_do_not_run_while_the_engine_is_idle() -> None:
    tries: list[int] = []
    async with running() as b:
        for _ in range(5):
            b.thread.poll(lambda engine: tries.append(1))
        await b.thread.call(lambda engine: None)
        before = len(tries)
        await asyncio.sleep(0.05)
        assert len(tries) == before


async def test_results_of_commands_do_not_wait_for_the_step() -> None:
    hold, held = threading.Event(), threading.Event()

    class SlowRunner(FakeRunner):
        def begin(self, batch: Batch) -> FakeStep:
            held.set()
            assert hold.wait(20)
            return super().begin(batch)

    engine = engine_of(SlowRunner(64))
    async with running(engine) as b:
        await b.thread.call(lambda engine: engine.add(make_request("a", prompt(20), max_tokens=1)))
        await asyncio.to_thread(held.wait, 20)
        assert b.outputs == []
        hold.set()
        await eventually(lambda: len(b.outputs) == 1)


async def test_tokens_of_a_step_do_not_wait_for_the_next_one() -> None:
    may_step, begun = threading.Semaphore(2), threading.Semaphore(0)

    class HeldRunner(FakeRunner):
        def begin(self, batch: Batch) -> FakeStep:
            begun.release()
            assert may_step.acquire(timeout=20)
            return super().begin(batch)

    async with running(engine_of(HeldRunner(64))) as b:
        await b.thread.call(lambda engine: engine.add(make_request("a", prompt(20), max_tokens=3)))
        for _ in range(3):
            await asyncio.to_thread(begun.acquire, timeout=20)
        await eventually(lambda: len(b.outputs) == 2)
        may_step.release()
        await eventually(lambda: len(b.outputs) == 3)


async def test_tokens_of_the_steps_before_a_failing_one_arrive_first() -> None:
    order: list[str] = []

    class FailsLater(FakeRunner):
        def begin(self, batch: Batch) -> FakeStep:
            if not batch.num_decodes:
                return super().begin(batch)
            raise RuntimeError("device lost")

    thread = EngineThread(lambda: engine_of(FailsLater(64)), on_failure=lambda error: order.append("failure"))
    thread.attach(lambda engine, output: None, lambda update: order.append("tokens") if update.output else None)
    await thread.start()
    await thread.call(lambda engine: engine.add(make_request("a", prompt(20), max_tokens=3)))
    await eventually(lambda: "failure" in order)
    await thread.close()
    assert order == ["tokens", "failure"]


async def test_events_are_numbered_without_gaps_and_follow_the_snapshot() -> None:
    engine, _ = make_engine(num_pages=24)
    async with running(engine) as b:
        await _serve(b, "a", 0)
        snapshot = await b.thread.snapshot()
        findable = {block_hash: tier for tier, hashes in snapshot.hashes.items() for block_hash in hashes}
        for i in range(1, 12):
            await _serve(b, f"r{i}", i)
        events = [update for update in b.updates if update.events]
        assert [update.number for update in events] == list(range(1, len(events) + 1))
        for update in events:
            if update.number > snapshot.number:
                follow(findable, update.events or ())
        assert findable == dict.fromkeys((await b.thread.snapshot()).hashes[Tier.PAGES], Tier.PAGES)
        assert any(event.tier is Tier.NONE for update in events for event in update.events or ())


async def test_stats_end_with_the_idle_state() -> None:
    async with running() as b:
        await _serve(b, "a", 0)
        await eventually(lambda: b.updates[-1].stats is not None)
        stats = [update.stats for update in b.updates if update.stats]
        assert stats[-1].running == stats[-1].waiting == 0
        reservation = await b.thread.call(lambda engine: engine.landings.reserve(make_request("b", prompt(40, 3))))
        assert reservation is not None
        await eventually(lambda: any(u.stats and u.stats.pages.reserved == 3 for u in b.updates))
        await b.thread.call(lambda engine: engine.landings.cancel(reservation, quarantine=False))


async def test_wrong_page_accounts_of_an_idle_engine_are_a_failure() -> None:
    async with running() as b:
        await b.thread.call(lambda engine: engine._pool.take(1))
        await eventually(lambda: bool(b.failures))
        assert isinstance(b.failures[0], AssertionError)


async def test_close_fails_waiting_calls_and_polls() -> None:
    b = RunningEngine(lambda: make_engine()[0])
    await b.thread.start()
    poll = b.thread.poll(_not_yet)
    await b.thread.close()
    with pytest.raises(EngineDiedError):
        await poll
    with pytest.raises(EngineDiedError):
        await b.thread.call(lambda engine: None)
    b.thread.post(lambda engine: None)
    assert b.failures == []


async def _serve(b: RunningEngine, name: str, start: int) -> None:
    await b.thread.call(lambda engine: engine.add(make_request(name, prompt(50, start), max_tokens=4)))
    await eventually(lambda: any(output.request_id == name and output.finish for output in b.outputs))


def _append(to: list[int], number: int, engine: Engine) -> None:
    to.append(number)


def _not_yet(engine: Engine) -> str | None:
    return None


def _raise(error: Exception) -> None:
    raise error


async def test_the_end_of_a_prefill_lane_chunk_wakes_a_sleeping_engine() -> None:
    engine, runner = make_engine(colocate="lanes")

    def begin(engine: Engine) -> None:
        for i in range(2):
            engine.add(make_request(f"d{i}", prompt(8, i), max_tokens=5))
        engine.step()
        engine.add(make_request("long", prompt(60, 3), max_tokens=2))

    async with running(engine) as b:
        await b.thread.call(begin)
        await eventually(lambda: sum(output.finish is not None for output in b.outputs) == 2)
        await eventually(lambda: not engine.has_work)  # the engine thread sleeps
        assert b.tokens("long") == []
        await asyncio.to_thread(runner.prefill_lane.finish)
        await eventually(lambda: len(b.tokens("long")) == 2)
    assert b.failures == []
