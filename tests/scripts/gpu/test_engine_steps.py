"""The experiments that run the engine, with a small model on a CPU."""

import pytest

from scripts.gpu import decode_floor, mixed_regime
from scripts.gpu.common import Timing
from scripts.gpu.random_model import random_runner
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
    def once(*args: object, **_: object) -> Timing:
        from scripts.gpu.random_model import step_ms

        return step_ms(*args, warmup=0, repeats=1)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_floor, "step_ms", once)
    monkeypatch.setattr(mixed_regime, "step_ms", once)


def test_a_runner_has_room_for_what_was_asked() -> None:
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    assert runner.config.vocab_size == 96
    assert runner.num_pages == 5  # page 0 stays empty


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


def test_the_outlier_has_as_many_tokens_as_the_uniform_lengths() -> None:
    assert sum(context for _, context in decode_floor.OUTLIER) == sum(context for _, context in decode_floor.UNIFORM)
    assert len(decode_floor.OUTLIER) == len(decode_floor.UNIFORM) == 128


def test_mixed_regime_reports_a_stretch_for_every_pair(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_regime, "DECODES", (1, 2))
    monkeypatch.setattr(mixed_regime, "CHUNKS", (16, 32))
    monkeypatch.setattr(mixed_regime, "CONTEXT", 48)
    mixed_regime.measure_all(report, SMALL, device="cpu")
    names = {figure.name: figure for figure in report.figures}
    assert names["Qwen3-8B: prefill 32: share of the peak"].target == mixed_regime.MIN_PREFILL_SHARE
    for count in (1, 2):
        for chunk in (16, 32):
            stretch = names[f"Qwen3-8B: decode {count} with prefill {chunk}: stretch"].value
            mixed = names[f"Qwen3-8B: decode {count} with prefill {chunk}"].value
            alone = names[f"Qwen3-8B: decode {count}"].value
            assert mixed is not None
            assert alone is not None
            assert stretch == pytest.approx(mixed / alone)
