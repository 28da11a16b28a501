"""C = A B in Triton, a tile of C in each program: the kernel that notebook 09 builds.

A is (m, k), B is (k, n), C is (m, n). It reads through pointers, so that it takes any strides and
runs on every generation; `matmul_persistent` and `matmul_pingpong` are faster on Hopper.
"""

import dataclasses

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers import waves
from helpers.device import interpreting
from helpers.triton_mode import on_device_of, tl, triton


@dataclasses.dataclass(frozen=True)
class Config:
    """How a matmul is divided: a program's tile of C, its steps along k, the order of tiles.

    group: rows of tiles that are taken together, `tile_of` says how; 1 is row by row.
    per_sm: programs on an SM, of kernels that give each of them several tiles.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int = 8
    warps: int = 4
    stages: int = 3
    per_sm: int = 1


@triton.jit
def tile_of(program, rows, columns, GROUP: tl.constexpr):
    first = program // (GROUP * columns) * GROUP  # row of tiles of this group of rows
    height = tl.minimum(rows - first, GROUP)  # the last group may have fewer
    within = program % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def activate(c, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":  # x sigmoid(2 a), as in helpers.kernels.gelu; here in powers of 2
        c = c / (1.0 + tl.exp2(c * (-2.302208198 - 0.1029432396 * c * c)))
    return c


# fmt: off
@triton.jit
def matmul_tiles_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    row, column = tile_of(tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), GROUP)
    i = row * TILE_M + tl.arange(0, TILE_M).to(tl.int64)[:, None]
    j = column * TILE_N + tl.arange(0, TILE_N).to(tl.int64)[None, :]
    l = tl.arange(0, TILE_K).to(tl.int64)  # noqa: E741
    a_at = a_ptr + i * a_stride_m + l[None, :] * a_stride_k
    b_at = b_ptr + l[:, None] * b_stride_k + j * b_stride_n
    c = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        left = k - start
        a = tl.load(a_at, mask=(i < m) & (l[None, :] < left), other=0.0)
        b = tl.load(b_at, mask=(l[:, None] < left) & (j < n), other=0.0)
        if UPCAST:  # the interpreter's tl.dot would multiply bf16's bits
            a, b = a.to(tl.float32), b.to(tl.float32)
        c = tl.dot(a, b, c, input_precision=PRECISION)
        a_at += TILE_K * tl.cast(a_stride_k, tl.int64)  # in 32 bits it could wrap around
        b_at += TILE_K * tl.cast(b_stride_k, tl.int64)
    c = activate(c, ACTIVATION)
    tl.store(c_ptr + i * c_stride_m + j, c.to(c_ptr.dtype.element_ty), mask=(i < m) & (j < n))
# fmt: on


def launch_tiles(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    config: Config,
    activation: str | None = None,
    precision: str = "ieee",
):
    """c = activation(a @ b) with `matmul_tiles_kernel`; what Triton compiled, None interpreted.

    a: (m, k), b: (k, n), any strides; c: (m, n), columns beside each other; none empty. None of
    this is checked. precision: what tl.dot makes of fp32, "ieee", "tf32" or "tf32x3".
    """
    (m, k), n = a.shape, b.shape[1]
    with on_device_of(a):
        grid = (waves.tiles(m, n, config.tile_m, config.tile_n),)
        return matmul_tiles_kernel[grid](
            *(a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0)),
            *(config.tile_m, config.tile_n, config.tile_k, config.group),
            *(activation, precision, interpreting()),
            num_warps=config.warps,
            num_stages=config.stages,
        )
