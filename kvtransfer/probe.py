"""Which transport `auto` takes, found out in processes of its own: see `kvtransfer/bench/trial.py`."""

import asyncio
import json
import sys
from dataclasses import dataclass

from cpd.common.errors import TransferError
from kvtransfer.addresses import rdma_ports
from kvtransfer.base import Cost

_PATIENCE_S = 120.0  # a hang, not a slow start: a machine may be busy with that of other workers


@dataclass(frozen=True, slots=True)
class Probe:
    """How nixl moves pages here.

    Attributes:
        memory: Cost of a transfer between processes of this machine; None if they may not write into each other.
        network: Over the network back end, measured between processes of this machine, too.
        ports: RDMA ports with a link.
    """

    memory: Cost | None
    network: Cost
    ports: tuple[str, ...]

    def __str__(self) -> str:
        network = f"RDMA ({', '.join(self.ports)})" if self.ports else "TCP (no RDMA port has a link)"
        if self.memory is None:
            return f"pages go over {network}; the kernel lets no process write into another one's memory"
        speed = f"{self.memory.bytes_per_ms / 1e6:.1f} GB/s"
        return f"pages go through memory between processes of one machine ({speed}), over {network} between machines"


async def probe(host: str) -> Probe:
    """Takes two or three seconds, mostly NIXL's first look at the machine.

    Args:
        host: IPv4 address to listen on, or a name of one.

    Raises:
        TransferError: nixl does not work; the message says why.
    """
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "kvtransfer.bench.trial", host]
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            out, said = await process.communicate()
    except TimeoutError:
        raise TransferError(f"pages took more than {_PATIENCE_S:g} s between two processes") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise TransferError(f"a process that tried it ended with code {process.returncode}: {last}")
    answer = json.loads(out)
    if "error" in answer:
        raise TransferError(answer["error"])
    memory = answer.get("memory")
    return Probe(Cost(**memory) if memory else None, Cost(**answer["network"]), rdma_ports())
