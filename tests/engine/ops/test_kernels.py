"""The compiled CPU kernels against the torch back end, and the bits of one token in different batches."""

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.common.blocks import BLOCK_SIZE
from engine.model.config import RopeConfig
from engine.model.decoder import LayerByLayer
from engine.model.rope import rope_table
from engine.ops import make_ops
from engine.ops.base import Experts, Heads, Layer, Linear, Ops, Routing, Stack, Weight
from engine.ops.cpu_ops import CpuOps, PackedExperts, PackedLinear
from engine.ops.kernels import KernelsUnavailableError
from engine.ops.kernels.build import build
from engine.ops.quantized import quantize
from engine.ops.torch_ops import TorchExperts, TorchOps
from tests.engine.steps import Lens, lay_out, step_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
LAYERS = 3
EPS = 1e-5
HEADS = Heads(4, 2, 64)


def assert_equal(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: float | None = None
) -> None:
    """Equal up to the order of float32 sums; in bf16 up to the rounding of result and one intermediate."""
    tolerance = tolerance or (2e-5 if dtype == torch.float32 else 1e-2)
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance * scale, rtol=tolerance)


def filled_pool(
    lens: Lens, pages: list[list[int]], num_pages: int, heads: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Makes a pool with random keys and values in the slots of the contexts, NaN elsewhere."""
    pool = torch.full((num_pages, LAYERS, 2, heads, BLOCK_SIZE, dim), torch.nan, dtype=dtype)
    for row, (_, context) in zip(pages, lens, strict=True):
        for index, page in enumerate(row):
            count = min(BLOCK_SIZE, context - index * BLOCK_SIZE)
            pool[page, :, :, :, :count] = torch.randn(LAYERS, 2, heads, count, dim).to(dtype)
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(512, 256), (33, 24), (7, 2), (64, 128), (200, 66)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torch(ops: CpuOps, threads: int, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    torch.manual_seed(n)
    weight, b = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if bias else None
    linear, reference = ops.pack(weight, b), TorchOps().pack(weight.double(), b.double() if b is not None else None)
    for m in (1, 2, 5, 6, 7, 16, 97, 300, 1100):
        x = torch.randn(m, k).to(dtype)
        assert_equal(linear(x), reference(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_others(ops: CpuOps, threads: int, dtype: torch.dtype) -> None:
    """Columns are more than a block, and counts of rows those of one tile, of several on a block, and of many."""
    linear = ops.pack(torch.randn(200, 1058).to(dtype), torch.randn(200).to(dtype))
    x = torch.randn(300, 1058).to(dtype)
    together = linear(x)
    for begin, count in ((0, 1), (5, 2), (7, 6), (10, 7), (20, 8), (30, 23), (40, 24), (40, 32), (80, 33), (90, 100)):
        assert torch.equal(linear(x[begin : begin + count]), together[begin : begin + count])


def test_torch_computes_odd_rows_of_bf16(ops: CpuOps) -> None:
    weight, x = torch.randn(5, 7).bfloat16(), torch.randn(3, 7).bfloat16()
    linear = ops.pack(weight, None)
    assert not isinstance(linear, PackedLinear)
    assert_equal(linear(x), x.float() @ weight.float().T, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (16, 1024), (5, 24), (300, 80), (3, 7)])
def test_norms_equal_torch(ops: CpuOps, threads: int, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    assert_equal(ops.rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS), dtype)
    sums = residual.clone(), residual.clone()
    expected = TorchOps().add_rms_norm(x, sums[0], weight, EPS)
    assert_equal(ops.add_rms_norm(x.clone(), sums[1], weight, EPS), expected, dtype)
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (16, 3072), (5, 97), (300, 80)])
def test_silu_equals_torch(ops: CpuOps, threads: int, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    assert_equal(ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up), dtype)


SHAPES = [(1, 1, 64), (2, 2, 32), (4, 2, 64), (8, 2, 128), (8, 1, 80), (6, 2, 24), (7, 7, 40), (4, 4, 22), (71, 1, 8)]
"""Query heads, key-value heads, head size."""
WINDOWS = [(1, 1), (16, 2), (63, 3), (64, 1), (65, 2), (100, 3), (511, 1), (512, 2), (513, 3), (1000, 3), (2000, 2)]
"""Tokens of the window, threads."""


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 3000),
    levels=st.sampled_from([2, 50, 100_000]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_the_largest_values_are_those_of_a_whole_sort(
    ops: CpuOps, seed: int, size: int, levels: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, size))
    x = (torch.randint(levels, (3, size), generator=torch.Generator().manual_seed(seed)) - levels // 2).to(dtype)
    values, columns = ops.top_k(x, count)
    assert torch.equal(values, x.float().sort(dim=-1, descending=True).values[:, :count])
    assert torch.equal(values, x.float().gather(1, columns))
    assert all(len(set(row)) == count for row in columns.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_ops", [CpuOps, TorchOps])
def test_the_largest_value_is_the_first_of_equal_ones(make_ops: Callable[[], Ops], dtype: torch.dtype) -> None:
    x = torch.randint(5, (50, 3000), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0] = -torch.inf
    columns = make_ops().top_k(x, 1)[1]
    assert columns.flatten().tolist() == (x == x.max(dim=1, keepdim=True).values).int().argmax(dim=1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "vocab"), [(1, 1), (3, 31), (3, 500), (2, 4096), (9, 151_936)])
def test_masked_logits_are_minus_infinity(
    ops: CpuOps, threads: int, dtype: torch.dtype, count: int, vocab: int
) -> None:
    rng = np.random.default_rng(vocab)
    words = rng.integers(0, 1 << 32, (count, (vocab + 31) // 32), dtype=np.uint32)
    words[rng.random(words.shape) < 0.4] = 0xFFFFFFFF
    words[rng.random(words.shape) < 0.4] = 0
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    logits, rows = torch.randn(count + 3, vocab).to(dtype), torch.from_numpy(rng.permutation(count + 3)[:count])
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    for back_end in (TorchOps(), ops):
        got = logits.clone()
        back_end.mask_logits(got, rows, torch.from_numpy(words.view(np.int32)))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_whole_vocabulary_share_the_threads(ops: CpuOps, threads: int, dtype: torch.dtype) -> None:
    x = torch.randn(16, 100_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    values, columns = ops.top_k(x, 40)
    assert torch.equal(values, x.float().topk(40).values)
    assert torch.equal(values, x.float().gather(1, columns))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_less_than_any_number(ops: CpuOps, dtype: torch.dtype) -> None:
    x = torch.full((2, 5000), torch.nan, dtype=dtype)
    x[0, 4321], x[0, 7] = 1.0, -2.0
    values, columns = ops.top_k(x, 3)
    assert values.tolist() == [[1.0, -2.0, -math.inf], [-math.inf] * 3]
    assert columns[0, :2].tolist() == [4321, 7]
    assert ((columns >= 0) & (columns < 5000)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_and_store_equal_torch(
    ops: CpuOps, threads: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, qk_norm: bool
) -> None:
    torch.manual_seed(dim)
    lens = [(1, 33), (1, 1), (20, 20), (150, 170)]
    pages, num_pages = lay_out(lens, np.random.default_rng(1))
    batch = step_of(lens, pages)
    qkv = torch.randn(batch.num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q_norm, k_norm = torch.rand(2, dim).to(dtype) if qk_norm else (None, None)
    table = rope_table(RopeConfig(), dim, 256, CPU)
    pools = [torch.full((num_pages, LAYERS, 2, kv_heads, BLOCK_SIZE, dim), 7.0, dtype=dtype) for _ in range(2)]
    queries = []
    back_ends: list[Ops] = [TorchOps(), ops]
    for back_end, pool in zip(back_ends, pools, strict=True):
        back_end.prepare(batch)
        queries.append(back_end.rope_store(qkv.clone(), batch, table, q_norm, k_norm, EPS, pool[:, 1]))
    assert_equal(queries[1], queries[0], dtype)
    assert_equal(pools[1], pools[0], dtype)
    assert torch.equal(pools[1] == 7, pools[0] == 7)


def check_attention(
    ops: CpuOps, lens: Lens, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None = None
) -> None:
    torch.manual_seed(dim)
    pages, num_pages = lay_out(lens, np.random.default_rng(dim))
    batch = step_of(lens, pages)
    pool = filled_pool(lens, pages, num_pages, kv_heads, dim, dtype)
    q = torch.randn(batch.num_tokens, heads, dim).to(dtype)
    reference = TorchOps()
    reference.prepare(batch)
    expected = reference.attention(q.float(), pool.nan_to_num(0.0).float()[:, 1], batch, 0.3, window)
    assert_equal(ops.attention(q, pool[:, 1], batch, 0.3, window), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_attention_equals_torch(
    ops: CpuOps, threads: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    decodes = [(1, context) for context in (1, 2, 15, 16, 17, 63, 64, 65, 600)]
    check_attention(ops, [*decodes, (2, 2), (16, 16), (100, 100), (37, 130), (3, 700)], heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_long_context_among_short_ones(ops: CpuOps, threads: int, dtype: torch.dtype) -> None:
    check_attention(ops, [(1, 3), (1, 3000), (1, 40), (5, 2000), (200, 1300)], 4, 2, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "threads"), WINDOWS, indirect=["threads"])
def test_attention_in_a_sliding_window_equals_torch(ops: CpuOps, threads: int, dtype: torch.dtype, window: int) -> None:
    decodes = [(1, context) for context in (1, 2, 64, 65, 513, 600, 1300)]
    prefills = [(2, 2), (16, 16), (100, 100), (37, 130), (3, 700), (200, 1300)]
    check_attention(ops, [*decodes, *prefills], 4, 2, 64, dtype, window)


@settings(deadline=None, max_examples=40)
@given(
    decodes=st.lists(st.integers(1, 1200).map(lambda context: (1, context)), max_size=6),
    prefills=st.lists(
        st.tuples(st.integers(2, 200), st.integers(0, 600)).map(lambda pair: (pair[0], sum(pair))), max_size=3
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([2, 16, 24, 32, 64, 66, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 1300),
)
def test_attention_of_any_batch_equals_torch(
    ops: CpuOps,
    decodes: Lens,
    prefills: Lens,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    lens = [*decodes, *prefills] or [(1, 1)]
    check_attention(ops, lens, kv_heads * group, kv_heads, dim, dtype, window)


# --- Experts


def random_experts(
    back_end: Ops, count: int, routing: Routing, hidden: int, width: int, dtype: torch.dtype, bits: int | None = None
) -> Experts:
    generator = torch.Generator().manual_seed(count)

    def weight(n: int, k: int) -> Weight:
        plain = torch.randn(n, k, generator=generator).div(k**0.5).to(dtype)
        return plain if bits is None else quantize(plain, bits)

    return back_end.pack_experts(
        ((weight(2 * width, hidden), weight(hidden, width)) for _ in range(count)), count, routing
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "per_token", "normalize", "hidden", "width", "threads"),
    [
        (8, 2, True, 64, 96, 2),
        (128, 8, False, 128, 48, 3),
        (5, 5, True, 80, 10, 1),
        (1, 1, True, 24, 98, 2),
        (33, 3, True, 66, 70, 3),
    ],
    indirect=["threads"],
)
def test_experts_equal_torch(
    ops: CpuOps, threads: int, dtype: torch.dtype, count: int, per_token: int, normalize: bool, hidden: int, width: int
) -> None:
    torch.manual_seed(width)
    routing = Routing(per_token, normalize)
    kernels, reference = (random_experts(o, count, routing, hidden, width, dtype) for o in (ops, TorchOps()))
    assert isinstance(kernels, PackedExperts)
    for tokens in (1, 2, 5, 16, 97, 600):
        x, router_output = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, count).to(dtype)
        assert_equal(kernels(x, router_output), reference(x, router_output), dtype)


def test_all_tokens_may_go_to_the_same_experts(ops: CpuOps, threads: int) -> None:
    routing = Routing(2, normalize=True)
    kernels, reference = (random_experts(o, 8, routing, 64, 96, torch.float32) for o in (ops, TorchOps()))
    x, router_output = torch.randn(1300, 64), torch.zeros(1300, 8)  # equally probable: the first ones compute
    router_output[:, 6] = -1.0
    assert_equal(kernels(x, router_output), reference(x, router_output), torch.float32)


def test_a_router_without_numbers_gives_none(ops: CpuOps) -> None:
    experts = random_experts(ops, 8, Routing(2, normalize=True), 64, 96, torch.float32)
    router_output = torch.zeros(3, 8)
    router_output[1] = torch.nan
    y = experts(torch.randn(3, 64), router_output)
    assert y.isnan().all(dim=1).tolist() == [False, True, False]


def test_torch_computes_experts_with_odd_rows_of_bf16(ops: CpuOps) -> None:
    routing = Routing(2, normalize=True)
    for hidden, width in ((64, 7), (7, 64)):
        experts = random_experts(ops, 4, routing, hidden, width, torch.bfloat16)
        assert isinstance(experts, TorchExperts)
        assert len(experts.down) == 4


# --- All layers at once


def random_stack(
    back_end: Ops,
    dtype: torch.dtype,
    *,
    qk_norm: bool,
    bias: bool,
    experts: frozenset[int] = frozenset(),
    per_token: int = 3,
    windows: tuple[int | None, ...] = (None,) * LAYERS,
    bits: int | None = None,
) -> Stack:
    """Hidden size 80, 4 query and 2 key-value heads of 24, width 100, vocabulary 50.

    Args:
        experts: Layers with 7 experts of width 40, `per_token` for each token.
        bits: Bits of quantised weights; then the sizes are multiples of 32.
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim = 4, 2, 24
    hidden, width, expert_width = (80, 100, 40) if bits is None else (96, 128, 64)

    def vector(n: int) -> torch.Tensor:
        return (1 + torch.randn(n, generator=generator) / 4).to(dtype)

    def linear(n: int, k: int) -> Linear:
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
        return back_end.pack(weight if bits is None else quantize(weight, bits), vector(n) if bias else None)

    def layer(index: int) -> Layer:
        attention = Layer(
            input_norm=vector(hidden),
            qkv=linear((heads + 2 * kv_heads) * dim, hidden),
            q_norm=vector(dim) if qk_norm else None,
            k_norm=vector(dim) if qk_norm else None,
            o=linear(hidden, heads * dim),
            post_norm=vector(hidden),
            window=windows[index],
        )
        if index not in experts:
            return replace(attention, gate_up=linear(2 * width, hidden), down=linear(hidden, width))
        router = back_end.pack((torch.randn(7, hidden, generator=generator) / hidden**0.5).to(dtype), None)
        routing = Routing(per_token, normalize=True)
        mixture = random_experts(back_end, 7, routing, hidden, expert_width, dtype, bits)
        return replace(attention, router=router, experts=mixture)

    layers = [layer(index) for index in range(LAYERS)]
    head = back_end.pack(torch.randn(50, hidden, generator=generator).to(dtype), None)
    return Stack(layers, vector(hidden), head, rope_table(RopeConfig(), dim, 2048, CPU), EPS, dim**-0.5)


def new_pool(num_pages: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((num_pages, LAYERS, 2, 2, BLOCK_SIZE, 24), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        {"qk_norm": False, "bias": False},
        {"qk_norm": True, "bias": False},
        {"qk_norm": False, "bias": True},
        {"qk_norm": True, "bias": False, "experts": frozenset({0, 1, 2})},
        {"qk_norm": False, "bias": True, "experts": frozenset({1})},
        {"qk_norm": False, "bias": False, "windows": (20, 20, 20)},
        {"qk_norm": True, "bias": False, "windows": (None, 70, 20), "experts": frozenset({2})},
        {"qk_norm": True, "bias": True, "bits": 8},
        {"qk_norm": False, "bias": False, "bits": 4, "experts": frozenset({1})},
    ],
)
def test_fused_layers_equal_single_operations(
    ops: CpuOps, threads: int, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    # Whole prompts and their continuation, so that every key and value that is read was stored before.
    pages, num_pages = lay_out([(1, 90)] * 3, np.random.default_rng(0))
    steps = [step_of([(2, 2), (60, 60), (20, 20)], pages), step_of([(1, 3), (1, 61), (30, 50)], pages)]
    rows = [None, *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 31], [5], []))]
    tolerance = 0.03 if "bits" in kind else None  # activations are quantised, too
    if dtype == torch.bfloat16 or tolerance:  # rounding may choose different experts, unless all are chosen
        kind = {**kind, "per_token": 7}
    results = []
    for back_end in (TorchOps(), ops):
        stack = random_stack(back_end, dtype, **kind)
        run = back_end.fuse(stack) or LayerByLayer(back_end, stack)
        assert isinstance(run, LayerByLayer) == isinstance(back_end, TorchOps)
        pool = torch.zeros(num_pages, LAYERS, 2, 2, BLOCK_SIZE, 24, dtype=dtype)
        kv = [pool[:, layer] for layer in range(LAYERS)]
        torch.manual_seed(0)
        first, second = (torch.randn(step.num_tokens, len(stack.norm)).to(dtype) for step in steps)
        back_end.prepare(steps[0])
        all_logits = run(first, steps[0], kv, None)
        back_end.prepare(steps[1])
        results.append((all_logits, *(run(second.clone(), steps[1], kv, wanted) for wanted in rows), pool))
    for expected, actual in zip(*results, strict=True):
        if expected is None:
            assert actual is None
        else:
            assert actual is not None
            assert_equal(actual, expected, dtype, tolerance)


