"""Prompts whose pages another worker fills."""

import pytest

from cpd.common.blocks import Tier
from engine.types import Finish, Output
from tests.engine.fakes import (
    GARBAGE,
    Served,
    arrive,
    arrive_first_blocks,
    assert_all_released,
    assert_as_expected,
    drain,
    make_engine,
    make_request,
    prompt,
)


def test_a_landed_request_goes_on_after_its_first_token() -> None:
    engine, runner = make_engine()
    request = make_request("a", prompt(70), max_tokens=20)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    assert (reservation.first_block, len(reservation.pages)) == (0, 5)
    assert not engine.has_work
    served = Served()
    arrive(engine, runner, reservation, request, served)
    assert_as_expected(drain(engine, served), engine, request)
    assert engine.stats().prefill_tokens == 0
    assert_all_released(engine)


@pytest.mark.parametrize("host_pages", [0, 8])
def test_copies_are_settled_before_pages_are_reserved(host_pages: int) -> None:
    """Another worker may start writing into them immediately."""
    engine, runner = make_engine(num_pages=8, host_pages=host_pages)
    engine.add(make_request("copies and evicts", prompt(70), n=3, max_tokens=20))
    drain(engine)
    engine.add(make_request("evicts", prompt(100, 1), max_tokens=1))
    drain(engine)
    assert not runner.settled
    assert engine.landings.reserve(make_request("a", prompt(40, 2))) is not None
    assert runner.settled


def test_cached_prefix_is_held_and_only_the_rest_is_reserved() -> None:
    engine, runner = make_engine()
    engine.add(make_request("warm", prompt(48), max_tokens=1))
    drain(engine)
    request = make_request("a", prompt(48) + prompt(30, 1), max_tokens=20)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    assert (reservation.first_block, len(reservation.pages)) == (3, 2)
    assert engine.stats().pages.used == 3
    served = Served()
    arrive(engine, runner, reservation, request, served)
    assert_as_expected(drain(engine, served), engine, request)
    assert_all_released(engine)


def test_blocks_that_are_being_computed_or_received_are_pending() -> None:
    engine, _ = make_engine()
    shared, other = make_request("b", prompt(150)), make_request("c", prompt(70, 2))
    reservation = engine.landings.reserve(make_request("a", prompt(70)))
    assert reservation is not None
    assert (engine.block_to_wait_for(shared), engine.block_to_wait_for(other)) == (shared.block_hashes[3], None)
    assert engine.block_to_wait_for(shared, 2) == shared.block_hashes[1]
    engine.landings.cancel(reservation, quarantine=False)
    assert not engine.block_to_wait_for(shared)
    engine.add(make_request("a", prompt(200)))
    engine.step()
    assert engine.block_to_wait_for(shared)
    drain(engine)
    assert not engine.block_to_wait_for(shared)


def test_the_first_blocks_alone_may_arrive() -> None:
    engine, runner = make_engine()
    engine.add(make_request("warm", prompt(32), max_tokens=1))
    drain(engine)
    request = make_request("a", prompt(100), max_tokens=20)
    reservation = engine.landings.reserve(request, 5)
    assert reservation is not None
    assert (reservation.first_block, len(reservation.pages)) == (2, 3)
    assert engine.block_to_wait_for(request)
    local = make_request("b", prompt(70), max_tokens=20)
    engine.add(local)
    assert engine.step().outputs == []
    arrive_first_blocks(engine, runner, reservation, request)
    assert not engine.block_to_wait_for(request)
    assert engine.uncached_tokens(request) == 20
    engine.add(request)
    served = drain(engine)
    assert_as_expected(served, engine, request)
    assert_as_expected(served, engine, local)
    assert engine.stats().prefill_tokens == 32 + 20 + 6
    assert_all_released(engine)


def test_nothing_is_reserved_for_first_blocks_that_are_cached() -> None:
    engine, _ = make_engine()
    engine.add(make_request("warm", prompt(64), max_tokens=1))
    drain(engine)
    assert engine.landings.reserve(make_request("a", prompt(100)), 4) is None
    assert engine.landings.reserve(make_request("a", prompt(100)), 5) is not None


def test_choices_fork_after_the_landing() -> None:
    engine, runner = make_engine()
    request = make_request("a", prompt(70), n=3, max_tokens=20)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    served = Served()
    arrive(engine, runner, reservation, request, served)
    assert_as_expected(drain(engine, served), engine, request)
    assert engine.stats().prefill_tokens == 0
    assert_all_released(engine)


def test_a_request_that_its_first_token_ended_does_not_go_on() -> None:
    engine, runner = make_engine()
    request = make_request("a", prompt(70), max_tokens=1)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    arrive(engine, runner, reservation, request, Served())
    assert not engine.has_work
    assert engine.uncached_tokens(make_request("b", prompt(70))) == 6
    assert_all_released(engine)


def test_a_choice_that_is_at_the_end_of_this_workers_context_ends() -> None:
    engine, _ = make_engine(max_model_len=71)
    request = make_request("a", prompt(70), max_tokens=9)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    ended = engine.landings.activate(reservation, request, [Output("a", 0, [5], [])])
    assert ended == [Output("a", 0, [], [], Finish.LENGTH)]
    assert_all_released(engine)


def test_others_wait_for_blocks_that_are_being_received() -> None:
    engine, runner = make_engine()
    remote = make_request("a", prompt(64), max_tokens=4)
    reservation = engine.landings.reserve(remote)
    assert reservation is not None
    local = make_request("b", prompt(64) + prompt(5, 1))
    engine.add(local)
    assert engine.step().outputs == []
    assert not engine.has_work
    served = Served()
    arrive(engine, runner, reservation, remote, served)
    assert_as_expected(drain(engine, served), engine, remote, local)
    assert served.cached_tokens["b", 0] == 64


