from pathlib import Path

import pytest
import torch

from scripts.gpu import run
from scripts.gpu.results import Report
from tests.engine.execution.cuda.fakes import FakeDriver
from tests.scripts.gpu.fake_gpu import FakeGpu
from tests.scripts.gpu.test_results import CEILINGS, ENVIRONMENT


@pytest.fixture
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `run_experiment` run on the CPU."""
    monkeypatch.setattr(run, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(run, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(run, "measure_ceilings", lambda: CEILINGS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake GPU that replaces `torch.cuda`."""
    fake = FakeGpu(FakeDriver(), 132)
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def experiment_report(tmp_path: Path) -> Report:
    """A report of an experiment that writes into `tmp_path`."""
    return Report("experiment", "?", ENVIRONMENT, CEILINGS, tmp_path)
