"""Connections to the page pools of other workers, kept between prefill requests."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvtransfer.base import Peer, Transport

MAX_IDLE = 64


@dataclass(slots=True)
class _Entry:
    connecting: asyncio.Task[Peer]
    users: int = 0

    @property
    def broken(self) -> bool:
        """True if connecting failed or the connection has broken."""
        task = self.connecting
        return task.done() and (task.cancelled() or task.exception() is not None or not task.result().alive)


class PoolConnections:
    """One shared connection per address.

    A broken connection stays with its users; the next user gets a new one. A connection attempt goes on after its last
    user has given up, and serves the next one. Above `MAX_IDLE` idle connections, the longest idle ones are closed.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    @contextlib.asynccontextmanager
    async def use(self, address: bytes) -> AsyncIterator[asyncio.Future[Peer]]:
        """Yields the connection to the pool at `address`, or its TransferError. Do not cancel it: it is shared."""
        entry = self._entries.get(address)
        if entry is None or entry.broken:
            entry = _Entry(asyncio.create_task(self._transport.connect(address), name="connect-pool"))
            entry.connecting.add_done_callback(_retrieve)
            self._entries[address] = entry
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield entry.connecting
        finally:
            entry.users -= 1
            if not entry.users and (entry.broken or self._entries.get(address) is not entry):
                if self._entries.get(address) is entry:
                    del self._entries[address]
                await _close(entry)
            await self._close_idle()

    async def close(self) -> None:
        """Closes every connection. None may be in use."""
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            await _close(entry)

    async def _close_idle(self) -> None:
        idle = [address for address, entry in self._entries.items() if not entry.users]
        for address in idle[: max(len(idle) - MAX_IDLE, 0)]:
            await _close(self._entries.pop(address))


def _retrieve(connecting: asyncio.Task[Peer]) -> None:
    """Retrieves the exception, which asyncio would otherwise report if no user waited for it."""
    if not connecting.cancelled():
        connecting.exception()


async def _close(entry: _Entry) -> None:
    entry.connecting.cancel()
    (peer,) = await asyncio.gather(entry.connecting, return_exceptions=True)
    if not isinstance(peer, BaseException):
        await peer.close()
