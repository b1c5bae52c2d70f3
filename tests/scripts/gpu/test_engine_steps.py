"""The experiments that run the engine, with a small model on a CPU."""

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.execution.executor import StepResult
from engine.model.parameters import expected_tensors
from scripts.gpu import (
    attention_layout,
    decode_floor,
    interference,
    mixed_regime,
    serving,
    transformers_batching,
)
from scripts.gpu.models import MODELS, kv_bytes, model_config, random_pages, step
from scripts.gpu.random_model import StepTime, ahead_ms, random_runner
from scripts.gpu.results import Report
from tests.scripts.gpu.test_results import CEILINGS, ENVIRONMENT

SMALL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def report() -> Report:
    return Report("steps", "?", ENVIRONMENT, CEILINGS)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(*args: object, **_: object) -> StepTime:
        from scripts.gpu.random_model import step_ms

        return step_ms(*args, warmup=0, repeats=1)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_floor, "step_ms", once)
    monkeypatch.setattr(mixed_regime, "step_ms", once)


def test_a_runner_has_room_for_what_was_asked() -> None:
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    assert runner.config.vocab_size == 96
    assert runner.num_pages == 5  # page 0 stays empty


def test_on_a_gpu_slower_kernels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker would accept them, but the experiment must not report their figures as the fastest kernels'."""

    def broken() -> None:
        raise OSError("no C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("engine.execution.runner.check_memory", lambda *_: None)
    monkeypatch.setattr("engine.ops.TritonOps", broken)
    with pytest.raises(OSError, match="no C compiler"):
        random_runner(SMALL, tokens=64, graph_decodes=0)


def test_a_gpu_without_lanes_is_an_error_where_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(*_: object, lanes: bool, **__: object) -> SimpleNamespace:
        return SimpleNamespace(pool=SimpleNamespace(is_cuda=True), splits=[])

    monkeypatch.setattr("scripts.gpu.random_model.TorchRunner", runner)
    random_runner(SMALL, tokens=64, graph_decodes=0)
    with pytest.raises(RuntimeError, match="lanes"):
        random_runner(SMALL, tokens=64, graph_decodes=0, lanes=True)


ENGINES = [decode_floor, serving, interference, transformers_batching, mixed_regime]


@pytest.mark.parametrize("experiment", ENGINES)
def test_an_engine_is_measured_in_a_process_like_a_workers(
    report: Report, monkeypatch: pytest.MonkeyPatch, experiment: ModuleType
) -> None:
    called: list[str] = []
    monkeypatch.setattr(experiment, "require", lambda *_: None)
    monkeypatch.setattr(experiment, "as_in_a_worker", lambda: called.append("set up"))
    monkeypatch.setattr(experiment, "measure_all", lambda *_: called.append("measured"))
    experiment.run(report)
    assert called == ["set up", "measured"]


def test_a_process_set_up_like_a_worker_has_short_waits() -> None:
    code = (
        "import gc, sys; from scripts.engine_driver import as_in_a_worker; as_in_a_worker();"
        "print(sys.getswitchinterval() < 1e-3, gc.get_freeze_count() > 0)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "True"]


GIB = 2**30
H100_GIB = 78.0
BESIDE_GIB = 8.0
"""Memory for the context, kernels, workspaces, activations of the longest chunk, and captured graphs."""


@pytest.mark.parametrize("experiment", ENGINES)
def test_weights_and_pages_of_every_experiment_fit_into_an_h100(
    report: Report, monkeypatch: pytest.MonkeyPatch, experiment: ModuleType
) -> None:
    made: list[float] = []

    def runner(fields: Mapping[str, object], *, tokens: int, **_: object) -> None:
        config = model_config(fields)
        weights = 2 * sum(math.prod(shape) for shape in expected_tensors(config).values())
        made.append((weights + tokens * kv_bytes(config)) / GIB)
        raise StopIteration

    monkeypatch.setattr(experiment, "random_runner", runner)
    with pytest.raises(StopIteration):
        experiment.measure_all(report, MODELS[experiment.MODEL])
    assert 10 < made[0] < H100_GIB - BESIDE_GIB


def test_three_layouts_of_the_attentions_pool_fit_into_an_h100() -> None:
    pages = [model_config(fields).page_bytes("bfloat16") for fields in MODELS.values()]
    assert 3 * attention_layout.POOL_PAGES * max(pages) / GIB < H100_GIB - BESIDE_GIB


def test_decode_floor_compares_graphs_with_eager_and_an_outlier_with_uniform_lengths(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_floor, "BATCHES", (1, 3))
    monkeypatch.setattr(decode_floor, "CONTEXT", 48)
    monkeypatch.setattr(decode_floor, "OUTLIER", [(1, 8)] * 2 + [(1, 65)])
    monkeypatch.setattr(decode_floor, "UNIFORM", [(1, 27)] * 3)
    decode_floor.measure_all(report, SMALL, device="cpu")
    names = {figure.name: figure for figure in report.figures}
    assert names["Llama-3-8B: decode 1: eager / graph"].target == decode_floor.MIN_GAIN
    assert names["Llama-3-8B: decode 3: eager / graph"].target is None
    share = names["Llama-3-8B: decode 3 x 48: share of the floor"]
    step = names["Llama-3-8B: decode 3 x 48, graph"]
    assert step.floor is not None
    assert step.value is not None
    assert share.value == pytest.approx(step.floor / step.value)
    assert names["Llama-3-8B: outlier / uniform"].target == decode_floor.MAX_OUTLIER
    assert {"Llama-3-8B: decode 1 x 48: no kernel", "Llama-3-8B: decode 3 x 48: no kernel"} <= names.keys()


class QueueingLane:
    """Chooses token 7 for each sample, and checks the order of launches. See `engine.execution.executor.Lane`."""

    share, overlaps = 1.0, True

    def __init__(self) -> None:
        self.overlapped: list[bool] = []
        self._launched = 0

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        assert self._launched <= (batch.token_sources is not None)
        if batch.token_sources is not None:
            assert batch.token_sources.tolist() == list(range(len(batch.samples)))
        self.overlapped.append(batch.token_sources is not None)
        self._launched += 1

    def done(self) -> bool:
        return self._launched > 0

    def collect(self) -> StepResult:
        self._launched -= 1
        return StepResult([], 0.0, 0.0)


def test_steps_that_are_launched_ahead_are_fed_by_the_one_before() -> None:
    lane, rng = QueueingLane(), np.random.default_rng(0)
    lens = [(1, 20)] * 3
    batch = step(lens, random_pages(lens, 20, rng), 100, rng)
    times = ahead_ms(lane, batch, warmup=1, repeats=2)
    assert lane.overlapped == [False, True, True, True]
    assert not lane.done()
    assert times.launch.median <= times.whole.median


def test_the_outlier_has_as_many_tokens_as_the_uniform_lengths() -> None:
    assert sum(context for _, context in decode_floor.OUTLIER) == sum(context for _, context in decode_floor.UNIFORM)
    assert len(decode_floor.OUTLIER) == len(decode_floor.UNIFORM) == 128


def test_mixed_regime_reports_a_slowdown_for_every_pair(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_regime, "DECODES", (1, 2))
    monkeypatch.setattr(mixed_regime, "CHUNKS", (16, 32))
    monkeypatch.setattr(mixed_regime, "CONTEXT", 48)
    mixed_regime.measure_all(report, SMALL, device="cpu")
    names = {figure.name: figure for figure in report.figures}
    assert names["Qwen3-8B: prefill 32: share of the peak"].target == mixed_regime.MIN_PREFILL_SHARE
    assert "Qwen3-8B: prefill 32: no kernel" in names
    for count in (1, 2):
        for chunk in (16, 32):
            slowdown = names[f"Qwen3-8B: decode {count} with prefill {chunk}: slowdown"].value
            mixed = names[f"Qwen3-8B: decode {count} with prefill {chunk}"].value
            alone = names[f"Qwen3-8B: decode {count}"].value
            assert mixed is not None
            assert alone is not None
            assert slowdown == pytest.approx(mixed / alone)
