"""What both ends of a nixl connection have in common: frames over TCP, and a time limit for a passive peer."""

import abc
import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from cpd.common.errors import TransferError
from kvtransfer.session import frames

_TICK_S = 0.25


async def read_frame(reader: StreamReader) -> bytes:
    """Reads the next frame, without its length, undecoded.

    Raises:
        TransferError: The length is impossible.
        asyncio.IncompleteReadError: The stream has ended.
        OSError: The stream broke.
    """
    return await reader.readexactly(frames.length(await reader.readexactly(frames.PREFIX_BYTES)))


class Connection(abc.ABC):
    """One end of a connection, on the event loop. It fails once, for the first reason.

    Attributes:
        failed: True if nothing new will happen over it.
        gone: Set when nothing touches pages for it any more.

    Args:
        on_gone: Called when `gone` is set.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter, on_gone: Callable[["Connection"], None]) -> None:
        self.failed = False
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stream = writer
        self._on_gone = on_gone
        self._moved_at = self._loop.time()
        sock: socket.socket = writer.get_extra_info("socket")
        # Detects an unreachable host within seconds.
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._tasks = [
            self._loop.create_task(self._read(reader), name="nixl-read"),
            self._loop.create_task(self._watch(), name="nixl-watch"),
        ]

    def fail(self, reason: str) -> None:
        """Ends the connection; `gone` follows. Idempotent."""
        if not self.failed:
            self.failed = True
            self._tasks.append(self._loop.create_task(self._end(reason), name="nixl-end"))
            self._failing(reason)

    @abc.abstractmethod
    def _handle(self, frame: frames.Frame) -> None:
        """Handles a frame, even after the failure. Raises TransferError if the peer may not send it now."""

    @abc.abstractmethod
    def _patience(self) -> float | None:
        """How many seconds the peer may be inactive. None if nothing is expected of it."""

    @abc.abstractmethod
    def _failing(self, reason: str) -> None:
        """Called when the connection has just failed."""

    @abc.abstractmethod
    async def _settle(self, reason: str) -> None:
        """Returns when nothing touches pages for this connection any more."""

    def _send(self, frame: frames.Frame) -> None:
        if not self._stream.is_closing():
            self._stream.write(frames.encode(frame))

    def _moved(self) -> None:
        """Records that the peer was active."""
        self._moved_at = self._loop.time()

    async def _read(self, reader: StreamReader) -> None:
        try:
            while True:
                data = await read_frame(reader)
                self._moved()
                try:
                    self._handle(frames.decode(data))
                except TransferError as error:
                    self.fail(str(error))
        except TransferError as error:
            self.fail(str(error))
        except (asyncio.IncompleteReadError, OSError):
            self.fail("the connection was reset by the peer")

    async def _watch(self) -> None:
        while not self.failed:
            await asyncio.sleep(_TICK_S)
            patience = self._patience()
            if patience is None:
                self._moved()
            elif self._loop.time() - self._moved_at > patience:
                self.fail(f"the peer did nothing for {patience:g} s")

    async def _end(self, reason: str) -> None:
        try:
            await self._settle(reason)
        finally:
            self._stream.close()
            for task in self._tasks[:2]:
                task.cancel()
            self.gone.set()
            self._on_gone(self)
