import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile, Work
from engine.batch import Batch
from engine.execution.executor import Executor, Lane, Split, StepResult
from engine.execution.runner import TorchRunner
from engine.profile.rough import measure_rough_profile
from sim.device.runner import work_of
from tests.conftest import MakeCheckpoint


class FakeDevice:
    """A runner and its lane. Steps return at once, with the time that a model predicts.

    Args:
        disturbed: Factor of the times of half of the steps.
    """

    def __init__(self, model: PerfModel, disturbed: float = 1.0) -> None:
        self.num_pages, self.vocab_size = 4096, 500
        self.full = self
        self.splits: Sequence[Split] = ()
        self.chunks: list[int] = []
        self._model = model
        self._disturbed = disturbed
        self._random = random.Random(0)

    def copy_page(self, source: int, target: int) -> None:
        pass

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        if not batch.num_decodes:
            self.chunks.append(len(batch.token_ids))
        self._work = work_of(batch)

    def collect(self) -> StepResult:
        factor = self._random.choice((1.0, self._disturbed))
        return StepResult([], 0.0, factor * self._model.step_ms(self._work))


def rough(device: FakeDevice) -> PerfModel:
    about: dict[str, Any] = {"device": "d", "model": "m"}
    return PerfModel(measure_rough_profile(cast(Executor, device), 40_960, **about))


def test_long_prompts_are_timed_if_short_ones_are_bound_by_reading_weights() -> None:
    gpu = PerfModel(Profile.load("h200-qwen3-8b"))
    model = rough(FakeDevice(gpu))
    for tokens in (512, 2048, 8192):
        assert model.step_ms(Work.prefill(tokens)) == pytest.approx(gpu.step_ms(Work.prefill(tokens)), rel=0.25)


@pytest.fixture
def cpu() -> PerfModel:
    cost = {"tokens": (1, 4096), "tokens_ms": (0.1, 409.6)}
    shares = ({"share": 1, "decode": cost, "prefill": cost},)
    return PerfModel(
        Profile.model_validate(
            {"schema": "cpd-profile/1", "source": "measured", "device": "d", "model": "m", "shares": shares}
        )
    )


def test_long_prompts_are_not_timed_if_short_ones_reach_full_speed(cpu: PerfModel) -> None:
    device = FakeDevice(cpu)
    rough(device)
    assert max(device.chunks) == 256


def test_other_work_on_the_machine_does_not_change_the_profile(cpu: PerfModel) -> None:
    model = rough(FakeDevice(cpu, disturbed=3.0))
    for tokens in (16, 100, 256, 4000):
        assert model.step_ms(Work.prefill(tokens)) == pytest.approx(cpu.step_ms(Work.prefill(tokens)))
    assert Colocation(model).max_tokens == Colocation(cpu).max_tokens


class FakeLane:
    """A lane of a FakeDevice. The other one slows it down while it has a step."""

    def __init__(self, model: PerfModel, share: float) -> None:
        self.share = share
        self.other: FakeLane | None = None
        self.work: Work | None = None
        self._model = model

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        self.work, self._asked = work_of(batch), 0
        assert self.other is not None
        self._set_ms(self.other.work)
        self.other._set_ms(self.work)

    def _set_ms(self, other: Work | None) -> None:
        if self.work is not None:
            self._ms = self._model.step_ms(self.work, self.share, other)

    def done(self) -> bool:
        self._asked += 1
        return self._asked > 3

    def collect(self) -> StepResult:
        self.work = None
        return StepResult([], 0.0, self._ms)


def test_lanes_and_the_context_of_decodes_are_measured() -> None:
    costs = {
        share: {"tokens": (1, 4096), "tokens_ms": (factor, 4096 * factor), "context_ms": 0.01 * factor, "slowdown": 1.5}
        for share, factor in ((0.25, 0.2), (0.75, 0.12), (1.0, 0.1))
    }
    shares = tuple({"share": share, "decode": cost, "prefill": cost} for share, cost in costs.items())
    about = {"schema": "cpd-profile/1", "source": "measured", "device": "d", "model": "m"}
    true = PerfModel(Profile.model_validate(about | {"shares": shares}))
    device, prefill, decode = FakeDevice(true), FakeLane(true, 0.75), FakeLane(true, 0.25)
    prefill.other, decode.other = decode, prefill
    device.splits = (Split(cast(Lane, prefill), cast(Lane, decode)),)
    model = rough(device)
    decodes, prompt = Work.decode(20, 5000), Work.prefill(300)
    assert model.step_ms(decodes) == pytest.approx(true.step_ms(decodes), rel=0.01)
    for work, share, other in ((decodes, 0.25, prompt), (prompt, 0.75, decodes)):
        assert model.step_ms(work, share) == pytest.approx(true.step_ms(work, share), rel=0.01)
        assert model.step_ms(work, share, other) == pytest.approx(true.step_ms(work, share, other), rel=0.01)


def test_longer_chunks_are_as_fast_as_the_last_measured_one(checkpoint: MakeCheckpoint) -> None:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=1 << 20, max_model_len=0)
    model = PerfModel(measure_rough_profile(runner, runner.config.max_model_len, device="d", model="m"))
    last = model.profile.shares[0].prefill.tokens[-2]
    for times in (2, 3, 16):
        assert model.step_ms(Work.prefill(times * last)) == pytest.approx(times * model.step_ms(Work.prefill(last)))


def test_more_tokens_never_take_less_time(checkpoint: MakeCheckpoint) -> None:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=1 << 20, max_model_len=0)
    model = PerfModel(measure_rough_profile(runner, runner.config.max_model_len, device="d", model="m"))
    short, long = Work.prefill(16), Work.prefill(512)
    assert 0 < model.step_ms(short) <= model.step_ms(long)
    assert 0 < model.step_ms(Work.decode(1, 100)) <= model.step_ms(Work.decode(8, 800))
    assert model.step_ms(long, 0.5) > 0


def test_the_smallest_pool_and_context_suffice(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    runner = TorchRunner(directory, dtype="auto", device="cpu", kv_bytes=1 << 17, max_model_len=12)
    assert runner.num_pages < 8
    assert PerfModel(measure_rough_profile(runner, 12, device="d", model="m")).step_ms(Work.prefill(12)) > 0
