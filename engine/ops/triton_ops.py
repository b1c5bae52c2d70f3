"""Ops for GPUs of fused Triton kernels, with torch's attention.

Needs the package `triton`, which torch for CUDA brings along.
"""

from typing import ClassVar

import torch

from cpd.blocks import BLOCK_SIZE
from engine.ops.base import DeviceBatch
from engine.ops.torch_ops import TorchOps

_SILU_BLOCK = 1024
_ROPE_HEADS = 8
"""Heads that one program turns."""


class TritonOps(TorchOps):
    """See `engine.ops.base.Ops`.

    Raises:
        ImportError: The package is missing.
    """

    kernels: ClassVar[str] = "Triton, attention by torch"

    def __init__(self) -> None:
        super().__init__()
        from engine.ops import triton_kernels

        self._kernels = triton_kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._kernels.rms_norm[(rows,)](x, weight, out, eps, **_row_of(width))
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        self._kernels.add_rms_norm[(rows,)](x, residual, weight, eps, **_row_of(width))
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
        _, _, num_kv, _, dim = kv.shape
        tokens = len(qkv)
        num_q = qkv.shape[1] // dim - 2 * num_kv
        q = torch.empty(tokens, num_q, dim, dtype=qkv.dtype, device=qkv.device)
        grid = tokens, _cdiv(num_q + 2 * num_kv, _ROPE_HEADS)
        self._kernels.rope_store[grid](
            qkv,
            batch.positions,
            batch.slots,
            cos_sin,
            qkv if q_norm is None else q_norm,  # not looked at then, but a kernel's argument must be some pointer
            qkv if k_norm is None else k_norm,
            q,
            kv,
            kv.stride(0),
            eps,
            num_q=num_q,
            num_kv=num_kv,
            dim=dim,
            page_tokens=BLOCK_SIZE,
            normed=q_norm is not None,
            heads=_ROPE_HEADS,
            half_block=_power_of_2(dim // 2),
            num_warps=2,
        )
        return q

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        block = min(_SILU_BLOCK, _power_of_2(width))
        self._kernels.silu_mul[tokens, _cdiv(width, block)](gate_up, out, width=width, block=block, num_warps=4)
        return out


def _row_of(width: int) -> dict[str, int]:
    """How a program works on a row of so many numbers."""
    block = _power_of_2(width)
    return {"width": width, "block": block, "num_warps": min(max(block // 512, 4), 16)}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()
