"""Tries nixl: `python -m kvtransfer.bench.trial HOST` prints what transfers cost between two processes of its own.

In processes of its own because one that has NIXL and ucxx crashes sooner or later, and NIXL may by itself.
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
    """The cost of a transfer, by the route that was taken. Raises TransferError if pages don't cross."""
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


def main() -> None:
    """The command."""
    switch_threads_often()
    try:
        answer = asyncio.run(trial(sys.argv[1]))
    except CPDError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
