import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from scripts.gpu.common import relative_error
from scripts.gpu.probes import Policy
from scripts.gpu.workloads import ContiguousDecode, Gemm, PagedDecode, PageReads, decode_attention
from tests.scripts.gpu.fake_gpu import FakeGpu, FakeProbes

CPU = torch.device("cpu")


class FakeWrapper:
    """See FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`. Implements its documented `plan` and `run` in torch."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "HND"

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *shape: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {indptr.dtype, indices.dtype, last_page_len.dtype} == {torch.int32}
        assert q_data_type == kv_data_type
        self._shape = shape
        ends = indptr.tolist()
        self._rows = [indices[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
        self._last = last_page_len.tolist()

    def run(self, q: torch.Tensor, kv: torch.Tensor, *, out: torch.Tensor, enable_pdl: bool) -> None:
        heads, kv_heads, dim, block = self._shape
        assert q.shape[1:] == (heads, dim)
        assert kv.shape[1:] == (2, kv_heads, block, dim)
        for index, (row, last) in enumerate(zip(self._rows, self._last, strict=True)):
            tokens = [(page, offset) for page in row for offset in range(block)][: (len(row) - 1) * block + last]
            k, v = (torch.stack([kv[page, part, :, offset] for page, offset in tokens], 1) for part in range(2))
            out[index] = scaled_dot_product_attention(q[index, :, None], k, v, enable_gqa=True)[:, 0]


@pytest.mark.parametrize("context", [1, 16, 37])
def test_paged_attention_is_planned_as_its_reference_computes_it(context: int) -> None:
    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    work = PagedDecode(flashinfer, CPU, 3, context)
    work()
    assert relative_error(work.out, work.reference()) < 1e-2


@pytest.mark.parametrize("matrices", [1, 3])
def test_a_product_is_near_its_reference_and_all_matrices_count(matrices: int) -> None:
    gemm = Gemm(CPU, 100, matrices, hidden=64, width=32)
    gemm()
    assert relative_error(gemm.out[:64], gemm.reference()) < 1e-2
    assert gemm.flop == 2 * 100 * 64 * 32 * matrices


def test_wrong_sums_are_counted(gpu: FakeGpu) -> None:
    reads = PageReads(FakeProbes(gpu), CPU, pages=8, page_bytes=32768)  # type: ignore[arg-type]
    assert reads.bytes == 8 * 32768
    reads.with_policy(Policy.EVICT_FIRST)()
    assert reads.wrong_sums() == 0
    reads._out[3] += 1
    assert reads.wrong_sums() == 1


def test_without_flashinfer_attention_is_torchs() -> None:
    name, work = decode_attention(CPU, 2, 16)
    assert name == "torch, contiguous"
    assert isinstance(work, ContiguousDecode)
    assert work().shape == (2, 32, 1, 128)
