"""Finds out whether `auto` should take nixl, in separate processes: see `kvtransfer/bench/trial.py`."""

import asyncio
import json
import sys

from cpd.common.errors import TransferError
from kvtransfer.addresses import rdma_ports
from kvtransfer.base import Cost

_TIMEOUT_S = 120.0  # detects a hang, not a slow start: other workers of the machine may probe at the same time


async def probe(host: str) -> tuple[str, Cost]:
    """Measures nixl in two or three seconds, most of which NIXL takes to initialise.

    Args:
        host: IPv4 address to listen on, or a name of one.

    Returns:
        How pages would travel, in words, and the cost of a transfer between processes of this machine.

    Raises:
        TransferError: nixl does not work; the message says why.
    """
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "kvtransfer.bench.trial", host]
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, errors = await process.communicate()
    except TimeoutError:
        raise TransferError(f"pages took more than {_TIMEOUT_S:g} s between two processes") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise TransferError(f"a process that tried it ended with code {process.returncode}: {last}")
    answer = json.loads(out)
    if "error" in answer:
        raise TransferError(answer["error"])
    ports = rdma_ports()
    network = f"RDMA ({', '.join(ports)})" if ports else "TCP (no RDMA port has a link)"
    if "memory" not in answer:
        reason = f"pages go over {network}; the kernel lets no process write into another one's memory"
        return reason, Cost(**answer["network"])
    cost = Cost(**answer["memory"])
    speed = f"{cost.bytes_per_ms / 1e6:.1f} GB/s"
    return f"pages go through memory between processes of one machine ({speed}), over {network} between machines", cost
