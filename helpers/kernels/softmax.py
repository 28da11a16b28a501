"""Softmax over the last dimension, y = exp(x - max x) / Σ exp(x - max x), four ways.

All of them: any shape and strides; fp32, fp16 and bf16 (else TypeError), computed in fp32; the
result is contiguous. Rows with NaN or +inf, and rows of nothing but -inf, become NaN as in PyTorch.
All are differentiable, and all but `compiled_softmax` twice. `triton_softmax` runs beside
torch.compile, with a graph break, and raises where PyTorch has to look into it. In fp32, with
u = 2^-24 and n columns, its relative error is at most u (3 (max x - x) + 3 ln n + 65 + 8 r), r
being how often the online form rescales; derived in tests/test_softmax.py.

How `triton_softmax` goes about a row depends on its width (speeds: shares of a copy's, on an H200):

- up to 1,024 columns: several rows in one program of one warp, 1,024 elements in all. A row alone
  would leave too few bytes on the way: at 512 columns in 16 bits it reaches 0.80, two reach 1.01.
- up to 4,096: a row in one program, held in registers between the looks. Wider ones leave too few
  programs on an SM, and what the next power of two adds to a width is carried along: 5,000 columns
  in bf16 reach 0.86 to 0.95 so. (The kernel spills with 4 warps, as the lecture has it, from 32,768
  columns of fp32 on, and with any number of warps from 65,536.)
- up to 65,536, and from 1,025 on if rows begin off a 16-byte boundary: in tiles, which find the
  row again on the chip (`helpers.kernels.softmax_tiles`): 0.90 to 1.02.
- wider: programs share a row, 32 KB each. One program a row would have 132 rows in flight on an
  H200, 66 MB at 131,072 columns of fp32, more than its 60 MB of L2: little would be found again.
- rows for which there are not enough programs (32 KB for each of four an SM, and 8 MB in all), and
  tensors that cannot be read in whole units: the online form, two looks at any width.
"""

import functools
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers import compute_roofs
from helpers.kernels.contract import apply, checked
from helpers.kernels.softmax_backward import (
    softmax_rows_backward_kernel,
    softmax_tiles_backward_kernel,
)
from helpers.kernels.softmax_plans import VECTOR_BYTES, launch_wide, plan, unit
from helpers.triton_mode import on_device_of, tl, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS_ELEMENTS = 1024  # of the several rows in one program
REGISTER_COLUMNS = 4096
ONLINE_BLOCK = 4096
BACKWARD_ELEMENTS = 2**15  # that the backward kernel looks at, at once
# Offsets within a row are 32 bits wide, and go beyond its end by what a kernel looks at, at once.
WIDEST = 2**31 - 2**17


def manual_softmax(x: torch.Tensor) -> torch.Tensor:
    """The formula in PyTorch's operations: five kernels on a GPU, and two casts in 16 bits."""
    return _formula(_checked(x))


