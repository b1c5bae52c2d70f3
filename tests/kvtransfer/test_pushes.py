from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.base import Ticket
from kvtransfer.pushes import merge
from kvtransfer.segments import Run

pages = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(pages, st.data(), st.integers(1, 5))
def test_runs_keep_the_order_of_the_push_and_are_contiguous_in_both_pools(
    own: list[int], data: st.DataObject, most: int
) -> None:
    landing = data.draw(st.permutations(range(40)))
    indices = data.draw(st.permutations(range(40)))[: len(own)]
    ticket = Ticket(1, 1, 1, tuple(landing))
    runs = merge(ticket, list(zip(own, indices, strict=True)), most)
    spread = [(run.page + k, run.index + k) for run in runs for k in range(run.count)]
    assert spread == list(zip(own, indices, strict=True))
    for run in runs:
        assert 1 <= run.count <= most
        assert list(landing[run.index : run.index + run.count]) == [landing[run.index] + k for k in range(run.count)]


def test_contiguous_pages_are_merged_up_to_the_limit() -> None:
    ticket = Ticket(1, 1, 1, tuple(range(100, 110)))
    assert list(merge(ticket, [(20 + k, k) for k in range(10)], max_pages=4)) == [
        Run(20, 0, 4),
        Run(24, 4, 4),
        Run(28, 8, 2),
    ]


def test_pages_contiguous_in_one_pool_only_are_not_merged() -> None:
    ticket = Ticket(1, 1, 1, (5, 6, 9))
    assert [run.count for run in merge(ticket, [(0, 0), (1, 1), (2, 2)], max_pages=9)] == [2, 1]
    assert [run.count for run in merge(ticket, [(0, 0), (2, 1)], max_pages=9)] == [1, 1]
    assert [run.count for run in merge(ticket, [(0, 1), (1, 0)], max_pages=9)] == [1, 1]
