from dataclasses import replace
from typing import Any

import pytest

from cpd.common.blocks import BLOCK_SIZE, Tier, extend_hashes
from cpd.common.errors import QueueFullError
from cpd.performance.model import Work
from engine.batch import Batch
from engine.engine import Engine
from engine.trace import MIN_STEPS_TO_COMPARE
from engine.types import Computed, Finish, Request
from tests.engine.fakes import (
    MODEL,
    FakeRunner,
    FakeStep,
    Served,
    assert_all_released,
    assert_as_expected,
    cached,
    drain,
    engine_of,
    expected,
    follow,
    make_engine,
    make_request,
    prompt,
    states_of,
)


class TestServing:
    def test_one_request_gets_its_tokens(self) -> None:
        engine, _ = make_engine()
        request = make_request("a", prompt(37))
        engine.add(request)
        served = drain(engine)
        assert_as_expected(served, engine, request)
        assert served.cached_tokens == {("a", 0): 0}
        assert_all_released(engine)

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100])
    def test_prompt_lengths_around_block_borders(self, length: int) -> None:
        engine, _ = make_engine()
        request = make_request("a", prompt(length), max_tokens=40)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)

    def test_requests_of_one_batch_get_the_tokens_they_get_alone(self) -> None:
        engine, runner = make_engine()
        requests = [make_request(f"r{i}", prompt(5 + 9 * i, i), max_tokens=3 + 4 * i, seed=i) for i in range(8)]
        for request in requests:
            engine.add(request)
        assert_as_expected(drain(engine), engine, *requests)
        assert max(batch.num_decodes for batch in runner.batches) > 4
        assert_all_released(engine)

    def test_prompt_longer_than_budget_is_prefilled_in_chunks(self) -> None:
        engine, runner = make_engine(token_budget=32)
        request = make_request("a", prompt(100), max_tokens=2)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)
        assert [len(batch.token_ids) for batch in runner.batches] == [32, 32, 32, 4, 1]
        assert [len(batch.samples) for batch in runner.batches] == [0, 0, 0, 1, 1]

    def test_decodes_go_on_beside_a_long_prefill(self) -> None:
        engine, runner = make_engine(token_budget=16)
        short, long = make_request("short", prompt(5), max_tokens=20), make_request("long", prompt(99, 1))
        engine.add(short)
        engine.step()
        engine.add(long)
        runner.batches.clear()
        for _ in range(6):
            assert [output.request_id for output in engine.step().outputs] == ["short"]
        assert all(batch.num_decodes == 1 and len(batch.token_ids) == 16 for batch in runner.batches)

    def test_more_sequences_than_the_batch_holds_take_turns(self) -> None:
        engine, runner = make_engine(max_num_seqs=3)
        requests = [make_request(f"r{i}", prompt(20, i)) for i in range(10)]
        for request in requests:
            engine.add(request)
        assert_as_expected(drain(engine), engine, *requests)
        assert max(len(batch.context_lens) for batch in runner.batches) == 3

    def test_waiting_requests_are_served_in_order(self) -> None:
        engine, _ = make_engine(max_num_seqs=1)
        for i in range(5):
            engine.add(make_request(f"r{i}", prompt(20, i), max_tokens=2))
        order = []
        while engine.has_work:
            order += [output.request_id for output in engine.step().outputs if output.finish]
        assert order == [f"r{i}" for i in range(5)]

    def test_stop_token_ends_a_choice_and_is_emitted(self) -> None:
        engine, _ = make_engine()
        free = expected(make_request("a", prompt(20), max_tokens=20), 0, engine.max_model_len)
        stop = free.token_ids[4]
        request = make_request("a", prompt(20), max_tokens=20, stop=[stop])
        engine.add(request)
        served = drain(engine)
        assert served.token_ids["a", 0] == free.token_ids[: free.token_ids.index(stop) + 1]
        assert served.finish["a", 0] is Finish.STOP

    def test_a_sequence_ends_with_the_context(self) -> None:
        engine, _ = make_engine(max_model_len=50)
        request = make_request("a", prompt(40), max_tokens=1000)
        engine.add(request)
        served = drain(engine)
        assert len(served.token_ids["a", 0]) == 10
        assert served.finish["a", 0] is Finish.LENGTH

    def test_replayed_request_goes_on_after_what_was_emitted(self) -> None:
        engine, _ = make_engine()
        whole = make_request("a", prompt(20), max_tokens=30)
        want = expected(whole, 0, engine.max_model_len)
        replay = make_request("a", prompt(20) + want.token_ids[:13], prompt_len=20, max_tokens=30)
        engine.add(replay)
        served = drain(engine)
        assert served.token_ids["a", 0] == want.token_ids[13:]

    def test_an_engine_without_requests_has_no_work(self) -> None:
        engine, _ = make_engine()
        assert not engine.has_work
        assert engine.step().outputs == []


