"""Evicted blocks that are offloaded to host memory and loaded again."""

from collections.abc import Mapping

from cpd.common import blocks
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostTier
from engine.types import Request
from tests.engine.fakes import (
    FakeHostMemory,
    FakeRunner,
    Served,
    assert_all_released,
    assert_as_expected,
    cached,
    drain,
    engine_of,
    follow,
    make_engine,
    make_request,
    prompt,
    states_of,
)

LONG = 70  # four full blocks and a partial one
PAGES = 5
"""Size of the pool: room for one such prompt."""


class Tier:
    """A small pool, and host memory beside it."""

    def __init__(self, host_pages: int = 20, slot_ms: float = 0.001, num_pages: int = PAGES) -> None:
        self.runner = FakeRunner(num_pages)
        self.host = FakeHostMemory(self.runner, host_pages, slot_ms)
        self.engine: Engine = engine_of(self.runner, host=self.host)

    def serve(self, name: str, start: int, length: int = LONG, max_tokens: int = 3) -> Served:
        """Serves a prompt, and checks the tokens."""
        request = self.add(name, start, length, max_tokens)
        served = drain(self.engine)
        assert_as_expected(served, self.engine, request)
        return served

    def add(self, name: str, start: int, length: int = LONG, max_tokens: int = 3) -> Request:
        request = make_request(name, prompt(length, start), max_tokens=max_tokens)
        self.engine.add(request)
        return request

    @property
    def blocks(self) -> Mapping[str, int]:
        return self.engine.stats().host.blocks


def test_an_evicted_prefix_is_loaded_and_counts_as_cached_tokens() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)  # evicts the first one
    served = tier.serve("again", 0)
    assert served.cached_tokens["again", 0] == 64
    assert tier.engine.stats().prefill_tokens == 70 + 70 + 6
    assert tier.blocks["loaded"] == 4
    host = tier.engine.stats().host
    assert (host.pages, host.offloaded) == (20, 8)
    assert_all_released(tier.engine)


def test_blocks_are_offloaded_and_loaded_again_and_again() -> None:
    tier = Tier()
    for turn in range(5):
        for number in range(4):
            served = tier.serve(f"{turn}-{number}", number)
            assert served.cached_tokens[f"{turn}-{number}", 0] == (64 if turn else 0)
    assert tier.blocks["offloaded"] == 16, "a block that is offloaded already is not copied again"


def test_events_tell_when_blocks_move_between_pages_and_host_memory_and_when_they_are_lost() -> None:
    tier, known = Tier(host_pages=6), dict[bytes, blocks.Tier]()
    for number in (0, 1, 0, 2, 3, 1):
        tier.serve(str(number), number)
        for event in tier.engine.take_cache_events():
            follow(known, [event])
            assert list(known.values()).count(blocks.Tier.HOST) <= 6
        assert known == cached(tier.engine)
    assert set(known.values()) == {blocks.Tier.PAGES, blocks.Tier.HOST}
    assert tier.blocks["evicted"] > 0


def test_a_loaded_block_goes_to_host_memory_again_when_its_page_is_needed() -> None:
    tier, known = Tier(), dict[bytes, blocks.Tier]()
    first, second = (make_request("", prompt(LONG, number)).block_hashes for number in (0, 1))
    for number in (0, 1, 0, 1):
        tier.serve(str(number), number)
        follow(known, tier.engine.take_cache_events())
        assert {known[block_hash] for block_hash in (first, second)[number]} == {blocks.Tier.PAGES}
    assert {known[block_hash] for block_hash in first} == {blocks.Tier.HOST}


def test_an_offloaded_block_may_be_evicted_for_others_of_the_same_eviction() -> None:
    pool, known = BlockPool(8), dict[bytes, blocks.Tier]()
    HostTier(pool, FakeHostMemory(FakeRunner(8), 3, slot_ms=5.0), lambda work: 0.0)  # two at a time are copied out
    for numbers in (range(8), range(10, 18), range(7, -1, -1), range(20, 28)):
        pages = pool.take(8)
        assert pages is not None
        pool.publish(pages, [bytes([number]) for number in numbers])
        pool.release(pages)
        follow(known, pool.take_events())
        assert known == cached(pool)


def test_blocks_that_only_host_memory_has_are_loaded_for_another_worker() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)
    hashes = make_request("for another worker", prompt(LONG)).block_hashes
    tier.host.by_hand = True
    tier.engine.load(hashes)
    assert tier.engine.loading(hashes)
    assert tier.engine.pin_cached(hashes) == []
    tier.host.finish()
    drain(tier.engine)
    assert not tier.engine.loading(hashes)
    pages = tier.engine.pin_cached(hashes)
    assert len(pages) == 4
    tier.engine.unpin(pages)


def test_blocks_are_copied_out_before_their_pages_are_written() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)
    assert [len(pages) for pages in tier.host.copied_out] == [4]


