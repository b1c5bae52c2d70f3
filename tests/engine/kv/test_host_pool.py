from collections import Counter, OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.host_pool import HostPool

SLOTS = 4


def blocks(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def indices(added: tuple[list[tuple[int, int]], list[bytes]]) -> list[int]:
    """The indices of the blocks to copy, from the result of `HostPool.add`."""
    return [index for index, _ in added[0]]


def test_the_least_recently_used_block_goes_first() -> None:
    pool = HostPool(3)
    assert indices(pool.add(blocks(3, 2, 1))) == [0, 1, 2]
    pool.release(pool.hold(blocks(3)))
    assert pool.add(blocks(4))[1] == blocks(2)
    assert pool.block_hashes() == blocks(1, 3, 4)


def test_if_there_are_too_many_blocks_the_last_ones_are_added() -> None:
    pool = HostPool(2)
    assert indices(pool.add(blocks(1, 2, 3, 4, 5))) == [3, 4]
    assert pool.find(blocks(4, 5, 3)) == 2


def test_a_block_that_is_there_is_not_copied_again_but_counts_as_used() -> None:
    pool = HostPool(3)
    pool.add(blocks(1, 2))
    assert indices(pool.add(blocks(1, 3))) == [1]
    pool.add(blocks(4))
    assert pool.block_hashes() == blocks(1, 3, 4)


def test_a_held_block_stays_and_its_slot_is_not_available() -> None:
    pool = HostPool(2)
    pool.add(blocks(1, 2))
    slots = pool.hold(blocks(1, 2))
    assert pool.add(blocks(3)) == ([], [])
    assert pool.find(blocks(1, 2)) == 2
    pool.release(slots)
    assert indices(pool.add(blocks(3))) == [0]


def test_holding_counts_as_use_and_a_chain_is_evicted_from_its_end() -> None:
    pool = HostPool(4)
    pool.add(blocks(9, 2, 1))
    pool.release(pool.hold(blocks(1, 2)))
    assert pool.block_hashes() == blocks(9, 2, 1)


def test_a_forgotten_slot_is_free_once_it_is_no_longer_held() -> None:
    pool = HostPool(1)
    pool.add(blocks(1))
    slots = pool.hold(blocks(1))
    pool.forget(*blocks(1))
    pool.forget(*blocks(1))
    pool.check_integrity()
    assert pool.find(blocks(1)) == 0
    assert pool.add(blocks(2)) == ([], [])
    pool.release(slots)
    assert pool.add(blocks(2)) == ([(0, slots[0])], [])


def test_releasing_too_often_is_an_error() -> None:
    pool = HostPool(1)
    with pytest.raises(AssertionError, match="more often"):
        pool.release([0])


class HostPoolMachine(RuleBasedStateMachine):
    """The pool against a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(SLOTS)
        self.lru: OrderedDict[bytes, int] = OrderedDict()
        self.held: list[list[int]] = []

    @rule(numbers=st.lists(st.integers(0, 9), unique=True, max_size=6))
    def keep(self, numbers: list[int]) -> None:
        hashes = blocks(*numbers)
        readers = {slot for slots in self.held for slot in slots}
        room = SLOTS - len(readers)
        wanted = hashes[len(hashes) - min(room, len(hashes)) :]
        before = dict(self.lru)
        new, evicted = self.pool.add(hashes)
        assert [hashes[index] for index, _ in new] == [h for h in wanted if h not in before]
        assert readers.isdisjoint(slot for _, slot in new)
        for block_hash in wanted:
            if block_hash in self.lru:
                self.lru.move_to_end(block_hash)
        gone = []
        for index, slot in new:
            for other in [other for other, used in self.lru.items() if used == slot]:
                evictable = [h for h, used in self.lru.items() if used not in readers]
                assert other == evictable[0]
                del self.lru[other]
                gone.append(other)
            self.lru[hashes[index]] = slot
        assert evicted == gone
        assert all(block_hash in self.lru for block_hash in wanted)

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        hashes = data.draw(st.lists(st.sampled_from(sorted(self.lru)), unique=True, min_size=1))
        self.held.append(self.pool.hold(hashes))
        assert self.held[-1] == [self.lru[block_hash] for block_hash in hashes]
        for block_hash in reversed(hashes):
            self.lru.move_to_end(block_hash)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(number=st.integers(0, 9))
    def forget(self, number: int) -> None:
        (block_hash,) = blocks(number)
        self.pool.forget(block_hash)
        self.lru.pop(block_hash, None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.block_hashes() == list(self.lru)
        assert len(self.pool) == len(self.lru) <= SLOTS
        assert self.pool.holders() == Counter(slot for slots in self.held for slot in slots)


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
