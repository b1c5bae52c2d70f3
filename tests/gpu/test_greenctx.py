"""Green Contexts on a real GPU."""

import contextlib

import pytest
import torch

from cpd.performance.split import lane_splits
from engine.execution.cuda.driver import CudaDriver
from engine.execution.cuda.greenctx import GreenContexts, Partition, UnusablePartitionError
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps
from scripts.gpu.partition import replayed_sms, sms_of_both
from scripts.gpu.probes import Probes
from scripts.gpu.streams import capture_on
from scripts.gpu.toolchain import cuda_root

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_nvcc = pytest.mark.skipif(cuda_root() is None, reason="needs nvcc")
SHARES = (1 / 8, 1 / 2, 7 / 8)


@pytest.fixture(autouse=True)
def device_in_use() -> None:
    torch.cuda.synchronize()


def on_part(part: Partition, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    with torch.cuda.stream(part.stream()):
        return left @ right


def test_both_parts_compute_what_the_whole_device_does() -> None:
    left, right = (torch.randn(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    wanted = left @ right
    with GreenContexts(CudaDriver()) as contexts:
        pairs = contexts.prepare(SHARES)
        assert pairs
        for pair in pairs:
            for part in (pair.prefill, pair.decode):
                got = on_part(part, left, right)
                torch.cuda.synchronize()
                torch.testing.assert_close(got, wanted)
                del got


def test_the_engines_own_kernels_run_on_both_parts() -> None:
    """Triton loads kernels into the device's own context; only their stream is the partition's."""
    pytest.importorskip("triton")
    x, weight = torch.randn(300, 512, device="cuda"), torch.randn(512, device="cuda")
    wanted, ops = TorchOps().rms_norm(x, weight, 1e-5), TritonOps()
    with GreenContexts(CudaDriver()) as contexts:
        for pair in contexts.prepare(SHARES):
            for part in (pair.prefill, pair.decode):
                torch.cuda.synchronize()
                with torch.cuda.stream(part.stream()):
                    got = ops.rms_norm(x, weight, 1e-5)
                torch.cuda.synchronize()
                torch.testing.assert_close(got, wanted)
                del got


def test_every_split_that_this_chip_has_opens_and_closes_twice() -> None:
    for _ in range(2):
        with GreenContexts(CudaDriver()) as contexts:
            sizes = [int(split.decode) for split in lane_splits(contexts.units)]
        for size in sizes:
            with GreenContexts(CudaDriver()) as contexts, contextlib.suppress(UnusablePartitionError):
                pair = contexts.open(size)
                assert pair.decode.sms == size
                assert pair.prefill.sms == contexts.units.units - size
    torch.cuda.synchronize()


@needs_nvcc
def test_kernels_and_replayed_graphs_stay_on_their_part() -> None:
    device = torch.device("cuda")
    probes = Probes.build(device)
    with GreenContexts(CudaDriver()) as contexts:
        for pair in contexts.prepare(SHARES):
            prefill, decode = sms_of_both(probes, device, pair)
            assert not prefill & decode
            assert (len(prefill), len(decode)) == (pair.prefill.sms, pair.decode.sms)
            out = torch.full((1024,), -1, dtype=torch.int32, device=device)
            graph = capture_on(pair.decode.stream(), lambda out=out: probes.record_sms(out, 100_000))  # type: ignore[misc]
            for stream in (pair.decode.stream(), pair.prefill.stream(), torch.cuda.current_stream()):
                assert replayed_sms(graph, stream, out) <= decode
            del graph
