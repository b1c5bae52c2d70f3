"""Replaces a GPU with the CPU, and FlashInfer's attention with torch's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are requested on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Wrapper:
    """Base of both paged wrappers of FlashInfer: attention for one sequence at a time, in the given layout."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **_: Any) -> None:
        self._layout = kv_layout
        self._plan: Any = None

    def _planned(self, counts: list[int], indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        self._plan = counts, indptr.tolist(), indices.tolist(), last.tolist()

    def run(self, q: torch.Tensor, kv: torch.Tensor, *, out: torch.Tensor, enable_pdl: bool) -> None:
        keys_values = kv if self._layout == "HND" else kv.transpose(2, 3)  # [pages, 2, Hkv, block, D]
        counts, indptr, indices, last = self._plan
        begin = 0
        for s, count in enumerate(counts):
            rows = keys_values[indices[indptr[s] : indptr[s + 1]]]
            context = (len(rows) - 1) * rows.shape[3] + last[s]
            k, v = rows.transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, :context].float()
            mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
            query = q[begin : begin + count].transpose(0, 1).float()
            attended = F.scaled_dot_product_attention(query[None], k[None], v[None], mask, enable_gqa=True)[0]
            out[begin : begin + count] = attended.transpose(0, 1).to(out.dtype)
            begin += count


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Of FlashInfer."""

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *_: Any, **__: Any) -> None:
        self._planned([1] * len(last), indptr, indices, last)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Of FlashInfer."""

    def plan(
        self,
        queries: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        *_: Any,
        causal: bool,
        **__: Any,
    ) -> None:
        assert causal
        self._planned(queries.diff().tolist(), indptr, indices, last)
