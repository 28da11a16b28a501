"""The checkers of exercises 05.1 and 05.2."""

from collections import namedtuple
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F

from helpers import cuda_source, ptx
from helpers.exercises.answers import is_whole, plain
from helpers.exercises.written_kernels import UNWRITTEN, gelu_inputs, kernel_of, run

Dim = namedtuple("Dim", "x y")
# The lecture's first; then grids whose sides all differ, so that nothing can be exchanged unseen.
GRIDS = (((2, 4), (1, 8)), ((3, 2), (4, 8)), ((5, 7), (2, 3)), ((4, 1), (32, 1)), ((1, 3), (1, 5)))
SIZES = ((1, 32), (255, 64), (1023, 256), (1025, 256), (2000, 1000), (4096, 512))  # n, block
TOLERANCE = 1e-5  # fp32 with a good tanh or exp; __tanhf's documented error is 5e-4
TIMEOUT_S = 10
SIGNATURE = "const float* x, float* y, int n"


def global_index(answer: Callable) -> None:
    """AssertionError unless answer(gridDim, blockDim, blockIdx, threadIdx) numbers the elements."""
    for grid, block in GRIDS:
        columns, seen = grid[0] * block[0], {}
        places = product(*(range(size) for size in (*grid, *block)))
        for bx, by, tx, ty in places:
            given = plain(answer(Dim(*grid), Dim(*block), Dim(bx, by), Dim(tx, ty)))
            who = f"thread ({tx}, {ty}) of block ({bx}, {by}) in a grid of {grid} blocks of {block}"
            if not is_whole(given):
                raise AssertionError(f"{who} needs a whole number, not {given!r}")
            if given in seen:
                raise AssertionError(f"{who} gets element {given}, as {seen[given]} does")
            seen[given] = f"thread ({tx}, {ty}) of block ({bx}, {by})"
            if given != (expected := (by * block[1] + ty) * columns + bx * block[0] + tx):
                raise AssertionError(
                    f"{who} has element {expected}, not {given}; a row has {columns} elements"
                )


def repaired_gelu(answer: Callable) -> None:
    """AssertionError unless answer() is the text of a `gelu` kernel without the four faults."""
    kernel = kernel_of(answer, "gelu", SIGNATURE)
    if "__tanhf" in cuda_source.code_alone(kernel.text):  # the emulator's is exact
        raise AssertionError("of __tanhf only 11 bits are promised: fp32 has 24")
    for n, block in SIZES:
        x = gelu_inputs(n)
        expected = F.gelu(x.double(), approximate="tanh")
        where = f"for n = {n} in blocks of {block}"
        grid = -(-n // block)
        y, counts = run(kernel, grid, block, x, (n,), n, timeout_s=TIMEOUT_S, where=where)
        if (unwritten := y == UNWRITTEN).any():
            i = int(unwritten.nonzero()[0])
            raise AssertionError(
                f"{where}, nothing was written to y[{i}]: does each thread find its i, whatever "
                "the size of a block?"
            )
        if (bad := ~y.isfinite()).any():
            i = int(torch.where(bad, x.abs(), torch.inf).argmin())  # the smallest that fails
            raise AssertionError(
                f"{where}, y[{i}] is {y[i]:g} for x = {x[i]:g}, and GeLU {expected[i]:g}: does "
                "an exponential overflow?"
            )
        # Element by element: beside the large ones, errors of the others would vanish in a norm.
        errors = (y - expected).abs() / expected.abs().clamp(min=1)
        if (error := errors.max()) > TOLERANCE:
            i = int(errors.argmax())
            raise AssertionError(
                f"{where} the error is {error:.1e}: y[{i}] is {y[i]:.6g} for x = {x[i]:g}, and "
                f"GeLU {expected[i]:.6g}"
            )
        if counts and counts.stores > n:
            raise AssertionError(
                f"{where} it stores {counts.stores:,} times: once for each is enough"
            )
    try:
        # Of the whole text: a function that the kernel calls may not have become part of it.
        fp64 = ptx.fp64_instructions(ptx.cuda_ptx(kernel.text, "sm_90", name=kernel.file))
    except ptx.CompileError as error:
        raise AssertionError(f"the values are right, but NVRTC says: {error}") from None
    except ptx.ToolMissing:
        return  # the values are right; without NVRTC nobody can say more
    if fp64:
        raise AssertionError(
            f"the values are right, but its PTX still has {fp64} fp64 instructions"
        )