def test_a_request_that_waited_for_a_cancelled_landing_computes_its_blocks() -> None:
    engine, _ = make_engine()
    remote = make_request("a", prompt(64))
    reservation = engine.landings.reserve(remote)
    assert reservation is not None
    local = make_request("b", prompt(64))
    engine.add(local)
    engine.step()
    engine.landings.cancel(reservation, quarantine=False)
    assert_as_expected(drain(engine), engine, local)
    assert_all_released(engine)


def test_quarantined_pages_are_not_used() -> None:
    engine, runner = make_engine(num_pages=8)
    reservation = engine.landings.reserve(make_request("lost", prompt(60)))
    assert reservation is not None
    engine.landings.cancel(reservation, quarantine=True)
    requests = [make_request(f"r{i}", prompt(30, i), max_tokens=10) for i in range(6)]
    served = Served()
    for request in requests:
        engine.add(request)
        served.take(engine.step())
        for page in reservation.pages:
            runner.pages[page] = [GARBAGE] * 16
    assert engine.stats().pages.quarantined == 4
    drain(engine, served)
    used = {int(slot) // 16 for batch in runner.batches for slot in batch.slots}
    assert used.isdisjoint(reservation.pages)
    assert_as_expected(served, engine, *requests)
    engine.landings.end_quarantine(reservation)
    assert_all_released(engine)


def test_a_reservation_ends_once() -> None:
    engine, _ = make_engine()
    request = make_request("a", prompt(60))
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    with pytest.raises(ValueError, match="not in quarantine"):
        engine.landings.end_quarantine(reservation)
    engine.landings.cancel(reservation, quarantine=True)
    for call in (
        lambda: engine.landings.cancel(reservation, quarantine=False),
        lambda: engine.landings.activate(reservation, request, []),
    ):
        with pytest.raises(ValueError, match="not live"):
            call()
    engine.landings.end_quarantine(reservation)
    again = engine.landings.reserve(request)
    assert again is not None
    assert (again.id, again.generation) == (reservation.id, reservation.generation + 1)
    with pytest.raises(ValueError, match="not live"):
        engine.landings.cancel(reservation, quarantine=False)


def test_reserving_leaves_headroom_for_what_runs() -> None:
    engine, _ = make_engine(num_pages=8)
    engine.add(make_request("a", prompt(30), max_tokens=50))
    engine.step()
    assert engine.landings.reserve(make_request("b", prompt(96, 1))) is None
    assert engine.landings.reserve(make_request("b", prompt(80, 1))) is not None
    engine.check_integrity()


def test_one_reservation_overtakes_a_request_that_lacks_pages_but_no_second_one() -> None:
    engine, _ = make_engine(num_pages=8)
    engine.add(make_request("a", prompt(48), max_tokens=50))
    engine.step()
    engine.add(make_request("b", prompt(90, 1)))
    engine.step()
    reservation = engine.landings.reserve(make_request("c", prompt(16, 2)))
    assert reservation is not None
    assert engine.landings.reserve(make_request("d", prompt(16, 3))) is None
    engine.landings.cancel(reservation, quarantine=False)
    assert engine.landings.reserve(make_request("d", prompt(16, 3))) is None
    while not any(output.request_id == "b" for output in engine.step().outputs):
        engine.check_integrity()
    assert engine.landings.reserve(make_request("d", prompt(16, 3))) is not None


def test_reservations_and_waiting_requests_get_rows_alternately() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for i in range(3):
        engine.add(make_request(f"r{i}", prompt(20, i), max_tokens=1))
    order = []
    for _ in range(7):
        reservation = engine.landings.reserve(make_request("remote", prompt(20, 9)))
        if reservation is not None:
            order.append("remote")
            engine.step()
            engine.landings.cancel(reservation, quarantine=False)
        else:
            order += [output.request_id for output in engine.step().outputs]
    assert order[0] == "remote"  # no request had found the row taken yet
    assert order[1:] == ["remote", "r0", "remote", "r1", "remote", "r2"]


def test_nothing_is_reserved_while_a_preempted_request_waits() -> None:
    engine, _ = make_engine(num_pages=8, max_model_len=128)
    for i in range(2):
        engine.add(make_request(f"r{i}", prompt(47, i), max_tokens=60))
    while not engine.stats().preemptions:
        engine.step()
    assert engine.landings.reserve(make_request("c", prompt(16, 2))) is None


def test_a_row_is_kept_for_a_reservation() -> None:
    engine, runner = make_engine(max_num_seqs=2)
    request = make_request("a", prompt(40), max_tokens=5)
    reservation = engine.landings.reserve(request)
    assert reservation is not None
    for i in range(3):
        engine.add(make_request(f"r{i}", prompt(20, i), max_tokens=40))
    engine.step()
    assert engine.stats().running == 1
    assert engine.landings.reserve(make_request("b", prompt(20, 7))) is None
    arrive(engine, runner, reservation, request, Served())
    assert engine.stats().running == 2


def test_a_block_that_is_computed_and_received_is_published_once() -> None:
    engine, runner = make_engine(token_budget=32)
    local = make_request("a", prompt(64), max_tokens=10)
    engine.add(local)
    engine.step()
    remote = make_request("b", prompt(64), max_tokens=10)
    reservation = engine.landings.reserve(remote)
    assert reservation is not None
    assert (reservation.first_block, len(reservation.pages)) == (2, 2)
    served = Served()
    served.take(engine.step())
    arrive(engine, runner, reservation, remote, served)
    engine.check_integrity()
    assert_as_expected(drain(engine, served), engine, local, remote)
    assert len(engine.cached_hashes(Tier.PAGES)) == len(set(engine.cached_hashes(Tier.PAGES)))
    assert_all_released(engine)
