"""What the frames between two nixl transports go through: it breaks where a test says."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvtransfer.nixl.details import Address
from kvtransfer.nixl.link import read_frame
from kvtransfer.session import frames


async def never(_: frames.Frame) -> bool:
    """Breaks on no frame."""
    return False


class Wire:
    """Passes the frames of any number of connections, each until one on which it breaks: that one is lost.

    Attributes:
        breaks: On which frames.
        broken: So many connections.
        address: Of the transport, by this way.
    """

    def __init__(self) -> None:
        self.breaks: Callable[[frames.Frame], Awaitable[bool]] = never
        self.broken = 0
        self.address = b""
        self._streams: set[StreamWriter] = set()
        self._server: asyncio.Server

    @classmethod
    async def to(cls, address: bytes) -> "Wire":
        """A new one, to the nixl transport that has this address."""
        wire, where = cls(), Address.decode(address)

        async def connected(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                back, there = await asyncio.open_connection(where.host, where.port)
            except OSError:
                writer.transport.abort()
                return
            wire._streams |= {writer, there}
            await asyncio.gather(wire._carry(reader, there), wire._carry(back, writer))
            wire._streams -= {writer, there}

        wire._server = await asyncio.start_server(connected, "127.0.0.1", 0)
        wire.address = Address(where.host, wire._server.sockets[0].getsockname()[1], where.key).encode()
        return wire

    def close(self) -> None:
        """Breaks all connections, and there will be no others."""
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Breaks all connections; later ones work."""
        for stream in self._streams:
            stream.transport.abort()

    async def _carry(self, source: StreamReader, target: StreamWriter) -> None:
        with suppress(OSError, EOFError):
            while True:
                data = await read_frame(source)
                if await self.breaks(frames.decode(data)):
                    self.broken += 1
                    self.reset()
                    break
                target.write(len(data).to_bytes(frames.PREFIX_BYTES, "little") + data)
        target.close()