class TestRefusal:
    def test_single_request_larger_than_pool_fails_with_reason(self) -> None:
        engine, _ = make_engine(num_pages=4)
        assert engine.max_model_len == 64
        with pytest.raises(ValueError, match="64 tokens leave no room for output in a context of 64"):
            engine.add(make_request("a", prompt(64)))
        engine.add(make_request("b", prompt(63), max_tokens=1000))
        assert len(drain(engine).token_ids["b", 0]) == 1

    def test_a_request_with_nothing_to_generate_is_refused(self) -> None:
        engine, _ = make_engine()
        with pytest.raises(ValueError, match="nothing to generate"):
            engine.add(make_request("a", prompt(20), prompt_len=10, max_tokens=10))

    def test_wrong_number_of_block_hashes_is_refused(self) -> None:
        engine, _ = make_engine()
        request = make_request("a", prompt(40))
        request.block_hashes.pop()
        with pytest.raises(ValueError, match="1 block hashes do not fit 40 tokens"):
            engine.add(request)

    def test_the_id_of_an_unfinished_request_is_refused(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", prompt(20)))
        with pytest.raises(ValueError, match="exists already"):
            engine.add(make_request("a", prompt(20)))

    def test_queue_full_is_token_bounded(self) -> None:
        engine, _ = make_engine(max_queue_tokens=100, max_num_seqs=1)
        engine.add(make_request("big", prompt(300), max_tokens=2))  # an empty queue takes anything
        with pytest.raises(QueueFullError):
            engine.add(make_request("refused", prompt(1, 1)))
        engine.step()
        engine.add(make_request("second", prompt(60, 1)))
        engine.add(make_request("third", prompt(40, 2)))
        with pytest.raises(QueueFullError):
            engine.add(make_request("refused", prompt(1, 3)))
        engine.abort("second")
        engine.add(make_request("fourth", prompt(60, 3)))
        assert set(drain(engine).finish) == {("big", 0), ("third", 0), ("fourth", 0)}

    def test_a_flooding_tenant_does_not_shut_others_out(self) -> None:
        engine, _ = make_engine(max_queue_tokens=100, max_num_seqs=1)
        engine.add(make_request("running", prompt(10), max_tokens=30))
        engine.step()
        for number in range(2):
            engine.add(replace(make_request(f"flood {number}", prompt(50, number)), tenant="flood"))
        with pytest.raises(QueueFullError) as refused:
            engine.add(replace(make_request("one more", prompt(1, 3)), tenant="flood"))
        assert not refused.value.over_share  # no other tenant waits
        engine.add(replace(make_request("other", prompt(40, 4)), tenant="other"))
        with pytest.raises(QueueFullError) as refused:
            engine.add(replace(make_request("one more", prompt(1, 3)), tenant="flood"))
        assert refused.value.over_share

    def test_retry_after_follows_from_how_fast_the_queue_empties(self) -> None:
        engine, _ = make_engine(max_queue_tokens=100, max_num_seqs=1)
        for number in range(6):
            engine.add(make_request(str(number), prompt(20, number), max_tokens=1))
            if number == 0:
                engine.step(0.0)
        for second in range(1, 4):
            engine.step(float(second))
        engine.add(replace(make_request("a", prompt(50, 9)), received=3.0))
        with pytest.raises(QueueFullError) as refused:
            engine.add(replace(make_request("b", prompt(50, 8)), received=3.0))
        assert refused.value.retry_after_s == pytest.approx(4.5)  # 90 wait, 20 a second leave

    def test_a_request_that_quarantine_makes_impossible_fails(self) -> None:
        engine, _ = make_engine(num_pages=8)
        reservation = engine.landings.reserve(make_request("lost", prompt(60)))
        assert reservation is not None
        request = make_request("a", prompt(100, 1))
        engine.add(request)
        assert engine.step().outputs == []
        assert not engine.has_work  # the reservation may still complete
        engine.landings.cancel(reservation, quarantine=True)
        served = drain(engine)
        assert "4 in quarantine" in served.failed["a"]
        engine.landings.end_quarantine(reservation)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)
        assert_all_released(engine)

    def test_a_running_request_that_quarantine_leaves_no_page_fails(self) -> None:
        engine, _ = make_engine(num_pages=8)
        reservation = engine.landings.reserve(make_request("lost", prompt(60)))
        assert reservation is not None
        engine.add(make_request("a", prompt(40, 1), max_tokens=100))
        served = Served()
        for _ in range(30):
            served.take(engine.step())
        assert not engine.has_work
        engine.landings.cancel(reservation, quarantine=True)
        assert "in quarantine" in drain(engine, served).failed["a"]
        assert engine.stats().pages.used == 0


