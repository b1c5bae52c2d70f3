"""The writer thread of a nixl connection, without NIXL."""

import asyncio

import numpy as np
import pytest

from cpd.common.errors import TransferError
from kvtransfer.nixl.writer import Writer, WriterBackend
from kvtransfer.segments import Addresses

PIECE = np.array([1], np.uint64)


class BrokenBackend:
    """Raises an error that no back end should, in one of its methods."""

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self.closed = False
        self._at("make")

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses) -> int:
        self._at("write")
        return 1

    def written(self, handle: int) -> bool:
        self._at("written")
        return True

    def close(self) -> None:
        self.closed = True

    def _at(self, method: str) -> None:
        if method == self._broken:
            raise RuntimeError("out of order")


@pytest.mark.parametrize("broken", ["make", "write", "written"])
async def test_any_error_of_a_back_end_is_reported_and_it_can_still_be_closed(broken: str) -> None:
    reported: asyncio.Queue[TransferError | None] = asyncio.Queue()
    backends: list[BrokenBackend] = []

    def make() -> WriterBackend:
        backends.append(BrokenBackend(broken))
        return backends[-1]

    writer = Writer("test-writer")
    writer.open(make, reported.put_nowait)
    async with asyncio.timeout(20):
        error = await reported.get()
        if broken != "make":
            assert error is None
            writer.write(PIECE, PIECE, PIECE, reported.put_nowait)
            error = await reported.get()
        assert error is not None
        assert "out of order" in str(error)
        await writer.close()
    assert all(backend.closed for backend in backends)
