"""Writing into a process of the same machine."""

import asyncio
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import TransferError
from kvtransfer.nixl import neighbour
from kvtransfer.nixl.neighbour import Neighbour
from kvtransfer.nixl.process import ProcessIdentity
from tests.kvtransfer.pools import EMPTY, Pool


def runs(*numbers: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(own page, their page, count) of each run, as a door takes them."""
    own, theirs, counts = np.array(numbers, np.int64).reshape(-1, 3).T
    return own, theirs, counts


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 3))
def test_runs_arrive_where_they_should_however_many_calls_it_takes(
    own: list[int], theirs: list[int], most: int
) -> None:
    source, target = Pool(16, 512, seed=3), Pool(16, 512)
    door = Neighbour(source.memory, ProcessIdentity.own(), target.memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbour, "_IOV_MAX", most)
        door.write(*runs(*((2 * a, 2 * b, 1 + a % 2) for a, b in zip(own, theirs, strict=True))))
    door.close()
    for a, b in zip(own, theirs, strict=True):
        assert (target.pages[2 * b] == source.pages[2 * a]).all()
        second = target.pages[2 * b + 1]
        assert (second == (source.pages[2 * a + 1] if a % 2 else EMPTY)).all()


def test_a_write_to_where_there_is_no_memory_is_an_error() -> None:
    source = Pool(4)
    door = Neighbour(source.memory, ProcessIdentity.own(), replace(source.memory, pointer=1 << 20))
    with pytest.raises(TransferError, match="0 of 4096 bytes"):
        door.write(*runs((0, 0, 1)))
    door.close()


async def test_a_process_that_has_ended_is_gone_also_if_another_has_its_number() -> None:
    source = Pool(4)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    door = Neighbour(source.memory, identity, source.memory)
    process.kill()
    await process.wait()
    with pytest.raises(TransferError, match="gone"):
        door.write(*runs((0, 0, 1)))
    door.close()
    with pytest.raises(TransferError, match="gone"):
        Neighbour(source.memory, identity, source.memory)
    own = ProcessIdentity.own()
    with pytest.raises(TransferError, match="gone"):
        Neighbour(source.memory, replace(own, started=own.started - 1), source.memory)


def test_a_door_that_does_not_open_leaves_no_file_behind() -> None:
    own, source = ProcessIdentity.own(), Pool(4)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError):
        Neighbour(source.memory, replace(own, started=own.started - 1), source.memory)
    assert len(os.listdir("/proc/self/fd")) == before
