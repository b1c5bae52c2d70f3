"""Simulated engines on an event loop in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest

from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost
from engine.engine import Engine
from engine.types import StepOutput
from sim.device.fast_forward import Choose
from sim.device.runner import SimulatedRunner, VirtualTime, build_outline, chooser
from simulated_workers.inline import InlineEngine
from tests.engine.fakes import make_request, prompt
from tests.virtual_time import run_in_virtual_time
from tests.waiting import DEADLINE_S
from worker.async_engine import CHECK_INTERVAL_S, EngineDiedError, Update

STEP_MS = 10.0
VOCAB = 1000


def profile(step_ms: float = STEP_MS) -> Profile:
    """All steps take the same time on any number of units, except that long prompts take longer."""
    cost = StepCost(tokens=(1, 512, 1024), tokens_ms=(step_ms, step_ms, 50 * step_ms))
    shares = tuple(ShareProfile(share=share, decode=cost, prefill=cost) for share in (0.25, 0.5, 1.0))
    return Profile(
        schema="cpd-profile/1", source="roofline", device="d", model="m", units=8, unit_step=2, shares=shares
    )


class Bridge:
    """An engine on the loop, and its updates with their times (in ms)."""

    def __init__(self, made: Profile, mode: Mode, choose: Choose | None) -> None:
        self.clock = VirtualTime()
        self.brought: list[tuple[float, Update]] = []
        self.failures: list[BaseException] = []
        self.after_pass: Callable[[Engine, StepOutput | None], None] = lambda engine, output: None
        build = partial(self._build, made, mode)
        self.inline = InlineEngine(build, on_failure=self.failures.append, clock=self.clock, choose=choose)
        self.inline.attach(lambda engine, output: self.after_pass(engine, output), self._take)

    def _build(self, made: Profile, mode: Mode) -> Engine:
        model = PerfModel(made)
        runner = SimulatedRunner(1000, model, self.clock, VOCAB)
        colocation = Colocation(model, mode=mode, splits=[split.shares for split in runner.splits], itl_ms=2 * STEP_MS)
        return Engine(
            runner,
            max_model_len=4096,
            colocation=colocation,
            max_num_seqs=64,
            max_queue_tokens=10**6,
            build=build_outline,
        )

    def _take(self, update: Update) -> None:
        self.brought.append((asyncio.get_running_loop().time() * 1e3, update))

    def tokens(self, request_id: str) -> list[tuple[float, int]]:
        """A request's tokens, with their times."""
        return [
            (ms, token)
            for ms, update in self.brought
            if update.output
            for output in update.output.outputs
            if output.request_id == request_id
            for token in output.token_ids
        ]

    async def done(self, *counts: tuple[str, int]) -> None:
        """Waits until these requests have this many tokens."""
        while any(len(self.tokens(name)) < count for name, count in counts):
            assert not self.failures
            await asyncio.sleep(0.001)


@asynccontextmanager
async def bridge(
    made: Profile | None = None, mode: Mode = "mixed", choose: Choose | None = None
) -> AsyncIterator[Bridge]:
    b = Bridge(made or profile(), mode, choose)
    await b.inline.start()
    try:
        yield b
    finally:
        await b.inline.close()


def test_tokens_come_at_the_profiles_times_and_delays_do_not_add_up() -> None:
    async def main() -> list[float]:
        async with bridge() as b:
            b.inline.post(partial(Engine.add, request=make_request("r", prompt(30), max_tokens=50)))
            await b.done(("r", 50))
            return [ms for ms, _ in b.tokens("r")]

    times, _ = run_in_virtual_time(main())
    assert times == pytest.approx([STEP_MS * (1 + index) for index in range(50)], abs=1.0)


def test_commands_wait_for_the_step_that_runs() -> None:
    async def main() -> float:
        async with bridge() as b:
            b.inline.post(partial(Engine.add, request=make_request("r", prompt(30), max_tokens=3)))
            await asyncio.sleep(0.4 * STEP_MS / 1e3)
            assert await b.inline.call(lambda engine: engine.stats().running) == 1
            return asyncio.get_running_loop().time() * 1e3

    called_ms, _ = run_in_virtual_time(main())
    assert called_ms == pytest.approx(STEP_MS, abs=1.0)


def test_two_engines_run_at_the_same_time() -> None:
    async def main() -> None:
        async with bridge() as one, bridge() as other:
            for b in (one, other):
                b.inline.post(partial(Engine.add, request=make_request("r", prompt(30), max_tokens=20)))
            await asyncio.gather(one.done(("r", 20)), other.done(("r", 20)))

    assert run_in_virtual_time(main())[1] == pytest.approx(20 * STEP_MS, abs=5.0)