@pytest.mark.parametrize("back_end", [TorchOps, CpuOps])
def test_a_step_counts_its_layers(back_end: Callable[[], Ops], threads: int) -> None:
    ops = back_end()
    stack = random_stack(ops, torch.float32, qk_norm=True, bias=True)
    (pages,), num_pages = lay_out([(1, 90)], np.random.default_rng(0))
    run, pool = ops.fuse(stack) or LayerByLayer(ops, stack), new_pool(num_pages, torch.float32)
    for steps in (1, 2):
        step = step_of([(60, 60)], [pages])
        ops.prepare(step)
        run(torch.randn(60, 80), step, [pool[:, layer] for layer in range(LAYERS)], None)
        assert stack.progress[0] == steps * LAYERS


def test_only_chosen_experts_are_read(ops: CpuOps, threads: int) -> None:
    """Their bytes are counted, and what the others hold changes nothing."""
    stack = random_stack(ops, torch.float32, qk_norm=True, bias=False, experts=frozenset({1, 2}))
    run, ((pages, *_), num_pages) = ops.fuse(stack), lay_out([(1, 90)] * 3, np.random.default_rng(0))
    assert run is not None
    expert = 3 * 80 * 40 * 4  # bytes
    pool = torch.zeros(num_pages, LAYERS, 2, 2, BLOCK_SIZE, 24)
    kv = [pool[:, layer] for layer in range(LAYERS)]
    x = torch.randn(1, 80, generator=torch.Generator().manual_seed(3))
    before = run(x.clone(), step_of([(1, 1)], [pages]), kv, None)
    assert stack.expert_bytes[0] == 2 * 3 * expert  # two layers, three experts each
    run(torch.randn(60, 80), step_of([(60, 60)], [pages]), kv, None)
    assert stack.expert_bytes[0] == 2 * (3 + 7) * expert  # all are chosen by some token, and read once

    changed = 0
    for layer in (1, 2):
        experts = stack.layers[layer].experts
        assert isinstance(experts, PackedExperts)
        for index in range(7):
            kept = experts.gate_up[index].clone(), experts.down[index].clone()
            experts.gate_up[index], experts.down[index] = torch.nan, torch.nan
            after = run(x.clone(), step_of([(1, 1)], [pages]), kv, None)
            assert before is not None
            assert after is not None
            changed += not torch.equal(after, before)
            experts.gate_up[index], experts.down[index] = kept
    assert changed == 2 * 3


