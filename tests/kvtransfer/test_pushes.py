from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.base import Ticket
from kvtransfer.pushes import Run, merge

pages = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(pages, st.data(), st.integers(1, 5))
def test_runs_are_the_push_in_its_order_and_neighbours_in_both_pools(
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


def test_neighbours_are_merged_up_to_the_limit() -> None:
    ticket = Ticket(1, 1, 1, tuple(range(100, 110)))
    assert list(merge(ticket, [(20 + k, k) for k in range(10)], most=4)) == [
        Run(20, 0, 4),
        Run(24, 4, 4),
        Run(28, 8, 2),
    ]


def test_pages_that_are_neighbours_on_one_side_only_are_not_merged() -> None:
    ticket = Ticket(1, 1, 1, (5, 6, 9))
    assert [run.count for run in merge(ticket, [(0, 0), (1, 1), (2, 2)], most=9)] == [2, 1]
    assert [run.count for run in merge(ticket, [(0, 0), (2, 1)], most=9)] == [1, 1]
    assert [run.count for run in merge(ticket, [(0, 1), (1, 0)], most=9)] == [1, 1]
