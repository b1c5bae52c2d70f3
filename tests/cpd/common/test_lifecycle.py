import asyncio
import os
import signal

from cpd.common.lifecycle import Lifecycle, on_stop_signals
from cpd.common.process import EXIT_DRAINED
from tests.waiting import DEADLINE_S, eventually


async def test_the_first_sigterm_drains_and_the_second_one_stops() -> None:
    changes: list[None] = []
    lifecycle = Lifecycle(30.0, lambda: changes.append(None))
    on_stop_signals(lifecycle)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(lifecycle.draining.wait(), DEADLINE_S)
    assert not lifecycle.stopping.is_set()
    assert len(changes) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(lifecycle.stopping.wait(), DEADLINE_S)
    assert (lifecycle.exit_code, lifecycle.failed) == (0, False)


async def test_sigint_stops_at_once() -> None:
    lifecycle = Lifecycle(30.0)
    on_stop_signals(lifecycle)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(lifecycle.stopping.wait(), DEADLINE_S)


async def test_a_drain_on_request_and_sigterm_end_with_the_code_of_the_request() -> None:
    lifecycle = Lifecycle(30.0)
    lifecycle.drain("asked to", EXIT_DRAINED)
    lifecycle.terminate("got SIGTERM")
    assert not lifecycle.stopping.is_set()
    lifecycle.terminate("got SIGTERM")
    assert lifecycle.stopping.is_set()
    assert lifecycle.exit_code == EXIT_DRAINED


async def test_sigterm_shortens_a_drain_and_does_not_prolong_it() -> None:
    long, short = Lifecycle(0.0), Lifecycle(1000.0)
    long.drain("asked to", timeout_s=1000.0)
    long.terminate("got SIGTERM")
    assert long.time_is_over
    short.drain("asked to", timeout_s=0.0)
    short.terminate("got SIGTERM")
    assert short.time_is_over


async def test_the_last_time_counts() -> None:
    lifecycle = Lifecycle(0.0)
    assert not lifecycle.time_is_over
    lifecycle.drain("asked to", timeout_s=1000.0)
    assert not lifecycle.time_is_over
    lifecycle.drain("asked to")
    await eventually(lambda: lifecycle.time_is_over)


async def test_a_failure_while_it_drains_has_its_own_exit_code() -> None:
    lifecycle = Lifecycle(30.0)
    lifecycle.drain("asked to", EXIT_DRAINED)
    lifecycle.stop("the engine failed", 75)
    assert (lifecycle.exit_code, lifecycle.failed) == (75, True)