class TestPrefixCache:
    def test_second_request_reuses_the_first_ones_blocks(self) -> None:
        engine, runner = make_engine()
        first, second = make_request("a", prompt(50)), make_request("b", prompt(50)[:40] + prompt(20, 3))
        engine.add(first)
        drain(engine)
        runner.batches.clear()
        engine.add(second)
        served = drain(engine)
        assert_as_expected(served, engine, second)
        assert served.cached_tokens["b", 0] == 32
        assert len(runner.batches[0].token_ids) == 60 - 32

    def test_full_prompt_hit_recomputes_one_token(self) -> None:
        engine, runner = make_engine()
        engine.add(make_request("a", prompt(48)))
        drain(engine)
        runner.batches.clear()
        again = make_request("b", prompt(48))
        assert engine.uncached_tokens(again) == 1
        engine.add(again)
        served = drain(engine)
        assert_as_expected(served, engine, again)
        assert served.cached_tokens["b", 0] == 47
        assert len(runner.batches[0].token_ids) == 1
        assert len(runner.copies) == 1
        assert_all_released(engine)

    def test_full_prompt_hit_in_a_full_pool(self) -> None:
        engine, _ = make_engine(num_pages=4, max_num_seqs=1)
        for name in ("a", "b"):
            request = make_request(name, prompt(48), max_tokens=16)
            engine.add(request)
            assert_as_expected(drain(engine), engine, request)
        exact = make_request("c", (prompt(48) + expected(request, 0, 64).token_ids)[:63], prompt_len=48, max_tokens=16)
        engine.add(exact)
        assert_as_expected(drain(engine), engine, exact)
        assert_all_released(engine)

    def test_generated_blocks_are_cached_too(self) -> None:
        engine, _ = make_engine()
        first = make_request("a", prompt(30), max_tokens=30)
        engine.add(first)
        output = drain(engine).token_ids["a", 0]
        follow_up = make_request("b", prompt(30) + output + prompt(10, 2))
        assert engine.uncached_tokens(follow_up) == 70 - 48  # the last token was never computed
        engine.add(follow_up)
        assert_as_expected(drain(engine), engine, follow_up)

    def test_other_roots_do_not_share(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", prompt(40)))
        drain(engine)
        other = Request("b", prompt(40), 40, make_request("x", [1]).params, b"other", [b"x" * 16, b"y" * 16])
        assert engine.uncached_tokens(other) == 40

    def test_eviction_takes_the_least_recently_used_and_tails_first(self) -> None:
        engine, _ = make_engine(num_pages=8)
        old, new = make_request("old", prompt(63, 1), max_tokens=1), make_request("new", prompt(63, 2), max_tokens=1)
        for request in (old, new, make_request("third", prompt(33, 3), max_tokens=1)):
            engine.add(request)
            drain(engine)
        assert engine.uncached_tokens(new) == 63 - 48
        assert engine.uncached_tokens(old) == 63 - 32  # its free pages and its last block went to the third

    def test_nothing_is_published_before_its_step_was_collected(self) -> None:
        seen: list[int] = []

        class Observer(FakeRunner):
            def begin(self, batch: Batch) -> FakeStep:
                seen.append(len(engine.cached_hashes(Tier.PAGES)))
                return super().begin(batch)

        engine = engine_of(Observer(64), token_budget=32)
        engine.add(make_request("a", prompt(100), max_tokens=1))
        drain(engine)
        assert seen == [0, 2, 4, 6]

    def test_waiting_request_waits_for_prefix_being_computed(self) -> None:
        engine, _ = make_engine(token_budget=100)
        producer, follower = make_request("a", prompt(64)), make_request("b", prompt(64) + prompt(8, 1))
        unrelated = make_request("c", prompt(10, 5), max_tokens=1)
        for request in (producer, follower, unrelated):
            engine.add(request)
        served = Served()
        served.take(engine.step())
        assert set(served.token_ids) == {("a", 0), ("c", 0)}
        assert_as_expected(drain(engine, served), engine, producer, follower, unrelated)
        assert served.cached_tokens["b", 0] == 64
        assert engine.stats().prefill_tokens == 64 + 8 + 10

    def test_stats_name_the_requests_without_a_token(self) -> None:
        engine, _ = make_engine(token_budget=100)
        for number, (name, length) in enumerate((("a", 64), ("b", 10), ("c", 90)), 1):
            engine.add(replace(make_request(name, prompt(length, number), max_tokens=2), number=number))
        assert engine.stats().awaiting_first_token == [3, 2, 1]
        served = Served()
        served.take(engine.step())
        assert engine.stats().awaiting_first_token == [3]
        drain(engine, served)
        assert engine.stats().awaiting_first_token == []

    def test_aborting_a_filler_lets_its_followers_go_on(self) -> None:
        engine, _ = make_engine(token_budget=32)
        follower = make_request("b", prompt(96) + prompt(8, 1))
        engine.add(make_request("a", prompt(96)))
        engine.add(follower)
        engine.step()
        engine.check_integrity()
        engine.abort("a")
        served = drain(engine)
        assert_as_expected(served, engine, follower)
        assert served.cached_tokens["b", 0] == 32  # the blocks that the producer had completed
        assert_all_released(engine)

    def test_followers_of_an_aborted_filler_compute_the_prefix_once(self) -> None:
        engine, _ = make_engine(token_budget=32)
        followers = [make_request(f"f{i}", prompt(96) + prompt(8, i)) for i in range(4)]
        for request in (make_request("a", prompt(96)), *followers):
            engine.add(request)
        engine.step()
        engine.abort("a")
        served = drain(engine)
        assert_as_expected(served, engine, *followers)
        assert engine.stats().prefill_tokens == 32 + (104 - 32) + 3 * 8

    def test_a_request_that_waits_for_a_prefix_can_be_aborted(self) -> None:
        engine, _ = make_engine(token_budget=100)
        requests = [make_request(f"r{i}", prompt(64)) for i in range(3)]
        for request in requests:
            engine.add(request)
        served = Served()
        served.take(engine.step())
        assert engine.stats().waiting == 2  # for the blocks of the first one's last chunk
        engine.abort("r1")
        engine.check_integrity()
        drain(engine, served)
        assert_as_expected(served, engine, requests[0], requests[2])
        assert served.cached_tokens == {("r0", 0): 0, ("r2", 0): 63}
        assert_all_released(engine)

    def test_a_preempted_request_can_be_aborted(self) -> None:
        engine, _ = make_engine(num_pages=8, max_model_len=128)
        requests = [make_request(f"r{i}", prompt(30, i), max_tokens=60) for i in range(3)]
        for request in requests:
            engine.add(request)
        served = Served()
        while not engine.stats().preemptions:
            served.take(engine.step())
        engine.abort("r2")
        engine.check_integrity()
        drain(engine, served)
        assert_as_expected(served, engine, *requests[:2])
        assert_all_released(engine)

    def test_events_and_snapshot_agree(self) -> None:
        engine, _ = make_engine(num_pages=8)
        known: dict[bytes, Tier] = {}
        for i in range(6):
            engine.add(make_request(f"r{i}", prompt(50, i % 4), max_tokens=20))
            drain(engine)
            follow(known, engine.take_cache_events())
            assert known == cached(engine)
        assert engine.take_cache_events() == []


class TestParking:
    """A request that is parked, and goes on under another name."""

    @pytest.mark.parametrize("n", [1, 3])
    def test_it_gets_the_same_tokens_and_computes_only_what_was_not_in_full_blocks(self, n: int) -> None:
        engine, _ = make_engine()
        request = make_request("a", prompt(37), max_tokens=60, n=n)
        engine.add(request)
        served = Served()
        while len(served.token_ids.get(("a", 0), [])) < 20:
            served.take(engine.step())
        pages = engine.park("a")
        assert pages is not None
        assert not drain(engine).token_ids
        assert engine.stats().pages.used == len(set(pages))
        for choice in range(n):
            before = served.token_ids["a", choice]
            rest = _continued(request, choice, before, f"b{choice}")
            assert engine.uncached_tokens(rest) <= 2 * BLOCK_SIZE
            engine.add(rest, resumed=True)
            served_rest = drain(engine)
            want = expected(request, choice, engine.max_model_len).token_ids
            assert before + served_rest.token_ids[rest.id, choice] == want
        engine.unpin(pages)
        assert_all_released(engine)

    def test_its_blocks_are_not_evicted(self) -> None:
        engine, _ = make_engine(num_pages=16)
        request = make_request("a", prompt(96), max_tokens=40)
        engine.add(request)
        served = Served()
        while len(served.token_ids.get(("a", 0), [])) < 5:
            served.take(engine.step())
        pages = engine.park("a")
        assert pages is not None
        for number in range(1, 5):
            engine.add(make_request(f"other-{number}", prompt(100, number), max_tokens=30))
            drain(engine)
        rest = _continued(request, 0, served.token_ids["a", 0], "b")
        assert engine.uncached_tokens(rest) <= 2 * BLOCK_SIZE
        engine.unpin(pages)
        assert_all_released(engine)

    def test_preempted_ones_can_be_parked(self) -> None:
        engine, _ = make_engine(num_pages=8, max_model_len=128)
        requests = [make_request(f"r{i}", prompt(30, i), max_tokens=60) for i in range(3)]
        for request in requests:
            engine.add(request)
        served = Served()
        while not engine.stats().preemptions:
            served.take(engine.step())
        pages = engine.park("r2")
        assert pages is not None
        engine.check_integrity()
        drain(engine, served)
        assert_as_expected(served, engine, *requests[:2])
        engine.unpin(pages)
        engine.add(_continued(requests[2], 0, served.token_ids["r2", 0], "again"), resumed=True)
        again = drain(engine).token_ids["again", 0]
        assert served.token_ids["r2", 0] + again == expected(requests[2], 0, engine.max_model_len).token_ids
        assert_all_released(engine)

    def test_an_unknown_request_is_not_parked(self) -> None:
        engine, _ = make_engine()
        assert engine.park("a") is None

    def test_resumed_ones_ignore_the_queue_limit_and_go_before_new_ones(self) -> None:
        engine, _ = make_engine(max_num_seqs=1, max_queue_tokens=1)
        engine.add(make_request("running", prompt(20), max_tokens=5))
        engine.step()
        engine.add(make_request("new", prompt(20, 1), max_tokens=2))
        with pytest.raises(QueueFullError):
            engine.add(make_request("refused", prompt(20, 2), max_tokens=2))
        engine.add(make_request("resumed", prompt(20, 3), max_tokens=2), resumed=True)
        ends = []
        while engine.has_work:
            ends += [output.request_id for output in engine.step().outputs if output.finish]
        assert ends == ["running", "resumed", "new"]


def _continued(request: Request, choice: int, tokens: list[int], name: str) -> Request:
    token_ids = [*request.token_ids, *tokens]
    hashes = extend_hashes(request.hash_root, token_ids)
    return replace(request, id=name, token_ids=token_ids, block_hashes=hashes, first_choice=choice, n=1)


class TestPreemption:
    def test_preempted_request_gives_same_tokens(self) -> None:
        engine, _ = make_engine(num_pages=8, max_model_len=128)
        requests = [make_request(f"r{i}", prompt(20, i), max_tokens=60, seed=i) for i in range(3)]
        for request in requests:
            engine.add(request)
        assert_as_expected(drain(engine), engine, *requests)
        assert engine.stats().preemptions > 0
        assert_all_released(engine)

    def test_the_newest_is_preempted_and_resumes_before_waiting_ones(self) -> None:
        engine, _ = make_engine(num_pages=8, max_model_len=128, max_num_seqs=2)
        for i in range(3):
            engine.add(make_request(f"r{i}", prompt(30, i), max_tokens=60))
        order = []
        while engine.has_work:
            order += [output.request_id for output in engine.step().outputs if output.finish]
        assert order == ["r0", "r1", "r2"]
        assert engine.stats().preemptions > 0

    def test_a_request_is_not_admitted_into_the_headroom_of_running_ones(self) -> None:
        engine, _ = make_engine(num_pages=8)
        engine.add(make_request("a", prompt(48), max_tokens=100))
        engine.step()
        engine.add(make_request("b", prompt(63, 1)))  # all 4 pages that are left
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (1, 1)
        engine.abort("b")
        engine.add(make_request("c", prompt(48, 1)))
        engine.step()
        assert engine.stats().running == 2


class TestChoices:
    def test_choices_share_one_prefill_and_differ(self) -> None:
        engine, runner = make_engine()
        request = make_request("a", prompt(40), n=4, max_tokens=30)
        engine.add(request)
        served = drain(engine)
        assert_as_expected(served, engine, request)
        assert len({tuple(tokens) for tokens in served.token_ids.values()}) == 4
        assert engine.stats().prefill_tokens == 40
        assert len(runner.copies) == 3
        assert_all_released(engine)

    def test_full_last_page_needs_no_copy(self) -> None:
        engine, runner = make_engine()
        request = make_request("a", prompt(48), n=3)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)
        assert runner.copies == []

    def test_choices_without_room_wait_as_if_preempted(self) -> None:
        engine, _ = make_engine(num_pages=8, max_model_len=100, max_num_seqs=2)
        request = make_request("a", prompt(75), n=5, max_tokens=20)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)
        assert_all_released(engine)

    def test_single_choices_can_be_aborted(self) -> None:
        engine, _ = make_engine()
        request = make_request("a", prompt(40), n=4, max_tokens=30)
        engine.add(request)
        engine.abort("a", [1])
        served = Served()
        served.take(engine.step())
        assert set(served.token_ids) == {("a", 0), ("a", 2), ("a", 3)}
        engine.abort("a", [2, 7])
        drain(engine, served)
        assert set(served.finish) == {("a", 0), ("a", 3)}
        for choice in (0, 3):
            assert served.token_ids["a", choice] == expected(request, choice, engine.max_model_len).token_ids
        assert_all_released(engine)

    def test_a_choice_that_ends_with_its_first_token_leaves_the_others(self) -> None:
        engine, _ = make_engine()
        probe = make_request("a", prompt(40), n=3)
        stop = expected(probe, 0, engine.max_model_len).token_ids[0]
        request = make_request("a", prompt(40), n=3, stop=[stop], max_tokens=30)
        engine.add(request)
        served = drain(engine)
        assert_as_expected(served, engine, request)
        assert served.token_ids["a", 0] == [stop]

    def test_first_choice_numbers_the_choices(self) -> None:
        engine, _ = make_engine()
        base = make_request("a", prompt(40))
        request = Request("a", base.token_ids, 40, base.params, base.hash_root, base.block_hashes, first_choice=5)
        engine.add(request)
        assert_as_expected(drain(engine), engine, request)


