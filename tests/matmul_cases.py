"""The cases of helpers/kernels/matmul.cu."""

import math
from collections.abc import Iterator

import torch
from cuda_cases import ROUNDING, SCALARS, Case, Launch, numbers, unwritten

from helpers.kernels.matmul import TILES

# (m, n, k, lda, ldb, ldc): tiles that are not full, a single element, long and flat, wider rows.
SIZES = (
    (1, 1, 1, 1, 1, 1),
    (17, 33, 40, 40, 33, 33),
    (1, 150, 3, 5, 151, 150),
    (150, 1, 9, 9, 2, 3),
    (67, 130, 17, 21, 131, 133),
)
# What kernels that load four elements at once are given: multiples of 4, of which no tile is one.
ALIGNED_SIZES = ((1, 4, 4, 4, 4, 4), (3, 132, 4, 8, 136, 140), (130, 36, 20, 24, 36, 40))
# Tiles that the emulator goes through quickly: 64 x 64 with 4 x 4 a thread, in warps of 16 x 32.
SMALL = (("BK", "16"), ("BM", "64"), ("BN", "64"), ("TM", "4"), ("TN", "4"))


def rows_of(values: torch.Tensor, width: int, device: torch.device) -> torch.Tensor:
    """The values of a matrix as the left part of one with `width` columns, the rest NaN."""
    whole = torch.full((len(values), width), torch.nan, dtype=values.dtype, device=device)
    whole[:, : values.shape[1]] = values.to(device)
    return whole[:, : values.shape[1]]


def product(kernel: str, tile: tuple[int, int], block: int | tuple[int, int], dtype: torch.dtype):
    """A launch for (m, n, k, lda, ldb, ldc); `tile`: rows and columns of C that a block writes."""

    def launch(size: tuple, device: torch.device) -> Launch:
        m, n, k, lda, ldb, ldc = size
        a, b = numbers(m * k).view(m, k).to(dtype), numbers(k * n, 1).view(k, n).to(dtype)
        expected = a.double() @ b.double()
        # What lies beside C must stay as it is.
        c = rows_of(unwritten(expected.to(dtype)), ldc, device)
        whole = torch.full((m, ldc), torch.nan, dtype=torch.float64)
        whole[:, :n] = expected
        tiles_m, tiles_n = math.ceil(m / tile[0]), math.ceil(n / tile[1])
        grid = {
            "matmul_rows": (tiles_m, tiles_n),
            "matmul_registers": tiles_m * tiles_n,
        }.get(kernel, (tiles_n, tiles_m))
        a, b = rows_of(a, lda, device), rows_of(b, ldb, device)
        c = c.as_strided((m, ldc), (ldc, 1))
        return Launch(grid, block, (a, b, c, m, n, k, lda, ldb, ldc), {2: whole})

    return launch


def matmul() -> Iterator[Case]:
    # A few: each set of macros is compiled for every generation. test_matmul.py has more tiles.
    def case(kernel, sizes, tile, block, dtype=torch.float32, **macros):
        defines = (("scalar", SCALARS[dtype]), *sorted(macros.items()))
        launch = product(kernel, tile, block, dtype)
        return Case("matmul.cu", kernel, sizes, launch, defines, ROUNDING[dtype])

    threads = TILES["BM"] // TILES["TM"] * (TILES["BN"] // TILES["TN"])
    for dtype in SCALARS:
        yield case("matmul_rows", SIZES, (16, 4), (16, 4), dtype)
        yield case("matmul_columns", SIZES, (4, 16), (16, 4), dtype)
        yield case("matmul_shared", SIZES, (16, 16), (16, 16), dtype)
        yield case("matmul_registers", ALIGNED_SIZES, (128, 128), threads, dtype)
    yield case("matmul_registers", SIZES, (128, 128), threads, ALIGNED="0")
    yield case("matmul_registers", SIZES, (64, 64), 256, ALIGNED="0", **dict(SMALL))
