"""The transport of a pool whose memory may be away for a while.

    closed ──open──▶ open ──close──▶ closed ──open──▶ open: another transport, with a new epoch and new addresses

Tickets for an earlier transport are refused by the new one, because of its epoch. All of them are of the kind that was
chosen first: a process can't load the libraries of several.
"""

import secrets
from collections.abc import Awaitable, Sequence
from typing import Protocol

from cpd.common.errors import TransferError
from cpd.common.settings import WorkerSettings
from kvtransfer.base import Landing, Peer, PoolMemory, Segment, Transport


class OpenTransport(Protocol):
    """The signature of `kvtransfer.create`."""

    def __call__(
        self, name: str, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str
    ) -> Awaitable[Transport]: ...


class PoolTransport:
    """Implements `kvtransfer.base.Transport`.

    Attributes:
        address, common_address, epoch: Of the transport that was opened last.
    """

    def __init__(self, open_transport: OpenTransport, memory: PoolMemory, settings: WorkerSettings) -> None:
        self.name: str = settings.transport
        self.reason = ""
        self.address = self.common_address = b""
        self.epoch = 0
        self._open = open_transport
        self._memory = memory
        self._settings = settings
        self._transport: Transport | None = None
        self._chosen = False

    async def open(self) -> None:
        """Opens a transport.

        Raises:
            ConfigError, TransferError: It can't be opened.
        """
        self._transport = transport = await self._open(
            self.name,
            self._memory,
            epoch=secrets.randbits(63),
            host=self._settings.host,
            advertise_host=self._settings.advertise_host,
        )
        self.address, self.common_address, self.epoch = transport.address, transport.common_address, transport.epoch
        if not self._chosen:
            self.name, self.reason, self._chosen = transport.name, transport.reason, True

    def expect(
        self, reservation: int, generation: int, pages: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Landing:
        return self._current.expect(reservation, generation, pages, segments)

    async def connect(self, address: bytes, page_bytes: int | None = None) -> Peer:
        return await self._current.connect(address, page_bytes)

    async def close(self) -> None:
        """Closes the transport, if it is open. Afterwards the pool is not touched any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    @property
    def _current(self) -> Transport:
        if self._transport is None:
            raise TransferError("the transport is closed")
        return self._transport
