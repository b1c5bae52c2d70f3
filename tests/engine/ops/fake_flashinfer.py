"""FlashInfer 0.6.4 without a GPU: its checks of a plan, its division of the work, and attention written out in torch.

What a captured step reads on a GPU is read here when it runs, from the same buffers, so that a graph that holds stale
addresses or numbers computes something wrong.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.execution.cuda.fake_cuda import recorded

SMS = 132


def divide(
    group: int, num_kv: int, page_counts: list[int], query_lens: list[int], graph: bool, split_size: int
) -> tuple[int, bool, int]:
    """Does what PrefillSplitQOKVIndptr in scheduler.cuh does: thread blocks per head, split or not, blocks used."""
    rows = [length * group for length in query_lens]
    count = len(rows)
    most = SMS * 2 // num_kv
    average = (sum(query_lens) - count + 1) * group if graph else sum(rows) // count
    tile = 16 if average <= 16 else 64 if average <= 64 else 128
    tiles = -(-sum(query_lens) * group // tile) + count - 1 if graph else sum(-(-row // tile) for row in rows)

    def used(size: int) -> int:
        return sum(-(-row // tile) * -(-max(pages, 1) // size) for row, pages in zip(rows, page_counts, strict=True))

    split = False
    if split_size > 0:
        size = split_size
        split = any(pages > size for pages in page_counts)
    else:
        size, high = 128 // 16, max(page_counts)
        while size < high:
            middle = (size + high) // 2
            if used(middle) > most:
                size = middle + 1
            else:
                high = middle
        split = graph or size < max(page_counts)
    padded = max(most, tiles) if graph else used(size)
    assert used(size) <= padded, "new batch size should not exceed padded batch size"
    return padded, split, used(size)


class _Wrapper:
    """Base of both wrappers. `planned` holds the arguments of the last plan."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto", **options: Any
    ) -> None:
        assert kv_layout == "HND"
        assert backend == "fa2"
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "must be zero for its first use"
        self.options = options
        self.workspace = workspace
        self.planned: dict[str, Any] = {}
        self.plans = 0

    def _set(
        self, query_start: torch.Tensor, indptr: torch.Tensor, last: torch.Tensor, causal: bool, **shape: Any
    ) -> Any:
        for array in (query_start, indptr, last):
            assert array.dtype == torch.int32
            assert array.is_contiguous()
            assert array.device.type == "cpu", "a plan that is on the device is copied back, which waits"
        assert query_start[0] == indptr[0] == 0
        assert len(query_start) == len(indptr) == len(last) + 1
        assert ((last >= 1) & (last <= shape["page_size"])).all()
        assert shape["num_qo_heads"] % shape["num_kv_heads"] == 0
        assert shape["head_dim"] in (64, 128, 256)
        self.plans += 1
        self.planned = {"query_start": query_start, "indptr": indptr, "last": last, "causal": causal, **shape}
        padded, split, used = divide(
            shape["num_qo_heads"] // shape["num_kv_heads"],
            shape["num_kv_heads"],
            indptr.diff().tolist(),
            query_start.diff().tolist(),
            bool(self.options.get("use_cuda_graph")),
            shape["fixed_split_size"] or -1,
        )
        self.planned |= {"blocks": used, "split": split}
        rows = padded * {True: 16, False: 128}[not causal]
        if split:
            assert rows * shape["num_qo_heads"] * (shape["head_dim"] + 1) * 4 <= len(self.workspace)
        return [padded, int(split)]

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        query_start, indptr = self.planned["query_start"].tolist(), self._indptr.tolist()
        for s, last in enumerate(self._last.tolist()):
            pages = self._indices[indptr[s] : indptr[s + 1]].long()
            context = (len(pages) - 1) * kv.shape[3] + last
            group = q.shape[1] // kv.shape[2]
            keys, values = (
                kv[pages, which].transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, 0).float()
                for which in (0, 1)
            )  # [Hq, context, D]
            rows = slice(query_start[s], query_start[s + 1])
            scores = torch.einsum("thd,hcd->htc", q[rows].float(), keys) * scale
            if self.planned["causal"]:
                reach = torch.arange(context) - (context - scores.shape[1])
                scores.masked_fill_(reach > torch.arange(scores.shape[1])[:, None], -math.inf)
            out[rows] = torch.einsum("htc,hcd->thd", scores.softmax(-1), values).to(out.dtype)

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, *, q_scale: float, out: torch.Tensor, enable_pdl: bool
    ) -> torch.Tensor:
        shape = self.planned
        assert not enable_pdl
        assert q.dtype == shape["q_data_type"]
        assert kv.dtype == shape["kv_data_type"]
        assert q.is_contiguous()
        assert out.shape == q.shape
        assert q.shape[1:] == (shape["num_qo_heads"], shape["head_dim"])
        assert len(q) == shape["query_start"][-1]
        assert kv.shape[1:] == (2, shape["num_kv_heads"], shape["page_size"], shape["head_dim"])
        assert kv.stride(-1) == 1
        scale = q_scale / math.sqrt(shape["head_dim"])
        recorded(lambda: self._attend(q, kv, scale, out))
        return out

    _indptr: torch.Tensor
    _indices: torch.Tensor
    _last: torch.Tensor


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """See the real one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.options["use_tensor_cores"]
        if self.options.get("use_cuda_graph"):
            self._indptr = self.options["paged_kv_indptr_buffer"]
            self._indices = self.options["paged_kv_indices_buffer"]
            self._last = self.options["paged_kv_last_page_len_buffer"]
            assert len(self._indptr) == len(self._last) + 1
        self._cached_module: Any = None
        self._plan_info: list[int] = []
        self._numbers: torch.Tensor | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self.workspace, self._numbers = float_workspace_buffer, int_workspace_buffer

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, **shape: Any) -> None:
        assert indices.dtype == torch.int32
        shape.setdefault("fixed_split_size", None)
        if self.options.get("use_cuda_graph"):
            assert len(last_page_len) == len(self._last), "the batch size should be fixed in cudagraph mode"
            self._indptr.copy_(indptr)
            self._indices[: len(indices)].copy_(indices)
            self._last.copy_(last_page_len)
        else:
            self._indptr, self._indices, self._last = indptr, indices, last_page_len
        query_start = torch.arange(len(indptr), dtype=torch.int32)
        self._plan_info = self._set(query_start, indptr, last_page_len, False, **shape)
        self._cached_module = SimpleNamespace(plan=self._plan_again)

    def _plan_again(self, *arguments: Any) -> list[int]:
        workspace, numbers, staging, query_start, indptr, lens, rows, size, num_q, num_kv, page, graph = arguments[:12]
        dim, dim_vo, causal, window, split_size, never_split, colocated = arguments[12:]
        assert workspace is self.workspace
        assert numbers is self._numbers
        assert numbers is not None
        assert staging.shape == numbers.shape
        assert rows == size == len(self._last)
        assert (graph, dim_vo, causal, window, never_split, colocated) == (True, dim, False, -1, False, 0)
        counts = indptr.diff()
        last = lens - (counts - 1) * page
        assert torch.equal(self._indptr, indptr), "the buffers hold another step's pages"
        assert torch.equal(self._last, last)
        shape = {"num_qo_heads": num_q, "num_kv_heads": num_kv, "head_dim": dim, "page_size": page}
        types = {name: self.planned[name] for name in ("q_data_type", "kv_data_type")}
        info: list[int] = self._set(query_start, indptr, last, causal, fixed_split_size=split_size, **shape, **types)
        return info


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """See the real one."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *,
        causal: bool = False,
        head_dim_qk: int,
        **shape: Any,
    ) -> None:
        assert causal
        assert paged_kv_indices.dtype == torch.int32
        self._indptr, self._indices, self._last = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._set(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_last_page_len,
            causal,
            head_dim=head_dim_qk,
            fixed_split_size=None,
            **shape,
        )
