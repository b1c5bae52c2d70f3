import asyncio
import time

from bench.load.clock import Clock
from bench.load.loop_lag import INTERVAL_S, LoopLag
from tests.waiting import DEADLINE_S


async def test_alarms_ring_in_the_order_of_their_times_and_never_early() -> None:
    rang: list[tuple[str, float]] = []
    start_s = time.perf_counter()
    with Clock() as clock:

        async def wait(name: str, after_s: float) -> None:
            await clock.until(start_s + after_s)
            rang.append((name, time.perf_counter() - start_s - after_s))

        await asyncio.gather(wait("third", 0.05), wait("first", 0.01), wait("second", 0.03))
    assert [name for name, _ in rang] == ["first", "second", "third"]
    assert all(late_s >= 0 for _, late_s in rang)


async def test_a_time_that_is_past_rings_at_once() -> None:
    with Clock() as clock:
        await asyncio.wait_for(clock.until(time.perf_counter() - 1), DEADLINE_S)


async def test_an_earlier_alarm_set_later_rings_first() -> None:
    with Clock() as clock:
        late = asyncio.create_task(clock.until(time.perf_counter() + 2 * DEADLINE_S))
        await asyncio.sleep(0)
        await asyncio.wait_for(clock.until(time.perf_counter() + 0.01), DEADLINE_S)
        assert not late.done()
        late.cancel()


async def test_the_lag_shows_a_blocked_event_loop() -> None:
    with Clock() as clock:
        loop_lag = LoopLag(clock)
        await clock.until(time.perf_counter() + 5 * INTERVAL_S)
        before = len(loop_lag.lags_s)
        deadline = time.perf_counter() + 0.2
        while time.perf_counter() < deadline:
            pass
        await clock.until(time.perf_counter() + INTERVAL_S)
    assert before > 0
    assert max(loop_lag.lags_s[before:]) > 0.1
    assert loop_lag.cpu_share > 0
