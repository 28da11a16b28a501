"""The derivative of softmax, dx = y (g - Σ y g) in each row: y the output, g its gradient.

`softmax_rows_backward_kernel` holds whole rows in registers. `softmax_tiles_backward_kernel` looks
at y and g twice, tile by tile: for the sum and for dx; the second look finds in L1 what fits there.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton
from helpers.triton_mode import tl, triton


@triton.jit
def softmax_rows_backward_kernel(
    y_ptr,
    grad_ptr,
    dx_ptr,
    rows,
    columns,
    y_stride,
    grad_stride,
    dx_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    columns, dx_stride = columns // UNIT * UNIT, dx_stride // UNIT * UNIT
    y_stride, grad_stride = y_stride // UNIT * UNIT, grad_stride // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    dx = y * (grad - tl.sum(y * grad, axis=1, keep_dims=True))
    tl.store(dx_ptr + row * dx_stride + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_tiles_backward_kernel(
    y_ptr,
    grad_ptr,
    dx_ptr,
    columns,
    y_stride,
    grad_stride,
    dx_stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = columns // UNIT * UNIT
    y_row = y_ptr + row * (y_stride // UNIT * UNIT)
    grad_row = grad_ptr + row * (grad_stride // UNIT * UNIT)
    dx_row = dx_ptr + row * (dx_stride // UNIT * UNIT)
    tile = tl.arange(0, BLOCK)
    products = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, columns, BLOCK * TILES):
        for i in tl.static_range(TILES):  # unrolled: their loads are under way at the same time
            at = start + i * BLOCK + tile
            mask = at < columns
            y = tl.load(y_row + at, mask=mask, other=0.0, eviction_policy="evict_last")
            grad = tl.load(grad_row + at, mask=mask, other=0.0, eviction_policy="evict_last")
            products += y.to(tl.float32) * grad.to(tl.float32)
    total = tl.sum(products, axis=0)
    for start in range(0, columns, BLOCK * TILES):
        for i in tl.static_range(TILES):
            at = start + i * BLOCK + tile
            mask = at < columns
            y = tl.load(y_row + at, mask=mask, eviction_policy="evict_first").to(tl.float32)
            grad = tl.load(grad_row + at, mask=mask, eviction_policy="evict_first").to(tl.float32)
            dx = (y * (grad - total)).to(dx_ptr.dtype.element_ty)
            tl.store(dx_row + at, dx, mask=mask, cache_modifier=".cs")
