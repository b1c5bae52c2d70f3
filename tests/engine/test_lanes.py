"""Decodes beside a prefill lane; the test decides when its chunks end."""

import pytest

from cpd.common.blocks import Tier
from engine.engine import Engine
from engine.execution.executor import StepResult
from tests.engine.fakes import (
    FakeRunner,
    Served,
    assert_all_released,
    assert_as_expected,
    drain,
    engine_of,
    expected,
    make_engine,
    make_request,
    prompt,
)


def decoding(engine: Engine, count: int = 2, max_tokens: int = 40) -> Served:
    """Serves this many requests until they decode."""
    served = Served()
    for i in range(count):
        engine.add(make_request(f"d{i}", prompt(8, i + 5), max_tokens=max_tokens))
    while len(served.token_ids) < count:
        served.take(engine.step())
    return served


def finish(engine: Engine, runner: FakeRunner, served: Served) -> None:
    """Serves all requests, ending each chunk when there is no other work."""
    while engine.has_work or runner.prefill_lane.running:
        drain(engine, served)
        if runner.prefill_lane.running:
            runner.prefill_lane.finish()


def test_a_prefill_runs_on_the_prefill_lane_and_then_joins_the_decodes() -> None:
    engine, runner = make_engine(colocate="lanes")
    served = decoding(engine)
    request = make_request("long", prompt(60, 1))
    engine.add(request)
    cached = set(engine.cached_hashes(Tier.PAGES))
    for _ in range(5):
        step = engine.step()
        assert {output.request_id for output in step.outputs} == {"d0", "d1"}
        served.take(step)
        assert not set(request.block_hashes) & set(engine.cached_hashes(Tier.PAGES))
    runner.prefill_lane.finish()
    assert set(engine.cached_hashes(Tier.PAGES)) == cached  # nothing happens between steps
    first = engine.step()
    assert {output.request_id for output in first.outputs} == {"d0", "d1", "long"}
    assert set(request.block_hashes) <= set(engine.cached_hashes(Tier.PAGES))
    served.take(first)
    assert engine.step().outputs[0].request_id == "d0"
    assert runner.batches[-1].num_decodes == 3


def test_without_decodes_everything_runs_on_the_full_lane() -> None:
    engine, runner = make_engine(colocate="lanes", token_budget=32)
    request = make_request("a", prompt(100))
    engine.add(request)
    served = drain(engine)
    assert_as_expected(served, engine, request)
    assert [len(batch.token_ids) for batch in runner.batches][:4] == [32, 32, 32, 4]


def test_a_long_prompt_goes_back_to_the_full_lane_when_the_decodes_end() -> None:
    engine, runner = make_engine(colocate="lanes", token_budget=48)
    served = decoding(engine, max_tokens=3)
    request = make_request("long", prompt(300, 1))
    engine.add(request)
    drain(engine, served)  # all decodes are done, and the lane is waited for
    runner.batches.clear()
    for _ in range(2):  # one chunk runs and one is queued
        assert runner.prefill_lane.running
        runner.prefill_lane.finish()
        drain(engine, served)
    assert_as_expected(served, engine, request)
    assert [len(batch.token_ids) for batch in runner.batches][:4] == [48, 48, 48, 300 - 2 * 64 - 3 * 48]


def test_the_lane_goes_on_with_the_prompt_without_waiting_for_a_step() -> None:
    engine, runner = make_engine(num_pages=128, colocate="lanes")
    served = decoding(engine)
    request = make_request("long", prompt(300, 1))
    engine.add(request)
    served.take(engine.step())
    chunks = []
    while ("long", 0) not in served.token_ids:
        runner.prefill_lane.finish()
        chunks.append(engine.stats().waiting_tokens)
        known = set(engine.cached_hashes(Tier.PAGES))
        assert not set(request.block_hashes[4 * len(chunks) - 4 :]) & known  # not before the chunk is collected
        assert runner.prefill_lane.running == (engine.stats().waiting_tokens > 64)
        served.take(engine.step())
    assert chunks == [300, 236, 172, 108, 44]
    finish(engine, runner, served)
    assert_as_expected(served, engine, request)


def test_a_queued_chunk_may_be_done_as_soon_as_the_one_before() -> None:
    engine, runner = make_engine(num_pages=128, colocate="lanes")
    served = decoding(engine)
    request = make_request("long", prompt(100, 1))
    engine.add(request)
    served.take(engine.step())
    for _ in range(2):
        runner.prefill_lane.finish()
    served.take(engine.step())
    assert ("long", 0) in served.token_ids
    finish(engine, runner, served)
    assert_as_expected(served, engine, request)


