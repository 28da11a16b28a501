"""The checkers of exercises 06.1 and 06.2."""

from collections.abc import Callable
from itertools import product

import torch

from helpers import access, emulator
from helpers.exercises.answers import is_whole, plain
from helpers.exercises.written_kernels import UNWRITTEN, kernel_of, run

# The easiest first: the first case that fails is the hint.
STRIDES = (1, 2, 32, 0, 8, 3, 7, 9, 33)
OFFSETS = (0, 1, 3, 7, 8, 9)
ELEMENT_BYTES = (4, 8, 1, 2, 16)

SIGNATURE = "const float* x, float* y, int rows, int columns"
BLOCK = (32, 8)
SHAPES = ((64, 64), (33, 65), (1, 1), (31, 100), (70, 1))
COUNTED = SHAPES[:2]
ORDERS = ("forward", "reverse", 1, 2)
MAX_SECTORS = 5  # per request: 32 adjacent floats that begin anywhere
REQUESTS_PER_BLOCK = 32  # a row of the tile each
TIMEOUT_S = 10


def predicted_sectors(answer: Callable) -> None:
    """AssertionError unless answer(stride, offset, element_bytes) counts a warp's sectors.

    Lane i of 32 reads element stride * i + offset of an array that begins at address 0.
    """
    for element_bytes, offset, stride in product(ELEMENT_BYTES, OFFSETS, STRIDES):
        given = plain(answer(stride, offset, element_bytes))
        case = f"for stride {stride}, offset {offset} and elements of {element_bytes} bytes"
        if not is_whole(given):
            raise AssertionError(f"{case} it needs a whole number, not {given!r}")
        where = access.addresses(
            lambda lane, stride=stride, offset=offset: stride * lane + offset,
            element_bytes=element_bytes,
        )
        touched = access.sectors(where, element_bytes)
        if given != len(touched):
            raise AssertionError(
                f"{case} it is {len(touched)}, not {given}: {_why(where, touched)}"
            )


def _why(where: access.Addresses, touched: tuple[int, ...]) -> str:
    first, last, gap = where[0], where[-1], where[1] - where[0]
    if not gap:
        return f"all lanes want address {first}, in sector {touched[0]}"
    lanes = f"lane 0 begins at byte {first}, in sector {touched[0]}, and lane 31 at byte {last}, "
    lanes += f"in sector {touched[-1]}"
    if len(touched) < touched[-1] - touched[0] + 1:
        return f"{lanes}, but a step of {gap} bytes leaves some between them out"
    return f"{lanes}, and none between them is left out"


def tiled_transpose(answer: Callable) -> None:
    """AssertionError unless answer() is the text of a good `transpose` kernel.

    The kernel writes x.T to y, whatever the order of its threads, through a tile in shared memory:
    at most 5 sectors a request for loads and for stores, no bank conflicts, each element once.
    Without the emulator only the values are checked, on the GPU.
    """
    kernel = kernel_of(answer, "transpose", SIGNATURE)
    counts = {}
    for (rows, columns), order in product(SHAPES, ORDERS):
        where = f"for {rows} x {columns}"
        x = torch.arange(1.0, rows * columns + 1).view(rows, columns)
        grid = (-(-columns // 32), -(-rows // 32))
        y, counted = run(
            kernel,
            grid,
            BLOCK,
            x,
            (columns, rows),
            rows,
            columns,
            timeout_s=TIMEOUT_S,
            where=where,
            order=order,
        )
        _assert_transposed(y, x, where, order)
        if order == "forward":
            counts[rows, columns] = counted
    for rows, columns in COUNTED:
        if counts[rows, columns]:
            _assert_frugal(counts[rows, columns], rows, columns)


def _assert_transposed(y: torch.Tensor, x: torch.Tensor, where: str, order: str | int) -> None:
    if torch.equal(y, x.T):
        return
    i, j = (y != x.T).nonzero()[0].tolist()
    value, columns = y[i, j].item(), x.shape[1]
    hint = ""
    if value == UNWRITTEN:
        found = f"nothing was written to y[{i}, {j}]"
    elif value in x:  # its elements are numbered from 1
        row, column = divmod(int(value) - 1, columns)
        found = f"y[{i}, {j}] is x[{row}, {column}]"
    else:
        found = f"y[{i}, {j}] is {value:g}, which x does not hold"
        hint = ": is all of the tile stored before it is read?"
    if order != "forward":
        found += f' when the threads run in another order ("{order}")'
    raise AssertionError(f"{where} {found}; it should be x[{j}, {i}]{hint}")


def _assert_frugal(counts: emulator.Counts, rows: int, columns: int) -> None:
    where, least_bytes = f"for {rows} x {columns} the values are right, but", 4 * rows * columns
    if counts.atomics:
        raise AssertionError(f"{where} it takes atomics: a plain load or store is enough")
    for doing, array, bytes_moved, sectors in (
        ("reads", "x", counts.bytes_read, counts.sectors_per_load_request),
        ("writes", "y", counts.bytes_written, counts.sectors_per_store_request),
    ):
        if bytes_moved > least_bytes:
            raise AssertionError(
                f"{where} it {doing} {bytes_moved:,} bytes of global memory: {least_bytes:,}, "
                "each element once, are enough"
            )
        if sectors > MAX_SECTORS:
            raise AssertionError(
                f"{where} a warp that {doing} {array} touches {sectors:.3g} sectors a request: do "
                f"neighbouring threads take neighbouring elements of {array}?"
            )
    requests = REQUESTS_PER_BLOCK * -(-rows // 32) * -(-columns // 32)
    if max(counts.load_requests, counts.store_requests) > requests:
        raise AssertionError(
            f"{where} its warps ask {counts.load_requests:,} times for x and "
            f"{counts.store_requests:,} times for y: {requests:,} are enough, if all 32 lanes of "
            "a warp load and store together"
        )
    if not counts.shared_stores:
        raise AssertionError(f"{where} it has no tile in shared memory, which this exercise is for")
    if counts.bank_conflicts:
        raise AssertionError(
            f"{where} its {counts.shared_requests} requests to shared memory need "
            f"{counts.bank_conflicts} passes more than that: how many of a column's elements lie "
            "in one of the 32 banks?"
        )
