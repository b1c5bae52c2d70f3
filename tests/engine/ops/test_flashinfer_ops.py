"""FlashInfer's inputs against hand-computed numbers and, with a fake of it, against torch."""

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.ops
from cpd.common.blocks import BLOCK_SIZE
from engine.ops.base import Heads
from engine.ops.flashinfer_ops import FlashInferOps, Geometry, PageTable
from engine.ops.torch_ops import TorchOps
from tests.engine.execution.cuda.fake_cuda import FakeEvent, cuda
from tests.engine.ops import fake_flashinfer, fake_kernels
from tests.engine.steps import Lens, lay_out, step_of

__all__ = ["cuda"]

HEADS = Heads(num_q=8, num_kv=2, dim=64)
CPU = torch.device("cpu")
LAYERS, LAYER = 3, 1
SCALE = 0.3


@pytest.fixture
def ops(cuda: None, monkeypatch: pytest.MonkeyPatch) -> FlashInferOps:
    monkeypatch.setattr(engine.ops, "triton_kernels", fake_kernels, raising=False)
    return make()


def make(dtype: torch.dtype = torch.float32, library: ModuleType = fake_flashinfer) -> FlashInferOps:
    return FlashInferOps(library, HEADS, dtype, CPU, sms=fake_flashinfer.SMS, max_decodes=64)


def test_page_tables_of_a_step_are_flattened() -> None:
    """Contexts that fill their last page, one token less, one more, and a single token."""
    pages = [[7, 3], [5], [1, 2, 9], [4]]
    table = PageTable.of(step_of([(1, 32), (1, 15), (1, 33), (1, 1)], pages).host)
    assert table.indptr.tolist() == [0, 2, 3, 6, 7]
    assert table.indices.tolist() == [7, 3, 5, 1, 2, 9, 4]
    assert table.last_page_len.tolist() == [16, 15, 1, 1]
    assert {array.dtype for array in (table.indptr, table.indices, table.last_page_len)} == {np.dtype(np.int32)}


def test_a_mixed_step_is_planned_as_decodes_and_prefills(ops: FlashInferOps) -> None:
    ops.prepare(step_of([(1, 17), (1, 16), (20, 20), (3, 40)], [[1, 2], [3], [4, 5], [6, 7, 8]]))
    decode, prefill = ops._decode, ops._prefill
    assert decode.planned["indptr"].tolist() == [0, 2, 3]
    assert decode._indices.tolist() == [1, 2, 3]
    assert decode.planned["last"].tolist() == [1, 16]
    assert not decode.planned["causal"]
    assert prefill.planned["query_start"].tolist() == [0, 20, 23]
    assert prefill.planned["indptr"].tolist() == [0, 2, 5]
    assert prefill._indices.tolist() == [4, 5, 6, 7, 8]
    assert prefill.planned["last"].tolist() == [4, 8]
    assert prefill.planned["causal"]
    for planned in (decode.planned, prefill.planned):
        assert (planned["num_qo_heads"], planned["num_kv_heads"], planned["head_dim"]) == (8, 2, 64)
        assert planned["page_size"] == BLOCK_SIZE
        assert planned["q_data_type"] == planned["kv_data_type"] == torch.float32


def test_absent_kinds_of_work_are_not_planned(ops: FlashInferOps) -> None:
    ops.prepare(step_of([(1, 17)], [[1, 2]]))
    assert (ops._decode.plans, ops._prefill.plans) == (1, 0)
    ops.prepare(step_of([(2, 17)], [[1, 2]]))
    assert (ops._decode.plans, ops._prefill.plans) == (1, 1)


def test_a_plan_waits_until_the_last_one_has_left_pinned_memory(ops: FlashInferOps) -> None:
    for _ in range(2):
        ops.prepare(step_of([(1, 17)], [[1, 2]]))
    assert [what for what, _ in FakeEvent.log] == ["synchronize", "record"] * 2
    assert len({event for _, event in FakeEvent.log}) == 1


