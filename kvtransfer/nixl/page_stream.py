"""Pages in the stream of a connection, between processes of different machines of which one does not load NIXL.

Both ends copy on the event loop, a slice at a time. The receiver puts the bytes into the pages that it has granted, so
nothing is written once it has given the connection up.
"""

import asyncio
import ctypes
from asyncio import StreamWriter
from collections import deque
from collections.abc import Callable, Iterator

from cpd.common.errors import TransferError
from kvtransfer.nixl.writer import OnEnd
from kvtransfer.segments import Addresses
from kvtransfer.session import frames

_SLICE_BYTES = 256 << 10  # an end copies them in a tenth of a millisecond, and then lets others run

Piece = tuple[int, int]
"""Address and number of bytes."""


class PageStreamSender:
    """Sends pages, in order. Used on the event loop, in place of a `kvtransfer.nixl.writer.Writer`.

    Args:
        stream: The connection's stream.
        moved: Called when the kernel has taken some bytes.
    """

    def __init__(self, stream: StreamWriter, moved: Callable[[], None]) -> None:
        self._stream = stream
        self._moved = moved
        self._batches: asyncio.Queue[tuple[int, list[Piece], OnEnd]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name="nixl-page-stream")

    def write(self, batch: int, sources: Addresses, num_bytes: Addresses, written: OnEnd) -> None:
        """Queues a granted batch. The pages are read until `written` is called or `close` has returned."""
        self._batches.put_nowait((batch, _pieces(sources, num_bytes), written))

    async def close(self) -> None:
        """Stops at once, and drops what the peer has not read: it may never read again."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._stream.transport.abort()

    async def _run(self) -> None:
        while True:
            batch, pieces, written = await self._batches.get()
            try:
                for data in _slices(pieces):
                    self._stream.write(frames.encode(frames.Pages(batch, data)))
                    await self._stream.drain()
                    self._moved()
                    await asyncio.sleep(0)  # drain waits only if the kernel does not take all of it
            except OSError:
                written(TransferError("the connection was reset by the peer"))
            else:
                written(None)


class PageStreamReceiver:
    """Puts what arrives into the granted pages."""

    def __init__(self) -> None:
        self._batches: dict[int, deque[Piece]] = {}

    def expect(self, batch: int, targets: Addresses, num_bytes: Addresses) -> None:
        """Opens these places to a batch that has just been granted."""
        self._batches[batch] = deque(_pieces(targets, num_bytes))

    def put(self, frame: frames.Pages) -> None:
        """Copies the next bytes of a batch. Raises TransferError if it is not granted, or they are too many."""
        places, start = self._batches.get(frame.batch), 0
        while start < len(frame.data):
            if not places:
                raise TransferError(f"the sender sent more of batch {frame.batch} than was granted")
            target, room = places.popleft()
            count = min(room, len(frame.data) - start)
            _memory(target, count)[:] = frame.data[start : start + count]
            start += count
            if count < room:
                places.appendleft((target + count, room - count))

    def finish(self, batch: int) -> None:
        """Raises TransferError if a batch has not arrived completely."""
        if self._batches.pop(batch, None):
            raise TransferError(f"the sender ended batch {batch} too soon")


def _pieces(addresses: Addresses, num_bytes: Addresses) -> list[Piece]:
    return list(zip(addresses.tolist(), num_bytes.tolist(), strict=True))


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _slices(pieces: list[Piece]) -> Iterator[bytes]:
    """The bytes of the pieces, one after the other, copied when they are asked for."""
    parts: list[memoryview] = []
    room = _SLICE_BYTES
    for address, num_bytes in pieces:
        start = 0
        while start < num_bytes:
            count = min(room, num_bytes - start)
            parts.append(_memory(address + start, count))
            start, room = start + count, room - count
            if not room:
                yield b"".join(parts)
                parts, room = [], _SLICE_BYTES
    if parts:
        yield b"".join(parts)
