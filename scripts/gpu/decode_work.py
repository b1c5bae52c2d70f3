"""Memory-bound work of a decode step, each with several kernels that can do it.

Products     a few rows times a matrix, by cuBLAS and by a Triton kernel
Attention    one query token per sequence, by FlashInfer and by a Triton kernel
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
"""Least bytes that a piece of work reads (copies of a matrix, or layers): many times the L2 cache."""
CHECKED_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sizes of a Triton kernel, see `decode_kernels_triton`.

    Attributes:
        width: Columns of a product's block; tokens of an attention block.
        inner: Depth of a product's block; parts of the context for attention.
        stages: Pipeline stages.
    """

    width: int
    inner: int
    stages: int


@dataclass(frozen=True, slots=True)
class Kind:
    """How the Triton kernels load: pipelined or not, and with which eviction policy."""

    name: str
    pipelined: bool
    evict: str = ""


KINDS = (Kind("pipelined", True), Kind("plain", False), Kind("evict first", False, "evict_first"))
GEMM_TILINGS = {
    True: [
        *(Tiling(16, 512, 4), Tiling(32, 256, 5), Tiling(64, 256, 4), Tiling(64, 128, 6)),
        *(Tiling(64, 128, 4), Tiling(128, 64, 5)),  # fit with 64 rows
    ],
    False: [Tiling(16, 256, 1), Tiling(16, 512, 1), Tiling(32, 256, 1), Tiling(64, 128, 1)],
}
ATTENTION_TILINGS = {
    True: [Tiling(tokens, splits, 3) for tokens in (32, 64) for splits in (1, 2, 32)],
    False: [Tiling(tokens, splits, 1) for tokens in (32, 64, 128) for splits in (1, 2, 32)],
}
"""Tilings to try, by whether loads are pipelined."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do a piece of work: its description, and its launch."""

    how: str
    launch: Launch


class Work(Protocol):
    """Work that several kernels can do.

    Attributes:
        name: Description.
        parts: Matrices or layers in a piece.
        part_bytes: Bytes that one of them must read.
    """

    name: str
    parts: int
    part_bytes: int

    def ways(self) -> Mapping[str, Sequence[Way]]:
        """The ways to try, by kind of kernel."""

    def error(self, way: Way) -> float:
        """Relative error of the last part's result against float64."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of the model, which a step runs `count` times."""

    name: str
    inner: int
    width: int
    count: int

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        return self.inner * self.width * BF16_BYTES


class Products:
    """The same rows times copies of a matrix, see `Work`."""

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
        """See `Work`. Checks the first and last columns only: all in float64 would not fit."""
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
    """One query per sequence over its pages, in some layers, see `Work`."""

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
    """All tilings of each kind of load."""
    return {
        f"Triton, {kind.name}": [
            Way(str(tiling), functools.partial(launch, tiling, kind.evict)) for tiling in tilings[kind.pipelined]
        ]
        for kind in KINDS
    }


def matrices(config: ModelConfig) -> list[Matrix]:
    """The linear layers of a model, fused as in the engine."""
    hidden, layers = config.hidden_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Matrix("qkv", hidden, q + 2 * kv, layers),
        Matrix("o", q, hidden, layers),
        Matrix("gate and up", hidden, 2 * config.intermediate_size, layers),
        Matrix("down", config.intermediate_size, hidden, layers),
        Matrix("head", hidden, config.vocab_size, 1),
    ]
