"""Ops for GPUs with FlashInfer's attention (back end `fa2`) and Triton kernels for the rest.

    prepare    copies the step's page tables to pinned memory and to the device; FlashInfer divides the work
    attention  launches one kernel for the decodes and one for the prefills, over a layer's pages in place

A layer's view of the pool has FlashInfer's layout HND, with a stride between pages that is larger than a page.

| memory                            | owner                     | shared with                                      |
| --- | --- | --- |
| float workspace (partial results) | `FlashInferOps`           | its capturable decodes: never run concurrently   |
| plan on the device                | each wrapper              | –                                                |
| plan in pinned memory             | each wrapper              | the copy from it, until an event                 |
| page tables of captured decodes   | `PageBuffer` of each lane | all captured sizes of the lane                   |
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import Batch, IntArray
from engine.ops.base import DeviceBatch, FixedBuffers, Heads
from engine.ops.buffers import upload_arrays, upload_size
from engine.ops.triton_ops import TritonOps, one_token

HEAD_DIMS = (64, 128, 256)
"""Head sizes for which FlashInfer has kernels."""

_MIN_WORKSPACE = 128 << 20  # recommended by FlashInfer's documentation
_PLAN_BYTES = 1 << 20
_MIN_SPLIT = 128 // BLOCK_SIZE
"""Fewest pages of context for one thread block: FlashInfer's own bound."""

