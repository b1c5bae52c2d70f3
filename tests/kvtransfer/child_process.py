"""A transport that carries out orders: `python -m tests.kvtransfer.child_process NAME PAGES PAGE_BYTES SEED`.

With one more argument its pool is on the fake GPU of `tests/kvtransfer/fake_gpu.py`.

Each line of stdin is JSON {"id", "do", …}; each line of stdout, {"id", "ok", …}, answers an order that is done.
"""

import asyncio
import json
import sys
from typing import Any

import pytest

import kvtransfer
from cpd.common.errors import TransferError
from kvtransfer.base import Landing, Peer, Ticket, Transport
from tests.kvtransfer import fake_gpu
from tests.kvtransfer.pools import Pool


class Child:
    def __init__(self, pool: Pool, transport: Transport) -> None:
        self._pool = pool
        self._transport = transport
        self._peer: Peer
        self._landing: Landing

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "address":
                address = self._transport.common_address if order["common"] else self._transport.address
                return {"address": address.hex()}
            case "connect":
                self._peer = await self._transport.connect(bytes.fromhex(order["address"]))
            case "push":
                ticket = Ticket(order["epoch"], order["reservation"], order["generation"], tuple(order["pages"]))
                await self._peer.push(ticket, order["pairs"]).done()
            case "expect":
                self._landing = self._transport.expect(order["reservation"], order["generation"], order["pages"])
                return {"epoch": self._transport.epoch}
            case "land":
                await self._landing.done()
                return {"first_bytes": self._pool.pages[order["pages"], 0].tolist()}
        return {}


async def answer(child: Child, order: dict[str, Any]) -> None:
    try:
        reply = {"ok": True} | await child.do(order)
    except TransferError as error:
        reply = {"ok": False, "error": type(error).__name__, "text": str(error)}
    print(json.dumps({"id": order["id"]} | reply), flush=True)


async def main(name: str, num_pages: int, page_bytes: int, seed: int, *, gpu: bool) -> None:
    if gpu:
        fake_gpu.install(pytest.MonkeyPatch())
    pool = Pool(num_pages, page_bytes, seed=seed, device=fake_gpu.DEVICE if gpu else None)
    child = Child(pool, await kvtransfer.create(name, pool.memory, epoch=seed, host="127.0.0.1"))
    stdin = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    tasks = set()
    while line := await stdin.readline():
        task = asyncio.create_task(answer(child, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5]), gpu=len(sys.argv) > 5))
