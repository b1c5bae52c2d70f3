from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from cpd.common.blocks import extend_hashes
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, Work
from engine.batch import Batch, SampleRow
from engine.engine import Engine
from engine.scheduling.plan import BuildBatch, build_batch
from engine.trace import StepRecord
from engine.types import Request, SamplingParams
from sim.device.runner import SimulatedRunner, VirtualTime, build_outline, work_of
from tests.engine.fakes import ROOT, Served, drain, engine_of, make_request, prompt

VOCAB = 1000


def share(part: float, factor: float) -> ShareProfile:
    decode = StepCost(tokens=(1, 101), tokens_ms=(10 * factor, 10 * factor), context_ms=0.01, slowdown=2.0)
    prefill = StepCost(tokens=(1, 101), tokens_ms=(11 * factor, 111 * factor), slowdown=1.25)
    return ShareProfile(share=part, decode=decode, prefill=prefill)


INSTANT = PerfModel(Profile.load("instant"))
MODEL = PerfModel(
    Profile(
        schema="cpd-profile/1",
        source="roofline",
        device="none",
        model="none",
        units=8,
        shares=(share(0.25, 3.0), share(0.75, 2.0), share(1.0, 1.0)),
    )
)


def batch(chunks: Sequence[tuple[int, int]]) -> Batch:
    """Makes a batch of chunks (tokens before, tokens computed) without samples."""
    counts = np.array([count for _, count in chunks], dtype=np.int32)
    size = int(counts.sum())
    nothing = np.zeros(size, dtype=np.int32)
    return Batch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array([sum(chunk) for chunk in chunks], dtype=np.int32),
        block_tables=np.zeros((len(chunks), 1), dtype=np.int32),
        num_decodes=int((counts == 1).sum()),
        samples=[],
    )


DECODES = batch([(99, 1)] * 4)  # 10 ms and 4 ms for the context on the whole device
PREFILL = batch([(0, 90)])  # 100 ms on the whole device


def runner_in(clock: VirtualTime) -> SimulatedRunner:
    return SimulatedRunner(16, MODEL, clock, VOCAB)


def test_the_work_of_a_batch_is_that_of_its_chunks() -> None:
    chunks = batch([(9, 1), (0, 5), (16, 20)])
    assert work_of(DECODES) == Work.decode(4, 400)
    assert work_of(chunks) == Work.decode(1, 10) + Work.prefill(5) + Work.prefill(20, 16)


def test_a_step_on_the_whole_device_takes_what_the_model_says() -> None:
    clock = VirtualTime(5.0)
    lane = runner_in(clock).full
    lane.launch(DECODES)
    assert not lane.done()
    ran = lane.collect()
    assert ran.start_s == 5.0
    assert ran.ms == pytest.approx(14)
    assert clock.time_s == pytest.approx(5.014)


def test_the_splits_are_parts_the_device_can_be_cut_into() -> None:
    splits = runner_in(VirtualTime()).splits
    assert [(split.prefill.share, split.decode.share) for split in splits] == [
        (7 / 8, 1 / 8), (6 / 8, 2 / 8), (4 / 8, 4 / 8), (2 / 8, 6 / 8)
    ]  # fmt: skip


def test_lanes_slow_each_other_down_only_while_both_run() -> None:
    clock = VirtualTime()
    split = runner_in(clock).splits[1]
    prefill_ms = MODEL.step_ms(Work.prefill(90), 0.75)
    decode_ms = MODEL.step_ms(Work.decode(4, 400), 0.25)
    split.prefill.launch(PREFILL)
    split.decode.launch(DECODES)
    assert split.decode.collect().ms == pytest.approx(2 * decode_ms)
    assert not split.prefill.done()
    # In that time, the prefill got on by what it does alone in 1 / 1.25 of it.
    ran = split.prefill.collect()
    assert ran.ms == pytest.approx(2 * decode_ms + prefill_ms - 2 * decode_ms / 1.25)
    assert clock.time_s == pytest.approx(ran.ms / 1e3)


def test_a_decode_goes_on_at_full_speed_when_the_prefill_ends() -> None:
    clock = VirtualTime()
    split = runner_in(clock).splits[1]
    decode_ms = MODEL.step_ms(Work.decode(4, 400), 0.25)
    split.prefill.launch(batch([(0, 2)]))
    split.decode.launch(DECODES)
    prefill_ms = 1.25 * MODEL.step_ms(Work.prefill(2), 0.75)
    assert prefill_ms < 2 * decode_ms
    assert split.decode.collect().ms == pytest.approx(prefill_ms + decode_ms - prefill_ms / 2)
    assert split.prefill.done()
    assert split.prefill.collect().ms == pytest.approx(prefill_ms)


