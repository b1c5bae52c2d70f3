"""An engine whose memory is given away for a while."""

from dataclasses import replace

import pytest

from cpd.common.blocks import BLOCK_SIZE, Tier, blocks_for
from cpd.common.errors import QueueFullError
from engine.engine import Engine
from engine.types import Request
from tests.engine.fakes import (
    GARBAGE,
    FakeRunner,
    Served,
    arrive,
    assert_all_released,
    assert_as_expected,
    cached,
    drain,
    follow,
    make_engine,
    make_request,
    prompt,
)


def add_and_run(engine: Engine, served: Served, *requests: Request, steps: int = 4) -> None:
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        served.take(engine.step())


def give_memory_away(engine: Engine, runner: FakeRunner) -> None:
    """Parks everything. Whatever is in the pages then is not what the engine left there."""
    engine.pause()
    assert engine.park_all()
    engine.check_integrity()
    assert engine.stats().pages.free == runner.num_pages
    assert engine.stats().running == 0
    for page in range(runner.num_pages):
        runner.pages[page] = [GARBAGE] * BLOCK_SIZE


def is_idle(engine: Engine) -> bool:
    return not engine.has_work


def finish_chunks(engine: Engine, runner: FakeRunner, served: Served) -> None:
    """Ends the chunks on the prefill lane, and collects them."""
    while runner.prefill_lane.running:
        runner.prefill_lane.finish()
        served.take(engine.step())


class TestStreams:
    @pytest.mark.parametrize("host_pages", [0, 3, 64])
    def test_they_go_on_after_their_last_token(self, host_pages: int) -> None:
        engine, runner = make_engine(host_pages=host_pages)
        requests = [make_request(f"r{i}", prompt(40 + 9 * i, i), max_tokens=30, n=1 + i % 2, seed=i) for i in range(4)]
        served = Served()
        add_and_run(engine, served, *requests, steps=8)
        for _ in range(3):
            before = {key: len(tokens) for key, tokens in served.token_ids.items()}
            give_memory_away(engine, runner)
            assert engine.step().outputs == []
            assert is_idle(engine)
            engine.go_on(0.0)
            while not all(len(served.token_ids[key]) > count for key, count in before.items()):
                assert engine.has_work
                served.take(engine.step())
        drain(engine, served)
        assert_as_expected(served, engine, *requests)
        assert_all_released(engine)

    def test_their_blocks_come_back_from_host_memory(self) -> None:
        engine, runner = make_engine(host_pages=64)
        request, served = make_request("a", prompt(100), max_tokens=30), Served()
        add_and_run(engine, served, request)
        give_memory_away(engine, runner)
        computed = engine.stats().prefill_tokens
        engine.go_on(0.0)
        drain(engine, served)
        assert_as_expected(served, engine, request)
        assert engine.stats().prefill_tokens - computed < BLOCK_SIZE
        assert engine.stats().host.blocks["loaded"] == 100 // BLOCK_SIZE

    def test_all_their_blocks_are_offloaded_and_of_other_ones_as_many_as_one_eviction_takes(self) -> None:
        engine, runner = make_engine(host_pages=64)
        assert runner.host is not None
        at_once = 3
        engine._host.max_offloaded = at_once  # type: ignore[union-attr]
        drain_one = make_request("cached", prompt(160, 5), max_tokens=1)
        engine.add(drain_one)
        drain(engine)
        request = make_request("a", prompt(160), max_tokens=30)
        add_and_run(engine, Served(), request)
        give_memory_away(engine, runner)
        hosted = set(engine.cached_hashes(Tier.HOST))
        assert hosted >= set(request.block_hashes)
        assert len(hosted & set(drain_one.block_hashes)) == at_once
        assert [len(pages) <= at_once for pages in runner.host.copied_out] == [True] * len(runner.host.copied_out)

    def test_they_go_before_requests_that_came_while_the_memory_was_away(self) -> None:
        engine, runner = make_engine(max_num_seqs=1)
        first, later = make_request("first", prompt(40), max_tokens=20), make_request("later", prompt(20, 1))
        served = Served()
        add_and_run(engine, served, first)
        give_memory_away(engine, runner)
        engine.add(later)
        engine.go_on(0.0)
        while engine.has_work and ("first", 0) not in served.finish:
            served.take(engine.step())
            assert ("later", 0) not in served.token_ids
        drain(engine, served)
        assert_as_expected(served, engine, first, later)

    def test_preempting_them_for_this_is_no_shortage_of_pages(self) -> None:
        engine, runner = make_engine()
        add_and_run(engine, Served(), make_request("a", prompt(40), max_tokens=20))
        give_memory_away(engine, runner)
        assert engine.stats().preemptions == 0

    def test_those_parked_before_are_counted(self) -> None:
        engine, runner = make_engine()
        served = Served()
        add_and_run(engine, served, make_request("a", prompt(40), max_tokens=20))
        assert (engine.stats().started, engine.stats().resumed) == (1, 0)
        give_memory_away(engine, runner)
        assert (engine.stats().started, engine.stats().resumed) == (1, 0)
        engine.go_on(0.0)
        add_and_run(engine, served, make_request("b", prompt(40, 1), max_tokens=20))
        assert (engine.stats().started, engine.stats().resumed) == (2, 1)

    def test_they_may_be_aborted_while_the_memory_is_away(self) -> None:
        engine, runner = make_engine(host_pages=64)
        add_and_run(engine, Served(), make_request("a", prompt(40), max_tokens=20, n=2))
        give_memory_away(engine, runner)
        engine.abort("a", [1])
        engine.abort("a")
        engine.check_integrity()
        engine.go_on(0.0)
        assert drain(engine).token_ids == {}
        assert_all_released(engine)


