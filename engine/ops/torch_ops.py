"""Ops of plain torch: correct on every device, fast on none. The fallback, and the tests' reference for the others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F

from cpd.common.blocks import BLOCK_SIZE
from engine.ops.base import DeviceBatch, Experts, FixedBuffers, FusedStack, Linear, Ops, Routing, Stack, Weight
from engine.ops.buffers import upload
from engine.ops.draw import Draws, draw
from engine.ops.quantized import QuantizedWeight

_DECODES_AT_ONCE = 16
"""Decodes whose contexts are gathered together, padded to one length."""

_MASK_ELEMENTS = 1 << 22
"""Largest attention mask of a prefill. A longer prefill is computed in pieces."""


@cache
def _byte_masks(device: torch.device) -> torch.Tensor:
    """What each byte of a mask adds to the logits of its eight tokens: 0, or -inf where its bit is 0. [256, 8]"""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))).to(device)


@dataclass(slots=True)
class _Decodes:
    """Leading sequences `start:stop` of a step, each with one query."""

    start: int
    stop: int
    pages: torch.Tensor  # int64 [n, B]
    distance: torch.Tensor  # int32 [n, B * BS], from a position to the query; negative outside the context


@dataclass(slots=True)
class _Prefill:
    """Queries `start:stop`, of one sequence; the first one is at `position`."""

    start: int
    stop: int
    position: int
    pages: torch.Tensor  # int64 [1, B]


@dataclass(slots=True)
class _Plan:
    positions: torch.Tensor  # int64 [T]
    pages: torch.Tensor  # int64 [T]
    offsets: torch.Tensor  # int64 [T]
    decodes: list[_Decodes] = field(default_factory=list)
    prefills: list[_Prefill] = field(default_factory=list)


class TorchOps:
    """See `engine.ops.base.Ops`."""

    kernels: ClassVar[str] = "torch"

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def with_own_workspaces(self) -> Self:
        return type(self)()

    def prepare(self, batch: DeviceBatch) -> None:
        slots = batch.slots.long()
        plan = _Plan(batch.positions.long(), slots // BLOCK_SIZE, slots % BLOCK_SIZE)
        tables = upload(batch.block_tables, slots.device).long()
        lens, starts = batch.host.context_lens, batch.host.query_start
        for start in range(0, batch.num_decodes, _DECODES_AT_ONCE):
            stop = min(start + _DECODES_AT_ONCE, batch.num_decodes)
            blocks = -(-int(lens[start:stop].max()) // BLOCK_SIZE)
            positions = torch.arange(blocks * BLOCK_SIZE, device=slots.device)
            distance = batch.context_lens[start:stop, None] - 1 - positions
            plan.decodes.append(_Decodes(start, stop, tables[start:stop, :blocks], distance))
        for s in range(batch.num_decodes, batch.num_seqs):
            start, stop, context = int(starts[s]), int(starts[s + 1]), int(lens[s])
            blocks = -(-context // BLOCK_SIZE)
            plan.prefills.append(_Prefill(start, stop, context - (stop - start), tables[s : s + 1, :blocks]))
        self._plan = plan

    def pack(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return DequantizedLinear(weight.dequantize(), None if bias is None else bias.float())
        return TorchLinear(weight, bias)

    def pack_experts(self, weights: Iterable[tuple[Weight, Weight]], count: int, routing: Routing) -> Experts:
        gate_up, down = zip(*((self.pack(first, None), self.pack(last, None)) for first, last in weights), strict=True)
        return TorchExperts(gate_up, down, routing)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_store(
        self,
        qkv: torch.Tensor,
        batch: DeviceBatch,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        assert self._plan is not None
        _, _, kv_heads, _, dim = kv.shape
        heads = qkv.view(len(qkv), -1, dim)  # [T, Hq + 2 Hkv, D]
        num_q = heads.shape[1] - 2 * kv_heads
        if q_norm is not None and k_norm is not None:
            heads[:, :num_q] = self.rms_norm(heads[:, :num_q], q_norm, eps)
            heads[:, num_q:-kv_heads] = self.rms_norm(heads[:, num_q:-kv_heads], k_norm, eps)
        cos, sin = cos_sin[self._plan.positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
        first, second = heads[:, :-kv_heads].float().chunk(2, dim=-1)  # queries and keys
        heads[:, :-kv_heads] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
        kv[self._plan.pages, :, :, self._plan.offsets] = heads[:, num_q:].view(-1, 2, kv_heads, dim)
        return heads[:, :num_q]

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None
    ) -> torch.Tensor:
        assert self._plan is not None
        num_tokens, num_q, dim = q.shape
        kv_heads = kv.shape[2]
        grouped = q.view(num_tokens, kv_heads, -1, dim)  # [T, Hkv, G, D]
        out = torch.empty(num_tokens, kv_heads, num_q // kv_heads, dim, dtype=q.dtype, device=q.device)
        for part in self._plan.decodes:
            keys, values = _gather(kv, part.pages)
            # Slots beyond the context hold stale values: the mask alone does not exclude a NaN.
            outside = (part.distance < 0)[:, None, :, None]
            keys.masked_fill_(outside, 0)
            values.masked_fill_(outside, 0)
            mask = _visible(part.distance, window)[:, None, None]
            out[part.start : part.stop] = F.scaled_dot_product_attention(
                grouped[part.start : part.stop], keys, values, attn_mask=mask, scale=scale
            )
        for prefill in self._plan.prefills:
            queries = grouped[prefill.start : prefill.stop].permute(1, 2, 0, 3)  # [Hkv, G, n, D]
            keys, values = (x.squeeze(0).unsqueeze(1) for x in _gather(kv, prefill.pages))  # [Hkv, 1, B * BS, D]
            result = _causal(queries, keys, values, prefill.position, scale, window)
            out[prefill.start : prefill.stop] = result.permute(2, 0, 1, 3)
        return out.view(num_tokens, -1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def top_k(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        # argmax of bfloat16 is four times slower than max on a CPU
        values, columns = x.max(dim=-1, keepdim=True) if count == 1 else torch.topk(x, count)
        return values, columns

    def log_sum_exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x.float(), dim=-1)

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        return draw(logits, draws)

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        # on a CPU a tenth of the time of unpacking the bits and `masked_fill`
        eights = F.embedding(masks.view(torch.uint8).int(), _byte_masks(logits.device)).flatten(1)
        logits.index_add_(0, rows, eights[:, : logits.shape[1]].to(logits.dtype))

    def with_fixed_buffers(self, max_tokens: int) -> tuple[Self, FixedBuffers] | None:
        return None

    def capturable_decodes(self, max_decodes: int, max_pages: int) -> Callable[[int], Ops] | None:
        return None

    def fuse(self, stack: Stack) -> FusedStack | None:
        return None


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A linear layer that torch computes."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DequantizedLinear(TorchLinear):
    """A linear layer in float32: what those of quantised weights should come to."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight, self.bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """Experts of plain torch: a few operations for each one that is used."""

    gate_up: Sequence[Linear]  # E of H -> 2I
    down: Sequence[Linear]  # E of I -> H
    routing: Routing

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for linear in (*self.gate_up, *self.down) for tensor in linear.tensors()]

    def __call__(self, x: torch.Tensor, router_output: torch.Tensor) -> torch.Tensor:
        weights, experts = route(router_output, self.routing)
        order = experts.flatten().argsort(stable=True)  # token and rank, by expert
        counts = torch.bincount(experts.flatten(), minlength=len(self.down))
        rows = x[order // self.routing.per_token]
        ends: list[int] = counts.cumsum(0).tolist()  # waits for the device
        for expert, (start, stop) in enumerate(pairwise([0, *ends])):
            if start < stop:
                gate, up = self.gate_up[expert](rows[start:stop]).chunk(2, dim=-1)
                rows[start:stop] = self.down[expert](F.silu(gate) * up)
        computed = torch.empty_like(rows)
        computed[order] = rows
        return (computed.view(*weights.shape, -1) * weights[..., None]).sum(dim=1).to(x.dtype)


def route(router_output: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts: [T, E] -> their float32 weights and indices, largest first, [T, per_token] each."""
    probabilities = torch.softmax(router_output, dim=-1, dtype=torch.float32)
    ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, : routing.per_token]
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts[:, : routing.per_token]


