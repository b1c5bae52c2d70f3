"""Kinds of work that run side by side on a combined worker, on random data. A call launches one piece.

Compute             bound by arithmetic
PageReads           bound by memory
Gemm                of a prefill (many rows) or a decode (few rows; a piece reads several matrices)
PagedDecode         a decode's attention, by FlashInfer
ContiguousDecode    the same by torch, for machines without FlashInfer
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cpd.common.blocks import BLOCK_SIZE
from scripts.gpu.common import MissingError, require
from scripts.gpu.probes import BLOCK, Policy, Probes
from scripts.gpu.streams import Load, alone_ms

HIDDEN, WIDTH = 4096, 28672
"""Llama 3 8B's fused gate and up projection, its largest matrix (0.23 GB) except for the LM head."""
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Llama 3 8B's attention."""
WORKSPACE_BYTES = 128 << 20


class Compute:
    """Fused multiply-adds in float32, in so many blocks that an incomplete last wave hardly matters."""

    def __init__(self, probes: Probes, device: torch.device, iterations: int, blocks: int = 8192) -> None:
        self._probes = probes
        self._source = torch.rand(blocks * BLOCK, device=device)
        self._out = torch.empty_like(self._source)
        self._iterations = iterations

    def __call__(self) -> None:
        self._probes.compute(self._source, self._out, self._iterations)


def compute_for(probes: Probes, device: torch.device, stream: torch.cuda.Stream, ms: float) -> Compute:
    """A `Compute` that takes about `ms` on a stream."""
    iterations = 1000
    trial_ms = alone_ms(Load(stream, Compute(probes, device, iterations)))
    return Compute(probes, device, max(1, round(iterations * ms / trial_ms)))


class PageReads:
    """Reads pages in random order, each once; `bytes` is the size of a piece."""

    def __init__(
        self,
        probes: Probes,
        device: torch.device,
        policy: Policy = Policy.PLAIN,
        *,
        pages: int = 32768,
        page_bytes: int = 65536,
    ) -> None:
        self._probes = probes
        self._policy = policy
        self._pool = torch.empty(pages, page_bytes // 4, dtype=torch.int32, device=device).random_()
        self._table = torch.randperm(pages, device=device).to(torch.int32)
        self._out = torch.empty_like(self._table)
        self.bytes = pages * page_bytes

    def __call__(self) -> None:
        self._probes.read_pages(self._pool, self._table, self._out, self._policy)

    def with_policy(self, policy: Policy) -> Callable[[], None]:
        """The same reads with another cache policy."""
        return lambda: self._probes.read_pages(self._pool, self._table, self._out, policy)

    def wrong_sums(self) -> int:
        """Number of pages for which the last piece's sum differs from torch's."""
        right = self._pool.sum(1, dtype=torch.int64)[self._table.long()]
        return int((right - self._out).remainder(2**32).count_nonzero().item())


class Gemm:
    """bfloat16 products of the same rows with several matrices, one after the other; `flop` counts a piece."""

    def __init__(
        self, device: torch.device, rows: int, matrices: int = 1, *, hidden: int = HIDDEN, width: int = WIDTH
    ) -> None:
        self._x = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
        self._weights = [
            (torch.randn(width, hidden, device=device) / math.sqrt(hidden)).to(torch.bfloat16) for _ in range(matrices)
        ]
        self.out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        self.flop = 2 * rows * hidden * width * matrices

    def __call__(self) -> None:
        for weight in self._weights:
            torch.mm(self._x, weight.T, out=self.out)

    def reference(self) -> torch.Tensor:
        """Expected first rows of `out` after a piece, at most 64, in float64: [rows, width]."""
        return self._x[:64].double() @ self._weights[-1].double().T


def decode_attention(device: torch.device, sequences: int, context: int) -> tuple[str, Callable[[], object]]:
    """Attention of a decode step in one layer, by FlashInfer if installed: its description, and the work."""
    try:
        return "FlashInfer, paged", PagedDecode(require("flashinfer", "flashinfer-python"), device, sequences, context)
    except MissingError:
        return "torch, contiguous", ContiguousDecode(device, sequences, context)


class ContiguousDecode:
    """torch's attention of one query token per sequence over contiguous keys and values."""

    def __init__(self, device: torch.device, sequences: int, context: int) -> None:
        self._q = torch.randn(sequences, HEADS, 1, HEAD_DIM, device=device).to(torch.bfloat16)
        shape = (2, sequences, KV_HEADS, context, HEAD_DIM)
        self._k, self._v = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    def __call__(self) -> torch.Tensor:
        return scaled_dot_product_attention(self._q, self._k, self._v, enable_gqa=True)


class PagedDecode:
    """FlashInfer's attention of one query token per sequence, in some layers, over pages in random order.

    Attributes:
        q: [sequences, HEADS, HEAD_DIM]
        layers: Keys and values of each layer, as in the engine's pool: [pages, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
        table: Pages of each sequence: [sequences, blocks] int32
        context: Tokens of each sequence.
        out: Result of the last layer: [sequences, HEADS, HEAD_DIM]
    """

    def __init__(
        self,
        flashinfer: Any,
        device: torch.device,
        sequences: int,
        context: int,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        blocks = -(-context // BLOCK_SIZE)
        pages = sequences * blocks
        self.context = context
        self.q = torch.randn(sequences, HEADS, HEAD_DIM, device=device).to(dtype)
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(sequences, blocks)
        shape = (pages, layers, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        pool = torch.empty(shape, dtype=dtype, device=device).normal_()
        self.layers = [pool[:, layer] for layer in range(layers)]
        self.out = torch.empty_like(self.q)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "HND", use_tensor_cores=True, backend="fa2"
        )
        self._wrapper.plan(
            torch.arange(0, pages + 1, blocks, dtype=torch.int32),
            self.table.view(-1),
            torch.full((sequences,), (context - 1) % BLOCK_SIZE + 1, dtype=torch.int32),
            *(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE),
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def __call__(self) -> None:
        for kv in self.layers:
            self._wrapper.run(self.q, kv, out=self.out, enable_pdl=False)  # as in the engine

    def reference(self) -> torch.Tensor:
        """Expected `out`, in float64."""
        rows = self.layers[-1][self.table.long()]  # [sequences, blocks, 2, KV_HEADS, BLOCK, HEAD_DIM]
        k, v = rows.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : self.context].double()
        q = self.q.view(len(self.q), KV_HEADS, -1, HEAD_DIM).double()
        weights = (q @ k.transpose(2, 3) / HEAD_DIM**0.5).softmax(-1)
        return torch.matmul(weights, v).view_as(self.out)
