"""Connections to the pools of workers that pages go to, kept between fills."""

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
        """Whether the connection did not come about or did not last."""
        task = self.connecting
        return task.done() and (task.cancelled() or task.exception() is not None or not task.result().alive)


class Peers:
    """One connection an address, shared by its fills.

    A connection that broke is kept for those who still use it, and replaced for the next one. One that is still being
    made when nobody waits for it any more goes on: it may take longer than a fill waits, and is there for the next one
    then. The longest idle ones are closed when there are many.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    @contextlib.asynccontextmanager
    async def use(self, address: bytes) -> AsyncIterator[asyncio.Future[Peer]]:
        """The connection to the pool at `address`, or TransferError. It is shared: not to be cancelled."""
        entry = self._entries.get(address)
        if entry is None or entry.broken:
            entry = _Entry(asyncio.create_task(self._transport.connect(address), name="connect-pool"))
            entry.connecting.add_done_callback(_take_note)
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
        """Closes every connection; nobody uses one any more."""
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            await _close(entry)

    async def _close_idle(self) -> None:
        idle = [address for address, entry in self._entries.items() if not entry.users]
        for address in idle[: max(len(idle) - MAX_IDLE, 0)]:
            await _close(self._entries.pop(address))


def _take_note(connecting: asyncio.Task[Peer]) -> None:
    """Of a failure that nobody may have waited for; asyncio would report it as forgotten."""
    if not connecting.cancelled():
        connecting.exception()


async def _close(entry: _Entry) -> None:
    entry.connecting.cancel()
    (peer,) = await asyncio.gather(entry.connecting, return_exceptions=True)
    if not isinstance(peer, BaseException):
        await peer.close()
