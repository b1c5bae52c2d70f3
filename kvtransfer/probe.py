"""Finds out whether NIXL works here. Only yes or no, so that a busy machine gives the same answer as an idle one.

In a process of its own (`python -m kvtransfer.probe HOST`), because NIXL may crash, and a process that loads both NIXL
and ucxx does sooner or later.
"""

import asyncio
import ctypes
import sys

from cpd.common.errors import CPDError, TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.nixl.agent import Agent, options

_TIMEOUT_S = 120.0
"""Detects a hang, not a slow start: other workers of the machine may probe at the same time."""


async def probe(host: str) -> None:
    """Returns if a NIXL agent can be set up, which takes a quarter of a second of CPU time.

    Args:
        host: IP address to listen on.

    Raises:
        TransferError: It can't; the message says why.
    """
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "kvtransfer.probe", host]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise TransferError(f"a process that tried it hung for {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    if process.returncode == 1 and last.startswith("error: "):
        raise TransferError(last.removeprefix("error: "))
    if process.returncode != 0:
        raise TransferError(f"a process that tried it ended with code {process.returncode}: {last}")


def _try(host: str) -> None:
    data = ctypes.create_string_buffer(1 << 16)
    memory = PoolMemory(ctypes.addressof(data), num_pages=16, page_bytes=1 << 12)
    agent = Agent(memory, options(host), progress=True)
    agent.metadata()
    agent.close()


if __name__ == "__main__":
    try:
        _try(sys.argv[1])
    except CPDError as error:
        sys.exit(f"error: {error}")
