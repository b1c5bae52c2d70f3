import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.cuda.setup import DECODE_SHARES
from scripts.gpu import decode_kernels, decode_work
from scripts.gpu.decode_work import Attention, Matrix, Products, Tiling, Way, Work, matrices
from scripts.gpu.models import MODELS, model_config, step_bytes
from scripts.gpu.results import Exit
from scripts.gpu.run import main
from scripts.gpu.workloads import Gemm
from tests.scripts.gpu.fake_gpu import FakeGpu, take_time
from tests.scripts.gpu.test_engine_steps import SMALL
from tests.scripts.gpu.test_workloads import FakeWrapper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter does not multiply bfloat16."""


@pytest.mark.parametrize("fields", [SMALL, *MODELS.values()])
def test_the_matrices_are_all_that_a_step_reads(fields: dict[str, object]) -> None:
    config = model_config(fields)
    weights = sum(matrix.bytes * matrix.count for matrix in matrices(config))
    assert weights == pytest.approx(step_bytes(config, []), rel=2e-2)  # which includes the norms


def check_every_way(work: Work) -> None:
    """Without a GPU, Triton's kernels are interpreted. FlashInfer is not available."""
    ways = [way for kind, ways in work.ways().items() if kind != "FlashInfer" for way in ways]
    assert len(ways) >= 3
    assert all(decode_kernels.MAX_ERROR.met(work.error(way)) for way in ways)


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_products_are_right_for_any_rows_and_columns(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(decode_work, "STREAM_BYTES", 2 * 2 * 64 * 300)
    monkeypatch.setattr(decode_work, "GEMM_TILINGS", {True: [Tiling(16, 32, 3)], False: [Tiling(32, 64, 1)]})
    check_every_way(Products(Matrix("m", 64, 300, 1), rows, DEVICE, DTYPE))


@pytest.mark.parametrize(("sequences", "context"), [(1, 1), (2, 37), (1, 150)])
def test_attention_is_right_however_its_context_is_divided(
    monkeypatch: pytest.MonkeyPatch, sequences: int, context: int
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(decode_work, "STREAM_BYTES", 1)
    tilings = {True: [Tiling(32, 2, 3)], False: [Tiling(64, 1, 1), Tiling(16, 4, 1)]}
    monkeypatch.setattr(decode_work, "ATTENTION_TILINGS", tilings)
    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    check_every_way(Attention(flashinfer, sequences, context, DEVICE, DTYPE))


def test_attention_reads_as_much_as_it_says() -> None:
    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_work, "STREAM_BYTES", 1 << 20)
        work = Attention(flashinfer, 2, 32, torch.device("cpu"))
    layers = work._paged.layers
    assert sum(kv.numel() for kv in layers) * 2 == work.parts * work.part_bytes
    assert len({kv.data_ptr() for kv in layers}) == work.parts > 1
    assert work.error(work.ways()["FlashInfer"][0]) < 1e-2


class FakeWork:
    """See `decode_work.Work`. Has two parts; each kind has a fixed time on the whole device."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.name, self.parts, self.part_bytes = name, 2, 1 << 20
        self._gpu = gpu

    def ways(self) -> Mapping[str, Sequence[Way]]:
        def too_large() -> None:
            raise ValueError("out of resource: shared memory")

        return {
            "library": [Way("library", self._taking(4.0))],
            "Triton": [Way("a", self._taking(6.0)), Way("b", self._taking(2.0)), Way("c", too_large)],
            "wrong": [Way("wrong", self._taking(1.0))],
            "too large": [Way("too large", too_large)],
        }

    def error(self, way: Way) -> float:
        return math.nan if way.how == "wrong" else 0.0

    def _taking(self, ms: float) -> Callable[[], None]:
        return lambda: self._gpu.launch(lambda _: None, lambda sms: ms * self._gpu.sms / sms)


def test_the_best_tiling_of_each_kind_that_is_right_counts(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend_device: None
) -> None:
    for name, stand_in in {
        "require": lambda *_: None,
        "require_cuda": lambda: torch.device("cpu"),
        "CudaDriver": lambda: gpu.driver,
        "MODELS": {decode_kernels.MODEL: SMALL},
        "Products": lambda matrix, rows, _: FakeWork(gpu, f"{rows} rows, {matrix.name}"),
        "Attention": lambda _library, sequences, context, _: FakeWork(gpu, f"attention of {sequences} x {context}"),
        "Gemm": partial(Gemm, hidden=16, width=16),
    }.items():
        monkeypatch.setattr(decode_kernels, name, stand_in)
    take_time(gpu, monkeypatch, Gemm)
    assert main(["decode_kernels", "--out", str(tmp_path)]) == Exit.OK
    content: dict[str, Any] = json.loads((tmp_path / "decode_kernels.json").read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    layers = f"{decode_kernels.MODEL}: linear layers of a step, 16 rows"
    matrices_of_a_step = 4 * 2 + 1
    assert figures[f"{layers}, library"]["value"] == pytest.approx(2.0 * matrices_of_a_step, rel=1e-2)
    assert figures[f"{layers}, Triton"]["value"] == pytest.approx(1.0 * matrices_of_a_step, rel=1e-2)
    assert figures[f"{layers}, Triton"]["floor"] == figures[f"{layers}, library"]["floor"] > 0
    assert figures["16 rows, o, Triton"]["note"] == "b"
    assert figures[f"{decode_kernels.MODEL}: attention of 64 x 1024, Triton"]["value"] == pytest.approx(2.0, rel=1e-2)
    assert figures["16 rows, o, wrong: relative error"]["met"] is False
    assert figures["16 rows, o, too large"]["value"] is None
    assert f"{layers}, wrong" not in figures
    beside = [name for name in figures if "beside" in name]
    assert len(beside) == len(DECODE_SHARES) * 2 * 2
    assert not gpu.driver.contexts
