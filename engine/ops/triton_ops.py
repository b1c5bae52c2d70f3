"""Ops for GPUs with fused Triton kernels and torch's attention.

Needs the package `triton`, which comes with torch for CUDA.
"""

from typing import ClassVar

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import Batch
from engine.ops.base import DeviceBatch, Heads
from engine.ops.torch_ops import TorchOps

_SILU_BLOCK = 1024
_ROPE_HEADS = 8
"""Heads that one program of `rope_store` computes."""


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

    def compile(self, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        """Builds every kernel, or finds it in Triton's cache, by running it on one token.

        Raises:
            RuntimeError, OSError, SubprocessError: They can't be built on this machine.
        """

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        row, norm, eps = zeros(1, heads.dim), zeros(heads.dim), 1e-6
        cos_sin = torch.zeros(2, heads.dim, device=device)
        page = zeros(1, 2, heads.num_kv, BLOCK_SIZE, heads.dim)
        try:
            self.rms_norm(row, norm, eps)
            self.add_rms_norm(row, zeros(1, heads.dim), norm, eps)
            self.silu_mul(row)
            qkv = zeros(1, (heads.num_q + 2 * heads.num_kv) * heads.dim)
            self.rope_store(qkv, one_token(device), cos_sin, norm, norm, eps, page)
        except self._kernels.TritonError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

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
        q = self._new_queries(qkv, num_q, dim)
        grid = tokens, _cdiv(num_q + 2 * num_kv, _ROPE_HEADS)
        self._kernels.rope_store[grid](
            qkv,
            batch.positions,
            batch.slots,
            cos_sin,
            qkv if q_norm is None else q_norm,  # unused without norms, but the argument must be a pointer
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

    def _new_queries(self, qkv: torch.Tensor, num_q: int, dim: int) -> torch.Tensor:
        """Returns memory for the queries of `rope_store`: [T, Hq, D]"""
        return torch.empty(len(qkv), num_q, dim, dtype=qkv.dtype, device=qkv.device)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        block = min(_SILU_BLOCK, _power_of_2(width))
        self._kernels.silu_mul[tokens, _cdiv(width, block)](gate_up, out, width=width, block=block, num_warps=4)
        return out


def one_token(device: torch.device) -> DeviceBatch:
    """Makes a step of one token, the second of its sequence."""
    one = np.ones(1, np.int32)
    return DeviceBatch.of(Batch(one, one, one, np.array([0, 1], np.int32), one, one[:, None], 1, []), device)


def _row_of(width: int) -> dict[str, int]:
    """Returns the launch parameters for rows of this width."""
    block = _power_of_2(width)
    return {"width": width, "block": block, "num_warps": min(max(block // 512, 4), 16)}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
