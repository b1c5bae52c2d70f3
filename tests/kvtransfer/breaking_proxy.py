"""A proxy between two nixl transports that breaks connections when a test wants it."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvtransfer.nixl.connection import read_frame
from kvtransfer.nixl.handshake import Address
from kvtransfer.session import frames


async def never(_: frames.Frame) -> bool:
    """Never breaks."""
    return False


class BreakingProxy:
    """Forwards the frames of any number of connections. A frame on which it breaks is lost.

    Attributes:
        breaks: Decides on which frames to break all connections.
        broken: How often it has broken them.
        address: Address of the transport through this proxy.
    """

    def __init__(self) -> None:
        self.breaks: Callable[[frames.Frame], Awaitable[bool]] = never
        self.broken = 0
        self.address = b""
        self._streams: set[StreamWriter] = set()
        self._server: asyncio.Server

    @classmethod
    async def to(cls, address: bytes) -> "BreakingProxy":
        """Starts a proxy to the nixl transport with this address."""
        proxy, where = cls(), Address.decode(address)

        async def connected(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                back, there = await asyncio.open_connection(where.host, where.port)
            except OSError:
                writer.transport.abort()
                return
            proxy._streams |= {writer, there}
            await asyncio.gather(proxy._carry(reader, there), proxy._carry(back, writer))
            proxy._streams -= {writer, there}

        proxy._server = await asyncio.start_server(connected, "127.0.0.1", 0)
        proxy.address = Address(where.host, proxy._server.sockets[0].getsockname()[1], where.key).encode()
        return proxy

    def close(self) -> None:
        """Breaks all connections and accepts no others."""
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Breaks all present connections."""
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
