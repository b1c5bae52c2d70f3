"""Fused elementwise kernels in Triton, called by `engine.ops.triton_ops`. Shapes use the letters of `engine.ops.base`.

They round after the same operations as plain torch. No argument is a count that varies between steps: Triton would
compile a kernel anew for each class of numbers while serving.
"""

import triton
import triton.language as tl
from triton import TritonError as TritonError


@triton.jit
def rms_norm(x, weight, out, eps, width: tl.constexpr, block: tl.constexpr):
    """RMSNorm. Each program computes one row [width]."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    wide = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    _norm(wide, weight, out + row, eps, column, inside, width)


@triton.jit
def add_rms_norm(x, residual, weight, eps, width: tl.constexpr, block: tl.constexpr):
    """Adds `x` to `residual`, and writes the norm of the sum to `x`. Each program computes one row [width]."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    wide = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    total = wide.to(residual.dtype.element_ty)
    tl.store(residual + row + column, total, mask=inside)
    _norm(total.to(tl.float32), weight, x + row, eps, column, inside, width)


@triton.jit
def _norm(wide, weight, out, eps, column, inside, width: tl.constexpr):
    """Writes the norm of a float32 row that is zero outside `width`."""
    dtype = out.dtype.element_ty
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)).to(dtype)
    scaled = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * normed.to(tl.float32)
    tl.store(out + column, scaled.to(dtype), mask=inside)


@triton.jit
def silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr):
    """silu(gate) · up. Each program computes `block` columns of one row [2 width]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + token * width + column, (activated * up).to(dtype), mask=inside)


@triton.jit
def rope_store(
    qkv,
    positions,
    slots,
    cos_sin,
    q_norm,
    k_norm,
    q_out,
    kv,
    page_stride,
    eps,
    num_q: tl.constexpr,
    num_kv: tl.constexpr,
    dim: tl.constexpr,
    page_tokens: tl.constexpr,
    normed: tl.constexpr,
    heads: tl.constexpr,
    half_block: tl.constexpr,
):
    """RoPE and store into pages. Each program computes `heads` heads of a token as two halves [heads, dim / 2]."""
    half: tl.constexpr = dim // 2
    total: tl.constexpr = num_q + 2 * num_kv
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    i = tl.arange(0, half_block)
    inside = (head < total)[:, None] & (i < half)[None, :]
    source = qkv + (token * total + head[:, None]) * dim + i[None, :]
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    dtype = qkv.dtype.element_ty
    a, b = first.to(tl.float32), second.to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / dim + eps)[:, None]
        is_q = (head < num_q)[:, None]
        a = _scaled(a * scale, is_q, q_norm + i, k_norm + i, i < half, dtype)
        b = _scaled(b * scale, is_q, q_norm + half + i, k_norm + half + i, i < half, dtype)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * dim + i
    cos = tl.load(angle, mask=i < half, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=i < half, other=0.0)[None, :]
    is_value = (head >= num_q + num_kv)[:, None]
    rotated_first = tl.where(is_value, first, (a * cos - b * sin).to(dtype))
    rotated_second = tl.where(is_value, second, (b * cos + a * sin).to(dtype))

    query = q_out + (token * num_q + head[:, None]) * dim + i[None, :]
    is_query = inside & (head < num_q)[:, None]
    tl.store(query, rotated_first, mask=is_query)
    tl.store(query + half, rotated_second, mask=is_query)

    slot = tl.load(slots + token)
    page = (slot // page_tokens).to(tl.int64)
    row = (head - num_q) * page_tokens + slot % page_tokens  # in a page's layer [2, Hkv, BS]: keys, then values
    target = kv + page * page_stride + row[:, None] * dim + i[None, :]
    is_stored = inside & (head >= num_q)[:, None]
    tl.store(target, rotated_first, mask=is_stored)
    tl.store(target + half, rotated_second, mask=is_stored)


@triton.jit
def _scaled(x, is_q, q_weight, k_weight, inside, dtype: tl.constexpr):
    """Multiplies normalised halves of heads by the weights of queries or keys, rounding as torch does."""
    q = tl.load(q_weight, mask=inside, other=0.0).to(tl.float32)[None, :]
    k = tl.load(k_weight, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (tl.where(is_q, q, k) * x.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
