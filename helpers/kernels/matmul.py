"""C = A B by our kernels: in Triton, and in CUDA C++ from the naive one to tiles in registers.

A is (m, k), B is (k, n). All take what torch.mm takes, in fp32, fp16 and bf16, and sum in fp32; the
launch_ functions write to a matrix that is there already. `triton_matmul`'s kernels are in
`matmul_tiles`, `matmul_persistent` and `matmul_pingpong`, and `matmul_plans` chooses among them.
"""

import functools
from collections.abc import Callable

import torch

from helpers import cuda
from helpers.kernels.contract import apply, checked
from helpers.kernels.gelu import DTYPES, pytorch_gradient
from helpers.kernels.matmul_plans import launch_triton_matmul

LARGEST = 2**31 - 1024  # kernels count rows, columns and k in an int, and look one tile ahead
BLOCK = (32, 8)  # of the naive kernels: a warp is 32 neighbours in x
MOST_BLOCKS_Y = 65_535
GRADIENTS = {"gelu": pytorch_gradient}  # of the activations that can be fused
# The tiles of matmul_registers: BM x BN elements of C a block, TM x TN a thread, steps of BK.
TILES = {"BM": 128, "BN": 128, "BK": 8, "TM": 8, "TN": 16, "LANES_M": 8}


def cuda_matmul_naive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with one thread an element of the result, which reads all it needs from memory.

    a: (m, k), b: (k, n), of one device and one dtype: fp32, fp16 or bf16 (else TypeError); sums in
    fp32, rounded once. Any strides: an operand whose rows are not dense is copied. ValueError for
    other shapes and for sizes from 2^31 - 1023 on. Differentiable. CPU tensors: in the emulator.
    """
    return _matmul(a, b, _dense(launch_columns))


def cuda_matmul_tiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with tiles in shared memory and in registers; otherwise as `cuda_matmul_naive`."""
    return _matmul(a, b, _dense(launch_registers))


def triton_matmul(a: torch.Tensor, b: torch.Tensor, activation: str | None = None) -> torch.Tensor:
    """activation(a @ b) by our Triton kernels; CPU tensors go through Triton's interpreter.

    activation: None or "gelu", applied in fp32 before the result is rounded, in the same kernel.
    fp32 is multiplied in TF32 where PyTorch's own switch allows it, and only there:
    `matmul_plans.precision` says which it is. Otherwise as `cuda_matmul_naive`, but no operand is
    copied (a view that stands for its negative is). The gradient of a fused activation computes
    a @ b once more, rounded to its dtype.
    """
    if activation not in (None, *GRADIENTS):
        raise ValueError(f"activation is None or {', '.join(GRADIENTS)}, not {activation!r}")
    return _matmul(a, b, launch_triton_matmul, activation)


def _matmul(
    a: torch.Tensor, b: torch.Tensor, launch: Callable, activation: str | None = None
) -> torch.Tensor:
    for x in (a, b):
        checked(x, "matmul", DTYPES)
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}: convert one of them")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}: move one of them")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"this matmul takes (m, k) and (k, n), not {shapes}")
    if max(*a.shape, *b.shape) > LARGEST:
        raise ValueError(f"rows and columns are at most {LARGEST:,}: {(*a.shape, b.shape[1])}")
    return apply(_WithGradient, a, b, launch, activation)


class _WithGradient(torch.autograd.Function):
    """C = f(A B) by `launch`, and dA = dC Bᵀ, dB = Aᵀ dC by the same kernel."""

    @staticmethod
    def forward(ctx, a, b, launch, activation):
        needs_a, needs_b, *_ = ctx.needs_input_grad  # dA needs b, and dB needs a
        saved = (a, b) if activation else (a if needs_b else None, b if needs_a else None)
        ctx.save_for_backward(*saved)
        ctx.launch, ctx.activation = launch, activation
        c = a.new_empty(a.shape[0], b.shape[1])
        if a.shape[1] == 0:
            return c.zero_()  # of which GeLU is 0 as well
        if c.numel():  # a grid of no blocks cannot be launched
            # A view that stands for its negative has the positive numbers in memory.
            more = {"activation": activation} if activation else {}
            launch(a.resolve_neg(), b.resolve_neg(), c, **more)
        return c

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        needs_a, needs_b, _, _ = ctx.needs_input_grad
        if ctx.activation:
            most = torch.finfo(a.dtype).max  # beyond fp16's end the slope is 0 or 1, not inf - inf
            product = _matmul(a, b, ctx.launch).clamp(-most, most)
            grad = GRADIENTS[ctx.activation](grad, product)
        grad_a = _matmul(grad, b.t(), ctx.launch) if needs_a else None
        grad_b = _matmul(a.t(), grad, ctx.launch) if needs_b else None
        return grad_a, grad_b, None, None


