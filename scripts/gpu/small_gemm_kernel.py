"""A matrix product of few rows that reads its weights as one stream. Written in Triton's language."""

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
    """x [rows, inner] @ weight [width, inner].T -> out [rows, width]: all rows and `width_block` columns a program.

    `row_block` is at least `rows`, and `inner` a multiple of `inner_block`. `evict` is Triton's eviction policy of the
    loads of weights. It is lost without a word where Triton pipelines them, with more than one stage.
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