def _gather(kv: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies keys and values of sequences with the pages [n, B]: two tensors [n, Hkv, B * BS, D]."""
    _, _, kv_heads, block_size, dim = kv.shape
    row = block_size * dim  # one head's keys or values of one page
    page_rows = kv.stride(0) // row
    rows = kv.as_strided(((len(kv) - 1) * page_rows + 2 * kv_heads, row), (row, 1))
    heads = torch.arange(kv_heads, device=kv.device)[:, None]
    index = pages[:, None] * page_rows + heads  # [n, Hkv, B]
    shape = (len(pages), kv_heads, -1, dim)
    return rows.index_select(0, index.flatten()).view(shape), rows.index_select(0, (index + kv_heads).flatten()).view(
        shape
    )


def _visible(distance: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns where a query attends to a position, from the distance between the two."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, scale: float, window: int | None
) -> torch.Tensor:
    """Computes attention of queries whose first one is at `position`.

    q: [Hkv, G, n, D], k and v: [Hkv, 1, position + n or more, D] -> [Hkv, G, n, D]
    """
    group, n = q.shape[1], q.shape[2]

    def context(end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return k[:, :, :end].expand(-1, group, -1, -1), v[:, :, :end].expand(-1, group, -1, -1)

    if position == 0 and (window is None or n <= window):
        return F.scaled_dot_product_attention(q, *context(n), is_causal=True, scale=scale)
    tile = max(1, _MASK_ELEMENTS // (position + n))
    results = []
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        end = position + stop
        positions = torch.arange(end, device=q.device)
        mask = _visible(positions[position + start :, None] - positions, window)
        results.append(F.scaled_dot_product_attention(q[:, :, start:stop], *context(end), attn_mask=mask, scale=scale))
    return torch.cat(results, dim=2)
