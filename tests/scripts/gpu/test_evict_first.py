import json
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts.gpu import evict_first, run
from scripts.gpu.probes import Policy, Probes
from scripts.gpu.results import Exit
from scripts.gpu.workloads import Gemm, PageReads
from tests.scripts.gpu.fake_gpu import FakeGpu, FakeProbes, take_time


def test_every_gemm_runs_beside_every_kind_of_load(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend_device: None
) -> None:
    probes = FakeProbes(gpu)
    monkeypatch.setattr(evict_first, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(evict_first, "CudaDriver", lambda: gpu.driver)
    monkeypatch.setattr(Probes, "build", lambda device: probes)
    monkeypatch.setattr(evict_first, "PageReads", partial(PageReads, pages=4, page_bytes=32768))
    monkeypatch.setattr(evict_first, "Gemm", partial(Gemm, hidden=16, width=16))
    take_time(gpu, monkeypatch, Gemm)
    monkeypatch.setattr(evict_first, "ROWS", (16,))
    assert run.main(["evict_first", "--out", str(tmp_path)]) == Exit.OK
    figures = json.loads((tmp_path / "evict_first.json").read_text())["figures"]
    names = [figure["name"] for figure in figures]
    for policy in ("plain", "streaming", "evict_first"):
        assert f"wrong pages, {policy}" in names
        assert f"116 + 16 SMs: GEMM of 16 rows beside pages, {policy}" in names
    assert all(figure["met"] for figure in figures if figure["target"])
    assert set(probes.policies) == set(Policy)