class TestAbort:
    @pytest.mark.parametrize("steps", range(8))
    def test_abort_at_any_step_frees_everything(self, steps: int) -> None:
        engine, _ = make_engine(token_budget=32)
        other = make_request("other", prompt(50, 1))
        engine.add(make_request("a", prompt(100), n=2))
        engine.add(other)
        served = Served()
        for _ in range(steps):
            served.take(engine.step())
        engine.abort("a")
        engine.abort("a")
        engine.check_integrity()
        drain(engine, served)
        assert_as_expected(served, engine, other)
        assert_all_released(engine)

    @pytest.mark.parametrize("steps", range(8))
    def test_its_pages_are_free_after_the_next_step(self, steps: int) -> None:
        engine, _ = make_engine(token_budget=32)
        engine.add(make_request("a", prompt(100), n=2))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.step()
        assert_all_released(engine)

    def test_the_blocks_of_an_aborted_request_stay_cached(self) -> None:
        engine, _ = make_engine(token_budget=32)
        engine.add(make_request("a", prompt(100)))
        engine.step()
        engine.step()
        engine.abort("a")
        assert engine.uncached_tokens(make_request("b", prompt(100))) == 36

    def test_unknown_request_is_ignored(self) -> None:
        engine, _ = make_engine()
        engine.abort("unknown")


