"""The Triton kernels against plain torch: compiled on a GPU, interpreted without one."""

import numpy as np
import pytest
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.model.config import RopeConfig
from engine.model.rope import rope_table
from engine.ops.base import DeviceBatch, Heads, Ops
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps
from tests.engine.steps import lay_out, step_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
"""The interpreter truncates float32 to bfloat16 instead of rounding."""

EPS = 1e-5
LAYERS = 3


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    pytest.importorskip("triton", reason="the package triton is not installed")
    return TritonOps()


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums; in 16 bits up to the rounding of result and one intermediate."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[expected.dtype]
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compile_builds_every_kernel(ops: TritonOps, dtype: torch.dtype) -> None:
    ops.compile(Heads(6, 2, 22), dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 1000), (3, 7)])
def test_norms_equal_torch(ops: Ops, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    before = x.clone()
    assert_equal(ops.rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
    assert torch.equal(x, before)
    sums = residual.clone(), residual.clone()
    expected = TorchOps().add_rms_norm(x, sums[0], weight, EPS)
    assert_equal(ops.add_rms_norm(x.clone(), sums[1], weight, EPS), expected)
    assert torch.equal(*sums)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # interpreter: e^10,000 is inf, as intended
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(2, 1024), (3, 2500), (5, 97)])
def test_silu_equals_torch(ops: Ops, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    gate_up[0, width : width + 4] = 1  # so that nothing overflows in float16
    assert_equal(ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up))


def on_device(batch: DeviceBatch) -> DeviceBatch:
    return DeviceBatch.of(batch.host, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 64), (8, 2, 128), (6, 2, 22)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_and_store_equal_torch(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, qk_norm: bool
) -> None:
    torch.manual_seed(dim)
    lens = [(1, 33), (1, 1), (5, 20), (2, 2)]
    pages, num_pages = lay_out(lens, np.random.default_rng(1))
    batch = on_device(step_of(lens, pages))
    qkv = randn(batch.num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = randn(2, dim, dtype=dtype) if qk_norm else (None, None)
    table = rope_table(RopeConfig(), dim, 256, DEVICE)
    pools = [
        torch.full((num_pages, LAYERS, 2, kv_heads, BLOCK_SIZE, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)
    ]
    reference = TorchOps()
    reference.prepare(batch)
    expected = reference.rope_store(qkv.clone(), batch, table, q_norm, k_norm, EPS, pools[0][:, 1])
    actual = ops.rope_store(qkv.clone(), batch, table, q_norm, k_norm, EPS, pools[1][:, 1])
    assert_equal(actual, expected.contiguous())
    assert_equal(pools[1], pools[0])
    assert torch.equal(pools[1] == 7, pools[0] == 7)


def test_pages_beyond_the_reach_of_32_bits_are_addressed(ops: Ops) -> None:
    """A real pool has 2^36 numbers. On a CPU the 4 GiB between the pages are never touched, and so not allocated."""
    heads, dim = 1, 16
    batch = on_device(step_of([(1, 1)], [[2]]))
    page_numbers, stride = 2 * BLOCK_SIZE * dim, 1 << 30
    memory = torch.empty(2 * stride + page_numbers, dtype=torch.float16, device=DEVICE)
    kv = memory.as_strided((3, 2, heads, BLOCK_SIZE, dim), (stride, BLOCK_SIZE * dim, BLOCK_SIZE * dim, dim, 1))
    written = memory[2 * stride :].zero_()
    qkv = torch.ones(1, 3 * dim, dtype=torch.float16, device=DEVICE)
    ops.rope_store(qkv, batch, rope_table(RopeConfig(), dim, 4, DEVICE), None, None, EPS, kv)
    assert written.nonzero().flatten().tolist() == [
        which * BLOCK_SIZE * dim + i for which in (0, 1) for i in range(dim)
    ]
