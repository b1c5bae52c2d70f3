import pytest
import torch

from scripts.gpu.models import step_bytes
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report
from scripts.gpu.step_parts import REST, KernelTime, kernel_times, report_parts
from tests.scripts.gpu.test_engine_steps import SMALL

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<...>>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, ...>", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "matrix products"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, __nv_bfloat16, ...>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, ...>", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn>", "matrix products"),
        ("add_rms_norm", "norms"),
        ("rope_store", "RoPE and store"),
        ("silu_mul", "activation"),
        ("Memcpy HtoD (Pinned -> Device)", REST),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>", REST),
    ],
)
def test_kernels_are_classified_by_their_names(kernel: str, kind: str) -> None:
    assert KernelTime(kernel, 1, 1.0).kind == kind


def sum_of_kernels(report: Report) -> float:
    """Total time of all kinds of kernels, ms."""
    return sum(figure.value or 0.0 for figure in report.figures if figure.name != "step: no kernel")


def test_what_runs_is_counted_per_step() -> None:
    x = torch.randn(32, 32)
    times = {time.name: time for time in kernel_times(lambda: (x @ x, x @ x), CPU, steps=3)}
    assert times["aten::mm"].count == 2
    assert times["aten::mm"].ms > 0


def test_all_of_a_steps_time_is_accounted_for(experiment_report: Report) -> None:
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    report_parts(experiment_report, runner, "step", [(16, 16), (8, 8)], 1000.0)
    assert sum(figure.value or 0.0 for figure in experiment_report.figures) == pytest.approx(1000.0)
    kernels = experiment_report.series["step: kernels"]
    assert sum(kernel["ms"] for kernel in kernels) == pytest.approx(sum_of_kernels(experiment_report))


def test_each_kind_stands_beside_its_floor(experiment_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    seen = [KernelTime("nvjet_a", 4, 5.0), KernelTime("flashinfer::b", 2, 2.0), KernelTime("nvjet_c", 1, 1.0)]
    monkeypatch.setattr("scripts.gpu.step_parts.kernel_times", lambda *_: seen)
    report_parts(experiment_report, runner, "step", [(1, 8)], 9.0)
    figures = {figure.name: figure for figure in experiment_report.figures}
    assert figures["step: matrix products"].value == 6.0
    assert figures["step: matrix products"].note == "5 launches; most of it nvjet_a"
    assert figures["step: no kernel"].value == 1.0
    products, attention = figures["step: matrix products"].floor, figures["step: attention"].floor
    assert products is not None
    assert attention is not None
    whole = experiment_report.ceilings.bytes_ms(step_bytes(runner.config, [(1, 8)]))
    assert products + attention == pytest.approx(whole)  # one decode is bound by bytes


def test_a_profiler_without_kernels_is_reported(experiment_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers do not allow profiling."""
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    monkeypatch.setattr("scripts.gpu.step_parts.kernel_times", lambda *_: [])
    report_parts(experiment_report, runner, "step", [(1, 8)], 1.0)
    assert [(figure.value, figure.note) for figure in experiment_report.figures] == [(None, "the profiler saw none")]
