"""Ops of the compiled CPU kernels (`engine.ops.kernels`), for float32 and bfloat16.

A result has the same bits in any batch, any chunk and with any number of threads: the order of every sum depends only
on the token's position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from engine.ops import kernels
from engine.ops.base import DeviceBatch, FixedBuffers, FusedStack, Linear, Ops, Stack, TorchLinear


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer in the kernels' own weight layout."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.cpd.linear(x, self.weight, self.bias, self.out_features)
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

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if weight.shape[1] * weight.element_size() % 4:
            return TorchLinear(weight, bias)  # the kernels read rows in 32-bit words
        return PackedLinear(torch.ops.cpd.pack_weight(weight.contiguous()), bias, weight.shape[0])

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
        _, _, kv_heads, _, dim = kv.shape
        return qkv.view(len(qkv), -1, dim)[:, : -2 * kv_heads]

    def attention(self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float) -> torch.Tensor:
        out: torch.Tensor = torch.ops.cpd.attention(
            q, kv, batch.query_start, batch.context_lens, batch.block_tables, scale
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.cpd.silu_mul(gate_up)
        return out

    def top_k(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, columns = torch.ops.cpd.top_k(x, count)
        return values, columns

    def with_fixed_buffers(self, max_tokens: int) -> tuple[Self, FixedBuffers] | None:
        return None

    def capturable_decodes(self, max_decodes: int, max_pages: int) -> Callable[[int], Ops] | None:
        return None

    def fuse(self, stack: Stack) -> FusedStack | None:
        """Returns one call of the kernels for all layers, without Python or starting threads in between."""
        head = stack.head
        if not isinstance(head, PackedLinear):
            return None
        weights: list[torch.Tensor | None] = []
        for layer in stack.layers:
            qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
            if not (
                isinstance(qkv, PackedLinear)
                and isinstance(o, PackedLinear)
                and isinstance(gate_up, PackedLinear)
                and isinstance(down, PackedLinear)
            ):
                return None
            weights += [layer.input_norm, qkv.weight, qkv.bias, layer.q_norm, layer.k_norm, o.weight, o.bias]
            weights += [layer.post_norm, gate_up.weight, gate_up.bias, down.weight, down.bias]
            intermediate = gate_up.out_features // 2
        weights += [stack.norm, head.weight]
        progress = torch.from_numpy(stack.progress)

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
            )
            return logits if num_rows else None

        return run
