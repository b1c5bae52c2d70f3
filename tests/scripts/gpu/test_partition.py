import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.cuda.driver import CudaError
from scripts.gpu import partition, workloads
from scripts.gpu.probes import Probes
from scripts.gpu.results import Exit
from scripts.gpu.run import main
from scripts.gpu.workloads import Compute, Gemm
from tests.scripts.gpu.fake_gpu import FakeGpu, FakeGraph, FakeProbes, FakeStream, take_time


@pytest.fixture
def run(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend_device: None
) -> Callable[[], dict[str, Any]]:
    """Runs the whole experiment without FlashInfer; returns its figures by name."""
    monkeypatch.setattr(partition, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(partition, "CudaDriver", lambda: gpu.driver)
    monkeypatch.setattr(Probes, "build", lambda device: FakeProbes(gpu))
    monkeypatch.setattr(workloads, "Compute", partial(Compute, blocks=2))
    monkeypatch.setattr(partition, "Gemm", partial(Gemm, hidden=16, width=16))
    monkeypatch.setattr(partition, "PREFILL_ROWS", 16)
    take_time(gpu, monkeypatch, Gemm)

    def run() -> dict[str, Any]:
        assert main(["partition", "--out", str(tmp_path)]) == Exit.MISSING
        content = json.loads((tmp_path / "partition.json").read_text())
        assert "flashinfer" in content["error"]
        return {figure["name"]: figure for figure in content["figures"]}

    return run


def test_a_device_that_keeps_its_parts_apart_meets_every_target(
    gpu: FakeGpu, run: Callable[[], dict[str, Any]]
) -> None:
    figures = run()
    assert not [figure for figure in figures.values() if figure["met"] is False]
    assert figures["smallest part"]["value"] == 8
    assert figures["splits that can be opened"]["value"] == 30
    assert figures["SMs of the other part: replayed on the other"]["value"] == 0
    assert any(name.startswith("cuBLAS, prefill, on 100 SMs, replayed") for name in figures)
    assert set(gpu.capture_modes) == {"thread_local"}
    assert not gpu.driver.contexts


def test_work_that_leaves_its_part_is_counted(
    gpu: FakeGpu, run: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "sms_of_current", lambda: list(range(gpu.sms)))
    assert run()["SMs of the other part: launched"]["met"] is False


def test_a_graph_that_forgets_its_part_is_counted(
    gpu: FakeGpu, run: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture_nothing(stream: FakeStream, launch: Callable[[], None]) -> FakeGraph:
        graph = FakeGraph()
        graph.nodes.append(launch)  # runs wherever it is replayed
        return graph

    monkeypatch.setattr(partition, "capture_on", capture_nothing)
    figures = run()
    assert figures["SMs of the other part: replayed on its own stream"]["value"] == 0
    assert figures["SMs of the other part: replayed on the other"]["met"] is False
    assert figures["SMs of the other part: replayed on a plain one"]["met"] is False


def test_a_device_without_clusters_has_its_other_questions_answered(
    gpu: FakeGpu, run: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stream: int, blocks: int) -> int:
        raise CudaError("cuOccupancyMaxActiveClusters", "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(gpu.driver, "max_clusters", refuse)
    figures = run()
    assert figures["fewest clusters of 8 blocks"]["value"] is None
    assert figures["SMs of the other part: launched"]["value"] == 0


def test_parts_that_wait_for_each_other_are_seen(
    gpu: FakeGpu, run: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_queue = gpu.stream_of(-1)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: one_queue)
    both = run()["compute on 64 SMs, GEMM on 68: both to the end"]
    assert both["value"] == pytest.approx(2, rel=0.05)
    assert both["met"] is False
