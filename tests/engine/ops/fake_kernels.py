"""The Triton kernels in plain torch, for tests of their callers. Tests with Triton compare the two."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


class TritonError(Exception):
    """Base class of Triton's errors, which is not a RuntimeError."""


class Kernel:
    """`kernel[grid](...)`"""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@Kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, **_: Any) -> None:
    out.copy_(_norm(x, weight, eps))


@Kernel
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **_: Any) -> None:
    residual += x
    x.copy_(_norm(residual, weight, eps))


@Kernel
def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, **_: Any) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


@Kernel
def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    q_out: torch.Tensor,
    kv: torch.Tensor,
    page_stride: int,
    eps: float,
    *,
    num_q: int,
    num_kv: int,
    page_tokens: int,
    normed: bool,
    **_: Any,
) -> None:
    assert page_stride == kv.stride(0)
    heads = qkv.view(len(qkv), num_q + 2 * num_kv, -1).clone()
    if normed:
        heads[:, :num_q] = _norm(heads[:, :num_q], q_norm, eps)
        heads[:, num_q:-num_kv] = _norm(heads[:, num_q:-num_kv], k_norm, eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[:, :-num_kv].float().chunk(2, dim=-1)
    heads[:, :-num_kv] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q_out.copy_(heads[:, :num_q])
    where = slots.long()
    kv[where // page_tokens, :, :, where % page_tokens] = heads[:, num_q:].view(len(qkv), 2, num_kv, -1)