class TestPrefillOnly:
    def test_it_ends_after_the_first_token_and_shows_progress_after_each_step(self) -> None:
        engine, runner = make_engine(token_budget=32)
        request = make_request("a", prompt(90), prefill_only=True, n=2)
        engine.add(request)
        steps = []
        while engine.has_work:
            step = engine.step()
            steps.append(step)
            for computed in step.computed:
                content = [slot for page in computed.pages for slot in runner.pages[page]]
                assert content[: computed.num_tokens] == states_of(request.token_ids)[: computed.num_tokens]
        progress = [computed for step in steps for computed in step.computed]
        assert [computed.num_tokens for computed in progress] == [32, 64, 90]
        assert [len(computed.pages) for computed in progress] == [2, 4, 6]
        outputs = [output for step in steps for output in step.outputs]
        assert [output.choice for output in outputs] == [0, 1]
        assert [output.finish for output in outputs] == [None, None]  # another worker continues the choice
        for output in outputs:
            assert output.token_ids == expected(request, output.choice, 512).token_ids[:1]
        assert_all_released(engine)

    def test_a_first_token_that_ends_the_choice_says_so(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", prompt(20), max_tokens=1, prefill_only=True))
        assert engine.step().outputs[0].finish is Finish.LENGTH

    def test_pages_outlive_the_request_while_pinned(self) -> None:
        engine, runner = make_engine(num_pages=8)
        request = make_request("a", prompt(60), prefill_only=True)
        engine.add(request)
        pages = engine.step().computed[0].pages
        engine.check_integrity()
        engine.pin(pages)
        drain(engine)
        assert engine.stats().pages.used == 4
        others = [make_request(f"o{i}", prompt(30, i + 1), max_tokens=3) for i in range(4)]
        for other in others:
            engine.add(other)
        assert_as_expected(drain(engine), engine, *others)
        content = [slot for page in pages for slot in runner.pages[page]]
        assert content[:60] == states_of(request.token_ids)
        engine.unpin(pages)
        assert_all_released(engine)
        with pytest.raises(ValueError, match="pinned"):
            engine.unpin(pages)

    def test_a_request_that_needs_pinned_pages_waits_for_them(self) -> None:
        engine, _ = make_engine(num_pages=4)
        engine.add(make_request("a", prompt(60), prefill_only=True))
        pages = engine.step().computed[0].pages
        engine.pin(pages)
        request = make_request("b", prompt(60, 1), max_tokens=2)
        engine.add(request)
        assert drain(engine).token_ids == {}
        engine.unpin(pages)
        assert_as_expected(drain(engine), engine, request)

    def test_cached_pages_can_be_pinned_by_their_hashes(self) -> None:
        engine, _ = make_engine(num_pages=8)
        request = make_request("a", prompt(64), max_tokens=1)
        engine.add(request)
        drain(engine)
        longer = make_request("b", prompt(100))
        pages = engine.pin_cached(longer.block_hashes)
        assert len(pages) == 4
        engine.add(make_request("big", prompt(100, 3), max_tokens=1))
        assert drain(engine).token_ids == {}
        assert engine.pin_cached(longer.block_hashes) == pages
        engine.unpin(pages)
        engine.unpin(pages)
        assert drain(engine).token_ids
        assert_all_released(engine)

    def test_pages_that_running_sequences_may_need_are_not_pinned(self) -> None:
        engine, _ = make_engine(num_pages=8)
        request = make_request("a", prompt(64), max_tokens=1)
        engine.add(request)
        drain(engine)
        engine.add(make_request("runs", prompt(60, 3), max_tokens=4))
        served = Served()
        served.take(engine.step())
        assert engine.stats().pages.cached == 4
        assert engine.pin_cached(request.block_hashes) == []
        drain(engine, served)
        pages = engine.pin_cached(request.block_hashes)
        assert pages
        engine.unpin(pages)
        assert_all_released(engine)

    def test_pages_that_are_held_anyway_are_pinned_however_few_are_left(self) -> None:
        engine, _ = make_engine(num_pages=9)
        moves = make_request("moves", prompt(60), max_tokens=30)
        engine.add(moves)
        engine.step()
        pages = engine.park("moves")
        assert pages
        engine.add(make_request("runs", prompt(60, 3), max_tokens=60))
        served = Served()
        while (counts := engine.stats().pages).free + counts.cached:
            served.take(engine.step())
        assert engine.pin_cached(moves.block_hashes) == pages
        engine.unpin(pages)
        engine.unpin(pages)
        drain(engine, served)
        assert_all_released(engine)


class TestStats:
    def test_waiting_tokens_are_prompt_tokens_not_yet_computed(self) -> None:
        engine, _ = make_engine(token_budget=32, max_num_seqs=1)
        engine.add(make_request("a", prompt(100)))
        engine.add(make_request("b", prompt(50, 1)))
        assert engine.stats().waiting_tokens == 150
        engine.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 1, 118)
        drain(engine)
        assert engine.stats().waiting_tokens == 0

    def test_totals_count_what_was_computed_and_cached(self) -> None:
        engine, _ = make_engine()
        for name in ("a", "b"):
            engine.add(make_request(name, prompt(40), max_tokens=5))
            drain(engine)
        stats = engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens, stats.cached_tokens) == (48, 8, 32)


