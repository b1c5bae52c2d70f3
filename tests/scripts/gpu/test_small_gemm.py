import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.setup import DECODE_SHARES
from scripts.gpu import small_gemm
from scripts.gpu.common import relative_error
from scripts.gpu.models import MODELS, model_config, step_bytes
from scripts.gpu.results import Exit
from scripts.gpu.small_gemm import Product, Tiling, by_triton, matrices
from scripts.gpu.workloads import Gemm
from tests.scripts.gpu.fake_gpu import FakeGpu, take_time
from tests.scripts.gpu.test_engine_steps import SMALL


@pytest.mark.parametrize("fields", [SMALL, *MODELS.values()])
def test_the_matrices_are_all_that_a_step_reads(fields: dict[str, object]) -> None:
    config = model_config(fields)
    weights = sum(matrix.bytes * matrix.count for matrix in matrices(config))
    assert weights == pytest.approx(step_bytes(config, []), rel=2e-2)  # which has the norms, too


@pytest.mark.parametrize("evict", ["", "evict_first"])
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_the_kernel_multiplies_any_rows_and_columns(rows: int, evict: str) -> None:
    """Interpreted where there is no GPU, in float16, since the interpreter cuts to bfloat16 off."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, weight = torch.randn(rows, 64, device=device).half(), torch.randn(70, 64, device=device).half()
    out = torch.full((rows, 70), torch.nan, dtype=torch.float16, device=device)
    by_triton(Tiling(16, 32, 1, 4), evict)(x, weight, out)
    assert relative_error(out, x.double() @ weight.double().T) < 2e-3


@pytest.fixture
def run(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretend_device: None
) -> Callable[[], dict[str, Any]]:
    """The whole experiment with a small model; a product takes so many ms on the whole device as its kind is told."""
    monkeypatch.setattr(small_gemm, "require", lambda *_: None)
    monkeypatch.setattr(small_gemm, "require_cuda", lambda: torch.device("cpu"))
    monkeypatch.setattr(small_gemm, "CudaDriver", lambda: gpu.driver)
    monkeypatch.setattr(small_gemm, "MODELS", {small_gemm.MODEL: SMALL})
    monkeypatch.setattr(small_gemm, "STREAM_BYTES", 1 << 14)
    monkeypatch.setattr(small_gemm, "Gemm", lambda device, rows: Gemm(device, rows, hidden=16, width=16))
    take_time(gpu, monkeypatch, Gemm)

    def product(ms: float) -> Product:
        def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            gpu.launch(lambda _: torch.mm(x, weight.T, out=out), lambda sms: ms * gpu.sms / sms)  # type: ignore[arg-type]

        return launch

    def too_large(*_: object) -> None:
        raise ValueError("out of resource: shared memory")

    ways = {
        "cuBLAS": [("cuBLAS", product(2.0))],
        "Triton": [("a", product(3.0)), ("b", product(1.0)), ("c", too_large)],
    }
    monkeypatch.setattr(small_gemm, "kernels", lambda: ways)

    def run() -> dict[str, Any]:
        assert small_gemm.main(["--out", str(tmp_path)]) == Exit.OK
        content: dict[str, Any] = json.loads((tmp_path / "small_gemm.json").read_text())
        return content

    return run


def test_the_best_tiling_of_each_kind_counts(run: Callable[[], dict[str, Any]]) -> None:
    content = run()
    figures = {figure["name"]: figure for figure in content["figures"]}
    name = f"{small_gemm.MODEL}: linear layers of a step, 16 rows"
    layers = 4 * 2 + 1
    assert figures[f"{name}, cuBLAS"]["value"] == pytest.approx(2.0 * layers, rel=1e-2)
    assert figures[f"{name}, Triton"]["value"] == pytest.approx(1.0 * layers, rel=1e-2)
    assert figures[f"{name}, Triton"]["floor"] == figures[f"{name}, cuBLAS"]["floor"] > 0
    assert {point["how"] for point in content["series"]["16 rows"]} == {"cuBLAS", "b"}
    assert all(figure["met"] for figure in content["figures"] if figure["target"])
    beside = [name for name in figures if "beside" in name]
    assert len(beside) == 2 * len(DECODE_SHARES)


def test_a_kind_that_never_runs_is_no_result(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    def broken(*_: object) -> None:
        raise ValueError("out of resource")

    work = small_gemm.Stream(small_gemm.Matrix("o", 16, 16, 1), 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="none of these runs: a"):
        small_gemm.best_of(work, [("a", broken)], gpu.current)  # type: ignore[arg-type]
