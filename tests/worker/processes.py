"""Workers as real processes, started like a user or a supervisor starts them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from cpd.common.membership import Member, members
from cpd.common.settings import Role
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from tests.secret import SECRET, secret_file

START_S = 120.0
STOP_S = 30.0
TOKEN = SECRET
ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """A running `python -m prefill_worker` or `python -m decode_worker`."""

    def __init__(self, process: subprocess.Popen[str], member: Member, log: Path) -> None:
        self._process = process
        self.member = member
        self.log = log

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def address(self) -> str:
        return self.member.address

    @property
    def session(self) -> str:
        return self.member.session

    @property
    def candidate(self) -> pb.PrefillCandidate:
        return pb.PrefillCandidate(worker_id=self.member.id, address=self.session)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this one process."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Waits until it ends; returns its exit code."""
        return await asyncio.wait_for(asyncio.to_thread(self._process.wait), STOP_S)


def command(role: Role, **flags: Any) -> list[str]:
    """The command line of a worker."""
    module = "prefill_worker" if role == "prefill" else "decode_worker"
    given = [
        part
        for name, value in flags.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    return [sys.executable, "-m", module, *given]


@asynccontextmanager
async def worker_process(
    role: Role, redis_url: str, directory: Path, *, worker_id: str, cluster: str, **flags: Any
) -> AsyncIterator[WorkerProcess]:
    """A worker process that has taken its lease; killed at the end if it is still there."""
    log = directory / f"{worker_id}.log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - takes no time, and `asyncio`'s ends with the loop
            command(
                role, redis_url=redis_url, worker_id=worker_id, cluster=cluster, secret_file=secret_file(), **flags
            ),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
    try:
        async with Redis.from_url(redis_url) as redis, asyncio.timeout(START_S):
            while not (found := [m for m in await members(redis, cluster, ClusterSecret(TOKEN)) if m.id == worker_id]):
                assert process.poll() is None, f"{worker_id} did not start:\n{log.read_text()}"
                await asyncio.sleep(0.05)
        yield WorkerProcess(process, found[0], log)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
