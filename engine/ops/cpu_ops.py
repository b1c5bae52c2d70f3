"""Ops of the compiled CPU kernels (`engine.ops.kernels`), for float32 and bfloat16.

A result has the same bits in any batch, any chunk and with any number of threads: the order of every sum depends only
on the token's position.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Self

import torch

from engine.ops import kernels
from engine.ops.base import DeviceBatch, Experts, FixedBuffers, FusedStack, Layer, Linear, Ops, Routing, Stack, Weight
from engine.ops.draw import Changes, Draws
from engine.ops.quantized import GROUP, QuantizedWeight
from engine.ops.torch_ops import TorchOps


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer in the kernels' own weight layout."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.cpd.linear(x, self.weight, self.bias, self.out_features)
        return y


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A layer's experts, each in the layout of a `PackedLinear`, one after the other."""

    gate_up: torch.Tensor
    down: torch.Tensor
    width: int
    routing: Routing

    def tensors(self) -> list[torch.Tensor]:
        return [self.gate_up, self.down]

    def __call__(self, x: torch.Tensor, router_output: torch.Tensor) -> torch.Tensor:
        per_token, normalize = self.routing.per_token, self.routing.normalize
        y: torch.Tensor = torch.ops.cpd.experts(
            x, router_output, self.gate_up, self.down, self.width, per_token, normalize
        )
        return y


