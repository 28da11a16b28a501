"""GeLU in its tanh form, y = 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), five ways.

All of them: any shape and strides; fp32, fp16 and bf16 (else TypeError), computed in fp32; NaN
gives NaN, +inf gives +inf. For -inf the limit is 0, and the formula gives NaN (-inf times 0), as
PyTorch does on most devices; so do these. All are differentiable, and all but `compiled_gelu`
twice; the slope at |x| above 1.8e19 is NaN, as PyTorch's, except for `triton_gelu`. `cuda_gelu` and
`triton_gelu` run beside torch.compile, with a graph break, and raise where PyTorch has to look into
them: fullgraph, export, tracing, torch.func, forward-mode derivatives. PyTorch's default GeLU is
another function, with erf; the two differ by up to 4.7e-4 near |x| = 2.7.
"""

import functools
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch
import torch.nn.functional as F

from helpers import compute_roofs, cuda
from helpers.kernels.contract import apply, checked
from helpers.triton_mode import on_device_of, tl, triton

DTYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
VECTOR_BYTES = 16  # the most that one thread reads in one instruction, from Volta to Hopper
CUDA_BLOCK = 128  # threads; of 128 to 1024, the fastest on an H200
# 16 bytes for each thread of four warps; of 1 to 8 KB the fastest on an H200, or within 1% of it.
TRITON_BLOCK_BYTES = 2048
BACKWARD_BLOCK = 1024  # elements


def manual_gelu(x: torch.Tensor) -> torch.Tensor:
    """The formula in PyTorch's operations: nine kernels on a GPU, and two casts in 16 bits."""
    return _formula(_checked(x))


def _formula(x: torch.Tensor) -> torch.Tensor:
    dtype, x = x.dtype, x.float()
    return (0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))).to(dtype)


def pytorch_gelu(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own, one kernel."""
    return F.gelu(_checked(x), approximate="tanh")


@functools.cache
def _compiled() -> Callable:
    return compute_roofs.compiled(_formula)


def compiled_gelu(x: torch.Tensor) -> torch.Tensor:
    """`manual_gelu` through torch.compile: one kernel, which TorchInductor writes.

    Every new shape, dtype or stride is compiled for seconds. Where nothing can be compiled
    (`compute_roofs.compiler_missing()` says why) the call raises what torch.compile raises.
    """
    return _compiled()(_checked(x))


def cuda_gelu(x: torch.Tensor) -> torch.Tensor:
    """Our CUDA kernel, helpers/kernels/gelu.cu; CPU tensors go through the emulator."""
    return _differentiable(_checked(x), launch_cuda_gelu, pytorch_gradient)


def triton_gelu(x: torch.Tensor) -> torch.Tensor:
    """Our Triton kernels, forward and backward; CPU tensors go through Triton's interpreter."""
    return _differentiable(_checked(x), launch_triton_gelu, _triton_gradient)


def _checked(x: torch.Tensor) -> torch.Tensor:
    return checked(x, "GeLU", DTYPES)


def launch_cuda_gelu(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write GeLU of x to y: both of one shape, dtype and dense strides, which is not checked."""
    n = x.numel()
    if n == 0:
        return  # a grid of no blocks cannot be launched
    aligned = x.data_ptr() % VECTOR_BYTES == 0 and y.data_ptr() % VECTOR_BYTES == 0
    vector_bytes = VECTOR_BYTES if aligned else x.itemsize
    threads = -(-n * x.itemsize // vector_bytes)
    gelu_kernel(x.dtype, vector_bytes)(-(-threads // CUDA_BLOCK), CUDA_BLOCK, x, y, n)


@functools.cache
def gelu_kernel(dtype: torch.dtype, vector_bytes: int = VECTOR_BYTES) -> cuda.Kernel:
    """The CUDA kernel for a dtype of `DTYPES`, reading `vector_bytes` at once."""
    return cuda.load("gelu.cu", "gelu_kernel", scalar=DTYPES[dtype], vector_bytes=str(vector_bytes))


@triton.jit
def gelu_block(x_ptr, y_ptr, offsets, mask):
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    y = x * tl.sigmoid(2 * a)  # = 0.5 x (1 + tanh a), since tanh a = 2 sigmoid(2a) - 1
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def triton_gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK  # in 32 bits it would end at 2^31
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # a mask costs the wide accesses, unless n is a multiple of 16
        gelu_block(x_ptr, y_ptr, offsets, None)
    else:
        gelu_block(x_ptr, y_ptr, offsets, offsets < n)


@triton.jit
def gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, mask):
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    square = tl.minimum(x * x, 1e9)  # there the slope is 0 or 1; an infinite one would make NaN
    s = tl.sigmoid(2 * 0.79788456 * (x + 0.044715 * x * square))
    slope = s + x * s * (1 - s) * 2 * 0.79788456 * (1 + 3 * 0.044715 * square)
    tl.store(dx_ptr + offsets, (grad * slope).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def triton_gelu_backward_kernel(grad_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(axis=0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, None)
    else:
        gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, offsets < n)


def launch_triton_gelu(x: torch.Tensor, y: torch.Tensor) -> None:
    """As `launch_cuda_gelu`, with the Triton kernel."""
    _launch(triton_gelu_kernel, TRITON_BLOCK_BYTES // x.itemsize, x, y)


def launch_triton_gelu_backward(grad: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """Write grad times GeLU's derivative at x to dx: all of one shape, dtype and dense strides."""
    _launch(triton_gelu_backward_kernel, BACKWARD_BLOCK, grad, x, dx)


def _launch(kernel, block: int, *tensors: torch.Tensor) -> None:
    n = tensors[0].numel()
    if n:
        with on_device_of(tensors[0]):
            kernel[(triton.cdiv(n, block),)](*tensors, n, block)


def _dense(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as it lies in memory, and an empty tensor like it; copied where it has gaps or overlaps."""
    x = x.resolve_neg()  # a view that stands for its negative has the positive numbers in memory
    y = torch.empty_like(x)  # keeps the strides of a dense tensor, a transposed one as well
    if y.stride() != x.stride():
        x = x.contiguous()
        y = torch.empty_like(x)
    return x, y


def _triton_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x, dx = _dense(x)
    grad = grad.resolve_neg()
    if grad.stride() != x.stride():
        grad = torch.empty_like(x).copy_(grad)
    launch_triton_gelu_backward(grad, x, dx)
    return dx


def pytorch_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad times GeLU's derivative at x, by PyTorch, so that it can be derived again."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


class _WithGradient(torch.autograd.Function):
    """Any way to launch GeLU, and a gradient(grad, x) to go with it."""

    @staticmethod
    def forward(ctx, x, launch, gradient):
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        x, y = _dense(x)
        launch(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        # With gradients enabled here a second derivative is wanted: PyTorch's can be derived again.
        gradient = pytorch_gradient if torch.is_grad_enabled() else ctx.gradient
        return gradient(grad, *ctx.saved_tensors), None, None


def _differentiable(x: torch.Tensor, launch: Callable, gradient: Callable) -> torch.Tensor:
    return apply(_WithGradient, x, launch, gradient)