def test_on_work_is_called_when_the_lane_is_done() -> None:
    has_work: list[bool] = []
    engine, runner = make_engine(colocate="lanes")
    engine.set_work_callback(lambda: has_work.append(engine.has_work))
    decoding(engine)
    engine.add(make_request("long", prompt(60, 1)))
    engine.step()
    assert has_work == []
    runner.prefill_lane.finish()
    assert has_work == [True]


def test_pages_of_an_aborted_prompt_stay_until_its_chunks_are_computed() -> None:
    engine, runner = make_engine(num_pages=16, colocate="lanes")
    served = decoding(engine)
    engine.add(make_request("long", prompt(100, 1)))
    served.take(engine.step())
    for name in ("long", "d0", "d1"):
        engine.abort(name)
    assert engine.stats().pages.used == 7
    engine.check_integrity()
    waits = make_request("next", prompt(200, 2), max_tokens=1)
    engine.add(waits)
    for _ in range(2):  # one chunk runs and one is queued
        drain(engine, served)
        assert ("next", 0) not in served.token_ids  # there are not enough pages yet
        runner.prefill_lane.finish()
    assert_as_expected(drain(engine, served), engine, waits)
    assert ("long", 0) not in served.token_ids
    assert_all_released(engine)


def test_a_request_may_come_again_while_its_aborted_chunk_runs() -> None:
    engine, runner = make_engine(colocate="lanes")
    served = decoding(engine)
    request = make_request("long", prompt(60, 1))
    engine.add(request)
    engine.step()
    engine.abort("long")
    engine.add(request)
    finish(engine, runner, served)
    assert_as_expected(served, engine, request)


def woken_prompt_waits_for_the_lane(max_num_seqs: int = 8) -> Engine:
    """Two prompts begin with the same 64 tokens, and the lane continues with the first one."""
    engine, runner = make_engine(num_pages=80, colocate="lanes", max_num_seqs=max_num_seqs)
    decoding(engine)
    for i in range(2):
        engine.add(make_request(f"long {i}", prompt(64, 1) + prompt(400, 2 + i)))
        engine.step()
    runner.prefill_lane.finish()
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 1)
    return engine


def test_landings_do_not_wait_for_a_woken_prompt_that_waits_for_the_lane() -> None:
    engine = woken_prompt_waits_for_the_lane()
    assert engine.landings.reserve(make_request("remote", prompt(64, 7))) is not None


