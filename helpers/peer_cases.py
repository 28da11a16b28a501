"""What `helpers.peers` times: our kernels, what else does the same, and what nothing can beat."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from helpers import compute_roofs
from helpers import device as machine
from helpers.check import assert_close
from helpers.kernels import gelu, matmul
from helpers.memory import free_bytes, largest_power_of_2

gelu_backward = torch.ops.aten.gelu_backward


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation at one size: what is timed, each a function without arguments.

    peers: name -> function, or the reason why it is left out. ceiling: name and function of what
    nothing can beat. check: raises AssertionError unless a function's result is right.
    """

    operation: str
    dtype: str
    shape: str
    ours: Callable
    peers: dict[str, Callable | str]
    ceiling: tuple[str, Callable]
    check: Callable[[Callable], None]


def _compiled(function: Callable) -> Callable | str:
    """`function` through torch.compile, for the shapes that it is first called with; or why not.

    Compiled when it is first called, and with no other: so no case runs another's kernel.
    """

    @functools.cache
    def compiled() -> Callable:
        torch.compiler.reset()
        return compute_roofs.compiled(function)

    return compute_roofs.compiler_missing() or (lambda *tensors: compiled()(*tensors))


def _write_gelu(x, y):
    return y.copy_(gelu.manual_gelu(x))


def _write_gelu_backward(grad, x, dx):
    return dx.copy_(gelu_backward(grad, x, approximate="tanh"))


def _gelu_sizes(dtype: torch.dtype, n: int, tensors: int) -> list[torch.Tensor]:
    """`tensors` of n random elements, fewer where memory is short."""
    n = min(n, largest_power_of_2(free_bytes() / 8 / (tensors + 1)))
    return [torch.randn(n, device=machine.device()).to(dtype) for _ in range(tensors)]


def _gelu_case(
    operation: str, ours: Callable, tensors: list, ceiling: str, best: Callable, peers: dict
) -> Case:
    """A function of tensors that writes the last one; `peers` take the same tensors."""
    *inputs, out = tensors
    few = slice(0, min(len(out), 2**20))
    exact = [tensor[few].double() for tensor in inputs]
    if len(exact) == 1:
        expected = torch.nn.functional.gelu(*exact, approximate="tanh")
    else:
        expected = gelu_backward(*exact, approximate="tanh")

    def check(run):
        out.fill_(torch.nan)  # what an earlier function wrote must not count
        run()
        assert_close(out[few], expected)
        assert out.isfinite().all(), "not all of the output was written"

    def bound(function):
        return function if isinstance(function, str) else lambda: function(*tensors)

    return Case(
        operation,
        str(out.dtype).removeprefix("torch."),
        str(len(out)),
        ours=bound(ours),
        peers={name: bound(peer) for name, peer in peers.items()},
        ceiling=(ceiling, bound(best)),
        check=check,
    )


def _gelu_cases(operation: str, ours: Callable, sizes: tuple, more: dict) -> Iterator[Case]:
    for n in sizes:
        for dtype in gelu.DTYPES:
            tensors = _gelu_sizes(dtype, n, 2)
            peers = {
                "pytorch": lambda x, y: torch.ops.aten.gelu.out(x, approximate="tanh", out=y),
                "torch.compile": _compiled(_write_gelu),
            }
            yield _gelu_case(
                operation, ours, tensors, "copy", lambda x, y: y.copy_(x), peers | more
            )


def cuda_gelu_cases() -> Iterator[Case]:
    """`cuda_gelu` beside PyTorch's kernel and torch.compile's, and a copy of the same bytes."""
    return _gelu_cases("cuda_gelu", gelu.launch_cuda_gelu, (2**28,), {})


def triton_gelu_cases() -> Iterator[Case]:
    """`triton_gelu` beside those and `cuda_gelu`, from large to small, and an odd size."""
    sizes = (2**28, 2**25, 2**25 - 1, 2**24, 2**20)
    return _gelu_cases(
        "triton_gelu", gelu.launch_triton_gelu, sizes, {"cuda_gelu": gelu.launch_cuda_gelu}
    )


def triton_gelu_backward_cases() -> Iterator[Case]:
    """The backward kernel beside PyTorch's and torch.compile's, and an addition, as many bytes."""
    for n in (2**28, 2**24):
        for dtype in gelu.DTYPES:
            peers = {
                "pytorch": lambda grad, x, dx: gelu_backward.grad_input(
                    grad, x, approximate="tanh", grad_input=dx
                ),
                "torch.compile": _compiled(_write_gelu_backward),
            }
            yield _gelu_case(
                "triton_gelu_backward",
                gelu.launch_triton_gelu_backward,
                _gelu_sizes(dtype, n, 3),
                "addition",
                lambda grad, x, dx: torch.add(grad, x, out=dx),
                peers,
            )


def matmul_cases() -> Iterator[Case]:
    """`cuda_matmul_tiled` in fp32 beside cuBLAS, which torch.mm calls, both without TF32."""
    side = min(4096, largest_power_of_2((free_bytes() / 32) ** 0.5))  # three matrices, and some
    a, b, c = (torch.randn(side, side, device=machine.device()) for _ in range(3))
    rows = slice(None, None, max(1, side // 64))  # some of every tile: all of it in fp64 is slow
    expected = a[rows].double() @ b.double()

    def cublas():
        with compute_roofs.tf32_allowed(False):
            torch.mm(a, b, out=c)

    def check(run):
        c.fill_(torch.nan)  # what an earlier function wrote must not count
        run()
        assert_close(c[rows], expected)
        assert c.isfinite().all(), "not all of the output was written"

    yield Case(
        "cuda_matmul_tiled",
        "float32",
        f"{side}x{side}x{side}",
        ours=lambda: matmul.launch_registers(a, b, c),
        peers={"pytorch": cublas, "torch.compile": "it calls the same kernel of cuBLAS"},
        ceiling=("cuBLAS fp32", cublas),
        check=check,
    )


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "cuda_gelu": cuda_gelu_cases,
    "triton_gelu": triton_gelu_cases,
    "triton_gelu_backward": triton_gelu_backward_cases,
    "cuda_matmul_tiled": matmul_cases,
}
