import json
from functools import partial
from pathlib import Path

import pytest
import torch

from cpd.performance.split import Device, lane_splits
from scripts.gpu import two_kernels, workloads
from scripts.gpu.probes import Probes
from scripts.gpu.results import Exit, Report
from scripts.gpu.run import main
from scripts.gpu.two_kernels import Pair, Point, curve, plan, study
from scripts.gpu.workloads import Compute, ContiguousDecode, Gemm, PageReads
from tests.scripts.gpu.fake_gpu import FakeGpu, FakeProbes, take_time

CPU = torch.device("cpu")


def compute_and_memory(gpu: FakeGpu, every: int = 1) -> Pair:
    """Two kernels of 1 ms each on the whole device; a third of the SMs is enough for the memory-bound one."""
    return Pair(
        "compute | memory",
        partial(gpu.launch, lambda _: None, lambda sms: 132 / sms),
        partial(gpu.launch, lambda _: None, lambda sms: max(1.0, 44 / sms)),
        every,
    )


def values(report: Report) -> dict[str, float]:
    return {figure.name.split(": ")[1]: figure.value for figure in report.figures if figure.value is not None}


@pytest.mark.parametrize("every", [1, 3])
def test_the_planned_split_is_as_good_as_the_best_of_the_sweep(
    gpu: FakeGpu, experiment_report: Report, every: int
) -> None:
    study(experiment_report, gpu.driver, compute_and_memory(gpu, every), pieces=20)
    got = values(experiment_report)
    assert got["one stream"] == pytest.approx(40, rel=0.01)
    # compute on 100 of 132 SMs takes 1.32 ms a piece, memory on the other 32 takes 1.375 ms
    assert got["best split"] == pytest.approx(20 * 1.375, rel=0.02)
    assert got["as planned / best split"] <= 1.03
    assert got["one stream / best split"] == pytest.approx(got["one stream"] / got["best split"])
    curves = experiment_report.series["compute | memory"]
    assert len(curves) == len(lane_splits(Device(132, 8, 8))[::every])
    assert all(point["first_sms"] + point["second_sms"] == 132 for point in curves)


def test_work_that_gains_nothing_from_a_split_is_planned_one_after_the_other(
    gpu: FakeGpu, experiment_report: Report
) -> None:
    launch = partial(gpu.launch, lambda _: None, lambda sms: (132 / sms) ** 1.5)
    study(experiment_report, gpu.driver, Pair("a | b", launch, launch, every=5), pieces=10)
    planned = next(figure for figure in experiment_report.figures if figure.name == "a | b: as planned")
    assert planned.note.startswith("one after the other")
    assert planned.value == pytest.approx(20, rel=0.01)


def test_a_split_that_clusters_do_not_fit_is_left_out(
    gpu: FakeGpu, experiment_report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.driver.no_clusters_on = 12
    study(experiment_report, gpu.driver, compute_and_memory(gpu), pieces=2)
    sizes = [point["second_sms"] for point in experiment_report.series["compute | memory"]]
    assert len(sizes) == len(lane_splits(Device(132, 8, 8))) - 2
    assert not {12, 120} & set(sizes)
    assert "12 SMs" in capsys.readouterr().out


def test_a_split_that_the_device_does_not_have_is_planned_around(gpu: FakeGpu, experiment_report: Report) -> None:
    """The best split gives 32 SMs to the second kind; this device can split off 72 at most."""
    gpu.driver.most = 72
    gpu.driver.no_clusters_on = 32
    study(experiment_report, gpu.driver, compute_and_memory(gpu), pieces=2)
    planned = next(figure for figure in experiment_report.figures if figure.name == "compute | memory: as planned")
    opened = {point["second_sms"] for point in experiment_report.series["compute | memory"]}
    assert int(planned.note.split(" + ")[1].split()[0]) in opened - {32}


def test_the_planner_uses_times_beside_the_other_work() -> None:
    points = [Point(132 - size, size, 1.0, 1.0, 1.0 if size == 64 else 5.0, 1.0, 0.0) for size in range(8, 128, 8)]
    chosen = plan(points, (3.0, 3.0), Device(132, 8, 8), pieces=10)
    assert chosen.second_sms[0] == 64
    assert chosen.ms == pytest.approx(10.0)


def test_a_curve_is_straight_in_speed_and_level_beyond_its_points() -> None:
    times = curve({40: 2.0, 20: 4.0})
    assert times(20) == 4.0
    assert times(30) == pytest.approx(1 / 0.375)
    assert times(8) == 4.0
    assert times(132) == 2.0


def test_the_whole_experiment_runs_and_its_results_are_a_file(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend_device: None
) -> None:
    monkeypatch.setattr(two_kernels, "require_cuda", lambda: CPU)
    monkeypatch.setattr(two_kernels, "CudaDriver", lambda: gpu.driver)
    monkeypatch.setattr(Probes, "build", lambda device: FakeProbes(gpu))
    monkeypatch.setattr(workloads, "Compute", partial(Compute, blocks=2))
    monkeypatch.setattr(two_kernels, "PageReads", partial(PageReads, pages=4, page_bytes=32768))
    monkeypatch.setattr(two_kernels, "Gemm", partial(Gemm, hidden=16, width=16))
    take_time(gpu, monkeypatch, Gemm)
    take_time(gpu, monkeypatch, ContiguousDecode)
    for name, value in {"PIECES": 2, "SEQUENCES": 2, "CONTEXT": 16, "ROUNDS": 1, "PREFILL_ROWS": 16}.items():
        monkeypatch.setattr(two_kernels, name, value)
    assert main(["two_kernels", "--out", str(tmp_path)]) == Exit.OK
    content = json.loads((tmp_path / "two_kernels.json").read_text())
    assert [name.split(":")[0] for name in content["series"]] == [
        "compute | memory",
        "prefill GEMM | decode GEMM",
        "prefill GEMM | decode attention (torch, contiguous)",
    ]
    gain = next(
        figure for figure in content["figures"] if figure["name"] == "compute | memory: one stream / best split"
    )
    assert gain["target"]["at_least"] == 1.34
    assert gain["met"] is True
