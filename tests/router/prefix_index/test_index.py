from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.common.blocks import Tier, extend_hashes, hash_root
from router.checks import ProtocolError
from router.prefix_index.index import PrefixIndex

CHAIN = extend_hashes(hash_root(b"model"), range(16 * 600))


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
        index.reset(worker)
        index.move(worker, _short(*blocks), Tier.PAGES)
    assert index.cached_prefixes(CHAIN[:4]).cached == {"a": 3, "b": 1, "e": 3}
    assert index.cached_prefixes(CHAIN[:1]).cached == {"a": 1, "b": 1, "e": 1}
    assert index.cached_prefixes(CHAIN[4:]).cached == {}
    assert index.cached_prefixes([]).cached == {}


def test_counts_long_prefixes(index: PrefixIndex) -> None:
    for worker, count in {"a": 600, "b": 300, "c": 256}.items():
        index.reset(worker)
        index.move(worker, _short(*range(count)), Tier.PAGES)
    assert index.cached_prefixes(CHAIN).cached == {"a": 600, "b": 300, "c": 256}
    assert index.cached_prefixes(CHAIN[:400]).cached == {"a": 400, "b": 300, "c": 256}


def test_counts_the_leading_blocks_in_pages(index: PrefixIndex) -> None:
    for worker, moved in {"pages": (), "end": (2, 3), "start": (0,), "between": (1,)}.items():
        index.reset(worker)
        index.move(worker, _short(0, 1, 2, 3), Tier.PAGES)
        index.move(worker, _short(*moved), Tier.HOST)
    cached, in_pages = index.cached_prefixes(CHAIN[:6])
    assert cached == {"pages": 4, "end": 4, "start": 4, "between": 4}
    assert in_pages == {"end": 2, "start": 0, "between": 1}
    assert index.cached_prefixes(CHAIN[:1]) == (dict.fromkeys(cached, 1), {"start": 0})
    index.move("start", _short(0), Tier.PAGES)
    index.move("end", _short(2), Tier.NONE)
    assert index.cached_prefixes(CHAIN[:6]) == ({**cached, "end": 2}, {"between": 1})


def test_blocks_of_an_old_session_or_a_lost_worker_do_not_count(index: PrefixIndex) -> None:
    index.reset("a")
    index.move("a", _short(0), Tier.PAGES)
    index.reset("a")
    assert index.cached_prefixes(CHAIN).cached == {}
    index.move("a", _short(0, 1), Tier.PAGES)
    assert index.cached_prefixes(CHAIN).cached == {"a": 2}
    index.forget("a")
    assert index.cached_prefixes(CHAIN).cached == {}
    assert index.size("a") == 0


@pytest.mark.parametrize(
    ("hashes", "message"), [(b"odd", "3 bytes of block hashes"), (_short(3) + bytes(8), "a block hash of zero")]
)
@pytest.mark.parametrize("tier", Tier)
def test_malformed_hashes_are_a_protocol_error(index: PrefixIndex, hashes: bytes, message: str, tier: Tier) -> None:
    index.reset("a")
    index.reset("b")
    index.move("b", _short(1, 2), Tier.PAGES)
    with pytest.raises(ProtocolError, match=message):
        index.move("a", hashes, tier)
    assert index.cached_prefixes(CHAIN[1:3]).cached == {"b": 2}


@pytest.mark.parametrize("tier", [Tier.PAGES, Tier.HOST])
def test_a_block_that_is_announced_twice_counts_once(index: PrefixIndex, tier: Tier) -> None:
    index.reset("a")
    for _ in range(2):
        index.move("a", _short(0, 1, 1), tier)
        assert index.size("a") == 2
    for _ in range(2):
        index.move("a", _short(1, 1, 2), Tier.NONE)
        assert (index.size("a"), len(index)) == (1, 1)
    assert index.cached_prefixes(CHAIN).cached == {"a": 1}


workers = st.sampled_from("abcde")
chosen = st.one_of(
    st.tuples(st.integers(0, 59), st.integers(1, 60)).map(lambda ends: set(range(*ends))),
    st.sets(st.integers(0, 59), max_size=8),
)
events = st.one_of(
    st.tuples(st.just("reset"), workers, st.none()),
    st.tuples(st.just("forget"), workers, st.none()),
    st.tuples(st.just("sweep"), st.none(), st.integers(1, 4)),
    st.tuples(st.sampled_from(Tier), workers, chosen),
)


@settings(max_examples=200)
@given(st.lists(events, max_size=60), st.integers(0, 60))
def test_follows_the_events_of_all_workers(events: list[tuple[Tier | str, str, Any]], asked: int) -> None:
    index = PrefixIndex()
    tiers: dict[str, dict[int, Tier]] = {}
    for event, worker, argument in events:
        if event == "reset":
            index.reset(worker)
            tiers[worker] = {}
        elif event == "forget":
            index.forget(worker)
            tiers.pop(worker, None)
        elif event == "sweep":
            for _ in range(argument):
                index.sweep()
        elif isinstance(event, Tier) and worker in tiers:
            known = tiers[worker]
            moved = sorted(block for block in argument if known.get(block, Tier.NONE) is not event)
            index.move(worker, _short(*moved), event)
            for block in moved:
                known.pop(block, None)
                if event is not Tier.NONE:
                    known[block] = event
        _compare(index, tiers, asked)
    _sweep(index)
    _compare(index, tiers, asked)
    assert len(index) == len(set().union(*tiers.values()))


def _compare(index: PrefixIndex, tiers: dict[str, dict[int, Tier]], asked: int) -> None:
    counts = {
        worker: [
            next((count for count in range(asked) if known.get(count) not in wanted), asked)
            for wanted in ((Tier.PAGES, Tier.HOST), (Tier.PAGES,))
        ]
        for worker, known in tiers.items()
    }
    cached = {worker: count for worker, (count, _) in counts.items() if count}
    in_pages = {worker: count for worker, (most, count) in counts.items() if count < most}
    assert index.cached_prefixes(CHAIN[:asked]) == (cached, in_pages)
    assert {worker: index.size(worker) for worker in "abcde"} == {
        worker: len(tiers.get(worker, ())) for worker in "abcde"
    }


def test_forgotten_workers_leave_no_state_behind(index: PrefixIndex) -> None:
    index.reset("stays")
    index.move("stays", _short(*range(100)), Tier.PAGES)
    for number in range(5_000):
        worker = f"w{number}"
        index.reset(worker)
        index.move(worker, _short(*range(number % 200, number % 200 + 100)), Tier.PAGES)
        if number >= 50:
            index.forget(f"w{number - 50}")
        index.sweep()
    for number in range(5_000):
        index.forget(f"w{number}")
    _sweep(index)
    assert len(index) == 100
    assert index.cached_prefixes(CHAIN).cached == {"stays": 100}
    assert len(index._workers) == 1
    assert len(index._names) < 200
    assert {mask for mask in index._sets.masks if mask > 0} == {index._workers["stays"].all_bits}
    assert len(index._sets.masks) < 1_000