def _formula(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():  # no maximum of nothing
        return pytorch_softmax(x)
    dtype, x = x.dtype, x.float()
    maximum = x.max(dim=-1, keepdim=True).values
    numerator = torch.exp(x - maximum)
    return (numerator / numerator.sum(dim=-1, keepdim=True)).to(dtype)


def pytorch_softmax(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, one kernel."""
    return torch.softmax(_checked(x), dim=-1)


@functools.cache
def _compiled() -> Callable:
    return compute_roofs.compiled(_formula)


def compiled_softmax(x: torch.Tensor) -> torch.Tensor:
    """`manual_softmax` through torch.compile: one or two kernels, which TorchInductor writes.

    Every new shape, dtype or stride is compiled for seconds. Where nothing can be compiled
    (`compute_roofs.compiler_missing()` says why) the call raises what torch.compile raises.
    """
    return _compiled()(_checked(x))


def triton_softmax(x: torch.Tensor) -> torch.Tensor:
    """Our Triton kernels, forward and backward; CPU tensors go through Triton's interpreter.

    ValueError for rows of more than 2,147,352,576 elements.
    """
    return apply(_TritonSoftmax, _checked(x))


def _checked(x: torch.Tensor) -> torch.Tensor:
    return checked(x, "softmax", DTYPES)


@triton.jit
def softmax_rows_kernel(
    x_ptr,
    y_ptr,
    rows,
    columns,
    x_stride,
    y_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    # These are multiples of UNIT. Written so, the compiler knows it too, and accesses are wide.
    columns, x_stride = columns // UNIT * UNIT, x_stride // UNIT * UNIT
    y_stride = y_stride // UNIT * UNIT
    row = tl.program_id(axis=0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    y = e * (1.0 / tl.sum(e, axis=1, keep_dims=True))  # a division a row, not one an element
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_online_kernel(x_ptr, y_ptr, columns, x_stride, y_stride, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * y_stride
    tile = tl.arange(0, BLOCK)
    m, d = -float("inf"), 0.0
    for start in range(0, columns, BLOCK):  # the first look: the maximum and the sum
        column = start + tile
        x = tl.load(x_row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - (-inf) would be NaN
        d = d * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)
        m = m_new
    for start in range(0, columns, BLOCK):  # the second: the output
        column = start + tile
        x = tl.load(x_row + column, mask=column < columns).to(tl.float32)
        y = tl.exp(x - m) / d
        tl.store(y_row + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)


def launch_triton_softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write softmax of x's rows to y: 2-D, of one shape and dtype, columns beside each other.

    Neither is checked, but for ValueError where rows are too wide.
    """
    rows, columns = x.shape
    if not x.numel():
        return  # a grid of no programs cannot be launched
    if columns > WIDEST:
        raise ValueError(f"softmax takes rows of up to {WIDEST:,} elements, not {columns:,}")
    with on_device_of(x):
        wide = unit(x, y) * x.itemsize == VECTOR_BYTES
        if columns <= (REGISTER_COLUMNS if wide else ROWS_ELEMENTS):
            launch_rows(x, y)
        elif not launch_wide(x, y, split=not wide):
            launch_online(x, y)


def launch_rows(x: torch.Tensor, y: torch.Tensor, warps: int | None = None) -> None:
    """With `softmax_rows_kernel`: rows of up to 2^20 elements, better far fewer."""
    rows, columns = x.shape
    at_once, block, own = _rows_plan(columns)
    softmax_rows_kernel[(triton.cdiv(rows, at_once),)](
        *(x, y, rows, columns, x.stride(0), y.stride(0)),
        *(at_once, block, unit(x, y)),
        num_warps=warps or own,
    )


def _rows_plan(columns: int) -> tuple[int, int, int]:
    """Rows a program, elements for each of them, warps."""
    block = triton.next_power_of_2(columns)
    return (
        max(1, ROWS_ELEMENTS // block),
        block,
        min(32, max(1, block // 512 if block > 1024 else 1)),
    )


def launch_online(x: torch.Tensor, y: torch.Tensor, block: int = ONLINE_BLOCK) -> None:
    """With `softmax_online_kernel`: rows of any width, in tiles of `block` elements."""
    rows, columns = x.shape
    softmax_online_kernel[(rows,)](x, y, columns, x.stride(0), y.stride(0), block, num_warps=8)


def launch_triton_softmax_backward(y: torch.Tensor, grad: torch.Tensor, dx: torch.Tensor) -> None:
    """Write y (grad - Σ y grad) to dx: all as `launch_triton_softmax` has them."""
    rows, columns = y.shape
    if not y.numel():
        return
    tensors = y, grad, dx
    strides = [tensor.stride(0) for tensor in tensors]
    with on_device_of(y):
        if columns <= REGISTER_COLUMNS:
            at_once, block, warps = _rows_plan(columns)
            softmax_rows_backward_kernel[(triton.cdiv(rows, at_once),)](
                *(*tensors, rows, columns, *strides),
                *(at_once, block, unit(*tensors)),
                num_warps=warps,
            )
        else:
            chosen, size = plan(columns, 2 * y.itemsize), unit(*tensors)  # y and grad are read
            block, at_once = chosen.block, BACKWARD_ELEMENTS
            if size * y.itemsize < VECTOR_BYTES:  # narrow accesses: an address each, in registers
                block, at_once = block // 2, block
            tiles = min(triton.cdiv(columns, block), at_once // block, 4)  # and so on in a loop
            softmax_tiles_backward_kernel[(rows,)](
                *(*tensors, columns, *strides), *(block, tiles, size), **chosen.options
            )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension alone and all others in one; copied where strides do not allow."""
    if not x.numel():
        return x.new_empty(0, 1)
    x = x.resolve_neg()  # a view that stands for its negative has the positive numbers in memory
    x = x.reshape(1, 1) if x.dim() == 0 else x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def _gradient(y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(y)
    launch_triton_softmax_backward(_rows(y), _rows(grad), _rows(dx))
    return dx


class _TritonSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch_triton_softmax(_rows(x), _rows(y))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        # With gradients enabled here a second derivative is wanted: PyTorch's can be derived again.
        if torch.is_grad_enabled():
            return torch._softmax_backward_data(grad, y, -1, y.dtype)
        return _gradient(y, grad)