def test_the_end_of_a_chunk_on_the_prefill_lane_wakes_an_idle_engine() -> None:
    async def main() -> None:
        async with bridge(mode="lanes") as b:
            b.inline.post(partial(Engine.add, request=make_request("stream", prompt(30), max_tokens=8)))
            await b.done(("stream", 2))
            b.inline.post(partial(Engine.add, request=make_request("long", prompt(2000, 1), max_tokens=2)))
            await b.done(("stream", 8), ("long", 2))
            assert b.tokens("stream")[-1][0] < b.tokens("long")[0][0]

    run_in_virtual_time(main())


async def test_steps_that_take_no_time_leave_the_loop_to_others() -> None:
    async with bridge(Profile.load("instant")) as b:
        passes = 0
        b.inline.post(partial(Engine.add, request=make_request("r", prompt(30), max_tokens=2000)))
        while len(b.tokens("r")) < 2000:
            passes += 1
            await asyncio.sleep(0)
        assert passes > 3


async def test_polls_are_tried_again_after_a_nudge() -> None:
    async with bridge(Profile.load("instant")) as b:
        attempts: list[bool] = []

        def third(engine: Engine) -> str | None:
            attempts.append(True)
            return "here" if len(attempts) == 3 else None

        found = b.inline.poll(third)
        while len(attempts) < 3:
            assert not found.done()
            b.inline.nudge()
            await b.inline.call(lambda engine: None)
        assert await found == "here"


async def test_an_error_in_a_call_is_its_callers() -> None:
    async with bridge() as b:
        with pytest.raises(ValueError, match="cancel"):
            await b.inline.call(lambda engine: fail(ValueError("cancel")))
        assert await b.inline.call(lambda engine: 7) == 7
        assert not b.failures


@pytest.mark.parametrize("where", ["after_pass", "post"])
async def test_any_other_error_fails_the_engine_and_all_waiters(where: str) -> None:
    async with bridge() as b:
        waiting: asyncio.Future[None] = b.inline.poll(lambda engine: None)
        if where == "after_pass":
            b.after_pass = lambda engine, output: fail(RuntimeError("broken"))
            b.inline.nudge()
        else:
            b.inline.post(lambda engine: fail(RuntimeError("broken")))
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(waiting, DEADLINE_S)
        assert [str(error) for error in b.failures] == ["broken"]
        with pytest.raises(EngineDiedError):
            await b.inline.call(lambda engine: None)


async def test_after_closing_calls_fail() -> None:
    async with bridge() as b:
        waiting: asyncio.Future[None] = b.inline.poll(lambda engine: None)
        await asyncio.sleep(0)
    for future in (waiting, b.inline.call(lambda engine: None)):
        with pytest.raises(EngineDiedError):
            await future


def test_the_page_accounts_of_an_idle_engine_are_checked() -> None:
    async def main() -> list[BaseException]:
        async with bridge() as b:
            await b.inline.call(lambda engine: engine._pool.take(1))
            await asyncio.sleep(2.0)
            return b.failures

    [failure], _ = run_in_virtual_time(main())
    assert isinstance(failure, AssertionError)


def test_accounts_are_checked_at_bounded_intervals_and_once_more_at_the_end() -> None:
    checked_s: list[float] = []

    async def main() -> None:
        async with bridge() as b:
            for _ in range(25):
                b.inline.nudge()
                await asyncio.sleep(1.0)
            await asyncio.sleep(20.0)

    with patch.object(Engine, "check_integrity", lambda engine: checked_s.append(asyncio.get_running_loop().time())):
        run_in_virtual_time(main())
    assert len(checked_s) == 4
    assert min(after - before for before, after in pairwise(checked_s)) >= CHECK_INTERVAL_S


def fail(error: Exception) -> None:
    raise error


async def test_steps_that_take_no_time_are_made_at_once_except_the_first_token() -> None:
    async def updates(choose: Choose | None) -> tuple[list[int], list[int]]:
        async with bridge(Profile.load("instant"), choose=choose) as b:
            b.inline.post(partial(Engine.add, request=make_request("r", prompt(30), max_tokens=20, stop=range(500))))
            await b.done(("r", 20))
            sizes = [len(update.output.outputs[0].token_ids) for _, update in b.brought if update.output]
            return sizes, [token for _, token in b.tokens("r")]

    sizes, tokens = await updates(chooser(VOCAB))
    assert sizes == [1, 19]
    assert ([1] * 20, tokens) == await updates(None)
