"""A worker's settings and role determine its runner."""

from typing import Any

import pytest

from cpd.common.settings import Role, WorkerSettings
from engine.execution.runner import TorchRunner
from tests.conftest import MakeCheckpoint
from worker import engine_loader


@pytest.mark.parametrize(("role", "graphs"), [("combined", True), ("prefill", False)])
def test_a_prefill_worker_captures_no_decode_graphs(
    role: Role, graphs: bool, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has room for steps with this many sequences: each may need only its last token."""
    asked: list[dict[str, Any]] = []

    class Spy(TorchRunner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            asked.append(kwargs)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(engine_loader, "TorchRunner", Spy)
    settings = WorkerSettings(model=str(checkpoint("qwen3")), device="cpu", kv_memory=1 << 20, max_num_seqs=4)
    assert engine_loader.load_engine(settings).engine.max_num_seqs == 4
    assert [(kwargs["graphs"], kwargs["max_num_seqs"]) for kwargs in asked] == [(graphs, 4)]


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
