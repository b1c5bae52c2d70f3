import pytest

from cpd.rpc import cpd_pb2 as pb
from decode_worker.page_verifier import PageVerifier
from engine.types import Reservation
from kvtransfer.checksums import CHECKSUM_BYTES, page_checksums
from tests.kvtransfer.pools import Pool
from worker.wire_format import InvalidRequestError

PAGES = [4, 9, 2]


@pytest.fixture
def pool() -> Pool:
    return Pool(10, 4096, seed=1)


def verifier(pool: Pool, *, checksums: bool) -> PageVerifier:
    return PageVerifier(Reservation(id=3, generation=8, first_block=5, pages=PAGES), pool.memory, checksums=checksums)


def told(
    first_block: int, pages: int, checksums: bytes = b"", reservation: int = 3, generation: int = 8
) -> pb.PrefillPages:
    return pb.PrefillPages(
        reservation=reservation, generation=generation, first_block=first_block, pages=pages, checksums=checksums
    )


async def test_complete_when_every_page_was_announced_once_in_any_order(pool: Pool) -> None:
    it = verifier(pool, checksums=False)
    complete = []
    for message in (told(7, 1), told(5, 2)):
        it.announce(message)
        complete.append(it.complete)
    assert complete == [False, True]
    assert await it.damaged_blocks() == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (told(5, 1, reservation=4), "reservation 4 generation 8 instead of 3"),
        (told(5, 1, generation=7), "generation 7 instead of"),
        (told(4, 1), "unasked"),
        (told(7, 2), "unasked"),
        (told(6, 0), "unasked"),
        (told(6, 1), "twice"),
        (told(5, 1, b"12345678"), "8 bytes of checksums"),
    ],
)
def test_unrequested_pages_are_refused(pool: Pool, message: pb.PrefillPages, why: str) -> None:
    it = verifier(pool, checksums=False)
    it.announce(told(6, 1))
    with pytest.raises(InvalidRequestError, match=why):
        it.announce(message)
    assert not it.complete


async def test_a_page_that_differs_from_its_checksum_is_found(pool: Pool) -> None:
    it = verifier(pool, checksums=True)
    sums = page_checksums(pool.memory, PAGES)
    it.announce(told(6, 2, sums[CHECKSUM_BYTES:]))
    it.announce(told(5, 1, sums[:CHECKSUM_BYTES]))
    assert await it.damaged_blocks() == []
    pool.pages[9, 100] ^= 1
    assert await it.damaged_blocks() == [6]


def test_missing_checksums_are_refused(pool: Pool) -> None:
    with pytest.raises(InvalidRequestError, match="0 bytes of checksums for 3 pages"):
        verifier(pool, checksums=True).announce(told(5, 3))