def test_dense_layers_read_no_experts(ops: CpuOps) -> None:
    stack = random_stack(ops, torch.float32, qk_norm=True, bias=False)
    run, ((pages,), num_pages) = ops.fuse(stack), lay_out([(1, 90)], np.random.default_rng(0))
    pool = torch.zeros(num_pages, LAYERS, 2, 2, BLOCK_SIZE, 24)
    assert run is not None
    run(torch.randn(9, 80), step_of([(9, 9)], [pages]), [pool[:, layer] for layer in range(LAYERS)], None)
    assert stack.expert_bytes[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"experts": frozenset({0, 2})},
        {"windows": (33, 33, 33)},
        {"windows": (None, 200, 200)},
        {"bits": 8},
        {"bits": 4, "experts": frozenset({0, 2})},
    ],
)
def test_a_token_has_the_same_bits_in_every_chunk_batch_and_team(
    ops: CpuOps, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    stack, length = random_stack(ops, dtype, qk_norm=True, bias=False, **kind), 600
    run, hidden = ops.fuse(stack), len(stack.norm)
    assert run is not None
    tokens = torch.randn(length, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    (pages, others, more), num_pages = lay_out([(1, length)] * 3, np.random.default_rng(0))

    def compute(cuts: list[int], shares_batch: Callable[[int], bool]) -> torch.Tensor:
        """Computes the prompt in chunks; chunk i shares its batch with other sequences if `shares_batch(i)`."""
        pool = torch.full((num_pages, LAYERS, 2, 2, BLOCK_SIZE, 24), torch.nan, dtype=dtype)
        kv = [pool[:, layer] for layer in range(LAYERS)]
        outputs = []
        for i, (start, stop) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            chunk = (stop - start, stop)
            if shares_batch(i):
                batch, own = step_of([(1, 1), chunk, (90, 90)], [others, pages, more]), slice(1, 1 + stop - start)
            else:
                batch, own = step_of([chunk], [pages]), slice(0, stop - start)
            x = torch.randn(batch.num_tokens, hidden).to(dtype)
            x[own] = tokens[start:stop]
            output = run(x, batch, kv, None)
            assert output is not None
            outputs.append(output[own])
        return torch.cat(outputs)

    before = torch.get_num_threads()
    expected = compute([], lambda i: False)
    assert not expected.isnan().any()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(compute([], lambda i: False), expected)
            assert torch.equal(compute([17, 18, 64, 333], lambda i: True), expected)
            assert torch.equal(compute(list(range(530, length)), lambda i: i % 2 == 1), expected)
    finally:
        torch.set_num_threads(before)


# --- Threads


def test_each_thread_has_its_own_team_which_ends_with_it(ops: CpuOps) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = ops.pack(torch.randn(512, 512, generator=generator), None)
    x = torch.randn(64, 512, generator=generator)
    expected = linear(x)
    before = len(os.listdir("/proc/self/task"))

    def lane(threads: int) -> bool:
        torch.get_num_threads()
        torch.set_num_threads(threads)
        return all(torch.equal(linear(x), expected) for _ in range(50))

    with ThreadPoolExecutor(3) as lanes:
        assert list(lanes.map(lane, (2, 3, 2))) == [True] * 3
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- The build


def test_several_builders_at_once_get_one_library(tmp_path: Path) -> None:
    program = "from engine.ops.kernels.build import build; print(build())"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXXFLAGS": "-O0"}
    builders = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [builder.communicate()[0].strip() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == [outputs[0]]


def test_without_a_compiler_the_torch_back_end_runs_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert isinstance(make_ops(CPU, torch.float32, HEADS), TorchOps)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no C++ compiler found" in warning


def test_a_compiler_that_fails_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXXFLAGS", "-include missing.h")
    with pytest.raises(KernelsUnavailableError, match=r"c\+\+ failed: .*missing\.h"):
        build()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpd").write_text("a file where the directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelsUnavailableError, match=f"{tmp_path}.* can't be written .* set XDG_CACHE_HOME"):
        build()


def test_torch_computes_float16() -> None:
    assert isinstance(make_ops(CPU, torch.float16, HEADS), TorchOps)
    assert isinstance(make_ops(CPU, torch.bfloat16, HEADS), CpuOps)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for older x86-64 CPUs")
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
def test_cpus_with_narrower_vectors_compute_the_same(tmp_path: Path, cpu: str) -> None:
    others = ("quantized_kernels", "pages_of_8_bits", "draw")
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in others)]
    numerics = (
        "(linear or norms or silu or rope or attention or context or experts or layers or activations or bits or draw) "
        "and not any_batch and not on1 and not on3"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", numerics],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXXFLAGS": f"-march={cpu} -O1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