def test_a_request_that_waits_for_a_load_does_not_block_others() -> None:
    tier = Tier(num_pages=14)
    tier.serve("a", 0)
    for number in range(1, 4):
        tier.serve(str(number), number)
    tier.host.by_hand = True
    has_work: list[bool] = []
    tier.engine.set_work_callback(lambda: has_work.append(tier.engine.has_work))
    requests = [tier.add("again", 0), tier.add("short", 9, length=5)]
    served = drain(tier.engine)
    assert served.finish.keys() == {("short", 0)}
    assert tier.host.copying
    assert not tier.engine.has_work
    assert tier.engine.stats().waiting == 1

    tier.host.finish()
    assert has_work == [True]
    drain(tier.engine, served)
    assert_as_expected(served, tier.engine, *requests)
    assert served.cached_tokens["again", 0] == 64


def test_requests_that_need_the_same_blocks_wait_for_one_load() -> None:
    tier = Tier(num_pages=12)
    tier.serve("a", 0)
    tier.serve("b", 1)
    tier.serve("c", 2)
    tier.host.by_hand = True
    requests = [tier.add("again", 0), tier.add("too", 0)]
    served = drain(tier.engine)
    tier.host.finish()
    assert not tier.host.copying
    drain(tier.engine, served)
    assert_as_expected(served, tier.engine, *requests)
    assert set(served.cached_tokens.values()) == {64}


def test_blocks_are_loaded_after_those_that_are_still_in_pages() -> None:
    tier = Tier(num_pages=8)
    tier.serve("a", 0)
    tier.serve("b", 1)
    first = tier.engine.stats().host.offloaded
    assert 0 < first < 4, "a part of it is evicted"
    assert tier.serve("again", 0).cached_tokens["again", 0] == 64
    assert tier.blocks["loaded"] == first


def test_a_damaged_block_and_the_blocks_after_it_are_computed() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)
    (slot,) = [slot for slot, content in enumerate(tier.host.slots) if content == _content(2)]
    tier.host.damaged.add(slot)
    served = tier.serve("again", 0)
    assert served.cached_tokens["again", 0] == 32
    assert (tier.blocks["damaged"], tier.blocks["loaded"]) == (1, 2)
    tier.serve("c", 2)
    assert tier.serve("once more", 0).cached_tokens["once more", 0] == 64, "it was copied out again"


def test_blocks_that_are_quicker_to_compute_are_not_loaded() -> None:
    tier = Tier(slot_ms=50.0)
    tier.serve("a", 0)
    tier.serve("b", 1)
    assert tier.serve("again", 0).cached_tokens["again", 0] == 0
    assert "loaded" not in tier.blocks
    assert tier.blocks["recomputed"] == 1  # one page takes 50 ms: an eviction copies out no more than that
    assert tier.blocks["skipped"] > 0


def test_blocks_that_would_be_loaded_count_as_cached() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)
    assert tier.engine.uncached_tokens(make_request("again", prompt(LONG))) == 6
    tier.add("again", 0)
    assert tier.engine.stats().waiting_tokens == 6


def test_an_abort_during_the_load_leaves_the_blocks_in_the_cache() -> None:
    tier = Tier()
    tier.serve("a", 0)
    tier.serve("b", 1)
    tier.host.by_hand = True
    tier.add("again", 0)
    drain(tier.engine)
    tier.engine.abort("again")
    assert not tier.engine.has_work
    tier.host.finish()
    drain(tier.engine)
    assert_all_released(tier.engine)
    tier.host.by_hand = False
    assert tier.serve("later", 0).cached_tokens["later", 0] == 64
    assert tier.blocks["loaded"] == 4


def test_pages_for_a_landing_are_copied_out_first() -> None:
    tier = Tier()
    tier.serve("a", 0)
    reservation = tier.engine.landings.reserve(make_request("landing", prompt(LONG, 1)))
    assert reservation is not None
    assert sum(map(len, tier.host.copied_out)) == 4
    tier.engine.landings.cancel(reservation, quarantine=True)
    tier.engine.landings.end_quarantine(reservation)
    assert tier.serve("again", 0).cached_tokens["again", 0] == 64


def test_a_preempted_sequence_gets_its_blocks_back() -> None:
    tier = Tier(num_pages=8)
    requests = [tier.add("first", 0, max_tokens=50), tier.add("second", 1, length=20, max_tokens=60)]
    served = drain(tier.engine)
    assert_as_expected(served, tier.engine, *requests)
    assert tier.engine.stats().preemptions
    assert tier.blocks["loaded"] > 0


def test_without_host_memory_nothing_is_offloaded() -> None:
    engine, _ = make_engine(PAGES)
    host = engine.stats().host
    assert (host.pages, host.offloaded, host.blocks) == (0, 0, {})


def _content(block: int) -> list[int]:
    """The content of a block of the first prompt."""
    return states_of(prompt(LONG))[16 * block : 16 * block + 16]
