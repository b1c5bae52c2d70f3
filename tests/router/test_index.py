from hypothesis import given
from hypothesis import strategies as st

from cpd.blocks import extend_hashes, hash_root
from router.index import PrefixIndex

CHAIN = extend_hashes(hash_root(b"model"), range(16 * 20))


def _short(*numbers: int) -> bytes:
    return b"".join(CHAIN[number][:8] for number in numbers)


def test_counts_the_leading_blocks_of_every_worker() -> None:
    index = PrefixIndex()
    for worker, blocks in {"a": (0, 1, 2), "b": (0, 2, 3), "c": (1, 2), "d": ()}.items():
        index.reset(worker)
        index.add(worker, _short(*blocks))
    assert index.cached_prefixes(CHAIN[:4]) == {"a": 3, "b": 1, "c": 0, "d": 0}
    assert index.cached_prefixes(CHAIN[:1]) == {"a": 1, "b": 1, "c": 0, "d": 0}
    assert index.cached_prefixes([]) == dict.fromkeys("abcd", 0)


def test_a_new_session_and_a_lost_worker_leave_nothing() -> None:
    index = PrefixIndex()
    index.reset("a")
    index.add("a", _short(0))
    index.reset("a")
    assert index.cached_prefixes(CHAIN) == {"a": 0}
    index.forget("a")
    assert index.cached_prefixes(CHAIN) == {}
    assert index.size("a") == 0


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 19), max_size=5)), max_size=20))
def test_follows_the_events(events: list[tuple[bool, list[int]]]) -> None:
    index = PrefixIndex()
    index.reset("a")
    cached: set[int] = set()
    for removed, blocks in events:
        if removed:
            index.remove("a", _short(*blocks))
            cached -= set(blocks)
        else:
            index.add("a", _short(*blocks))
            cached |= set(blocks)
    assert index.size("a") == len(cached)
    expected = next((count for count in range(20) if count not in cached), 20)
    assert index.cached_prefixes(CHAIN) == {"a": expected}
