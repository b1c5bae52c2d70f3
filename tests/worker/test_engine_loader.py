"""What the engine's loader tells people."""

import pytest
import torch
from pydantic import ByteSize

from cpd.common.errors import ConfigError
from cpd.common.settings import WorkerSettings
from tests.conftest import MakeCheckpoint
from worker import engine_loader


@pytest.mark.parametrize(("quota", "warned"), [(None, False), (0.5, True), (1000.0, False)])
def test_a_cpu_quota_below_the_number_of_threads_gives_a_warning(
    quota: float | None,
    warned: bool,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_loader, "core_quota", lambda: quota)
    settings = WorkerSettings(model=str(checkpoint("qwen3")), device="cpu", kv_memory=1 << 20, max_num_seqs=4)
    engine_loader.load_engine(settings)
    assert ("--cpuset-cpus" in caplog.text) == warned


def test_what_a_model_will_take_is_known_before_it_is_loaded(checkpoint: MakeCheckpoint) -> None:
    settings = WorkerSettings(model=str(checkpoint("qwen3")), device="cpu", kv_memory=ByteSize(1 << 20))
    expected = engine_loader.expected_memory(settings)
    assert 1 << 20 < expected.size < 1 << 30
    assert engine_loader.expected_memory(settings) == expected
    larger = engine_loader.expected_memory(settings.model_copy(update={"kv_memory": 1 << 21}))
    assert larger.size == expected.size + (1 << 20)
    assert larger.fingerprint != expected.fingerprint
    other = engine_loader.expected_memory(settings.model_copy(update={"model": str(checkpoint("llama2"))}))
    assert other.fingerprint != expected.fingerprint


def test_a_model_that_cannot_be_on_a_shared_device_is_refused_before_it_is_loaded(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--model must name a checkpoint directory"):
        engine_loader.expected_memory(WorkerSettings(model="/nowhere"))
    monkeypatch.setattr(engine_loader, "resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigError, match="--device-memory is for machines without GPUs so far"):
        engine_loader.expected_memory(WorkerSettings(model=str(checkpoint("qwen3"))))
