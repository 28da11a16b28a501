"""What the checkers of kernels that a reader writes have in common."""

from collections.abc import Callable

import torch

from helpers import cuda, emulator
from helpers.check import CannotCheck
from helpers.device import device, has_cuda

UNWRITTEN = -12345.0  # what y holds before
# GeLUs break at these: exponentials overflow, and so do cubes.
LARGE = (-100, 100, -10.2, 10.2, 44, -44, 1e4, -1e4, 0, 3e38, -3e38)
SLACK = 4096  # elements behind y on a GPU, where nothing else tells that a kernel writes too far


def gelu_inputs(n: int, seed: int = 0) -> torch.Tensor:
    """n fp32 numbers, first `LARGE`, then random ones: the same for the same arguments."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n + seed)) * 3
    large = torch.tensor(LARGE)[:n]
    x[: len(large)] = large
    return x


def kernel_of(answer: Callable, name: str, signature: str) -> cuda.Kernel:
    """The kernel in the text that answer() returns; AssertionError if its parameters differ.

    signature: the parameters as the exercise asks for them, "const float* x, float* y, int n".
    """
    text = answer()
    if not isinstance(text, str):
        raise AssertionError(f"return the kernel's text, not {type(text).__name__}")
    asked = cuda.Kernel(f"__global__ void {name}({signature}) {{}}", name)
    try:
        kernel = cuda.Kernel(text, name, "yours.cu")
        found, expected = (
            [(p.name, p.type, p.pointer) for p in each.parameters] for each in (kernel, asked)
        )
    except ValueError as error:
        raise AssertionError(str(error)) from None
    if found != expected:
        raise AssertionError(f"keep the parameters: {signature}")
    return kernel


def run(
    kernel: cuda.Kernel,
    grid,
    block,
    x: torch.Tensor,
    y_shape: tuple[int, ...],
    *sizes: int,
    timeout_s: float,
    where: str,
    order: str | int = "forward",
) -> tuple[torch.Tensor, emulator.Counts | None]:
    """kernel(x, y, *sizes): its y, UNWRITTEN where it writes nothing, and the emulator's counts.

    Where there is no emulator it runs on the GPU, in the GPU's order, and the counts are None.
    AssertionError, which says where, for a kernel that touches what is not its own.
    """
    try:
        y, before = torch.full(y_shape, UNWRITTEN), x.clone()
        counts = kernel.emulate(grid, block, x, y, *sizes, order=order, timeout_s=timeout_s)
        _assert_same(x, before)
        return y, counts
    except (emulator.KernelFault, emulator.CompileError) as fault:
        raise AssertionError(str(fault)) from None
    except emulator.Unsupported as reason:
        if not has_cuda():
            raise CannotCheck(reason) from None
    n, there = y.numel(), x.to(device(), copy=True)
    y = torch.full((n + SLACK,), UNWRITTEN, device=device())
    kernel(grid, block, there, y[:n], *sizes)
    if (y[n:] != UNWRITTEN).any():
        raise AssertionError(f"{where} it writes past the end of y")
    _assert_same(there.cpu(), x)
    return y[:n].view(y_shape).cpu(), None


def _assert_same(x: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(x, before):
        raise AssertionError("the kernel changes x, which is its input")