class TestRequests:
    def test_they_are_queued_and_computed_afterwards(self) -> None:
        engine, runner = make_engine()
        give_memory_away(engine, runner)
        request = make_request("a", prompt(40))
        engine.add(request)
        assert engine.step().outputs == []
        assert is_idle(engine)
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        engine.go_on(0.0)
        assert engine.has_work
        assert_as_expected(drain(engine), engine, request)

    def test_while_it_drains_new_ones_wait_and_those_that_ran_go_on(self) -> None:
        engine, _ = make_engine(num_pages=7)
        old = [make_request(f"old{i}", prompt(20, i), max_tokens=40) for i in range(2)]
        new, served = make_request("new", prompt(20, 5)), Served()
        add_and_run(engine, served, *old)
        engine.hold_new()
        engine.add(new)
        drain(engine, served)  # they do not fit together: one is preempted, and goes on
        assert engine.stats().preemptions > 0
        assert_as_expected(served, engine, *old)
        assert (engine.stats().waiting, engine.stats().started) == (1, 0)
        assert not engine.starts_new
        engine.go_on(0.0)
        drain(engine, served)
        assert_as_expected(served, engine, new)

    def test_the_time_without_memory_does_not_count_for_the_queues_limit(self) -> None:
        engine, runner = make_engine(max_num_seqs=1, max_wait_s=5)
        for i in range(20):
            engine.add(make_request(f"r{i}", prompt(100, i), max_tokens=1))
        for number in range(10):
            engine.step(number / 10)
        give_memory_away(engine, runner)
        engine.go_on(9.0)
        engine.add(replace(make_request("accepted", prompt(100, 30), max_tokens=1), received=9.0))
        drain(engine)

    def test_the_limit_holds_while_the_memory_is_away(self) -> None:
        engine, runner = make_engine(max_queue_tokens=100)
        give_memory_away(engine, runner)
        engine.add(make_request("a", prompt(90)))
        with pytest.raises(QueueFullError):
            engine.add(make_request("b", prompt(90, 1)))


