import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import cuda
from kvtransfer.checksums import CHECKSUM_BYTES, page_checksums
from tests.kvtransfer import fake_gpu
from tests.kvtransfer.pools import Pool

PAGES, PAGE_BYTES = 8, 4096


def test_equal_pages_have_equal_checksums_wherever_they_are() -> None:
    one, other = Pool(PAGES, PAGE_BYTES, seed=1), Pool(PAGES, PAGE_BYTES, seed=2)
    other.pages[5] = one.pages[2]
    sums = page_checksums(one.memory, [2, 3])
    assert len(sums) == 2 * CHECKSUM_BYTES
    assert sums[:CHECKSUM_BYTES] == page_checksums(other.memory, [5])
    assert sums[CHECKSUM_BYTES:] != sums[:CHECKSUM_BYTES]
    assert page_checksums(one.memory, []) == b""


def test_a_gpus_pages_are_summed_as_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "read", fake_gpu.Memory().read)
    pool = Pool(PAGES, PAGE_BYTES, seed=1)
    on_device = dataclasses.replace(pool.memory, device=fake_gpu.DEVICE)
    assert page_checksums(on_device, [5, 2]) == page_checksums(pool.memory, [5, 2])


@given(page=st.integers(0, PAGES - 1), byte=st.integers(0, PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_changes_the_checksum_of_its_page_only(page: int, byte: int, bit: int) -> None:
    pool = Pool(PAGES, PAGE_BYTES, seed=3)
    before = page_checksums(pool.memory, range(PAGES))
    pool.pages[page, byte] ^= 1 << bit
    after = page_checksums(pool.memory, range(PAGES))
    differing = {i // CHECKSUM_BYTES for i in range(len(before)) if before[i] != after[i]}
    assert differing == {page}
