"""Child processes with a transport, for tests that kill, stop or restart them."""

import asyncio
import itertools
import json
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from kvtransfer.base import Ticket
from tests.waiting import DEADLINE_S

T = TypeVar("T")
PAGES, PAGE_BYTES = 160, 1 << 20
START_S = 60.0


class Remote:
    """A process of tests/kvtransfer/child_process.py."""

    def __init__(self, process: asyncio.subprocess.Process, *, differs: bool) -> None:
        self._process = process
        self._differs = differs
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        transport: str,
        seed: int,
        num_pages: int = PAGES,
        page_bytes: int = PAGE_BYTES,
        *,
        gpu: bool = False,
        differs: bool = False,
    ) -> "Remote":
        """Starts a process and waits until it answers. `differs`: this process has another transport."""
        command = [sys.executable, "-m", "tests.kvtransfer.child_process", transport]
        command += [str(num_pages), str(page_bytes), str(seed), *(["gpu"] if gpu else [])]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
        remote = cls(process, differs=differs)
        async with asyncio.timeout(START_S):
            await remote.order("address", common=False)
        return remote

    def order(self, do: str, **arguments: Any) -> "asyncio.Future[dict[str, Any]]":
        """Sends an order. The future resolves to the child's answer."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do} | arguments).encode() + b"\n")
        return self._waiting[number]

    async def address(self) -> bytes:
        return bytes.fromhex((await within(self.order("address", common=self._differs)))["address"])

    async def connect(self, address: bytes) -> None:
        answer = await within(self.order("connect", address=address.hex()))
        assert answer["ok"], answer

    async def expect(self, pages: Sequence[int]) -> Ticket:
        """Opens a landing; returns its ticket."""
        answer = await within(self.order("expect", reservation=1, generation=1, pages=list(pages)))
        return Ticket(answer["epoch"], 1, 1, tuple(pages))

    def push(self, landing: Ticket, pairs: Sequence[tuple[int, int]]) -> "asyncio.Future[dict[str, Any]]":
        return self.order(
            "push",
            epoch=landing.epoch,
            reservation=landing.reservation,
            generation=landing.generation,
            pages=landing.pages,
            pairs=list(pairs),
        )

    def signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    @property
    def state(self) -> str:
        """State in /proc: "T" once SIGSTOP has taken effect."""
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def stop(self) -> None:
        """Stops the process, and returns when that has taken effect. May be called from any thread."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while self.state != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    async def end(self) -> int:
        """Ends the process by closing its stdin; returns the exit code."""
        assert self._process.stdin is not None
        self.signal(signal.SIGCONT)
        self._process.stdin.close()
        await within(self._reader)
        return await within(self._process.wait())

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ended()

    async def ended(self) -> None:
        """Waits until the process has ended."""
        await within(self._process.wait())
        await within(self._reader)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer)
        for future in self._waiting.values():
            future.cancel()


async def within(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable
