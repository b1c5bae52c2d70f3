import os

from hypothesis import given
from hypothesis import strategies as st

from deploy.cores import split_cores, usable_cores


@given(cores=st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True), workers=st.integers(1, 64))
def test_each_core_has_one_worker_while_there_are_enough(cores: list[int], workers: int) -> None:
    parts = split_cores(cores, workers)
    assert len(parts) == workers
    assert all(parts)
    if workers <= len(cores):
        assert sorted(core for part in parts for core in part) == sorted(cores)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert list(map(len, parts)) == sorted(map(len, parts), reverse=True)


def test_workers_get_adjacent_cores() -> None:
    assert split_cores([0, 4, 1, 5], 2) == [{0, 4}, {1, 5}]


def test_workers_share_cores_when_there_are_too_few() -> None:
    assert split_cores([3, 7], 3) == [{3}, {7}, {3}]


def test_the_usable_cores_are_those_of_this_process() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)
