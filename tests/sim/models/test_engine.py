import pytest

from cpd.performance.model import PerfModel, Profile, Work
from sim.models.engine import FluidEngine, Request

MODEL = PerfModel(Profile.load("h200-qwen3-8b"))


def finish(engine: FluidEngine, now: float = 0.0, share: float = 1.0) -> list[Request]:
    """Runs an engine until it is empty."""
    ended: list[Request] = []
    while len(engine):
        seconds = engine.next_s(share)
        assert seconds < float("inf")
        engine.advance(seconds, share)
        now += seconds
        for one in engine.collect(now):
            one.ended_s = now
            ended.append(one)
    return ended


def test_a_lone_request_takes_a_prefill_and_its_decodes() -> None:
    engine = FluidEngine(MODEL, 1.0, 8)
    engine.add(Request(0.0, 1000, 101))
    (one,) = finish(engine)
    prompt_s = MODEL.step_ms(Work.prefill(1000)) / 1e3
    assert one.first_s == pytest.approx(prompt_s)
    assert one.ended_s == pytest.approx(prompt_s + 100 * MODEL.step_ms(Work.decode(1, 1050)) / 1e3, rel=1e-3)


def test_half_the_device_or_twice_the_weights_take_twice_as_long() -> None:
    times = []
    for scale, share in ((1.0, 1.0), (1.0, 0.5), (2.0, 1.0)):
        engine = FluidEngine(MODEL, scale, 8)
        engine.add(Request(0.0, 500, 50))
        times.append(finish(engine, share=share)[0].ended_s)
    assert times[1] == pytest.approx(2 * (times[0] or 0))
    assert times[2] == pytest.approx(2 * (times[0] or 0))


def test_streams_share_steps() -> None:
    engine = FluidEngine(MODEL, 1.0, 64)
    for _ in range(32):
        engine.add(Request(0.0, 10, 1000))
    alone = FluidEngine(MODEL, 1.0, 64)
    alone.add(Request(0.0, 10, 1000))
    assert max(one.ended_s or 0 for one in finish(engine)) < 3 * (finish(alone)[0].ended_s or 0)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_parked_streams_keep_their_tokens_and_dropped_pages_are_computed_again(keep_kv: bool) -> None:
    engine = FluidEngine(MODEL, 1.0, 8)
    engine.add(Request(0.0, 1000, 100))
    engine.advance(engine.next_s(1.0), 1.0)
    assert list(engine.collect(0.1)) == []
    engine.advance(engine.next_s(1.0) / 2, 1.0)
    (one,) = engine.park(keep_kv)
    assert len(engine) == 0
    assert one.tokens == pytest.approx(50, abs=1)
    assert one.first_s == 0.1
    engine.add(one)
    (again,) = finish(engine, now=5.0)
    decodes_s = 50 * MODEL.step_ms(Work.decode(1, 1050)) / 1e3
    prompt_s = 0.0 if keep_kv else MODEL.step_ms(Work.prefill(1050)) / 1e3
    assert (again.ended_s or 0) - 5 == pytest.approx(decodes_s + prompt_s, rel=0.03)
    assert again.first_s == 0.1
