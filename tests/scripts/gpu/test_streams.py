import itertools

import pytest

from scripts.gpu.streams import Launch, Load, alone_ms, beside_ms, new_stream, together_ms
from tests.scripts.gpu.fake_gpu import FakeGpu


def work(gpu: FakeGpu, ms: float, log: list[float] | None = None) -> Launch:
    def launch() -> None:
        gpu.launch(lambda _: log.append(gpu.current.clock) if log is not None else None, lambda _: ms)

    return launch


def test_a_piece_is_timed_alone(gpu: FakeGpu) -> None:
    assert alone_ms(Load(new_stream(), work(gpu, 2.5))) == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(("ms", "other_ms"), [(2.0, 3.0), (3.0, 0.01), (0.01, 3.0)])
def test_a_piece_is_timed_while_the_other_work_never_pauses(gpu: FakeGpu, ms: float, other_ms: float) -> None:
    mine: list[float] = []
    others: list[float] = []
    load = Load(new_stream(), work(gpu, ms, mine))
    other = Load(new_stream(), work(gpu, other_ms, others))
    assert beside_ms(load, other, repeats=7) == pytest.approx(ms, abs=0.01)
    timed = mine[-7:]
    assert others[-1] + other_ms > timed[-1] + ms
    covered = [time for time in others if timed[0] - other_ms <= time <= timed[-1] + ms]
    assert covered
    assert all(later - earlier <= other_ms + 0.01 for earlier, later in itertools.pairwise(covered))


def test_work_that_always_ends_too_soon_is_an_error(gpu: FakeGpu) -> None:
    pieces = 0

    def slower_and_slower() -> None:
        nonlocal pieces
        pieces += 1
        gpu.launch(lambda _: None, lambda _: 1.0 if pieces <= 6 else 1000.0)

    with pytest.raises(RuntimeError, match="too soon"):
        beside_ms(Load(new_stream(), slower_and_slower), Load(new_stream(), work(gpu, 1.0)))


def test_loads_on_two_streams_overlap_and_on_one_take_turns(gpu: FakeGpu) -> None:
    first, second = work(gpu, 1.0), work(gpu, 3.0)
    apart = [Load(new_stream(), first), Load(new_stream(), second)]
    assert together_ms(apart, 10) == pytest.approx(30, abs=0.1)
    stream = new_stream()
    assert together_ms([Load(stream, first), Load(stream, second)], 10) == pytest.approx(40, abs=0.1)
