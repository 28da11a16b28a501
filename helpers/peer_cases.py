"""What `helpers.peers` times: our kernels, what else does the same, and what nothing can beat.

Softmax and matmul have modules of their own, `helpers.softmax_peers` and `helpers.matmul_peers`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from helpers import compute_roofs
from helpers import device as machine
from helpers.check import assert_close
from helpers.kernels import gelu
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


def compiled(function: Callable) -> Callable | str:
    """`function` through torch.compile, for the shapes that it is first called with; or why not.

    Compiled when it is first called, and with no other: so no case runs another's kernel.
    """

    @functools.cache
    def made() -> Callable:
        torch.compiler.reset()
        return compute_roofs.compiled(function)

    return compute_roofs.compiler_missing() or (lambda *tensors: made()(*tensors))


def random_tensors(
    dtype: torch.dtype, n: int, tensors: int, columns: int = 1
) -> list[torch.Tensor]:
    """`tensors` of n random elements, fewer where memory is short.

    Their shape is (n // columns, columns), at least one row; (n,) where columns is 1.
    """
    n = min(n, largest_power_of_2(free_bytes() / 8 / (tensors + 1)))
    shape = (n,) if columns == 1 else (max(1, n // columns), columns)
    return [torch.randn(shape, device=machine.device()).to(dtype) for _ in range(tensors)]


def check_of(
    out: torch.Tensor,
    some: slice | list[int],
    expected: torch.Tensor,
    tolerance: float | None = None,
) -> Callable:
    """A check of functions that write `out` or return another tensor, compared at `some`.

    tolerance: as for `assert_close`.
    """

    def check(run):
        out.fill_(torch.nan)  # what an earlier function wrote must not count
        returned = run()
        result = returned if isinstance(returned, torch.Tensor) else out
        assert_close(result[some], expected, tolerance)
        assert result.isfinite().all(), "not all of the output was written"

    return check


def case_of(
    operation: str,
    tensors: list[torch.Tensor],
    ours: Callable,
    peers: dict[str, Callable | str],
    ceiling: tuple[str, Callable],
    some: slice | list[int],
    reference: Callable,
) -> Case:
    """A case of functions that take `tensors` and write the last one, or return another.

    some: the part of the result that is compared with `reference` of the same part of the inputs,
    in float64: all of it would be slow.
    """
    *inputs, out = tensors

    def bound(function):
        return function if isinstance(function, str) else lambda: function(*tensors)

    return Case(
        operation,
        str(out.dtype).removeprefix("torch."),
        "x".join(map(str, out.shape)),
        ours=bound(ours),
        peers={name: bound(peer) for name, peer in peers.items()},
        ceiling=(ceiling[0], bound(ceiling[1])),
        check=check_of(out, some, reference(*(tensor[some].double() for tensor in inputs))),
    )


def copy(x, y):
    return y.copy_(x)


def add(a, b, out):
    return torch.add(a, b, out=out)


def _write_gelu(x, y):
    return y.copy_(gelu.manual_gelu(x))


def _write_gelu_backward(grad, x, dx):
    return dx.copy_(gelu_backward(grad, x, approximate="tanh"))


def _gelu_cases(operation: str, ours: Callable, sizes: tuple, more: dict) -> Iterator[Case]:
    for n in sizes:
        for dtype in gelu.DTYPES:
            peers = {
                "pytorch": lambda x, y: torch.ops.aten.gelu.out(x, approximate="tanh", out=y),
                "torch.compile": compiled(_write_gelu),
            }
            yield case_of(
                operation,
                random_tensors(dtype, n, 2),
                ours,
                peers | more,
                ("copy", copy),
                slice(2**20),
                lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
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
                "torch.compile": compiled(_write_gelu_backward),
            }
            yield case_of(
                "triton_gelu_backward",
                random_tensors(dtype, n, 3),
                gelu.launch_triton_gelu_backward,
                peers,
                ("addition", add),
                slice(2**20),
                lambda grad, x: gelu_backward(grad, x, approximate="tanh"),
            )


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "cuda_gelu": cuda_gelu_cases,
    "triton_gelu": triton_gelu_cases,
    "triton_gelu_backward": triton_gelu_backward_cases,
}
