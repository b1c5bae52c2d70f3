"""Writing into another process of this machine."""

import asyncio
import os
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.base import PoolMemory
from kvtransfer.nixl import same_host
from kvtransfer.nixl.same_host import SameHostBackend
from kvtransfer.segments import Addresses, Run, resolve_runs
from tests.kvtransfer.pools import EMPTY, Pool


def backend(process: ProcessIdentity, source: Pool) -> SameHostBackend:
    return SameHostBackend(process, source.memory.pointer)


def runs(source: Pool, target: PoolMemory, *numbers: tuple[int, int, int]) -> tuple[Addresses, Addresses, Addresses]:
    """The memory of runs of pages, each (own page, their page, count)."""
    return resolve_runs(
        source.memory, target, [Run(own, 0, n) for own, _, n in numbers], [b for _, b, _ in numbers], ()
    )


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 3))
def test_runs_arrive_where_they_should_however_many_calls_it_takes(
    own: list[int], theirs: list[int], most: int
) -> None:
    source, target = Pool(16, 512, seed=3), Pool(16, 512)
    writes = backend(ProcessIdentity.own(), source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_host, "_IOV_MAX", most)
        numbers = [(2 * a, 2 * b, 1 + a % 2) for a, b in zip(own, theirs, strict=True)]
        writes.write(*runs(source, target.memory, *numbers))
    writes.close()
    for a, b in zip(own, theirs, strict=True):
        assert (target.pages[2 * b] == source.pages[2 * a]).all()
        second = target.pages[2 * b + 1]
        assert (second == (source.pages[2 * a + 1] if a % 2 else EMPTY)).all()


def test_a_write_to_an_unmapped_address_is_an_error() -> None:
    source = Pool(4)
    writes = backend(ProcessIdentity.own(), source)
    with pytest.raises(TransferError, match="0 of 4096 bytes"):
        writes.write(*runs(source, replace(source.memory, pointer=1 << 20), (0, 0, 1)))
    writes.close()


async def test_a_process_that_has_ended_is_gone_even_if_another_has_its_number() -> None:
    source = Pool(4)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    writes = backend(identity, source)
    process.kill()
    await process.wait()
    with pytest.raises(TransferError, match="gone"):
        writes.write(*runs(source, source.memory, (0, 0, 1)))
    writes.close()
    with pytest.raises(TransferError, match="gone"):
        backend(identity, source)
    own = ProcessIdentity.own()
    with pytest.raises(TransferError, match="gone"):
        backend(replace(own, started=own.started - 1), source)


def test_a_back_end_that_does_not_open_leaves_no_file_behind() -> None:
    own = ProcessIdentity.own()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError):
        backend(replace(own, started=own.started - 1), Pool(4))
    assert len(os.listdir("/proc/self/fd")) == before