def test_a_landing_leaves_a_woken_prompt_its_pages() -> None:
    engine = woken_prompt_waits_for_the_lane()
    spared = engine.stats().pages.free - (464 // 16) - (3 + 1)  # and a page for each to grow by
    assert engine.landings.reserve(make_request("remote", prompt(spared * 16 + 1, 7))) is None
    assert engine.landings.reserve(make_request("remote", prompt(spared * 16, 7))) is not None


def test_a_landing_leaves_a_woken_prompt_its_row() -> None:
    engine = woken_prompt_waits_for_the_lane(max_num_seqs=4)
    assert engine.landings.reserve(make_request("remote", prompt(64, 7))) is None


@pytest.mark.parametrize("ended", [[0], [1, 2], [3]])
def test_some_choices_are_ended_while_the_prompt_is_computed(ended: list[int]) -> None:
    engine, runner = make_engine(colocate="lanes")
    served = decoding(engine)
    request = make_request("long", prompt(60, 1), n=4)
    engine.add(request)
    served.take(engine.step())
    engine.abort("long", ended)
    finish(engine, runner, served)
    for choice in range(4):
        want = [] if choice in ended else expected(request, choice, engine.max_model_len).token_ids
        assert served.token_ids.get(("long", choice), []) == want
    assert_all_released(engine)


def test_a_stream_that_needs_a_page_of_the_prompt_on_the_lane_waits_for_its_chunk() -> None:
    engine, runner = make_engine(num_pages=12, colocate="lanes")
    served = decoding(engine, count=2, max_tokens=60)
    request = make_request("long", prompt(100, 1), max_tokens=3)  # 7 pages, and 3 for the others to grow
    engine.add(request)
    for _ in range(100):
        if not engine.has_work:
            break
        served.take(engine.step())
        engine.check_integrity()
    assert engine.stats().preemptions == 0
    assert all(len(served.token_ids[name, 0]) < 60 for name in ("d0", "d1"))
    finish(engine, runner, served)
    assert engine.stats().preemptions > 0
    assert_as_expected(served, engine, request)
    assert_all_released(engine)


def test_a_fully_cached_prompt_does_not_wait_for_the_lane() -> None:
    engine, _ = make_engine(colocate="lanes")
    known = make_request("known", prompt(64, 3), max_tokens=1)
    engine.add(known)
    drain(engine)
    decoding(engine)
    engine.add(make_request("long", prompt(100, 1)))
    engine.step()
    engine.add(make_request("again", prompt(64, 3), max_tokens=1))
    assert "again" in {output.request_id for output in engine.step().outputs}


def test_a_sequence_on_the_prefill_lane_is_not_in_a_step_as_well() -> None:
    engine, runner = make_engine(colocate="lanes")
    known = make_request("known", prompt(64, 3), max_tokens=1)
    engine.add(known)
    drain(engine)
    served = decoding(engine)
    requests = [make_request(f"again {i}", prompt(64, 3), seed=i) for i in range(2)]
    for request in requests:
        engine.add(request)
    for _ in range(3):  # each lacks one token: the first joins the decodes, the second goes to the lane
        served.take(engine.step())
    assert runner.prefill_lane.running
    assert set(served.token_ids) == {("d0", 0), ("d1", 0), ("again 0", 0)}
    finish(engine, runner, served)
    assert_as_expected(served, engine, *requests)


def test_pages_of_a_prefill_only_request_on_the_prefill_lane_can_be_pinned() -> None:
    engine, runner = make_engine(colocate="lanes")
    decoding(engine)
    request = make_request("p", prompt(60, 1), prefill_only=True)
    engine.add(request)
    assert engine.step().computed == []
    runner.prefill_lane.finish()
    (computed,) = engine.step().computed
    assert computed.num_tokens == 60
    engine.pin(computed.pages)
    engine.step()
    engine.check_integrity()
    engine.unpin(computed.pages)


class TestAuto:
    def test_a_short_prompt_joins_the_decodes_batch(self) -> None:
        engine, runner = make_engine(colocate="auto")
        served = decoding(engine)
        engine.add(make_request("short", prompt(6, 1)))
        served.take(engine.step())
        assert ("short", 0) in served.token_ids
        assert not runner.prefill_lane.running

    def test_a_long_prompt_goes_to_the_lane_and_a_short_one_passes_it(self) -> None:
        engine, runner = make_engine(colocate="auto")
        served = decoding(engine)
        engine.add(make_request("long", prompt(60, 1)))
        engine.add(make_request("short", prompt(6, 2)))
        served.take(engine.step())
        assert runner.prefill_lane.running
        assert ("short", 0) in served.token_ids
        finish(engine, runner, served)

    def test_short_prompts_pass_a_long_one_that_waits_for_the_lane(self) -> None:
        engine, runner = make_engine(num_pages=128, colocate="auto")
        served = decoding(engine)
        engine.add(make_request("on the lane", prompt(60, 1)))
        engine.add(make_request("waits for it", prompt(70, 2)))
        served.take(engine.step())
        assert runner.prefill_lane.running
        for number in range(3):
            engine.add(make_request(f"short {number}", prompt(3, 3 + number)))
            served.take(engine.step())
            assert (f"short {number}", 0) in served.token_ids
        assert not {"on the lane", "waits for it"} & {name for name, _ in served.token_ids}
        finish(engine, runner, served)
        assert ("waits for it", 0) in served.finish

    def test_no_split_for_a_single_stream(self) -> None:
        engine, runner = make_engine(colocate="auto", token_budget=32)
        served = decoding(engine, count=1)
        engine.add(make_request("long", prompt(60, 1)))
        served.take(engine.step())
        assert not runner.prefill_lane.running
        assert len(runner.batches[-1].token_ids) == 32


def test_a_failure_on_the_lane_fails_the_engine_and_frees_nothing() -> None:
    runner = FakeRunner(64, lanes=True)

    def fail() -> StepResult:
        raise RuntimeError("device lost")

    engine = engine_of(runner, colocate="lanes")
    decoding(engine)
    engine.add(make_request("long", prompt(60, 1)))
    engine.step()
    runner.prefill_lane.collect = fail  # type: ignore[method-assign]
    runner.prefill_lane.finish()
    used = engine.stats().pages.used
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert engine.stats().pages.used >= used


def test_without_splits_every_mode_is_mixed() -> None:
    runner = FakeRunner(64)
    engine = engine_of(runner, colocate="lanes", token_budget=32)
    served = decoding(engine)
    engine.add(make_request("long", prompt(60, 1)))
    served.take(engine.step())
    assert len(runner.batches[-1].token_ids) == 32


def test_a_stream_that_needs_a_page_of_the_prompt_on_the_lane_waits_for_at_most_two_chunks() -> None:
    engine, runner = make_engine(num_pages=30, colocate="lanes")
    served = decoding(engine, count=2, max_tokens=60)
    request = make_request("long", prompt(400, 1), max_tokens=3)
    engine.add(request)
    drain(engine, served)  # both streams wait for a page
    for _ in range(2):
        assert engine.stats().preemptions == 0
        runner.prefill_lane.finish()
        drain(engine, served)
    assert engine.stats().preemptions > 0
    finish(engine, runner, served)
    assert_as_expected(served, engine, request)