_TILES = (16, 64, 128)
"""Query rows of one thread block; each query head of a key-value head is a row."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of a step's sequences in FlashInfer's format. All arrays are int32.

    Attributes:
        indptr: Sequence s has the pages `indices[indptr[s]:indptr[s + 1]]`. [S + 1]
        indices: Pages of all sequences, concatenated.
        last_page_len: Tokens in each sequence's last page: 1 to BLOCK_SIZE. [S]
    """

    indptr: IntArray
    indices: IntArray
    last_page_len: IntArray

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Makes the table of a step."""
        counts = -(-batch.context_lens // np.int32(BLOCK_SIZE))
        indptr = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        inside = np.arange(batch.block_tables.shape[1]) < counts[:, None]
        last = batch.context_lens - (counts - np.int32(1)) * np.int32(BLOCK_SIZE)
        return cls(indptr, np.ascontiguousarray(batch.block_tables[inside], np.int32), last.astype(np.int32))


@dataclass(frozen=True, slots=True)
class Geometry:
    """How FlashInfer divides attention on a device.

    Attributes:
        sms: SMs of the whole device: FlashInfer does not know of partitions.
    """

    heads: Heads
    sms: int

    @property
    def splits(self) -> int:
        """Thread blocks per key-value head that run at once, with two on each SM."""
        return max(1, 2 * self.sms // self.heads.num_kv)

    @property
    def decode_tile(self) -> int:
        """Query rows of a decode's thread block."""
        group = self.heads.num_q // self.heads.num_kv
        return next((tile for tile in _TILES if group <= tile), _TILES[-1])

    def decode_blocks(self, decodes: int) -> int:
        """Returns the thread blocks per key-value head that a captured step of this size starts, needed or not."""
        rows = decodes * self.heads.num_q // self.heads.num_kv
        return max(self.splits, -(-rows // self.decode_tile) + decodes - 1)

    def workspace_bytes(self, max_decodes: int) -> int:
        """Returns the bytes of all partial results. They are bf16; this leaves room for float32."""
        rows = max(self.splits * _TILES[-1], self.decode_blocks(max_decodes) * self.decode_tile)
        return max(_MIN_WORKSPACE, rows * self.heads.num_q * (self.heads.dim + 1) * 4 + 1024)

    def split_pages(self, page_counts: IntArray) -> int | None:
        """Chooses the pages of context per thread block, so that one long sequence does not delay many short ones.

        FlashInfer never starts more blocks than run at once, and so does not split any sequence of a large batch.

        Args:
            page_counts: Pages of each decoding sequence.

        Returns:
            The fewest pages with which the step stays within `decode_blocks`; None if nothing needs splitting.
        """
        limit = self.decode_blocks(len(page_counts))
        low, high = _MIN_SPLIT, max(_MIN_SPLIT, int(page_counts.max()))
        while low < high:
            middle = (low + high) // 2
            if int((-(-page_counts // middle)).sum()) > limit:
                low = middle + 1
            else:
                high = middle
        return low if low < int(page_counts.max()) else None


class FlashInferOps(TritonOps):
    """See `engine.ops.base.Ops`.

    Args:
        library: The module `flashinfer`.
        dtype: float16 or bfloat16.
        max_decodes: Most decodes of one step.
    """

    kernels: ClassVar[str] = "FlashInfer"

    def __init__(
        self, library: Any, heads: Heads, dtype: torch.dtype, device: torch.device, sms: int, max_decodes: int
    ) -> None:
        super().__init__()
        self._library = library
        self._dtype = dtype
        self._device = device
        self._max_decodes = max_decodes
        self._geometry = Geometry(heads, sms)
        # FlashInfer requires zeros at first.
        self._workspace = torch.zeros(self._geometry.workspace_bytes(max_decodes), dtype=torch.uint8, device=device)
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=True, backend="fa2"
        )
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend="fa2")
        self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffers: FixedBuffers | None = None

    def with_fixed_buffers(self, max_tokens: int) -> tuple[Self, FixedBuffers] | None:
        other, heads = copy(self), self._geometry.heads
        queries = torch.zeros(max_tokens, heads.num_q, heads.dim, dtype=self._dtype, device=self._device)
        other._buffers = FixedBuffers(queries, torch.zeros_like(queries).view(max_tokens, -1))
        return other, other._buffers

    def with_own_workspaces(self) -> Self:
        heads, sms = self._geometry.heads, self._geometry.sms
        return type(self)(self._library, heads, self._dtype, self._device, sms, self._max_decodes)

    def capturable_decodes(self, max_decodes: int, max_pages: int) -> "Callable[[int], GraphedDecodeOps]":
        pages = PageBuffer(max_decodes, max_pages, self._device)
        return lambda size: GraphedDecodeOps(self._library, self._geometry, self._dtype, self._workspace, size, pages)

    def compile_attention(self) -> None:
        """Builds FlashInfer's kernels, or finds them in its cache, by planning a step.

        Raises:
            RuntimeError, OSError: They can't be built on this machine.
        """
        self.prepare(one_token(self._device))

    def prepare(self, batch: DeviceBatch) -> None:
        self._staged.synchronize()  # the last plan has been copied from pinned memory
        table = PageTable.of(batch.host)
        indices = upload_arrays([table.indices], self._device)[0]
        d = batch.num_decodes
        if d:
            self._decode.plan(
                _pinned(table.indptr[: d + 1], self._device),
                indices[: table.indptr[d]],
                _pinned(table.last_page_len[:d], self._device),
                fixed_split_size=self._geometry.split_pages(np.diff(table.indptr[: d + 1])),
                **_shape(self._geometry.heads, self._dtype),
            )
        if d < batch.num_seqs:
            self._prefill.plan(
                _pinned(batch.host.query_start[d:] - batch.host.query_start[d], self._device),
                _pinned(table.indptr[d:] - table.indptr[d], self._device),
                indices[table.indptr[d] :],
                _pinned(table.last_page_len[d:], self._device),
                causal=True,
                **_shape(self._geometry.heads, self._dtype, "head_dim_qk"),
            )
        self._staged.record()

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None
    ) -> torch.Tensor:
        assert window is None, "FlashInfer is not chosen for models with windows"
        out = torch.empty_like(q) if self._buffers is None else self._buffers.attended[: len(q)].view(q.shape)
        d = batch.num_decodes
        if d:
            _run(self._decode, q[:d], kv, scale, out[:d])
        if d < batch.num_seqs:
            _run(self._prefill, q[d:], kv, scale, out[d:])
        return out.view(len(q), -1)

    def _new_queries(self, qkv: torch.Tensor, num_q: int, dim: int) -> torch.Tensor:
        return self._buffers.queries[: len(qkv)] if self._buffers else super()._new_queries(qkv, num_q, dim)


class PageBuffer:
    """Device memory, at fixed addresses, for the page tables of a lane's captured decodes.

    Args:
        max_decodes: Most decodes of a captured step.
        max_pages: Most pages of one sequence.
    """

    def __init__(self, max_decodes: int, max_pages: int, device: torch.device) -> None:
        size = upload_size([max_decodes + 1, max_decodes, max_decodes * max_pages])
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns where `upload_arrays` puts indptr [size + 1], last_page_len [size] and indices (the rest)."""
        last, indices = upload_size([size + 1]), upload_size([size + 1, size])
        return self.numbers[: size + 1], self.numbers[last : last + size], self.numbers[indices:]


class GraphedDecodeOps(TritonOps):
    """See `engine.ops.base.Ops`. For steps of exactly `size` decodes: `prepare` each step, capture the rest once.

    The first `prepare` uses FlashInfer's wrapper. Later ones call only its planner: the wrapper would spend tenths of a
    millisecond on work not needed here, and copy three times.
    """

    def __init__(
        self,
        library: Any,
        geometry: Geometry,
        dtype: torch.dtype,
        workspace: torch.Tensor,
        size: int,
        pages: PageBuffer,
    ) -> None:
        super().__init__()
        self._geometry = geometry
        self._dtype = dtype
        self._workspace = workspace
        self._size = size
        self._pages = pages
        indptr, last_page_len, indices = pages.views(size)
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend="fa2",
        )
        device = workspace.device
        self._numbers = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._wrapper.reset_workspace_buffer(workspace, self._numbers)
        self._staging = torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._query_start = torch.arange(size + 1, dtype=torch.int32)
        self._captured_plan: list[int] | None = None
        self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def prepare(self, batch: DeviceBatch) -> None:
        assert batch.num_seqs == batch.num_decodes == self._size
        self._staged.synchronize()
        table = PageTable.of(batch.host)
        if self._captured_plan is None:
            self._captured_plan = self._first_plan(table)
        else:
            upload_arrays(
                [table.indptr, table.last_page_len, table.indices], self._workspace.device, self._pages.numbers
            )
            if self._next_plan(table, batch.host.context_lens) != self._captured_plan:
                raise RuntimeError(
                    f"FlashInfer's plan of {self._size} decodes differs from the captured one: this version of "
                    "FlashInfer is not supported; install CPD with its extra `gpu`"
                )
        self._staged.record()

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None
    ) -> torch.Tensor:
        assert window is None, "FlashInfer is not chosen for models with windows"
        out = torch.empty_like(q)
        _run(self._wrapper, q, kv, scale, out)
        return out.view(self._size, -1)

    def _first_plan(self, table: PageTable) -> list[int]:
        """Plans with FlashInfer's own division, which is marked as split for any contexts."""
        self._wrapper.plan(
            torch.from_numpy(table.indptr),
            torch.from_numpy(table.indices),
            torch.from_numpy(table.last_page_len),
            **_shape(self._geometry.heads, self._dtype),
        )
        return list(self._wrapper._plan_info)

    def _next_plan(self, table: PageTable, context_lens: IntArray) -> list[int]:
        heads, size = self._geometry.heads, self._size
        split = self._geometry.split_pages(np.diff(table.indptr))
        planned = self._wrapper._cached_module.plan(
            self._workspace,
            self._numbers,
            self._staging,
            self._query_start,
            torch.from_numpy(table.indptr),
            torch.from_numpy(context_lens),
            size,  # query rows
            size,  # sequences
            heads.num_q,
            heads.num_kv,
            BLOCK_SIZE,
            True,  # for a graph
            heads.dim,
            heads.dim,
            False,  # causal: one query attends to all
            -1,  # sliding window: none
            -1 if split is None else split,
            False,  # never split
            0,  # thread blocks reserved for other kernels
        )
        return list(planned)


def _shape(heads: Heads, dtype: torch.dtype, dim: str = "head_dim") -> dict[str, Any]:
    """Returns the arguments of every plan. FlashInfer's defaults are float16 and no causal mask."""
    return {
        "num_qo_heads": heads.num_q,
        "num_kv_heads": heads.num_kv,
        dim: heads.dim,
        "page_size": BLOCK_SIZE,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }


def _run(wrapper: Any, q: torch.Tensor, kv: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Computes attention of a planned step. FlashInfer scales by 1 / sqrt(D) and by `q_scale`.

    PDL lets a kernel start before the previous one has ended; it stays off, since Triton's kernels do not support it.
    """
    wrapper.run(q, kv, q_scale=scale * math.sqrt(q.shape[-1]), out=out, enable_pdl=False)


def _pinned(array: IntArray, device: torch.device) -> torch.Tensor:
    """Copies an array to host memory from which a wrapper can copy to the device without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor
