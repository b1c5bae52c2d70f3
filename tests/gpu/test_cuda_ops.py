"""The CUDA ops on a GPU, against plain torch."""

import importlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import SampleRow
from engine.execution.cuda.graphs import graph_sizes
from engine.execution.sampling.sampler import Sampler
from engine.ops import make_ops
from engine.ops.base import DeviceBatch, Heads
from engine.ops.flashinfer_ops import FlashInferOps
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_ops import TritonOps
from engine.types import SamplingParams
from tests.engine.ops.test_triton_ops import (
    ops,
    test_norms_equal_torch,
    test_pages_beyond_the_reach_of_32_bits_are_addressed,
    test_rope_and_store_equal_torch,
    test_silu_equals_torch,
)
from tests.engine.steps import Lens, lay_out, step_of

__all__ = [
    "ops",
    "test_norms_equal_torch",
    "test_pages_beyond_the_reach_of_32_bits_are_addressed",
    "test_rope_and_store_equal_torch",
    "test_silu_equals_torch",
]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, LAYER = 3, 1
SHAPES = [Heads(32, 8, 128), Heads(8, 8, 64), Heads(14, 2, 64), Heads(32, 1, 128)]
"""The two head sizes for which `scripts.gpu.carry` has compiled kernels."""

STEPS: Sequence[Lens] = [
    [(1, context) for context in (1, 2, 15, 16, 17, 600, 3000)],
    [(16, 16), (100, 100), (37, 130), (3, 700), (700, 1500)],
    [(1, 33), (1, 2000), (2, 2), (300, 300)],
    [(1, 100)] * 127 + [(1, 5000)],
]


def make(heads: Heads, dtype: torch.dtype) -> FlashInferOps:
    pytest.importorskip("flashinfer")
    made = make_ops(torch.device("cuda"), dtype, heads, 128)
    assert isinstance(made, FlashInferOps), "FlashInfer is there and does not work; the log says why"
    return made


def step(lens: Lens, heads: Heads, dtype: torch.dtype, seed: int) -> tuple[DeviceBatch, torch.Tensor, torch.Tensor]:
    """Returns a step on the GPU, its queries, and a pool with NaN outside the context."""
    torch.manual_seed(seed)
    pages, num_pages = lay_out(lens, np.random.default_rng(seed))
    batch = DeviceBatch.of(step_of(lens, pages).host, torch.device("cuda"))
    pool = torch.full(
        (num_pages, LAYERS, 2, heads.num_kv, BLOCK_SIZE, heads.dim), torch.nan, dtype=dtype, device="cuda"
    )
    for row, (_, context) in zip(pages, lens, strict=True):
        for index, page in enumerate(row):
            count = min(BLOCK_SIZE, context - index * BLOCK_SIZE)
            pool[page, :, :, :, :count].normal_()
    return batch, torch.randn(batch.num_tokens, heads.num_q, heads.dim, dtype=dtype, device="cuda"), pool


def expected(batch: DeviceBatch, q: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Computes attention with torch in float32."""
    reference = TorchOps()
    reference.prepare(batch)
    return reference.attention(q.float(), pool.float()[:, LAYER], batch, 0.3)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Asserts ‖actual − wanted‖ / ‖wanted‖ < 0.006, for 16-bit operands."""
    error = (actual.float() - wanted).norm() / wanted.norm()
    assert error < 6e-3, error


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_over_strided_pages_equals_torch(heads: Heads) -> None:
    dtype = torch.bfloat16
    flashinfer = make(heads, dtype)
    for seed, lens in enumerate(STEPS):
        batch, q, pool = step(lens, heads, dtype, seed)
        flashinfer.prepare(batch)
        out = flashinfer.attention(q.clone(), pool[:, LAYER], batch, 0.3)
        assert_close(out, expected(batch, q, pool))


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_a_captured_attention_serves_every_step_of_its_size(heads: Heads) -> None:
    """Covers short and long contexts, whose work FlashInfer divides differently."""
    flashinfer, device = make(heads, torch.bfloat16), torch.device("cuda")
    generator = np.random.default_rng(0)
    ops_of_size = flashinfer.capturable_decodes(128, 400)
    for size in graph_sizes(128)[::3]:
        graphed = ops_of_size(size)
        graph, captured_q, out = torch.cuda.CUDAGraph(), None, None
        pool = torch.randn(6000, LAYERS, 2, heads.num_kv, BLOCK_SIZE, heads.dim, dtype=torch.bfloat16, device=device)
        for longest in (1, 40, 5000, 300):
            lens = [(1, int(context)) for context in generator.integers(1, longest + 1, size)]
            lens[-1] = (1, longest)
            pages = [generator.integers(0, len(pool), -(-context // BLOCK_SIZE)).tolist() for _, context in lens]
            batch = DeviceBatch.of(step_of(lens, pages).host, device)
            graphed.prepare(batch)
            if captured_q is None or out is None:
                captured_q = torch.randn(size, heads.num_q, heads.dim, dtype=torch.bfloat16, device=device)
                graphed.attention(captured_q, pool[:, LAYER], batch, 0.3)
                with torch.cuda.graph(graph):
                    out = graphed.attention(captured_q, pool[:, LAYER], batch, 0.3)
            captured_q.normal_()
            out.fill_(torch.nan)
            graph.replay()
            assert_close(out, expected(batch, captured_q, pool))


def test_torch_computes_what_flashinfer_does_not_support() -> None:
    importlib.import_module("triton")
    for dtype, dim in ((torch.float32, 128), (torch.bfloat16, 40)):
        made = make_ops(torch.device("cuda"), dtype, Heads(4, 2, dim))
        assert type(made) is TritonOps


def test_the_device_chooses_the_tokens_that_a_cpu_does() -> None:
    """A request can move from one to the other: both compute the same noise."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, min_tokens=99, stop_token_ids=frozenset([2]), logit_bias={7: 3.0}),
        SamplingParams(temperature=1.0, top_logprobs=4),
    ]
    vocab_size, tokens = 50_000, np.random.default_rng(0).integers(50_000, size=90, dtype=np.int32)
    rows = [
        SampleRow(
            row, replace(kinds[row % len(kinds)], seed=row**9), row % 3, 50 + row % 40, tokens[: 50 + row % 40], 30
        )
        for row in range(84)
    ]
    logits = 3 * torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(0))
    wanted = Sampler(vocab_size).sample(logits.clone(), rows)
    got = Sampler(vocab_size).sample(logits.cuda(), rows)
    assert [one.token_id for one in got] == [one.token_id for one in wanted]
    for here, there in zip(got, wanted, strict=True):
        if here.logprobs is not None and there.logprobs is not None:
            assert here.logprobs.logprob == pytest.approx(there.logprobs.logprob, abs=1e-4)
