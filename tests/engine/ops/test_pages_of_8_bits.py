"""Keys and values in 8 bits: the CPU kernels against the numbers that the pages stand for."""

import numpy as np
import pytest
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.model.config import RopeConfig
from engine.model.rope import rope_table
from engine.ops.cpu_ops import CpuOps
from engine.ops.torch_ops import TorchOps
from tests.engine.ops.test_kernels import (
    CPU,
    DTYPES,
    EPS,
    LAYERS,
    SHAPES,
    assert_equal,
    filled_pool,
    random_stack,
)
from tests.engine.steps import Lens, lay_out, step_of

CASES = [(*shape, (None, 100)[index % 2], index % 3 + 1) for index, shape in enumerate(SHAPES)]
"""Query heads, key-value heads, head size, window, threads."""
STORED = [(*shape, threads) for *shape, _, threads in CASES]


def quantized(pool: torch.Tensor) -> torch.Tensor:
    """[.., heads, BS, D], NaN where nothing is stored -> bytes [.., heads, BS · (D + 4)], with scales of NaN there"""
    scales = pool.float().abs().amax(-1) / 127
    numbers = (pool.float() / scales[..., None]).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat([numbers.flatten(-2).view(torch.uint8), scales.contiguous().view(torch.uint8)], dim=-1)


def dequantized(pool: torch.Tensor, dim: int) -> torch.Tensor:
    """The reverse."""
    numbers = pool[..., : BLOCK_SIZE * dim].contiguous().view(torch.int8).view(*pool.shape[:-1], BLOCK_SIZE, dim)
    return numbers.float() * pool[..., BLOCK_SIZE * dim :].contiguous().view(torch.float32)[..., None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "threads"), CASES, indirect=["threads"])
def test_attention_equals_that_over_dequantised_pages(
    ops: CpuOps, threads: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    torch.manual_seed(dim)
    decodes = [(1, context) for context in (1, 2, 15, 16, 17, 63, 64, 65, 600)]
    lens: Lens = [*decodes, (2, 2), (16, 16), (100, 100), (37, 130), (3, 700)]
    pages, num_pages = lay_out(lens, np.random.default_rng(dim))
    batch = step_of(lens, pages)
    pool = quantized(filled_pool(lens, pages, num_pages, kv_heads, dim, dtype))
    q = torch.randn(batch.num_tokens, heads, dim).to(dtype)
    reference = TorchOps()
    reference.prepare(batch)
    expected = reference.attention(q.float(), dequantized(pool, dim).nan_to_num(0.0)[:, 1], batch, 0.3, window)
    assert_equal(ops.attention(q, pool[:, 1], batch, 0.3, window), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "threads"), STORED, indirect=["threads"])
def test_stored_numbers_are_within_half_a_step(
    ops: CpuOps, threads: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(dim)
    lens = [(1, 33), (1, 1), (20, 20), (150, 170)]
    pages, num_pages = lay_out(lens, np.random.default_rng(1))
    batch = step_of(lens, pages)
    qkv = torch.randn(batch.num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    qkv[0] = 0.0
    table = rope_table(RopeConfig(), dim, 256, CPU)
    plain = torch.zeros(num_pages, LAYERS, 2, kv_heads, BLOCK_SIZE, dim, dtype=dtype)
    small = torch.zeros(num_pages, LAYERS, 2, kv_heads, BLOCK_SIZE * (dim + 4), dtype=torch.uint8)
    queries = [ops.rope_store(qkv.clone(), batch, table, None, None, EPS, pool[:, 1]) for pool in (plain, small)]
    assert torch.equal(*queries)
    step = plain.float().abs().amax(-1, keepdim=True) / 127
    assert ((dequantized(small, dim) - plain.float()).abs() <= step * 0.501).all()
    scales = small[..., BLOCK_SIZE * dim :].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, step.squeeze(-1))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_is_seen_by_those_that_attend_to_it(ops: CpuOps, number: float) -> None:
    (pages,), num_pages = lay_out([(1, 40)], np.random.default_rng(0))
    batch, pool = step_of([(40, 40)], [pages]), torch.zeros(num_pages, LAYERS, 2, 2, BLOCK_SIZE * 36, dtype=torch.uint8)
    qkv = torch.randn(40, 8 * 32)
    qkv[20, 4 * 32 + 5] = number  # a key
    q = ops.rope_store(qkv, batch, rope_table(RopeConfig(), 32, 64, CPU), None, None, EPS, pool[:, 0])
    finite = ops.attention(q, pool[:, 0], batch, 0.3).isfinite().all(dim=1)
    assert finite[:20].all()
    assert not finite[20:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 8])
def test_a_token_has_the_same_bits_in_every_chunk(
    ops: CpuOps, threads: int, dtype: torch.dtype, bits: int | None
) -> None:
    stack, length = random_stack(ops, dtype, qk_norm=True, bias=False, bits=bits), 300
    run = ops.fuse(stack)
    assert run is not None
    tokens = torch.randn(length, len(stack.norm), generator=torch.Generator().manual_seed(1)).to(dtype)
    (pages,), num_pages = lay_out([(1, length)], np.random.default_rng(0))
    results = []
    for cuts in ([], [17, 18, 64, 233], range(260, length)):
        pool = torch.full((num_pages, LAYERS, 2, 2, BLOCK_SIZE * 28), 255, dtype=torch.uint8)
        kv = [pool[:, layer] for layer in range(LAYERS)]
        outputs = [
            run(tokens[start:stop].clone(), step_of([(stop - start, stop)], [pages]), kv, None)
            for start, stop in zip([0, *cuts], [*cuts, length], strict=True)
        ]
        results.append((torch.cat([output for output in outputs if output is not None]), pool))
    for logits, pool in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(pool, results[0][1])
    assert results[0][0].isfinite().all()
