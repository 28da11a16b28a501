"""C = A B for Hopper and later, in Triton: one program an SM, and the tensor memory accelerator.

A program takes tile after tile of C. Tensor descriptors say where a matrix lies, so that one thread
asks for a tile of it and that engine (TMA) computes all addresses, also at the edges.
"""

import functools
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers import waves
from helpers.device import interpreting
from helpers.kernels.matmul_tiles import Config, activate, tile_of
from helpers.triton_mode import on_device_of, tl, triton

# TMA's rows begin at multiples of 16 bytes, less than 2^40 apart.
UNIT_BYTES, MOST_BYTES = 16, 2**40


@triton.jit
def matmul_persistent_kernel(
    a_matrix,
    b_matrix,
    c_matrix,
    m,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    A_COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    rows, columns, steps = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N), tl.cdiv(k, TILE_K)
    # Flattened, the two loops are one: the next tile's first loads are on their way already while
    # this one is written.
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        row, column = tile_of(tile, rows, columns, GROUP)
        i, j = row * TILE_M, column * TILE_N
        c = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for step in range(steps):
            at = step * TILE_K
            a = a_matrix.load([at, i]).T if A_COLUMNS else a_matrix.load([i, at])
            b = b_matrix.load([j, at]).T if B_COLUMNS else b_matrix.load([at, j])
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            c = tl.dot(a, b, c)
        # In halves, so that the second is computed while the first is written.
        halves = c.reshape(TILE_M, 2, TILE_N // 2).permute(0, 2, 1)
        left, right = tl.split(halves)
        c_matrix.store([i, j], activate(left, ACTIVATION).to(c_matrix.dtype))
        c_matrix.store([i, j + TILE_N // 2], activate(right, ACTIVATION).to(c_matrix.dtype))


def has_descriptor(x: torch.Tensor) -> bool:
    """True when x's rows, or its columns, are dense and begin at multiples of 16 bytes."""
    columns = x.stride(1) != 1
    dense, leading = x.stride()[::-1] if not columns else x.stride()
    size = x.shape[0 if columns else 1]
    unit = UNIT_BYTES // x.itemsize
    strides = dense == 1 and leading % unit == 0 and size <= leading < MOST_BYTES // x.itemsize
    return strides and x.data_ptr() % UNIT_BYTES == 0


def can_be_written(x: torch.Tensor) -> bool:
    """True when x's rows are dense, have a descriptor and are multiples of 16 bytes long.

    TMA reads up to the last element, but writes whole units: on an H200 what lies behind a row of
    other length, up to the next multiple of 16 bytes, was set to 0.
    """
    return x.stride(1) == 1 and has_descriptor(x) and x.shape[1] * x.itemsize % UNIT_BYTES == 0


def descriptor(x: torch.Tensor, rows: int, columns: int, make: Callable) -> tuple[object, bool]:
    """What `make` makes of a matrix in blocks of rows x columns, and whether its columns are dense.

    Then it stands for x transposed. make: takes a tensor, its shape, its strides and a block's
    shape, as both of Triton's classes TensorDescriptor do.
    """
    by_columns = x.stride(1) != 1
    block = [rows, columns]
    if by_columns:
        x, block = x.t(), block[::-1]
    return make(x, list(x.shape), list(x.stride()), block), by_columns


def described(a, b, c, config: Config, make: Callable, c_columns: int):
    """(descriptors of a, b and c, m, n, k), (whether a's and b's columns are dense), the tiles.

    c_columns: the width of the blocks that are written; `make` as for `descriptor`.
    """
    (m, k), n = a.shape, b.shape[1]
    a_matrix, a_columns = descriptor(a, config.tile_m, config.tile_k, make)
    b_matrix, b_columns = descriptor(b, config.tile_k, config.tile_n, make)
    c_matrix, _ = descriptor(c, config.tile_m, c_columns, make)
    tiles = waves.tiles(m, n, config.tile_m, config.tile_n)
    return (a_matrix, b_matrix, c_matrix, m, n, k), (a_columns, b_columns), tiles


def launch_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    config: Config,
    activation: str | None = None,
):
    """As `launch_tiles`, in 16 bits, for matrices of which `has_descriptor` holds, c's rows dense.

    On a GPU of compute capability 9.0 or later. What it does behind c's rows: see `can_be_written`.
    """
    with on_device_of(a):
        from triton.tools.tensor_descriptor import TensorDescriptor

        matrices, columns, tiles = described(a, b, c, config, TensorDescriptor, config.tile_n // 2)
        return matmul_persistent_kernel[(min(tiles, sms(a.device) * config.per_sm),)](
            *matrices,
            *(config.tile_m, config.tile_n, config.tile_k, config.group),
            *(*columns, activation, interpreting()),
            num_warps=config.warps,
            num_stages=config.stages,
        )


@functools.cache
def sms(device: torch.device) -> int:
    """How many SMs a GPU has; interpreted, programs run one by one, and two will do."""
    if interpreting():
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