def test_computed_pages_are_a_plain_list() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", prompt(20), prefill_only=True))
    (computed,) = engine.step().computed
    assert isinstance(computed, Computed)
    assert all(type(page) is int for page in computed.pages)


class TestQueue:
    """The order of the waiting queue, and its figures."""

    def order(self, engine: Engine, now: float = 0.0) -> list[str]:
        """The requests in the order of their first tokens."""
        names: list[str] = []
        while engine.has_work:
            for output in engine.step(now).outputs:
                if output.request_id not in names:
                    names.append(output.request_id)
        return names

    def test_priority_tenant_and_deadline_decide(self) -> None:
        engine, _ = make_engine(max_num_seqs=1)
        terms: list[dict[str, Any]] = [
            {"deadline": 9.0},
            {"deadline": 3.0},
            {"deadline": 6.0},
            {"tenant": "other"},
            {"priority": 1},
        ]
        for number, each in enumerate(terms):
            engine.add(replace(make_request(str(number), prompt(300, number), max_tokens=1), **each))
        assert self.order(engine, now=4.0) == ["4", "2", "3", "0", "1"]

    def test_a_preempted_request_goes_before_new_ones(self) -> None:
        engine, _ = make_engine(num_pages=8, max_num_seqs=2)
        for number in range(2):
            engine.add(make_request(str(number), prompt(40, number), max_tokens=60))
        while not engine.stats().preemptions:
            engine.step()
        engine.add(replace(make_request("urgent", prompt(10, 3), max_tokens=1), priority=9))
        assert self.order(engine) == ["0", "1", "urgent"]

    def test_the_first_output_has_the_time_in_the_queue(self) -> None:
        engine, _ = make_engine(max_num_seqs=1)
        for number in range(2):
            engine.add(replace(make_request(str(number), prompt(10, number), max_tokens=1), received=1.0))
        waited = [output.queued_s for now in (1.5, 3.0) for output in engine.step(now).outputs]
        assert waited == [0.5, 2.0]

    def test_stats_have_decodes_and_uncomputed_tokens(self) -> None:
        engine, _ = make_engine(max_num_seqs=2, token_budget=50)
        assert (engine.stats().prefill_ms, engine.stats().step_ms) == (0, 0)
        for number, length in enumerate((20, 100, 200)):
            engine.add(make_request(str(number), prompt(length, number), max_tokens=30))
        before = engine.stats()
        assert (before.decodes, before.waiting_tokens, before.queued_tokens) == (0, 320, 320)
        assert before.prefill_ms == pytest.approx(320 / 50 * MODEL.step_ms(Work.prefill(50)))
        engine.step()
        after = engine.stats()
        assert (after.decodes, after.decode_context, after.queued_tokens) == (1, 21, 200)
        assert after.waiting_tokens == 320 - 50
        engine.step()
        assert engine.stats().step_ms == 1.0  # all steps of a fake lane take this long

    def test_stats_have_the_slowdown_against_the_prediction(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", prompt(10), max_tokens=20))
        for _ in range(MIN_STEPS_TO_COMPARE - 1):
            engine.step()
        assert engine.stats().slowdown == 0
        engine.step()
        assert engine.stats().slowdown == pytest.approx(1.0 / MODEL.step_ms(Work.decode(1, 17)), rel=0.1)

    def test_cached_tokens_do_not_count_as_uncomputed(self) -> None:
        engine, _ = make_engine(max_num_seqs=1)
        engine.add(make_request("first", prompt(100), max_tokens=1))
        drain(engine)
        engine.add(make_request("running", prompt(20, 1)))
        engine.step()
        engine.add(make_request("again", prompt(100), max_tokens=1))
        stats = engine.stats()
        assert (stats.waiting_tokens, stats.queued_tokens) == (4, 100)