class CpuOps:
    """See `engine.ops.base.Ops`."""

    kernels: ClassVar[str] = "C++"

    def __init__(self) -> None:
        """Loads the kernels, and compiles them the first time.

        Raises:
            KernelsUnavailableError: They can't be compiled or loaded on this machine.
        """
        kernels.load()

    def with_own_workspaces(self) -> Self:
        return self

    def prepare(self, batch: DeviceBatch) -> None:
        pass

    def pack(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        if not _is_packable(weight):
            return TorchOps().pack(weight, bias)
        packed = _empty_packed(weight, 1)[0]
        _pack_into(weight, packed)
        return PackedLinear(packed, bias, weight.shape[0])

    def pack_experts(self, weights: Iterable[tuple[Weight, Weight]], count: int, routing: Routing) -> Experts:
        each = iter(weights)
        first = next(each)
        if not all(map(_is_packable, first)):
            return TorchOps().pack_experts(chain([first], each), count, routing)
        gate_up, down = (_empty_packed(weight, count) for weight in first)
        for expert, both in enumerate(chain([first], each)):
            for weight, packed in zip(both, (gate_up, down), strict=True):
                _pack_into(weight, packed[expert])
        return PackedExperts(gate_up, down, first[0].shape[0] // 2, routing)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = torch.ops.cpd.rms_norm(x, weight, eps)
        return normed

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        torch.ops.cpd.add_rms_norm(x, residual, weight, eps)
        return x

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
        torch.ops.cpd.rope_store(qkv, batch.positions, batch.slots, cos_sin, q_norm, k_norm, eps, kv)
        return qkv.view(len(qkv), -1, cos_sin.shape[1])[:, : -2 * kv.shape[2]]

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.cpd.attention(
            q, kv, batch.query_start, batch.context_lens, batch.block_tables, scale, window or 0
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.cpd.silu_mul(gate_up)
        return out

    def top_k(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, columns = torch.ops.cpd.top_k(x, count)
        return values, columns

    def log_sum_exp(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.cpd.log_sum_exp(x)
        return y

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        filters = (draws.temperatures, draws.top_k, draws.top_p, draws.min_p, draws.keys)
        tokens: torch.Tensor = torch.ops.cpd.draw(
            logits, *map(torch.from_numpy, filters), _tensors(draws.factors), _tensors(draws.additions)
        )
        return tokens

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        torch.ops.cpd.mask_logits(logits, rows, masks)

    def with_fixed_buffers(self, max_tokens: int) -> tuple[Self, FixedBuffers] | None:
        return None

    def capturable_decodes(self, max_decodes: int, max_pages: int) -> Callable[[int], Ops] | None:
        return None

    def fuse(self, stack: Stack) -> FusedStack | None:
        """Returns one call of the kernels for all layers, without Python or starting threads in between."""
        head = stack.head
        weights: list[torch.Tensor | None] = []
        if not isinstance(head, PackedLinear):
            return None
        for layer in stack.layers:
            packed = _packed_layer(layer)
            if packed is None:
                return None
            weights += packed
        weights += [stack.norm, head.weight]
        mlps = [layer.gate_up for layer in stack.layers if isinstance(layer.gate_up, PackedLinear)]
        intermediate = mlps[0].out_features // 2 if mlps else 0
        experts = [layer.experts for layer in stack.layers if isinstance(layer.experts, PackedExperts)]
        # Empty if there are none: then a step does not look at them.
        routers = [_router_weight(layer) for layer in stack.layers] if experts else []
        has_windows = any(layer.window is not None for layer in stack.layers)
        windows = [layer.window or 0 for layer in stack.layers] if has_windows else []
        width = experts[0].width if experts else 0
        routing = experts[0].routing if experts else Routing(0, False)
        progress, expert_bytes = torch.from_numpy(stack.progress), torch.from_numpy(stack.expert_bytes)

        def run(
            residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
        ) -> torch.Tensor | None:
            num_rows = batch.num_tokens if rows is None else len(rows)
            logits = torch.ops.cpd.layers(
                residual,
                weights,
                kv,
                stack.cos_sin,
                batch.positions,
                batch.slots,
                batch.query_start,
                batch.context_lens,
                batch.block_tables,
                rows,
                num_rows,
                intermediate,
                head.out_features,
                stack.eps,
                stack.scale,
                progress,
                windows,
                routers,
                width,
                routing.per_token,
                routing.normalize,
                expert_bytes,
            )
            return logits if num_rows else None

        return run


def _packed_layer(layer: Layer) -> list[torch.Tensor | None] | None:
    """Returns the twelve weights of a layer in the kernels' order; None if one is not in their layout."""
    qkv, o, gate_up, down, experts = layer.qkv, layer.o, layer.gate_up, layer.down, layer.experts
    if not (isinstance(qkv, PackedLinear) and isinstance(o, PackedLinear)):
        return None
    weights = [layer.input_norm, qkv.weight, qkv.bias, layer.q_norm, layer.k_norm, o.weight, o.bias, layer.post_norm]
    if isinstance(gate_up, PackedLinear) and isinstance(down, PackedLinear):
        return [*weights, gate_up.weight, gate_up.bias, down.weight, down.bias]
    if isinstance(experts, PackedExperts) and isinstance(layer.router, PackedLinear):
        return [*weights, experts.gate_up, None, experts.down, None]
    return None


def _router_weight(layer: Layer) -> torch.Tensor | None:
    return layer.router.weight if isinstance(layer.router, PackedLinear) else None


def _is_packable(weight: Weight) -> bool:
    """True if the kernels can read a weight: they read rows in groups or in 32-bit words."""
    if isinstance(weight, QuantizedWeight):
        return weight.shape[1] % GROUP == 0
    return weight.shape[1] * weight.element_size() % 4 == 0


def _empty_packed(weight: Weight, count: int) -> torch.Tensor:
    """Returns memory for `count` packed weights of this shape and format: [count, ...]"""
    packed: torch.Tensor
    if isinstance(weight, QuantizedWeight):
        packed = torch.ops.cpd.empty_quantized(*weight.shape, weight.bits, weight.minima is not None, count)
    else:
        packed = torch.ops.cpd.empty_packed(weight, count)
    return packed


def _pack_into(weight: Weight, packed: torch.Tensor) -> None:
    if isinstance(weight, QuantizedWeight):
        torch.ops.cpd.pack_quantized_into(weight.values, weight.scales, weight.minima, weight.bits, packed)
    else:
        torch.ops.cpd.pack_into(weight.contiguous(), packed)


def _tensors(changes: Changes | None) -> list[torch.Tensor]:
    return [] if changes is None else [*map(torch.from_numpy, (changes.starts, changes.tokens, changes.numbers))]
