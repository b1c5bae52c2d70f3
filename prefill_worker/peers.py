"""Connections to decode workers' pools, kept between fills."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvtransfer.base import Peer, Transport

log = logging.getLogger(__name__)

MAX_IDLE = 64


@dataclass(slots=True)
class _Entry:
    connecting: asyncio.Task[Peer]
    users: int = 0


class Peers:
    """One connection an address, shared by its fills.

    A connection that broke is given up with `drop`: fills that still use it keep it until they end, the next one
    connects anew. The longest idle ones are closed when there are many.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    @contextlib.asynccontextmanager
    async def use(self, address: bytes) -> AsyncIterator[Peer]:
        """The connection to the pool at `address`.

        Raises:
            TransferError: Nobody answers there.
        """
        entry = self._entries.get(address)
        if entry is None:
            entry = _Entry(asyncio.create_task(self._transport.connect(address), name="connect-pool"))
            self._entries[address] = entry
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield await asyncio.shield(entry.connecting)
        finally:
            entry.users -= 1
            if entry.connecting.done() and entry.connecting.exception() is not None:
                self._forget(address, entry)
            elif self._entries.get(address) is not entry and not entry.users:
                await _close(entry)
            await self._close_idle()

    def drop(self, address: bytes, peer: Peer) -> None:
        """Uses `peer` for nothing new: it broke."""
        entry = self._entries.get(address)
        if entry is not None and entry.connecting.done() and entry.connecting.result() is peer:
            self._forget(address, entry)

    async def close(self) -> None:
        """Closes every connection; nobody uses one any more."""
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            await _close(entry)

    def _forget(self, address: bytes, entry: _Entry) -> None:
        if self._entries.get(address) is entry:
            del self._entries[address]

    async def _close_idle(self) -> None:
        idle = [address for address, entry in self._entries.items() if not entry.users]
        for address in idle[: max(len(idle) - MAX_IDLE, 0)]:
            await _close(self._entries.pop(address))


async def _close(entry: _Entry) -> None:
    if not entry.connecting.done():
        entry.connecting.cancel()
    (peer,) = await asyncio.gather(entry.connecting, return_exceptions=True)
    if not isinstance(peer, BaseException):
        await peer.close()
