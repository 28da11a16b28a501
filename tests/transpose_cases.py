"""Cases for the kernels of transpose.cu; cuda_cases.CASES holds them."""

from collections.abc import Iterator

import torch
from cuda_cases import Case, Launch, numbers, placed, unwritten

# One element, one row, one column; tiles that are full, cut on either side, and cut on both.
SIZES = ((1, 1), (1, 40), (70, 1), (31, 100), (64, 32), (33, 65))


def transpose(size: tuple[int, int], device: torch.device) -> Launch:
    rows, columns = size
    values = numbers(rows * columns).view(rows, columns)
    expected = values.T.contiguous()
    x, y = placed(values, device, offset=1), placed(unwritten(expected), device, offset=3)
    grid = (-(-columns // 32), -(-rows // 32))
    return Launch(grid, (32, 8), (x, y, rows, columns), {0: values, 1: expected})


def transposes() -> Iterator[Case]:
    file = "transpose.cu"
    for kernel in ("transpose_naive", "transpose_swizzled"):
        yield Case(file, kernel, SIZES, transpose, tolerance=0)
    for pad in "01":
        yield Case(file, "transpose_tiled", SIZES, transpose, (("PAD", pad),), tolerance=0)