def _dense(launch: Callable) -> Callable:
    return lambda a, b, c: launch(_with_dense_rows(a), _with_dense_rows(b), c)


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows are not dense or overlap: kernels read rows one after another."""
    rows, columns = x.shape
    dense = (columns == 1 or x.stride(1) == 1) and (rows == 1 or x.stride(0) >= columns)
    return x if dense else x.contiguous()


# Launches. a (m, k), b (k, n), c (m, n): none empty, of one dtype and device, the rows dense
# (stride(1) is 1, stride(0) the leading dimension). None of this is checked. They return what
# the emulator counted, and None on a GPU.


def launch_rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block=BLOCK):
    """c = a @ b, a warp's lanes in neighbouring rows of c: accesses that are not coalesced."""
    grid = (_ceil(c.shape[0], block[0]), _ceil(c.shape[1], block[1]))
    return matmul_kernel("matmul_rows", a.dtype)(grid, block, *_arguments(a, b, c))


def launch_columns(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block=BLOCK):
    """c = a @ b, a warp's lanes in neighbouring columns of c: coalesced. The naive kernel.

    More than half a million rows are several launches; the last one's counts are returned.
    """
    kernel = matmul_kernel("matmul_columns", a.dtype)
    most = MOST_BLOCKS_Y * block[1]
    for rows in (slice(i, i + most) for i in range(0, c.shape[0], most)):
        grid = (_ceil(c.shape[1], block[0]), _ceil(len(c[rows]), block[1]))
        counts = kernel(grid, block, *_arguments(a[rows], b, c[rows]))
    return counts


def launch_shared(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tile: int = 32):
    """c = a @ b with tiles of `tile` x `tile` (at most 32) in shared memory."""
    grid = (_ceil(c.shape[1], tile), _ceil(c.shape[0], tile))
    kernel = matmul_kernel("matmul_shared", a.dtype, TILE=tile)
    return kernel(grid, (tile, tile), *_arguments(a, b, c))


def launch_registers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **macros: int):
    """c = a @ b with a tile of c in each thread's registers; `macros` change `TILES`."""
    tiles = TILES | macros
    (m, n), k = c.shape, a.shape[1]
    bytes_of_4 = 4 * a.itemsize
    aligned = k % 4 == n % 4 == 0 and all(
        x.stride(0) % 4 == 0 and x.data_ptr() % bytes_of_4 == 0 for x in (a, b, c)
    )
    kernel = matmul_kernel("matmul_registers", a.dtype, **tiles, ALIGNED=int(aligned))
    threads = tiles["BM"] // tiles["TM"] * (tiles["BN"] // tiles["TN"])
    blocks = _ceil(m, tiles["BM"]) * _ceil(n, tiles["BN"])
    return kernel(blocks, threads, *_arguments(a, b, c))


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _arguments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple:
    sizes = (*c.shape, a.shape[1])
    return (a, b, c, *sizes, a.stride(0), b.stride(0), c.stride(0))


@functools.cache
def matmul_kernel(name: str, dtype: torch.dtype, **macros: int) -> cuda.Kernel:
    """A kernel of matmul.cu for a dtype of `DTYPES`; `macros` as the file names them."""
    values = {key: str(value) for key, value in macros.items()}
    return cuda.load("matmul.cu", name, scalar=DTYPES[dtype], **values)
