"""Whether what arrived in a reservation's pages is what the prefill worker says it sent, and what was asked of it.

The transport has counted the pages that arrived. Beside it the prefill worker tells, over the fill's own stream, for
which reservation and which blocks it sent them. Only when both agree are the pages used.
"""

import asyncio

from cpd.rpc import cpd_pb2 as pb
from engine.types import Reservation
from kvtransfer.base import PoolMemory
from kvtransfer.checksums import CHECKSUM_BYTES, page_checksums
from worker.convert import InvalidRequestError


class Arrivals:
    """What was told of one reservation's pages.

    Args:
        reservation: The pages.
        memory: Of the pool.
        checksums: Whether each page's checksum is to be told and checked.
    """

    def __init__(self, reservation: Reservation, memory: PoolMemory, *, checksums: bool) -> None:
        self._reservation = reservation
        self._memory = memory
        self._checksum_bytes = CHECKSUM_BYTES if checksums else 0
        self._told = bytearray(len(reservation.pages))  # 1: the page at this index was told
        self._checksums = bytearray(len(reservation.pages) * self._checksum_bytes)

    @property
    def all_told(self) -> bool:
        """Whether every page was told."""
        return all(self._told)

    def told(self, message: pb.FillPages) -> None:
        """Takes what the prefill worker says.

        Raises:
            InvalidRequestError: It speaks of another reservation or of other blocks, or has told these before.
        """
        reservation, size = self._reservation, self._checksum_bytes
        if (message.reservation, message.generation) != (reservation.id, reservation.generation):
            raise InvalidRequestError(
                f"it sent pages of reservation {message.reservation} generation {message.generation} instead of "
                f"{reservation.id} generation {reservation.generation}"
            )
        start = message.first_block - reservation.first_block
        end = start + message.pages
        if not 0 <= start < end <= len(self._told):
            raise InvalidRequestError(f"it sent {message.pages} pages from block {message.first_block} on unasked")
        if any(self._told[start:end]):
            raise InvalidRequestError(
                f"it sent a page of the {message.pages} from block {message.first_block} on twice"
            )
        if len(message.checksums) != size * message.pages:
            raise InvalidRequestError(f"it sent {len(message.checksums)} bytes of checksums for {message.pages} pages")
        self._told[start:end] = b"\x01" * message.pages
        self._checksums[start * size : end * size] = message.checksums

    async def damaged_blocks(self) -> list[int]:
        """Blocks whose pages do not have the checksum that was told; to be asked when all have arrived."""
        size = self._checksum_bytes
        if not size:
            return []
        reservation, told = self._reservation, bytes(self._checksums)
        here = await asyncio.to_thread(page_checksums, self._memory, reservation.pages)
        return [
            reservation.first_block + index
            for index in range(len(reservation.pages))
            if here[index * size : (index + 1) * size] != told[index * size : (index + 1) * size]
        ]
