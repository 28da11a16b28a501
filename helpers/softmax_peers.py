"""The cases of softmax for `helpers.peers`: rows of 128 to 262,144 columns, about 1 GB of fp32."""

import functools
from collections.abc import Callable, Iterator

import torch

from helpers.kernels import softmax
from helpers.peer_cases import Case, add, case_of, compiled, copy, random_tensors
from helpers.triton_mode import triton

# All of it is to take little more than a minute: torch.compile takes seconds for a width and dtype.
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = (128, 512, 1024, 4096, 5000, 10007, 16384, 20000, 32768, 65536, 131072, 262144)
FP16_COLUMNS = 4096
COMPILED_COLUMNS = (1024, 4096, 16384, 32768)
LECTURE_COLUMNS = (512, 4096, 5000, 16384, 32768)  # wider ones compile for seconds
ONLINE_COLUMNS = (16384, 65536, 131072, 262144)
BACKWARD_COLUMNS = (1024, 4096, 16384, 32768)
ELEMENTS = 2**28
NOT_COMPILED = "not compiled for this width and dtype, to save time"


def triton_softmax_cases() -> Iterator[Case]:
    """`triton_softmax` beside PyTorch's, torch.compile's, Liger's, and two plain Triton kernels.

    "lecture" has a row in one program, "online" looks at its tiles twice. A copy is the ceiling.
    """
    for columns in COLUMNS:
        for dtype in softmax.DTYPES if columns == FP16_COLUMNS else DTYPES:
            to_compile = columns in COMPILED_COLUMNS and dtype in DTYPES
            peers = {
                "pytorch": lambda x, y: torch.ops.aten._softmax.out(x, -1, False, out=y),
                "torch.compile": compiled(_write_softmax) if to_compile else NOT_COMPILED,
                "liger": _liger(),
            }
            if columns in LECTURE_COLUMNS:
                peers["lecture"] = _launch_lecture
            if columns in ONLINE_COLUMNS:
                peers["online"] = softmax.launch_online
            tensors = random_tensors(dtype, ELEMENTS, 2, columns)
            yield case_of(
                "triton_softmax",
                tensors,
                softmax.launch_triton_softmax,
                peers,
                ("copy", copy),
                _some(len(tensors[0])),
                lambda x: torch.softmax(x, dim=-1),
            )


def triton_softmax_backward_cases() -> Iterator[Case]:
    """The backward kernel beside PyTorch's, and an addition, which moves as many bytes."""
    for columns in BACKWARD_COLUMNS:
        for dtype in DTYPES:
            y, grad, dx = random_tensors(dtype, ELEMENTS, 3, columns)
            torch.ops.aten._softmax.out(grad, -1, False, out=y)
            yield case_of(
                "triton_softmax_backward",
                [y, grad, dx],
                softmax.launch_triton_softmax_backward,
                {"pytorch": _torch_backward},
                ("addition", add),
                _some(len(y)),
                lambda y, grad: y * (grad - (y * grad).sum(dim=-1, keepdim=True)),
            )


def _some(rows: int) -> list[int]:
    """The first row, one in the middle, the last three."""
    return sorted({0, rows // 2, *range(max(0, rows - 3), rows)})


def _write_softmax(x, y):
    return y.copy_(softmax.manual_softmax(x))


def _torch_backward(y, grad, dx):
    return torch.ops.aten._softmax_backward_data.out(grad, y, -1, y.dtype, grad_input=dx)


def _launch_lecture(x, y):
    """A row a program at every width and Triton's own number of warps, four.

    UNIT = 1: the compiler is told nothing about where rows begin.
    """
    rows, columns = x.shape
    softmax.softmax_rows_kernel[(rows,)](
        *(x, y, rows, columns, x.stride(0), y.stride(0)),
        *(1, triton.next_power_of_2(columns), 1),
    )


@functools.cache
def _liger() -> Callable | str:
    """Liger's function, or why it is not there.

    It allocates its result. PyTorch keeps that memory from call to call, so that takes no GPU time.
    """
    try:
        from liger_kernel.transformers.functional import liger_softmax
    except ImportError as missing:
        return str(missing)
    return lambda x, y: liger_softmax(x)


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "triton_softmax": triton_softmax_cases,
    "triton_softmax_backward": triton_softmax_backward_cases,
}
