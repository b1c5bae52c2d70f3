"""What decodes read once, weights and pages, and several ways to do the work on it.

Products     of few rows, by cuBLAS and by a Triton kernel
Attention    of one query token a sequence, by FlashInfer and by a Triton kernel
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.model.config import ModelConfig
from scripts.gpu.common import relative_error
from scripts.gpu.models import BF16_BYTES
from scripts.gpu.streams import Launch
from scripts.gpu.workloads import HEAD_DIM, HEADS, KV_HEADS, PagedDecode

STREAM_BYTES = 1 << 30
"""A piece of work reads so many bytes at least, many times the L2 cache: copies of a matrix, or layers."""
CHECKED_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program of a Triton kernel works on, and how. See `decode_kernels_triton`.

    Attributes:
        width, inner: Columns and depth of a product; tokens, and parts of the context, of attention.
    """

    width: int
    inner: int
    stages: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to run the Triton kernels."""

    name: str
    pipelined: bool
    evict: str = ""


KINDS = (Kind("pipelined", True), Kind("plain", False), Kind("evict first", False, "evict_first"))
GEMM_TILINGS = {
    True: [
        *(Tiling(16, 512, 4), Tiling(32, 256, 5), Tiling(64, 256, 4), Tiling(64, 128, 6)),
        *(Tiling(64, 128, 4), Tiling(128, 64, 5)),  # what has room for 64 rows
    ],
    False: [Tiling(16, 256, 1), Tiling(16, 512, 1), Tiling(32, 256, 1), Tiling(64, 128, 1)],
}
ATTENTION_TILINGS = {
    True: [Tiling(tokens, splits, 3) for tokens in (32, 64) for splits in (1, 2, 32)],
    False: [Tiling(tokens, splits, 1) for tokens in (32, 64, 128) for splits in (1, 2, 32)],
}
"""Of kernels whose loads are pipelined, and of those whose are not."""


@dataclass(frozen=True, slots=True)
class Way:
    """To do a piece of work."""

    how: str
    launch: Launch


class Work(Protocol):
    """What can be done in several ways.

    Attributes:
        name: What it is.
        parts: Matrices or layers of a piece.
        part_bytes: What must be read for one of them.
    """

    name: str
    parts: int
    part_bytes: int

    def ways(self) -> Mapping[str, Sequence[Way]]:
        """The kinds of kernels, and of each what to try."""

    def error(self, way: Way) -> float:
        """Of the last part's result, relative to float64."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of the model.

    Attributes:
        count: In a step.
    """

    name: str
    inner: int
    width: int
    count: int

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return self.inner * self.width * BF16_BYTES


class Products:
    """See `Work`: the same rows times copies of a matrix."""

    def __init__(self, matrix: Matrix, rows: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = f"{rows} rows, {matrix.name}"
        self.parts = math.ceil(STREAM_BYTES / matrix.bytes)
        self.part_bytes = matrix.bytes
        self._x = torch.randn(rows, matrix.inner, device=device).to(dtype)
        self._out = torch.empty(rows, matrix.width, dtype=dtype, device=device)
        self._weights = torch.empty(self.parts, matrix.width, matrix.inner, dtype=dtype, device=device)
        self._weights.normal_(std=matrix.inner**-0.5)

    def ways(self) -> Mapping[str, Sequence[Way]]:
        """See `Work`."""
        return {"cuBLAS": [Way("cuBLAS", self._by_cublas)], **triton_ways(GEMM_TILINGS, self._by_triton)}

    def error(self, way: Way) -> float:
        """See `Work`. Only of the first and the last columns: all in float64 would not fit."""
        self._out.fill_(math.nan)
        way.launch()
        weight, ends = self._weights[-1], (slice(None, CHECKED_COLUMNS), slice(-CHECKED_COLUMNS, None))
        return max(relative_error(self._out[:, end], self._x.double() @ weight[end].double().T) for end in ends)

    def _by_cublas(self) -> None:
        for weight in self._weights:
            torch.mm(self._x, weight.T, out=self._out)

    def _by_triton(self, tiling: Tiling, evict: str) -> None:
        from scripts.gpu.decode_kernels_triton import small_gemm

        (rows, inner), width = self._x.shape, self._out.shape[1]
        for weight in self._weights:
            small_gemm[-(-width // tiling.width),](
                self._x,
                weight,
                self._out,
                rows,
                inner,
                width,
                row_block=max(16, 1 << (rows - 1).bit_length()),
                width_block=tiling.width,
                inner_block=tiling.inner,
                evict=evict,
                num_stages=tiling.stages,
            )


class Attention:
    """See `Work`: one query a sequence over its pages, in some layers."""

    def __init__(
        self,
        flashinfer: Any,
        sequences: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.name = f"attention of {sequences} x {context:,}"
        self.part_bytes = sequences * context * 2 * KV_HEADS * HEAD_DIM * BF16_BYTES
        self.parts = math.ceil(STREAM_BYTES / self.part_bytes)
        self._paged = PagedDecode(flashinfer, device, sequences, context, self.parts, dtype)
        self._context_lens = torch.full((sequences,), context, dtype=torch.int32, device=device)

    def ways(self) -> Mapping[str, Sequence[Way]]:
        """See `Work`."""
        return {"FlashInfer": [Way("FlashInfer", self._paged)], **triton_ways(ATTENTION_TILINGS, self._by_triton)}

    def error(self, way: Way) -> float:
        """See `Work`."""
        self._paged.out.fill_(math.nan)
        way.launch()
        return relative_error(self._paged.out, self._paged.reference())

    def _by_triton(self, tiling: Tiling, evict: str) -> None:
        from scripts.gpu.decode_kernels_triton import merge_parts, paged_decode

        q, out, splits = self._paged.q, self._paged.out, tiling.inner
        parts = torch.empty(*q.shape[:2], splits, HEAD_DIM, dtype=torch.float32, device=q.device)
        exponents = torch.empty(*q.shape[:2], splits, dtype=torch.float32, device=q.device)
        for kv in self._paged.layers:
            paged_decode[len(q), KV_HEADS, splits](
                q,
                kv,
                self._paged.table,
                self._context_lens,
                parts,
                exponents,
                kv.stride(0),
                self._paged.table.stride(0),
                math.log2(math.e) / math.sqrt(HEAD_DIM),
                num_q=HEADS,
                num_kv=KV_HEADS,
                dim=HEAD_DIM,
                page_tokens=BLOCK_SIZE,
                head_block=16,
                token_block=tiling.width,
                splits=splits,
                evict=evict,
                num_stages=tiling.stages,
            )
            merge_parts[len(q) * HEADS,](parts, exponents, out, dim=HEAD_DIM, splits=splits, num_warps=1)


def triton_ways(
    tilings: Mapping[bool, Sequence[Tiling]], launch: Callable[[Tiling, str], None]
) -> dict[str, Sequence[Way]]:
    """All tilings of each kind."""
    return {
        f"Triton, {kind.name}": [
            Way(str(tiling), functools.partial(launch, tiling, kind.evict)) for tiling in tilings[kind.pipelined]
        ]
        for kind in KINDS
    }


def matrices(config: ModelConfig) -> list[Matrix]:
    """The linear layers, fused as the engine fuses them."""
    hidden, layers = config.hidden_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Matrix("qkv", hidden, q + 2 * kv, layers),
        Matrix("o", q, hidden, layers),
        Matrix("gate and up", hidden, 2 * config.intermediate_size, layers),
        Matrix("down", config.intermediate_size, hidden, layers),
        Matrix("head", hidden, config.vocab_size, 1),
    ]
