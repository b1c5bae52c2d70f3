import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from cpd.common.process import NICENESS
from router.text.fair_threads import LARGE, FairThreads


class Calls:
    """Calls on one thread or more that run until they are let go."""

    def __init__(self, threads: FairThreads) -> None:
        self.started: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self._threads = threads
        self._gates: dict[str, threading.Event] = {}
        self._began: dict[str, asyncio.Event] = {}

    def add(self, name: str, work: int = 1, *, held: bool = False) -> None:
        """Queues a call of the tenant that is the first letter of its name."""
        gate, loop = threading.Event(), asyncio.get_running_loop()
        if not held:
            gate.set()
        self._gates[name], self._began[name] = gate, asyncio.Event()

        def call() -> str:
            self.started.append(name)
            loop.call_soon_threadsafe(self._began[name].set)
            gate.wait()
            return name

        self.tasks[name] = asyncio.create_task(self._threads.run(name[:1].encode(), work, call))

    async def began(self, name: str) -> None:
        """Waits until a call has started."""
        await self._began[name].wait()

    async def let_go(self, *names: str) -> None:
        """Ends calls and waits for all."""
        for name in names:
            self._gates[name].set()
        for name, task in self.tasks.items():
            assert task.cancelled() or await task == name


async def test_tenants_take_turns_by_work() -> None:
    calls = Calls(FairThreads(1))
    calls.add("a0", held=True)
    await calls.began("a0")
    for number in range(1, 4):
        calls.add(f"a{number}", 100)
    await asyncio.sleep(0)
    for number in range(3):
        calls.add(f"b{number}", 50)
    await asyncio.sleep(0)
    await calls.let_go("a0")
    # a has had 1 when b comes; then 100 of a count as two times 50 of b
    assert calls.started == ["a0", "b0", "a1", "b1", "b2", "a2", "a3"]


async def test_a_large_call_leaves_a_thread_for_small_ones() -> None:
    calls = Calls(FairThreads(2))
    calls.add("a0", LARGE + 1, held=True)
    await calls.began("a0")
    calls.add("a1", LARGE + 1)
    calls.add("b0", LARGE + 1)
    calls.add("c0", LARGE)
    await calls.began("c0")
    assert await calls.tasks["c0"] == "c0"
    assert calls.started == ["a0", "c0"]
    await calls.let_go("a0")
    assert sorted(calls.started) == ["a0", "a1", "b0", "c0"]


async def test_a_cancelled_call_never_starts() -> None:
    calls = Calls(FairThreads(1))
    calls.add("a0", held=True)
    await calls.began("a0")
    calls.add("b0")
    calls.add("c0")
    await asyncio.sleep(0)
    calls.tasks["b0"].cancel()
    await calls.let_go("a0")
    assert calls.started == ["a0", "c0"]


async def test_errors_go_to_the_caller() -> None:
    threads = FairThreads(2)
    fails: Callable[[], float] = lambda: 1 / 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        await threads.run(b"a", 1, fails)
    assert await threads.run(b"a", 1, lambda: 7) == 7


async def test_tenants_that_are_done_are_forgotten() -> None:
    threads = FairThreads(2)
    for number in range(50):
        await threads.run(b"%d" % number, 10, lambda: None)
    assert len(threads._tenants) <= 2


async def test_threads_give_way_to_the_event_loop() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert await FairThreads().run(b"a", 1, niceness) == min(19, niceness() + NICENESS)
