"""The reference back end against attention, norms and RoPE written out token by token."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.model.config import RopeConfig
from engine.model.rope import rope_table
from engine.ops.base import DeviceBatch, Routing
from engine.ops.torch_ops import TorchOps, route
from tests.engine.steps import step_of

LAYERS, LAYER, KV_HEADS, GROUP, DIM = 3, 1, 2, 3, 8


def make_batch(rng: np.random.Generator, lens: Sequence[tuple[int, int]], num_pages: int) -> DeviceBatch:
    """Sequences of (query length, context length) over pages in random order, decodes first."""
    free = iter(rng.permutation(num_pages).tolist())
    lens = sorted(lens, key=lambda pair: pair[0] != 1)
    return step_of(lens, [[next(free) for _ in range(blocks_for(context))] for _, context in lens])


def attend(q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, window: int | None = None) -> torch.Tensor:
    """Computes one query and head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s in range(batch.num_seqs):
        start, stop = batch.query_start[s : s + 2].tolist()
        for i in range(start, stop):
            context = int(batch.context_lens[s]) - (stop - 1 - i)
            places = [
                (int(batch.block_tables[s, p // BLOCK_SIZE]), p % BLOCK_SIZE)
                for p in range(max(0, context - (window or context)), context)
            ]
            for head in range(q.shape[1]):
                keys, values = (
                    torch.stack([kv[page, which, head // GROUP, offset] for page, offset in places]).double()
                    for which in (0, 1)
                )
                out[i, head] = torch.softmax(keys @ q[i, head].double() * 0.3, dim=0) @ values
    return out.view(len(q), -1)


@settings(deadline=None, max_examples=30)
@given(
    lens=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1])),
        min_size=1,
        max_size=6,
    ),
    decodes=st.lists(st.integers(1, 70).map(lambda context: (1, context)), max_size=20),
    window=st.none() | st.integers(1, 90),
    seed=st.integers(0, 99),
)
def test_attention_is_causal_over_the_sequences_own_pages(
    lens: list[tuple[int, int]], decodes: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_pages = sum(blocks_for(context) for _, context in lens + decodes) + 1
    batch = make_batch(rng, lens + decodes, num_pages)
    pool = torch.randn(num_pages, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM)
    q = torch.randn(batch.num_tokens, KV_HEADS * GROUP, DIM)
    ops = TorchOps()
    ops.prepare(batch)
    expected = attend(q, pool[:, LAYER], batch, window)
    actual = ops.attention(q, pool[:, LAYER], batch, 0.3, window)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lens", [[(1, 20), (1, 5)], [(3, 20), (9, 9)]])
def test_stale_values_in_a_page_have_no_influence(lens: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(0)
    batch = make_batch(rng, lens, 8)
    pool = torch.full((8, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM), torch.nan)
    for s in range(batch.num_seqs):
        for p in range(int(batch.context_lens[s])):
            page, offset = int(batch.block_tables[s, p // BLOCK_SIZE]), p % BLOCK_SIZE
            pool[page, :, :, :, offset] = torch.randn(LAYERS, 2, KV_HEADS, DIM)
    q = torch.randn(batch.num_tokens, KV_HEADS * GROUP, DIM)
    ops = TorchOps()
    ops.prepare(batch)
    expected = attend(q, pool[:, LAYER], batch)
    torch.testing.assert_close(ops.attention(q, pool[:, LAYER], batch, 0.3).double(), expected, atol=1e-5, rtol=1e-4)


def test_a_long_chunk_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(np.random.default_rng(0), [(50, 90)], 8)
    pool = torch.randn(8, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM)
    q = torch.randn(50, KV_HEADS * GROUP, DIM)
    ops = TorchOps()
    ops.prepare(batch)
    at_once = ops.attention(q, pool[:, LAYER], batch, 0.3)
    monkeypatch.setattr("engine.ops.torch_ops._MASK_ELEMENTS", 90 * 7)
    torch.testing.assert_close(ops.attention(q, pool[:, LAYER], batch, 0.3), at_once)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(qk_norm: bool) -> None:
    torch.manual_seed(0)
    batch = make_batch(np.random.default_rng(1), [(1, 33), (20, 20), (7, 30)], 12)
    heads = KV_HEADS * GROUP
    qkv = torch.randn(batch.num_tokens, (heads + 2 * KV_HEADS) * DIM)
    q_norm, k_norm = (torch.rand(DIM), torch.rand(DIM)) if qk_norm else (None, None)
    table = rope_table(RopeConfig(), DIM, 64, torch.device("cpu"))
    pool = torch.full((12, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM), 7.0)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        angle = batch.positions[:, None] * 10_000 ** (-torch.arange(0, DIM, 2) / DIM)
        number = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * torch.polar(torch.ones(()), angle)[:, None]
        return torch.cat((number.real, number.imag), -1)

    parts = torch.split(qkv.clone().view(batch.num_tokens, -1, DIM), [heads, KV_HEADS, KV_HEADS], dim=1)
    ops = TorchOps()
    ops.prepare(batch)
    q = ops.rope_store(qkv, batch, table, q_norm, k_norm, 1e-6, pool[:, LAYER])
    torch.testing.assert_close(q, turned(parts[0], q_norm), atol=1e-5, rtol=1e-4)
    expected = torch.full_like(pool, 7.0)
    for i, slot in enumerate(batch.slots.tolist()):
        expected[slot // BLOCK_SIZE, LAYER, 0, :, slot % BLOCK_SIZE] = turned(parts[1], k_norm)[i]
        expected[slot // BLOCK_SIZE, LAYER, 1, :, slot % BLOCK_SIZE] = parts[2][i]
    torch.testing.assert_close(pool, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_token_is_the_weighted_sum_of_its_best_experts(normalize: bool) -> None:
    torch.manual_seed(0)
    tokens, hidden, width, count, per_token = 9, 16, 10, 5, 2
    gate_up, down = torch.randn(count, 2 * width, hidden), torch.randn(count, hidden, width)
    x, router_output = torch.randn(tokens, hidden), torch.randn(tokens, count)
    router_output[:, 3] = -9.0  # an expert without tokens
    experts = TorchOps().pack_experts(zip(gate_up, down, strict=True), count, Routing(per_token, normalize))
    for token, actual in enumerate(experts(x, router_output)):
        probabilities = router_output[token].double().softmax(dim=-1)
        best = sorted(range(count), key=lambda expert, p=probabilities: float(-p[expert]))[:per_token]  # type: ignore[misc]
        total = probabilities[best].sum() if normalize else 1.0
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert in best:
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected += probabilities[expert] / total * (down[expert].double() @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)


def test_of_equally_probable_experts_the_first_ones_are_taken() -> None:
    weights, experts = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]), Routing(4, normalize=False))
    assert experts.tolist() == [[1, 2, 4, 0]]
    assert weights.tolist() == [sorted(weights[0].tolist(), reverse=True)]


def test_norms_linear_and_activation() -> None:
    torch.manual_seed(0)
    ops, x, residual, weight = TorchOps(), torch.randn(5, 16), torch.randn(5, 16), torch.rand(16)
    total = x + residual
    expected = weight * total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ops.rms_norm(total, weight, 1e-5), expected)
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), expected)
    torch.testing.assert_close(residual, total)
    matrix, bias = torch.randn(7, 16), torch.randn(7)
    torch.testing.assert_close(ops.pack(matrix, None)(total), total @ matrix.T)
    torch.testing.assert_close(ops.pack(matrix, bias)(total), total @ matrix.T + bias)
    gate, up = total.chunk(2, dim=-1)
    torch.testing.assert_close(ops.silu_mul(total), gate * gate.sigmoid() * up)
