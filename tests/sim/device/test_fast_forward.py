from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, Work
from engine.engine import Engine
from engine.types import CacheEvent, EngineStats
from sim.device.fast_forward import FastForward, next_work, possible_steps
from sim.device.runner import SimulatedRunner, VirtualTime, chooser
from tests.engine.fakes import Served, assert_as_expected, drain, make_engine, make_request, prompt

VOCAB = 1000
COST = StepCost(tokens=(1, 101), tokens_ms=(10, 10), context_ms=0.01)
MODEL = PerfModel(
    Profile(
        schema="cpd-profile/1",
        source="roofline",
        device="none",
        model="none",
        shares=(ShareProfile(share=1.0, decode=COST, prefill=COST),),
    )
)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(2, 60)), min_size=1, max_size=6),
    num_pages=st.integers(16, 80),
    most=st.integers(1, 40),
)
def test_steps_made_at_once_have_the_effect_of_one_after_the_other(
    lengths: list[tuple[int, int]], num_pages: int, most: int
) -> None:
    def run(*, at_once: bool) -> tuple[dict[tuple[str, int], list[int]], list[CacheEvent], EngineStats, float]:
        clock, tokens = VirtualTime(), defaultdict[tuple[str, int], list[int]](list)
        runner = SimulatedRunner(num_pages, MODEL, clock, VOCAB)
        colocation = Colocation(MODEL, token_budget=64)
        engine = Engine(runner, max_model_len=200, colocation=colocation, max_num_seqs=8, max_queue_tokens=10_000)
        for number, (length, max_tokens) in enumerate(lengths):
            stop, n = range(0, VOCAB, 2) if number % 2 else (), 1 + number % 3
            request = make_request(f"r{number}", prompt(length, number), max_tokens=max_tokens, stop=stop, n=n)
            engine.add(request)
        while engine.has_work:
            steps = min(possible_steps(engine), most) if at_once else 0
            if steps:
                work, ms = next_work(engine), []
                for _ in range(steps):
                    ms.append(MODEL.step_ms(work))
                    work = Work.decode(work.seqs, work.context + work.seqs)
                clock.time_s += sum(ms) / 1e3
                step = FastForward(engine, steps, chooser(VOCAB)).end(ms)
            else:
                step = engine.step()
            for output in step.outputs:
                tokens[output.request_id, output.choice] += output.token_ids
            engine.check_integrity()
        return dict(tokens), engine.take_cache_events(), engine.stats(), clock.time_s

    tokens, events, stats, took_s = run(at_once=True)
    one_by_one = run(at_once=False)
    assert (tokens, events) == one_by_one[:2]
    assert stats._replace(step_ms=0.0, slowdown=0.0) == one_by_one[2]._replace(step_ms=0.0, slowdown=0.0)
    assert (stats.step_ms, stats.slowdown) == pytest.approx((one_by_one[2].step_ms, one_by_one[2].slowdown))
    assert took_s == pytest.approx(one_by_one[3])


def test_loaded_blocks_are_published_before_more_steps_are_made_at_once() -> None:
    engine, runner = make_engine(num_pages=12, host_pages=20)
    host, offloaded = runner.host, make_request("offloaded", prompt(70), max_tokens=3)
    assert host is not None
    for request in (offloaded, *(make_request(str(number), prompt(70, number), max_tokens=3) for number in (1, 2))):
        engine.add(request)
        drain(engine)
    stream, served = make_request("stream", prompt(5, 9), max_tokens=8), Served()
    engine.add(stream)
    while not possible_steps(engine):
        served.take(engine.step())
    host.by_hand = True
    engine.load(offloaded.block_hashes)
    assert possible_steps(engine)
    host.finish()
    assert possible_steps(engine) == 0
    assert_as_expected(drain(engine, served), engine, stream)
