"""Tries nixl: `python -m kvtransfer.bench.trial HOST` prints the cost of transfers between two processes of its own.

Separate processes, because NIXL may crash, and a process that loads both NIXL and ucxx does sooner or later.
"""

import asyncio
import json
import sys
from dataclasses import asdict

from pydantic import ByteSize

from cpd.common.errors import CPDError
from cpd.common.process import switch_threads_often
from kvtransfer.bench.measure import measure
from kvtransfer.bench.settings import TransferBenchSettings


async def trial(host: str) -> dict[str, object]:
    """The cost of a transfer by each route. Raises TransferError if pages don't arrive."""
    costs: dict[str, object] = {}
    for route in ("auto", "network"):
        settings = TransferBenchSettings(
            transport="nixl",
            pages=[1, 64],
            page_size=[ByteSize(256 << 10)],
            repeats=10,
            pool=ByteSize(64 << 20),
            perftest=False,
            route=route,
            host=host,
        )
        result = await measure(settings, lambda *_: None)
        costs[result.route] = asdict(result.cost(best=True))  # other workers start at the same time
    return costs


if __name__ == "__main__":
    switch_threads_often()
    try:
        answer = asyncio.run(trial(sys.argv[1]))
    except CPDError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
