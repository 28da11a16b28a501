"""The checkers of exercises 05.1 and 05.2."""

from collections import namedtuple
from collections.abc import Callable
from itertools import product
from numbers import Integral

import torch

from helpers import cuda, cuda_source, emulator, ptx
from helpers.device import device, has_cuda
from helpers.kernels.gelu import pytorch_gelu

Dim = namedtuple("Dim", "x y")
# The lecture's first; then grids whose sides all differ, so that nothing can be exchanged unseen.
GRIDS = (((2, 4), (1, 8)), ((3, 2), (4, 8)), ((5, 7), (2, 3)), ((4, 1), (32, 1)), ((1, 3), (1, 5)))
SIZES = ((1, 32), (255, 64), (1023, 256), (1025, 256), (2000, 1000), (4096, 512))  # n, block
TOLERANCE = 1e-5  # fp32 with a good tanh or exp; __tanhf's documented error is 5e-4
UNWRITTEN = -12345.0  # what y holds before: GeLU is nowhere below -0.2
TIMEOUT_S = 10
SIGNATURE = [("x", "float", True), ("y", "float", True), ("n", "int", False)]


def global_index(answer: Callable) -> None:
    """AssertionError unless answer(gridDim, blockDim, blockIdx, threadIdx) numbers the elements."""
    for grid, block in GRIDS:
        columns, seen = grid[0] * block[0], {}
        places = product(*(range(size) for size in (*grid, *block)))
        for bx, by, tx, ty in places:
            given = answer(Dim(*grid), Dim(*block), Dim(bx, by), Dim(tx, ty))
            who = f"thread ({tx}, {ty}) of block ({bx}, {by}) in a grid of {grid} blocks of {block}"
            if isinstance(given, bool) or not isinstance(given, Integral):
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
    text = answer()
    if not isinstance(text, str):
        raise AssertionError(f"return the kernel's text, not {type(text).__name__}")
    try:
        kernel = cuda.Kernel(text, "gelu", "yours.cu")
        found = [(p.name, p.type, p.pointer) for p in kernel.parameters]
    except ValueError as error:
        raise AssertionError(str(error)) from None
    if found != SIGNATURE:
        raise AssertionError("keep the parameters: const float* x, float* y, int n")
    if "__tanhf" in cuda_source.code_alone(text):  # the emulator's is exact
        raise AssertionError("of __tanhf only 11 bits are promised: fp32 has 24")
    for n, block in SIZES:
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 3
        large = torch.tensor([-100, 100, -10.2, 10.2, 44, -44, 1e4, -1e4, 0, 3e38, -3e38])[:n]
        x[: len(large)] = large
        expected = pytorch_gelu(x.double())
        y, stores = _run(kernel, x, block)
        where = f"for n = {n} in blocks of {block}"
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
        if stores > n:
            raise AssertionError(f"{where} it stores {stores:,} times: once for each is enough")
    try:
        # Of the whole text: a function that the kernel calls may not have become part of it.
        fp64 = ptx.fp64_instructions(ptx.cuda_ptx(text, "sm_90", name=kernel.file))
    except ptx.CompileError as error:
        raise AssertionError(f"the values are right, but NVRTC says: {error}") from None
    except ptx.ToolMissing:
        return  # the values are right; without NVRTC nobody can say more
    if fp64:
        raise AssertionError(
            f"the values are right, but its PTX still has {fp64} fp64 instructions"
        )


def _run(kernel: cuda.Kernel, x: torch.Tensor, block: int) -> tuple[torch.Tensor, int]:
    """The kernel's y for x, and its stores; AssertionError where it touches what is not its own."""
    n = x.numel()
    grid = -(-n // block)
    try:
        y = torch.full_like(x, UNWRITTEN)
        before = x.clone()
        counts = kernel.emulate(grid, block, x, y, n, timeout_s=TIMEOUT_S)
        if not torch.equal(x, before):
            raise AssertionError("the kernel changes x, which is its input")
        return y, counts.stores
    except (emulator.KernelFault, emulator.CompileError) as fault:
        raise AssertionError(str(fault)) from None
    except emulator.Unsupported as reason:
        if not has_cuda():
            raise AssertionError(f"it cannot be checked on this machine: {reason}") from None
    there = torch.full((n + 4096,), UNWRITTEN, device=device())
    kernel(grid, block, x.to(device()), there[:n], n)
    if (there[n:] != UNWRITTEN).any():
        raise AssertionError(f"for n = {n} in blocks of {block} it writes past the end of y")
    return there[:n].cpu(), n  # what a GPU stores, it does not say
