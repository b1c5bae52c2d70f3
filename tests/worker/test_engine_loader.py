"""What the engine's loader tells people."""

import pytest

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
