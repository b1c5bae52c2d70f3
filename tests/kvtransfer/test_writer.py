"""The thread on which a nixl connection writes, without NIXL."""

import asyncio

import numpy as np
import pytest

from cpd.common.errors import TransferError
from kvtransfer.nixl.writer import Door, Pages, Writer

PAGES = np.array([0], np.int64)


class BrokenDoor:
    """Raises what no door should, at one of its methods."""

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self.closed = False
        self._at("make")

    def write(self, own: Pages, theirs: Pages, counts: Pages) -> int:
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
async def test_whatever_a_door_raises_is_told_and_it_can_still_be_closed(broken: str) -> None:
    told: asyncio.Queue[TransferError | None] = asyncio.Queue()
    doors: list[BrokenDoor] = []

    def make() -> Door:
        doors.append(BrokenDoor(broken))
        return doors[-1]

    writer = Writer("test-writer")
    writer.open(make, told.put_nowait)
    async with asyncio.timeout(20):
        error = await told.get()
        if broken != "make":
            assert error is None
            writer.write(PAGES, PAGES, PAGES + 1, told.put_nowait)
            error = await told.get()
        assert error is not None
        assert "out of order" in str(error)
        await writer.close()
    assert all(door.closed for door in doors)
