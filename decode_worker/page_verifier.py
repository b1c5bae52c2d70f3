"""Verifies the pages that arrived for a reservation.

The transport counts the pages that arrived. The sender also announces, on the request's own stream, which pages of
which reservation it sends, with checksums if asked for. Pages are used only if both agree.
"""

import asyncio

from cpd.rpc import cpd_pb2 as pb
from engine.types import Reservation
from kvtransfer.base import PoolMemory
from kvtransfer.checksums import CHECKSUM_BYTES, page_checksums
from worker.wire_format import InvalidRequestError


class PageVerifier:
    """The announced pages of one reservation.

    Args:
        reservation: The pages.
        memory: The memory of their pool.
        checksums: Expect a checksum per page and verify it.
    """

    def __init__(self, reservation: Reservation, memory: PoolMemory, *, checksums: bool) -> None:
        self._reservation = reservation
        self._memory = memory
        self._checksum_bytes = CHECKSUM_BYTES if checksums else 0
        self._announced = bytearray(len(reservation.pages))  # 1: the page at this index was announced
        self._checksums = bytearray(len(reservation.pages) * self._checksum_bytes)

    @property
    def complete(self) -> bool:
        """True if every page was announced."""
        return all(self._announced)

    def announce(self, message: pb.PrefillPages) -> None:
        """Records announced pages.

        Raises:
            InvalidRequestError: They are of another reservation, of other blocks, or were announced before.
        """
        reservation, size = self._reservation, self._checksum_bytes
        if (message.reservation, message.generation) != (reservation.id, reservation.generation):
            raise InvalidRequestError(
                f"it sent pages of reservation {message.reservation} generation {message.generation} instead of "
                f"{reservation.id} generation {reservation.generation}"
            )
        start = message.first_block - reservation.first_block
        end = start + message.pages
        if not 0 <= start < end <= len(self._announced):
            raise InvalidRequestError(f"it sent {message.pages} pages from block {message.first_block} on unasked")
        if any(self._announced[start:end]):
            raise InvalidRequestError(
                f"it sent a page of the {message.pages} from block {message.first_block} on twice"
            )
        if len(message.checksums) != size * message.pages:
            raise InvalidRequestError(f"it sent {len(message.checksums)} bytes of checksums for {message.pages} pages")
        self._announced[start:end] = b"\x01" * message.pages
        self._checksums[start * size : end * size] = message.checksums

    async def damaged_blocks(self) -> list[int]:
        """Returns the blocks whose pages differ from their checksums. Call it when all pages have arrived."""
        size = self._checksum_bytes
        if not size:
            return []
        reservation, sent = self._reservation, bytes(self._checksums)
        here = await asyncio.to_thread(page_checksums, self._memory, reservation.pages)
        return [
            reservation.first_block + index
            for index in range(len(reservation.pages))
            if here[index * size : (index + 1) * size] != sent[index * size : (index + 1) * size]
        ]