def test_many_decode_steps_beside_a_prefill() -> None:
    clock = VirtualTime()
    split = runner_in(clock).splits[1]
    split.prefill.launch(PREFILL)
    steps = 0
    while not split.prefill.done():
        split.decode.launch(DECODES)
        split.decode.collect()
        steps += 1
    alone_ms = MODEL.step_ms(Work.prefill(90), 0.75)
    assert split.prefill.collect().ms == pytest.approx(1.25 * alone_ms)
    assert steps == -(-1.25 * alone_ms // (2 * MODEL.step_ms(Work.decode(4, 400), 0.25)))


def test_a_queued_step_begins_when_the_one_before_ends_even_within_a_decode() -> None:
    clock = VirtualTime()
    split = runner_in(clock).splits[1]
    prefill_ms, decode_ms = 1.25 * MODEL.step_ms(Work.prefill(2), 0.75), 2 * MODEL.step_ms(Work.decode(4, 400), 0.25)
    split.prefill.launch(batch([(0, 2)]))
    split.prefill.launch(PREFILL)
    assert prefill_ms < decode_ms
    split.decode.launch(DECODES)
    assert split.decode.collect().ms == pytest.approx(decode_ms)  # never alone
    first = split.prefill.collect()
    assert first.ms == pytest.approx(prefill_ms)
    assert not split.prefill.done()
    second = split.prefill.collect()
    assert second.start_s == pytest.approx(prefill_ms / 1e3)
    beside_ms = decode_ms - prefill_ms
    assert second.ms == pytest.approx(beside_ms + MODEL.step_ms(Work.prefill(90), 0.75) - beside_ms / 1.25)


def test_a_queued_step_begins_without_decodes_too() -> None:
    clock = VirtualTime()
    lane = runner_in(clock).splits[1].prefill
    alone_s = MODEL.step_ms(Work.prefill(90), 0.75) / 1e3
    for _ in range(2):
        lane.launch(PREFILL, lambda: None)
    assert clock.alarm_s == pytest.approx(alone_s)
    clock.time_s = alone_s
    assert lane.done()
    lane.collect()
    assert clock.alarm_s == pytest.approx(2 * alone_s)
    assert lane.collect().start_s == pytest.approx(alone_s)


def test_the_alarm_is_when_the_prefill_lane_will_be_done() -> None:
    clock = VirtualTime(1.0)
    split = runner_in(clock).splits[1]
    assert clock.alarm_s is None
    split.prefill.launch(PREFILL, lambda: None)
    assert clock.alarm_s == pytest.approx(1 + MODEL.step_ms(Work.prefill(90), 0.75) / 1e3)
    split.prefill.collect()
    assert clock.alarm_s is None


def test_without_a_model_nothing_takes_time() -> None:
    clock = VirtualTime()
    runner = SimulatedRunner(16, INSTANT, clock, VOCAB)
    assert not runner.splits
    runner.full.launch(PREFILL)
    assert runner.full.done()
    assert runner.full.collect().ms == 0
    assert clock.time_s == 0


def simulated_engine(**options: int) -> Engine:
    return engine_of(SimulatedRunner(64, INSTANT, VirtualTime(), VOCAB), **options)  # type: ignore[arg-type]


def tokens_of(request: Request, **options: int) -> list[int]:
    engine = simulated_engine(**options)
    engine.add(request)
    return drain(engine).token_ids[request.id, 0]


def test_tokens_follow_from_the_prompt_alone() -> None:
    whole = tokens_of(make_request("a", prompt(100), max_tokens=20))
    assert len(whole) == 20
    assert tokens_of(make_request("b", prompt(100), max_tokens=20, seed=3), token_budget=7) == whole
    replayed = make_request("c", prompt(100) + whole[:6], prompt_len=100, max_tokens=20)
    assert tokens_of(replayed) == whole[6:]
    assert tokens_of(make_request("d", prompt(100, 1), max_tokens=20)) != whole


def test_choices_differ() -> None:
    engine = simulated_engine()
    engine.add(make_request("a", prompt(40), max_tokens=8, n=2))
    served = drain(engine)
    assert served.token_ids["a", 0] != served.token_ids["a", 1]


def test_stop_tokens_are_never_chosen() -> None:
    whole = tokens_of(make_request("a", prompt(50), max_tokens=20))
    stopped = tokens_of(make_request("a", prompt(50), max_tokens=20, stop=whole))
    assert len(stopped) == 20
    assert not set(stopped) & set(whole)


def test_logprobs_are_returned_if_asked_for() -> None:
    runner = SimulatedRunner(16, INSTANT, VirtualTime(), VOCAB)
    tokens = np.arange(8, dtype=np.int32)
    for top, alternatives in ((0, 0), (3, 1)):
        one = batch([(0, 8)])
        one.samples = [SampleRow(7, SamplingParams(top_logprobs=top), 0, 8, tokens, 8)]
        runner.full.launch(one)
        (sampled,) = runner.full.collect().sampled
        assert sampled.logprobs is not None
        assert len(sampled.logprobs.top) == alternatives


def test_an_engine_runs_on_it_with_lanes_in_virtual_time() -> None:
    clock = VirtualTime()
    runner = SimulatedRunner(256, MODEL, clock, VOCAB)
    engine = engine_of(runner, colocate="lanes")  # type: ignore[arg-type]
    served = Served()
    for i in range(4):
        engine.add(make_request(f"d{i}", prompt(16, i + 3), max_tokens=8))
    served.take(engine.step())
    engine.add(
        Request("p", prompt(400, 1), 400, SamplingParams(max_tokens=2), ROOT, extend_hashes(ROOT, prompt(400, 1)))
    )
    while clock.alarm_s or engine.has_work:
        if not engine.has_work:
            assert clock.alarm_s is not None
            clock.time_s = clock.alarm_s
        served.take(engine.step())
        engine.check_integrity()
    assert {len(tokens) for tokens in served.token_ids.values()} == {8, 2}
    assert {record.lane for record in engine.trace.records()} == {"full", "prefill", "decode"}


def test_within_a_prompt_the_lane_waits_for_a_step_only_to_change_the_split() -> None:
    clock = VirtualTime()
    runner = SimulatedRunner(1000, MODEL, clock, VOCAB)
    splits = [split.shares for split in runner.splits]
    colocation = Colocation(MODEL, token_budget=64, mode="lanes", splits=splits, itl_ms=80)
    engine = Engine(runner, max_model_len=2000, colocation=colocation, max_num_seqs=8, max_queue_tokens=10_000)
    for i in range(6):
        engine.add(make_request(f"d{i}", prompt(900, i), max_tokens=60 if i < 4 else 200))
    while engine.has_work or clock.alarm_s:
        clock.time_s = clock.time_s if engine.has_work else clock.alarm_s or 0.0
        engine.step()
        engine.check_integrity()
    chunks = [record for record in engine.trace.records() if record.lane == "prefill"]
    waited = defaultdict[bool, list[float]](list)
    for chunk, after in pairwise(chunks):
        if after.prefill_context - after.prefill_tokens == chunk.prefill_context:  # of the same prompt
            waited[after.share != chunk.share].append(1e3 * (after.start_s - chunk.start_s) - chunk.ms)
    assert min(waited[True]) > 1
    at_once = [ms for ms in waited[False] if ms < 1e-6]
    assert len(at_once) >= len(waited[False]) - 1 > 5  # once another split would have been better meanwhile


def test_an_outline_of_the_batches_gives_the_same_run() -> None:
    def run(build: BuildBatch = build_batch) -> list[StepRecord]:
        clock = VirtualTime()
        runner = SimulatedRunner(256, MODEL, clock, VOCAB)
        colocation = Colocation(MODEL, token_budget=64, mode="lanes", splits=[split.shares for split in runner.splits])
        engine = Engine(
            runner, max_model_len=512, colocation=colocation, max_num_seqs=8, max_queue_tokens=10_000, build=build
        )
        for i, length in enumerate((16, 30, 400, 90)):
            engine.add(make_request(f"r{i}", prompt(length, i), max_tokens=9, n=1 + i % 2))
        while clock.alarm_s or engine.has_work:
            clock.time_s = clock.time_s if engine.has_work else clock.alarm_s or 0.0
            engine.step()
        return engine.trace.records()

    assert run() == run(build=build_outline)
