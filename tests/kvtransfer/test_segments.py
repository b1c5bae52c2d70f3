import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.base import PoolMemory, Segment
from kvtransfer.segments import Run, layout_of, problem_with, resolve_runs

OWN, THEIRS = PoolMemory(1 << 40, 64, 100), PoolMemory(1 << 62, 64, 60)
segments = st.lists(st.builds(Segment, st.integers(0, 40), st.integers(0, 40), st.integers(1, 20)), min_size=1)
pages = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=20)


@given(pages, segments)
def test_every_segment_of_every_page_has_its_addresses(numbers: list[tuple[int, int]], parts: list[Segment]) -> None:
    runs = [Run(own, 0, 1) for own, _ in numbers]
    found = resolve_runs(OWN, THEIRS, runs, [place for _, place in numbers], parts)
    expected = [
        (OWN.pointer + own * 100 + part.source, THEIRS.pointer + place * 60 + part.target, part.num_bytes)
        for own, place in numbers
        for part in parts
    ]
    assert list(zip(*(each.tolist() for each in found), strict=True)) == expected


@given(pages, st.integers(1, 5))
def test_a_run_of_whole_pages_is_one_piece_of_memory(numbers: list[tuple[int, int]], count: int) -> None:
    runs = [Run(own, 0, count) for own, _ in numbers]
    found = resolve_runs(OWN, OWN, runs, [place for _, place in numbers], ())
    expected = [(OWN.pointer + own * 100, OWN.pointer + place * 100, count * 100) for own, place in numbers]
    assert list(zip(*(each.tolist() for each in found), strict=True)) == expected


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], ""),
        ([Segment(0, 0, 60)], ""),
        ([Segment(0, 20, 40), Segment(0, 0, 20)], ""),
        ([Segment(0, 20, 40), Segment(0, 0, 21)], "overlap"),
        ([Segment(0, 21, 40)], "are not inside pages of 60 bytes"),
        ([Segment(0, -1, 5)], "are not inside pages of 60 bytes"),
        ([Segment(0, 5, 0)], "are not inside pages of 60 bytes"),
    ],
)
def test_segments_lie_in_the_page_and_do_not_overlap(parts: list[Segment], problem: str) -> None:
    assert problem_with(parts, THEIRS.page_bytes) == problem


def test_other_segments_have_another_layout() -> None:
    layouts = {layout_of(parts) for parts in ([], [Segment(0, 0, 8)], [Segment(8, 0, 8)], [Segment(0, 8, 8)])}
    assert len(layouts) == 4
    assert layout_of([]) == 0
    assert layout_of([Segment(0, 0, 8)]) == layout_of((Segment(0, 0, 8),)) < 1 << 64
