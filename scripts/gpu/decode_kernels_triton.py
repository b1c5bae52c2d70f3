"""Triton kernels of a decode step that read weights and pages once, as a stream.

`evict` is Triton's eviction policy of those loads. Triton drops it silently where it pipelines them (`num_stages` > 1).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def small_gemm(
    x,
    weight,
    out,
    rows,
    inner,
    width,
    row_block: tl.constexpr,
    width_block: tl.constexpr,
    inner_block: tl.constexpr,
    evict: tl.constexpr,
):
    """x [rows, inner] @ weight [width, inner].T -> out [rows, width]; one program computes `width_block` columns.

    `row_block` must be at least `rows`, and `inner` a multiple of `inner_block`.
    """
    row = tl.arange(0, row_block)
    column = tl.program_id(0).to(tl.int64) * width_block + tl.arange(0, width_block)
    k = tl.arange(0, inner_block)
    of_x = x + row[:, None] * inner + k[None, :]
    of_weight = weight + column[:, None] * inner + k[None, :]
    is_row, is_column = row < rows, column < width
    total = tl.zeros((row_block, width_block), tl.float32)
    for start in range(0, inner, inner_block):
        part = tl.load(of_x + start, mask=is_row[:, None], other=0.0)
        weights = tl.load(of_weight + start, mask=is_column[:, None], other=0.0, eviction_policy=evict)
        total = tl.dot(part, tl.trans(weights), total)
    place = out + row[:, None] * width + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def paged_decode(
    q,
    kv,
    table,
    context_lens,
    parts,
    exponents,
    page_stride,
    table_stride,
    scale,
    num_q: tl.constexpr,
    num_kv: tl.constexpr,
    dim: tl.constexpr,
    page_tokens: tl.constexpr,
    head_block: tl.constexpr,
    token_block: tl.constexpr,
    splits: tl.constexpr,
    evict: tl.constexpr,
):
    """Attention of one query token per sequence. One program computes one sequence, one key-value head and one of
    `splits` parts of the context; `merge_parts` combines the parts.

    q [S, Hq, D], kv [pages, 2, Hkv, page_tokens, D] with `page_stride` from page to page, table [S, `table_stride`],
    context_lens [S]; float32 parts [S, Hq, splits, D] and exponents (log2 of the sum) [S, Hq, splits].
    `head_block` is at least Hq / Hkv. `scale` includes log2(e).
    """
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = num_q // num_kv
    context = tl.load(context_lens + seq)
    size = tl.cdiv(tl.cdiv(context, splits), token_block) * token_block
    begin = split * size
    end = tl.minimum(begin + size, context)
    row, d = tl.arange(0, head_block), tl.arange(0, dim)
    is_row = row < group
    of_row = seq * num_q + head * group + row
    query = tl.load(q + of_row[:, None] * dim + d[None, :], mask=is_row[:, None], other=0.0)
    most = tl.full((head_block,), -1e30, tl.float32)
    total = tl.zeros((head_block,), tl.float32)
    sums = tl.zeros((head_block, dim), tl.float32)
    for start in range(begin, end, token_block):
        token = start + tl.arange(0, token_block)
        inside = token < end
        page = tl.load(table + seq * table_stride + token // page_tokens, mask=inside, other=0).to(tl.int64)
        of_key = kv + page * page_stride + (head * page_tokens + token % page_tokens) * dim
        of_value = of_key + num_kv * page_tokens * dim
        key = tl.load(of_key[:, None] + d[None, :], mask=inside[:, None], other=0.0, eviction_policy=evict)
        value = tl.load(of_value[:, None] + d[None, :], mask=inside[:, None], other=0.0, eviction_policy=evict)
        scores = tl.where(inside[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
        total = total * kept + tl.sum(weights, axis=1)
        sums = sums * kept[:, None] + tl.dot(weights.to(value.dtype), value)
        most = higher
    place = of_row * splits + split
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(parts + place[:, None] * dim + d[None, :], sums / divisor[:, None], mask=is_row[:, None])
    tl.store(exponents + place, tl.where(total > 0, most + tl.log2(divisor), -1e30), mask=is_row)


@triton.jit
def merge_parts(parts, exponents, out, dim: tl.constexpr, splits: tl.constexpr):
    """Combines the parts of `paged_decode`; one program computes one query head's row [D]. `splits`: a power of two."""
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, splits), tl.arange(0, dim)
    exponent = tl.load(exponents + row * splits + split)
    weights = tl.exp2(exponent - tl.max(exponent, axis=0))
    values = tl.load(parts + (row * splits + split)[:, None] * dim + d[None, :])
    merged = tl.sum(values * (weights / tl.sum(weights, axis=0))[:, None], axis=0)
    tl.store(out + row * dim + d, merged.to(out.dtype.element_ty))
