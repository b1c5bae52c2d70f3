from collections.abc import Callable
from typing import Any, cast

import pytest

from cpd.performance.model import PerfModel, Profile, Work
from engine.batch import Batch
from engine.execution.executor import Executor, StepResult
from engine.execution.runner import TorchRunner
from engine.profile.rough import measure_rough_profile
from sim.device.runner import work_of
from tests.conftest import MakeCheckpoint


class FakeDevice:
    """A runner and its lane. Steps return at once, with the time that a model predicts."""

    def __init__(self, model: PerfModel) -> None:
        self.num_pages = 4096
        self.full = self
        self.chunks: list[int] = []
        self._model = model

    def copy_page(self, source: int, target: int) -> None:
        pass

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        if not batch.num_decodes:
            self.chunks.append(len(batch.token_ids))
        self._work = work_of(batch)

    def collect(self) -> StepResult:
        return StepResult([], 0.0, self._model.step_ms(self._work))


def rough(device: FakeDevice) -> PerfModel:
    about: dict[str, Any] = {"device": "d", "model": "m"}
    return PerfModel(measure_rough_profile(cast(Executor, device), 40_960, **about))


def test_long_prompts_are_timed_if_short_ones_are_bound_by_reading_weights() -> None:
    gpu = PerfModel(Profile.load("h200-qwen3-8b"))
    model = rough(FakeDevice(gpu))
    for tokens in (512, 2048, 8192):
        assert model.step_ms(Work.prefill(tokens)) == pytest.approx(gpu.step_ms(Work.prefill(tokens)), rel=0.25)


def test_long_prompts_are_not_timed_if_short_ones_reach_full_speed() -> None:
    cost = {"tokens": (1, 4096), "tokens_ms": (0.1, 409.6)}
    shares = ({"share": 1, "decode": cost, "prefill": cost},)
    profile = Profile.model_validate(
        {"schema": "cpd-profile/1", "source": "measured", "device": "d", "model": "m", "shares": shares}
    )
    device = FakeDevice(PerfModel(profile))
    rough(device)
    assert max(device.chunks) == 256


def test_more_tokens_never_take_less_time(checkpoint: MakeCheckpoint) -> None:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=1 << 20, max_model_len=0)
    model = PerfModel(measure_rough_profile(runner, runner.config.max_model_len, device="d", model="m"))
    short, long = Work.prefill(16), Work.prefill(512)
    assert 0 < model.step_ms(short) <= model.step_ms(long)
    assert 0 < model.step_ms(Work.decode(1, 100)) <= model.step_ms(Work.decode(8, 800))
    assert model.step_ms(long, 0.5) == 2 * model.step_ms(long)


def test_the_smallest_pool_and_context_suffice(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    runner = TorchRunner(directory, dtype="auto", device="cpu", kv_bytes=1 << 17, max_model_len=12)
    assert runner.num_pages < 8
    assert PerfModel(measure_rough_profile(runner, 12, device="d", model="m")).step_ms(Work.prefill(12)) > 0