def compare(ops: FlashInferOps, lens: Lens, seed: int) -> None:
    """Computes the expected result with torch."""
    torch.manual_seed(seed)
    pages, num_pages = lay_out(lens, np.random.default_rng(seed))
    batch = step_of(lens, pages)
    kv = torch.randn(num_pages, LAYERS, 2, HEADS.num_kv, BLOCK_SIZE, HEADS.dim)[:, LAYER]
    q = torch.randn(batch.num_tokens, HEADS.num_q, HEADS.dim)
    reference = TorchOps()
    reference.prepare(batch)
    expected = reference.attention(q.clone(), kv, batch, SCALE)
    ops.prepare(batch)
    torch.testing.assert_close(ops.attention(q, kv, batch, SCALE), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    decodes=st.lists(st.integers(1, 300).map(lambda context: (1, context)), max_size=6),
    prefills=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 60)).map(lambda p: (p[0], sum(p))), max_size=3),
    seed=st.integers(0, 99),
)
def test_attention_equals_torch(
    ops: FlashInferOps, decodes: list[tuple[int, int]], prefills: list[tuple[int, int]], seed: int
) -> None:
    if decodes or prefills:
        compare(ops, decodes + prefills, seed)


def test_ops_with_own_workspaces_share_none(ops: FlashInferOps) -> None:
    other = ops.with_own_workspaces()
    assert other._workspace.data_ptr() != ops._workspace.data_ptr()
    assert other._decode.workspace is other._prefill.workspace is other._workspace


def test_captured_sizes_read_each_steps_pages_from_the_same_buffers(ops: FlashInferOps) -> None:
    ops_of_size = ops.capturable_decodes(max_decodes=4, max_pages=20)
    graphed = {size: ops_of_size(size) for size in (4, 2)}
    for seed, lens in enumerate(([1, 1], [1] * 4, [300, 5], [17, 33, 290, 1], [16, 320])):
        compare(graphed[len(lens)], [(1, context) for context in lens], seed)  # type: ignore[arg-type]
    assert {size: each._wrapper.plans for size, each in graphed.items()} == {2: 3, 4: 2}


def test_a_plan_that_differs_from_the_captured_one_is_refused(ops: FlashInferOps) -> None:
    graphed = ops.capturable_decodes(1, 4)(1)
    graphed.prepare(step_of([(1, 1)], [[1]]))
    graphed._captured_plan = [0]
    with pytest.raises(RuntimeError, match="this version of FlashInfer is not supported"):
        graphed.prepare(step_of([(1, 1)], [[1]]))


@given(
    counts=st.lists(st.integers(1, 600), min_size=1, max_size=140),
    heads=st.sampled_from([Heads(32, 8, 128), Heads(8, 8, 64), Heads(28, 4, 128), Heads(32, 1, 128), Heads(71, 1, 64)]),
)
def test_every_step_has_the_captured_plan(counts: list[int], heads: Heads) -> None:
    """A graph contains the padded blocks and the split flag."""
    geometry = Geometry(heads, fake_flashinfer.SMS)
    split = geometry.split_pages(np.array(counts, np.int32))
    group, ones = heads.num_q // heads.num_kv, [1] * len(counts)
    captured = fake_flashinfer.divide(group, heads.num_kv, ones, ones, True, -1)
    padded, is_split, _ = fake_flashinfer.divide(group, heads.num_kv, counts, ones, True, split or -1)
    assert (padded, is_split) == captured[:2]
    assert padded == geometry.decode_blocks(len(counts))
    assert padded * geometry.decode_tile * heads.num_q * (heads.dim + 1) * 4 <= geometry.workspace_bytes(len(counts))


def test_one_long_context_among_many_short_ones_is_divided() -> None:
    """FlashInfer alone would give its 512 pages to one thread block."""
    geometry = Geometry(Heads(32, 8, 128), fake_flashinfer.SMS)
    counts = [16] * 127 + [512]
    assert fake_flashinfer.divide(4, 8, counts, [1] * 128, True, -1)[2] == 128
    split = geometry.split_pages(np.array(counts, np.int32))
    assert split == 16
    assert fake_flashinfer.divide(4, 8, counts, [1] * 128, True, split)[2] == 127 + 32
    assert geometry.split_pages(np.array([8, 8], np.int32)) is None