class TestPagesInUse:
    """`park_all` waits for whoever uses pages."""

    def test_a_chunk_on_the_prefill_lane(self) -> None:
        engine, runner = make_engine(colocate="lanes")
        short, long, served = make_request("s", prompt(5), max_tokens=30), make_request("l", prompt(200, 1)), Served()
        add_and_run(engine, served, short)
        add_and_run(engine, served, long)
        assert runner.prefill_lane.running
        engine.pause()
        assert not engine.park_all()
        version = engine.version
        finish_chunks(engine, runner, served)
        assert engine.version != version
        give_memory_away(engine, runner)
        engine.go_on(0.0)
        while ("l", 0) not in served.finish:
            served.take(engine.step())
            finish_chunks(engine, runner, served)
        drain(engine, served)
        assert_as_expected(served, engine, short, long)

    def test_a_step_in_flight(self) -> None:
        engine, runner = make_engine(overlaps=True)
        request, served = make_request("a", prompt(40), max_tokens=30), Served()
        add_and_run(engine, served, request)
        assert engine.in_flight.main
        engine.pause()
        assert not engine.park_all()
        assert engine.has_work
        served.take(engine.step())
        assert not engine.in_flight.main
        give_memory_away(engine, runner)
        engine.go_on(0.0)
        assert_as_expected(drain(engine, served), engine, request)

    def test_pins(self) -> None:
        engine, runner = make_engine()
        request = make_request("a", prompt(64))
        engine.add(request)
        drain(engine)
        pages = engine.pin_cached(request.block_hashes)
        engine.pause()
        assert not engine.park_all()
        version = engine.version
        engine.unpin(pages)
        assert engine.version != version
        give_memory_away(engine, runner)

    @pytest.mark.parametrize("quarantine", [False, True])
    def test_landings(self, quarantine: bool) -> None:
        engine, runner = make_engine()
        reservation = engine.landings.reserve(make_request("a", prompt(64)))
        assert reservation is not None
        engine.pause()
        assert not engine.park_all()
        engine.landings.cancel(reservation, quarantine=quarantine)
        if quarantine:
            assert not engine.park_all()
            version = engine.version
            engine.landings.end_quarantine(reservation)
            assert engine.version != version
        give_memory_away(engine, runner)

    def test_a_landing_that_arrives_is_parked_and_goes_on(self) -> None:
        engine, runner = make_engine(host_pages=64)
        request, served = make_request("a", prompt(64), max_tokens=20), Served()
        reservation = engine.landings.reserve(request)
        assert reservation is not None
        engine.pause()
        arrive(engine, runner, reservation, request, served)
        give_memory_away(engine, runner)
        engine.go_on(0.0)
        assert_as_expected(drain(engine, served), engine, request)

    def test_blocks_that_are_being_loaded(self) -> None:
        engine, runner = make_engine(num_pages=16, host_pages=64)
        first, served = make_request("first", prompt(160)), Served()
        engine.add(first)
        drain(engine)
        engine.add(make_request("evicts", prompt(200, 5)))
        drain(engine)
        assert runner.host is not None
        runner.host.by_hand = True
        again = make_request("again", prompt(160), seed=3)
        add_and_run(engine, served, again, steps=1)
        assert runner.host.copying
        engine.pause()
        assert not engine.park_all()
        runner.host.finish()
        assert engine.has_work
        served.take(engine.step())
        give_memory_away(engine, runner)
        runner.host.by_hand = False
        engine.go_on(0.0)
        assert_as_expected(drain(engine, served), engine, again)


class TestWithoutMemory:
    def test_no_landing_is_reserved_and_nothing_is_loaded_or_found(self) -> None:
        engine, runner = make_engine(host_pages=64)
        request = make_request("a", prompt(64))
        engine.add(request)
        drain(engine)
        give_memory_away(engine, runner)
        assert engine.landings.reserve(make_request("b", prompt(64, 1))) is None
        engine.load(request.block_hashes)
        assert not engine.loading(request.block_hashes)
        assert engine.pin_cached(request.block_hashes) == []
        assert engine.stats().pages.free == runner.num_pages

    @pytest.mark.parametrize("host_pages", [0, 5, 64])
    def test_routers_learn_what_is_lost_and_what_is_in_host_memory(self, host_pages: int) -> None:
        engine, runner = make_engine(host_pages=host_pages)
        known: dict[bytes, Tier] = {}
        add_and_run(engine, Served(), make_request("a", prompt(100), max_tokens=30))
        give_memory_away(engine, runner)
        follow(known, engine.take_cache_events())
        assert known == cached(engine)
        assert set(known.values()) <= {Tier.HOST}
        assert len(known) == min(host_pages, blocks_for(100) - 1)
