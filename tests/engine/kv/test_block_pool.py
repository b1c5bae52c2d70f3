from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cpd.common.blocks import Tier
from engine.kv.block_pool import BlockPool
from engine.types import PoolCounts
from tests.engine.fakes import cached, follow

PAGES = 6


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def published(pool: BlockPool, *numbers: int) -> list[int]:
    """Makes cached pages with these blocks. The first one will be evicted last."""
    pages = pool.take(len(numbers))
    assert pages is not None
    pool.publish(pages, [block(number) for number in numbers])
    pool.release(pages)
    return pages


def test_nothing_is_taken_if_there_are_too_few_pages() -> None:
    pool = BlockPool(PAGES)
    assert pool.take(PAGES + 1) is None
    assert pool.reserve(PAGES + 1) is None
    assert pool.counts() == PoolCounts(PAGES, 0, 0, 0, 0)
    pages = pool.take(PAGES)
    assert pages is not None
    assert sorted(pages) == list(range(PAGES))
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_free_pages_go_before_cached_ones() -> None:
    pool = BlockPool(PAGES)
    published(pool, 1, 2, 3)
    pages = pool.take(3)
    assert pages is not None
    assert pool.counts() == PoolCounts(0, 3, 3, 0, 0)
    pool.release(pages)
    assert pool.take(3) is not None
    assert all(pool.is_cached(block(number)) for number in (1, 2, 3))


def test_the_least_recently_released_page_is_evicted_first_and_a_chain_from_its_end() -> None:
    pool = BlockPool(PAGES)
    first, second = published(pool, 1, 2, 3), published(pool, 4, 5, 6)
    pool.hold(first)
    pool.release(first)
    assert pool.take(4) == [second[2], second[1], second[0], first[2]]


def test_pages_found_again_and_again_are_evicted_in_the_order_of_their_last_release() -> None:
    pool = BlockPool(PAGES)
    pages = published(pool, *range(PAGES))
    for page in pages * PAGES:
        pool.hold([page])
        pool.release([page])
    assert pool.take(PAGES) == pages


def test_a_page_may_be_found_twice() -> None:
    pool = BlockPool(PAGES)
    published(pool, 1)
    pages = pool.find([block(1), block(1)])
    pool.hold(pages)
    assert pool.counts() == PoolCounts(PAGES - 1, 0, 1, 0, 0)
    pool.release(pages)
    pool.check_integrity()
    assert pool.counts() == PoolCounts(PAGES - 1, 1, 0, 0, 0)


def test_find_gives_the_longest_prefix_by_the_whole_hash() -> None:
    pool = BlockPool(PAGES)
    pages = published(pool, 1, 2, 3)
    assert pool.find([block(1), block(2), block(9), block(3)]) == pages[:2]
    assert pool.find([block(2)]) == [pages[1]]
    assert pool.find([block(1)[:8] + b"12345678"]) == []
    assert pool.find([]) == []


def test_a_block_is_published_once() -> None:
    pool = BlockPool(PAGES)
    pages = pool.take(2)
    assert pages is not None
    pool.publish(pages, [block(1), block(1)])
    pool.release(pages)
    assert pool.counts() == PoolCounts(PAGES - 1, 1, 0, 0, 0)
    assert pool.find([block(1)]) == [pages[0]]


def test_shared_page_is_cached_when_the_last_holder_is_gone() -> None:
    pool = BlockPool(PAGES)
    pages = published(pool, 1)
    pool.hold(pages)
    pool.hold(pages)
    pool.release(pages)
    assert pool.counts().used == 1
    pool.release(pages)
    assert pool.counts().cached == 1


def test_reserving_evicts_and_arrived_pages_are_used() -> None:
    pool = BlockPool(PAGES)
    published(pool, 1, 2, 3, 4, 5, 6)
    pages = pool.reserve(2)
    assert pages is not None
    assert pool.counts() == PoolCounts(0, 4, 0, 2, 0)
    pool.arrived(pages)
    assert pool.counts() == PoolCounts(0, 4, 2, 0, 0)
    pool.publish(pages[:1], [block(7)])
    assert pool.find([block(7)]) == pages[:1]


