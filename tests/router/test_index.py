from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.blocks import extend_hashes, hash_root
from router.index import InvalidEventError, PrefixIndex

CHAIN = extend_hashes(hash_root(b"model"), range(16 * 600))
CAPACITY = 1000


def _short(*numbers: int) -> bytes:
    return b"".join(CHAIN[number][:8] for number in numbers)


def _sweep(index: PrefixIndex) -> None:
    while index.sweep():
        pass


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


def test_counts_the_leading_blocks_of_every_worker_that_has_some(index: PrefixIndex) -> None:
    for worker, blocks in {"a": (0, 1, 2), "b": (0, 2, 3), "c": (1, 2), "d": (), "e": (0, 1, 2)}.items():
        index.reset(worker, CAPACITY)
        index.add(worker, _short(*blocks))
    assert index.cached_prefixes(CHAIN[:4]) == {"a": 3, "b": 1, "e": 3}
    assert index.cached_prefixes(CHAIN[:1]) == {"a": 1, "b": 1, "e": 1}
    assert index.cached_prefixes(CHAIN[4:]) == {}
    assert index.cached_prefixes([]) == {}


def test_counts_long_prefixes(index: PrefixIndex) -> None:
    for worker, count in {"a": 600, "b": 300, "c": 256}.items():
        index.reset(worker, CAPACITY)
        index.add(worker, _short(*range(count)))
    assert index.cached_prefixes(CHAIN) == {"a": 600, "b": 300, "c": 256}
    assert index.cached_prefixes(CHAIN[:400]) == {"a": 400, "b": 300, "c": 256}


def test_a_new_session_and_a_lost_worker_count_no_more_at_once(index: PrefixIndex) -> None:
    index.reset("a", CAPACITY)
    index.add("a", _short(0))
    index.reset("a", CAPACITY)
    assert index.cached_prefixes(CHAIN) == {}
    index.add("a", _short(0, 1))
    assert index.cached_prefixes(CHAIN) == {"a": 2}
    index.forget("a")
    assert index.cached_prefixes(CHAIN) == {}
    assert index.size("a") == 0


class TestWhatCannotBeTrue:
    @pytest.fixture
    def index(self, index: PrefixIndex) -> PrefixIndex:
        index.reset("a", 4)
        index.add("a", _short(0, 1))
        index.reset("b", 3)
        index.add("b", _short(1, 2))
        return index

    @pytest.mark.parametrize(
        ("hashes", "message"),
        [
            (_short(0), "stored 1 blocks that it had stored before"),
            (_short(2, 3, 4), "5 cached blocks, but it has only 4 pages"),
            (_short(2, 2), "stored 1 blocks that it had stored before"),
            (b"odd", "3 bytes of block hashes"),
        ],
    )
    def test_is_refused_when_it_is_added(self, index: PrefixIndex, hashes: bytes, message: str) -> None:
        with pytest.raises(InvalidEventError, match=message):
            index.add("a", hashes)
        index.forget("a")
        assert index.cached_prefixes(CHAIN[1:3]) == {"b": 2}

    @pytest.mark.parametrize(
        ("hashes", "message"),
        [
            (_short(2, 5), "removed 2 blocks that it had not stored"),
            (_short(0, 0), "removed 1 blocks that it had not stored"),
            (b"odd", "3 bytes of block hashes"),
        ],
    )
    def test_is_refused_when_it_is_removed(self, index: PrefixIndex, hashes: bytes, message: str) -> None:
        with pytest.raises(InvalidEventError, match=message):
            index.remove("a", hashes)
        index.forget("a")
        assert index.cached_prefixes(CHAIN[1:3]) == {"b": 2}

    def test_a_second_removal_is_refused(self, index: PrefixIndex) -> None:
        index.remove("a", _short(1))
        with pytest.raises(InvalidEventError, match="removed 1 blocks that it had not stored"):
            index.remove("a", _short(1))


workers = st.sampled_from("abcde")
events = st.one_of(
    st.tuples(st.just("reset"), workers, st.none()),
    st.tuples(st.just("forget"), workers, st.none()),
    st.tuples(st.just("sweep"), st.none(), st.integers(1, 4)),
    st.tuples(st.sampled_from(["add", "remove"]), workers, st.tuples(st.integers(0, 59), st.integers(1, 60))),
    st.tuples(st.sampled_from(["add", "remove"]), workers, st.lists(st.integers(0, 59), unique=True, max_size=8)),
)


@settings(max_examples=150)
@given(st.lists(events, max_size=60), st.integers(0, 60))
def test_follows_the_events_of_all_workers(events: list[tuple[str, str, object]], asked: int) -> None:
    index = PrefixIndex()
    cached: dict[str, set[int]] = {}
    for event, worker, blocks in events:
        if event == "reset":
            index.reset(worker, CAPACITY)
            cached[worker] = set()
        elif event == "forget":
            index.forget(worker)
            cached.pop(worker, None)
        elif event == "sweep":
            assert isinstance(blocks, int)
            for _ in range(blocks):
                index.sweep()
        elif worker in cached:
            chosen = set(range(*blocks)) if isinstance(blocks, tuple) else set(_ints(blocks))
            if event == "add":
                index.add(worker, _short(*sorted(chosen - cached[worker])))
                cached[worker] |= chosen
            else:
                index.remove(worker, _short(*sorted(chosen & cached[worker])))
                cached[worker] -= chosen
        _compare(index, cached, asked)
    _sweep(index)
    _compare(index, cached, asked)
    assert len(index) == len(set().union(*cached.values()))


def _ints(blocks: object) -> Sequence[int]:
    assert isinstance(blocks, list)
    return blocks


def _compare(index: PrefixIndex, cached: dict[str, set[int]], asked: int) -> None:
    counts = {
        worker: next((count for count in range(asked) if count not in blocks), asked)
        for worker, blocks in cached.items()
    }
    assert index.cached_prefixes(CHAIN[:asked]) == {worker: count for worker, count in counts.items() if count}
    assert {worker: index.size(worker) for worker in "abcde"} == {
        worker: len(cached.get(worker, ())) for worker in "abcde"
    }


def test_churn_leaves_nothing_behind(index: PrefixIndex) -> None:
    index.reset("stays", CAPACITY)
    index.add("stays", _short(*range(100)))
    for number in range(5_000):
        worker = f"w{number}"
        index.reset(worker, CAPACITY)
        index.add(worker, _short(*range(number % 200, number % 200 + 100)))
        if number >= 50:
            index.forget(f"w{number - 50}")
        index.sweep()
    for number in range(5_000):
        index.forget(f"w{number}")
    _sweep(index)
    assert len(index) == 100
    assert index.cached_prefixes(CHAIN) == {"stays": 100}
    assert len(index._workers) == 1
    assert len(index._names) < 200
    assert {mask for mask in index._sets.masks if mask > 0} == {index._workers["stays"].bit}
    assert len(index._sets.masks) < 1_000
