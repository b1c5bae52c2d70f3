import pytest

from engine.trace import MIN_SLOWDOWN, MIN_STEPS_TO_COMPARE, StepTimes
from tests.engine.fakes import drain, make_engine, make_request, prompt


def test_every_step_is_recorded() -> None:
    engine, _ = make_engine(token_budget=32, max_num_seqs=2)
    engine.add(make_request("a", prompt(40), max_tokens=3))
    engine.add(make_request("b", prompt(20, 1), max_tokens=1))
    engine.add(make_request("c", prompt(10, 2), max_tokens=1))
    drain(engine)
    steps = [
        (step.decodes, step.decode_context, step.prefills, step.prefill_tokens, step.prefill_context, step.waiting)
        for step in engine.trace.records()
    ]
    assert steps == [
        (0, 0, 1, 32, 32, 2),
        (0, 0, 2, 8 + 20, 40 + 20, 1),
        (1, 41, 1, 10, 10, 0),
        (1, 42, 0, 0, 0, 0),
    ]
    assert {(step.lane, step.share) for step in engine.trace.records()} == {("full", 1.0)}


def test_the_lane_is_recorded() -> None:
    engine, runner = make_engine(colocate="lanes")
    for i in range(2):
        engine.add(make_request(f"d{i}", prompt(8, i + 5), max_tokens=30))
    engine.step()
    engine.add(make_request("long", prompt(60, 1), max_tokens=1))
    engine.step()
    runner.prefill_lane.finish()
    engine.step()
    steps = [(step.lane, step.share, step.decodes, step.prefill_tokens) for step in engine.trace.records()]
    assert steps == [("full", 1.0, 0, 16), ("decode", 0.5, 2, 0), ("decode", 0.5, 2, 0), ("prefill", 0.5, 0, 60)]


def test_slow_steps_are_told_from_usual_ones() -> None:
    times = StepTimes()
    for _ in range(MIN_STEPS_TO_COMPARE - 1):
        times.add(30.0, 10.0, decodes=True)
    assert (times.slowdown, times.slowdown_p90) == (0.0, 1.0)  # too few to tell
    for step in range(32):
        times.add(20.0 if step % 8 == 0 else 5.0, 10.0, decodes=True)
    assert times.slowdown == pytest.approx(0.5)
    assert times.slowdown_p90 == pytest.approx(2.0)
    for _ in range(32):
        times.add(0.0, 10.0, decodes=True)
    assert times.slowdown_p90 == MIN_SLOWDOWN
