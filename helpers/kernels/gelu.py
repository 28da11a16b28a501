"""GeLU in its tanh form, y = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), several ways.

All of them: any shape; NaN gives NaN, +inf gives +inf. For -inf the limit is 0, and the formula
gives NaN (-inf times 0), as PyTorch does on most devices; so does this. PyTorch's default GeLU is
another function, with erf; the two differ by up to 4.7e-4 near |x| = 2.7.
"""

import functools

import torch
import torch.nn.functional as F

from helpers import cuda

DTYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
BLOCK = 128  # of 128 to 1024, the fastest on an H200
VECTOR_BYTES = 16  # the most that one thread reads in one instruction, from Volta to Hopper


def manual_gelu(x: torch.Tensor) -> torch.Tensor:
    """The formula in PyTorch's operations, nine kernels on a GPU, in x's dtype."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def pytorch_gelu(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, one kernel."""
    return F.gelu(x, approximate="tanh")


@functools.cache
def _compiled():
    return torch.compile(manual_gelu)


def compiled_gelu(x: torch.Tensor) -> torch.Tensor:
    """`manual_gelu` through torch.compile: one kernel, which TorchInductor writes."""
    return _compiled()(x)


def cuda_gelu(x: torch.Tensor) -> torch.Tensor:
    """Our CUDA kernel, helpers/kernels/gelu.cu; CPU tensors go through the emulator.

    x: fp32, fp16 or bf16 (else TypeError), any strides; computed in fp32. Differentiable.
    """
    _check(x)
    return _WithGradient.apply(x, _cuda_forward)


def _check(x: torch.Tensor) -> None:
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"GeLU takes {names}, not {x.dtype}")


def _cuda_forward(x: torch.Tensor) -> torch.Tensor:
    x = x.resolve_neg()  # a view that stands for its negative has the positive numbers in memory
    y = torch.empty_like(x)  # keeps the strides of a dense tensor, a transposed one as well
    if y.stride() != x.stride():
        x = x.contiguous()  # gaps or overlaps: only then a copy is made
        y = torch.empty_like(x)
    launch_cuda_gelu(x, y)
    return y


def launch_cuda_gelu(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write GeLU of x to y: both of one shape, dtype and dense strides, which is not checked."""
    n = x.numel()
    if n == 0:
        return  # a grid of no blocks cannot be launched
    aligned = x.data_ptr() % VECTOR_BYTES == 0 and y.data_ptr() % VECTOR_BYTES == 0
    vector_bytes = VECTOR_BYTES if aligned else x.itemsize
    threads = -(-n * x.itemsize // vector_bytes)
    gelu_kernel(x.dtype, vector_bytes)(-(-threads // BLOCK), BLOCK, x, y, n)


@functools.cache
def gelu_kernel(dtype: torch.dtype, vector_bytes: int = VECTOR_BYTES) -> cuda.Kernel:
    """The kernel for a dtype of `DTYPES`, reading `vector_bytes` at once."""
    return cuda.load("gelu.cu", "gelu_kernel", scalar=DTYPES[dtype], vector_bytes=str(vector_bytes))


class _WithGradient(torch.autograd.Function):
    """Any forward that computes GeLU, with the derivative that PyTorch has for it."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh"), None