def test_quarantined_pages_are_free_only_after_end_quarantine() -> None:
    pool = BlockPool(PAGES)
    pages = pool.reserve(4)
    assert pages is not None
    pool.quarantine(pages)
    assert pool.available == PAGES - 4
    assert pool.counts() == PoolCounts(2, 0, 0, 0, 4)
    pool.end_quarantine(pages)
    assert pool.available == PAGES


def test_misuse_is_an_error() -> None:
    pool = BlockPool(PAGES)
    (page,) = pool.take(1) or []
    (other,) = pool.reserve(1) or []
    pool.publish([page], [block(1)])
    misuses: list[Callable[[], None]] = [
        lambda: pool.publish([page], [block(2)]),
        lambda: pool.publish([other], [block(2)]),
        lambda: pool.hold([other]),
        lambda: pool.release([other]),
        lambda: pool.arrived([page]),
        lambda: pool.free_reserved([page]),
        lambda: pool.quarantine([page]),
        lambda: pool.end_quarantine([other]),
    ]
    for wrong in misuses:
        with pytest.raises(AssertionError):
            wrong()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES)
        self.holders: dict[int, int] = {}
        self.reserved: set[int] = set()
        self.quarantined: set[int] = set()
        self.blocks: dict[int, bytes] = {}
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.known: dict[bytes, Tier] = {}

    @property
    def free(self) -> set[int]:
        return set(range(PAGES)) - set(self.holders) - self.reserved - self.quarantined - set(self.lru)

    def claimed(self, pages: list[int] | None, count: int) -> list[int]:
        """Checks that free pages were given first, then the least recently used ones."""
        if count > len(self.free) + len(self.lru):
            assert pages is None
            return []
        assert pages is not None
        assert len(set(pages)) == count
        for page in pages:
            if page in self.free:
                continue
            assert not self.free - set(pages)
            assert page == next(iter(self.lru))
            del self.lru[page]
            del self.blocks[page]
        return pages

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        self.holders.update(dict.fromkeys(self.claimed(self.pool.take(count), count), 1))

    @rule(count=st.integers(0, 3))
    def reserve(self, count: int) -> None:
        self.reserved.update(self.claimed(self.pool.reserve(count), count))

    @precondition(lambda self: self.holders or self.lru)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.holders, *self.lru})))
        self.pool.hold([page])
        self.lru.pop(page, None)
        self.holders[page] = self.holders.get(page, 0) + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True))
        self.pool.release(pages)
        for page in reversed(pages):
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                if page in self.blocks:
                    self.lru[page] = None

    @precondition(lambda self: self.holders.keys() - self.blocks.keys())
    @rule(data=st.data(), number=st.integers(0, 9))
    def publish(self, data: st.DataObject, number: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.holders.keys() - self.blocks.keys())))
        new = block(number) not in self.blocks.values()
        self.pool.publish([page], [block(number)])
        assert (self.pool.find([block(number)]) == [page]) is new
        if new:
            self.blocks[page] = block(number)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), how=st.sampled_from(["arrived", "freed", "quarantined"]))
    def end_reservation(self, data: st.DataObject, how: str) -> None:
        pages = data.draw(st.sets(st.sampled_from(sorted(self.reserved))))
        self.reserved -= pages
        if how == "arrived":
            self.pool.arrived(pages)
            self.holders.update(dict.fromkeys(pages, 1))
        elif how == "freed":
            self.pool.free_reserved(pages)
        else:
            self.pool.quarantine(pages)
            self.quarantined |= pages

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(self.quarantined)
        self.quarantined = set()

    @rule()
    def take_events(self) -> None:
        follow(self.known, self.pool.take_events())
        assert self.known == cached(self.pool)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.counts() == PoolCounts(
            len(self.free), len(self.lru), len(self.holders), len(self.reserved), len(self.quarantined)
        )
        assert self.pool.available == len(self.free) + len(self.lru)
        assert sorted(self.pool.cached_hashes(Tier.PAGES)) == sorted(self.blocks.values())
        for page, block_hash in self.blocks.items():
            assert self.pool.find([block_hash]) == [page]
        assert self.pool.refcounts().tolist() == [self.holders.get(page, 0) for page in range(PAGES)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
