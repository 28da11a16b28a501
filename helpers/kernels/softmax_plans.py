"""How wide rows are divided among programs, warps and tiles: the launches of `softmax_tiles`."""

import dataclasses
import math

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.device import interpreting
from helpers.kernels.softmax_tiles import softmax_shared_kernel, softmax_tiles_kernel
from helpers.triton_mode import triton

VECTOR_BYTES = 16  # the most that one thread reads in one instruction, up to Hopper


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one program goes through its row, or its part of one."""

    block: int
    tiles: int
    options: dict


# KB of a row, and the warps for it: the rows in flight on an SM are to fit into 256 KB of L1.
WARPS = ((4, 1), (8, 2), (16, 4), (48, 8), (112, 16), (256, 32))
TILES_COLUMNS = 65536
SHARED_BYTES, SHARED_WARPS, SHARED_BLOCK = 32 * 1024, 8, 4096
PROGRAMS_PER_SM = 4  # with 64 registers for each of 256 threads
MOST_PARTS = 256


def plan(columns: int, itemsize: int) -> Plan:
    """For one row a program; itemsize: the bytes that are read for an element."""
    row_kb = columns * itemsize / 1024
    warps = next((warps for kb, warps in WARPS if row_kb <= kb), 32)
    if warps == 32 and itemsize == 2:
        warps = 16  # 128 KB: two such rows fit, and in 16 bits there is more to compute
    block = warps * 32 * 8
    if row_kb > 112 or columns > 8 * block:  # more tiles would spill: their loads come all at once
        block *= 2
    return Plan(block, triton.cdiv(columns, block), dict(num_warps=warps, maxnreg=64))


def unit(*tensors: torch.Tensor) -> int:
    """How many elements can be read at once wherever a row begins: a power of 2, up to 16 bytes.

    tensors: of one 2-D shape and dtype. That they begin at a multiple Triton sees for itself.
    """
    most = VECTOR_BYTES // tensors[0].itemsize
    strides = [tensor.stride(0) for tensor in tensors if len(tensor) > 1]
    return math.gcd(most, tensors[0].shape[1], *strides)


def launch_wide(x: torch.Tensor, y: torch.Tensor, split: bool) -> bool:
    """Write softmax of x's rows to y; False where that is not for these kernels.

    split: rows begin at any element; x and y then have to begin at the same within 16 bytes.
    """
    rows, columns = x.shape
    size = VECTOR_BYTES // x.itemsize
    strides = x.stride(0), y.stride(0)
    if any(tensor.data_ptr() % VECTOR_BYTES for tensor in (x, y)):
        return False
    if split and rows > 1 and (strides[0] - strides[1]) % size:
        return False
    whole = columns // size * size
    if whole <= TILES_COLUMNS:
        chosen = plan(whole, x.itemsize)
        softmax_tiles_kernel[(rows,)](
            *(x, y, columns, *strides),
            *(chosen.block, chosen.tiles, size, split),
            **chosen.options,
        )
        return True
    parts = triton.cdiv(columns * x.itemsize, SHARED_BYTES)
    programs = programs_at_once(x.device)
    if parts > min(MOST_PARTS, programs):
        return False
    parts = programs // (programs // parts)  # all programs have something to do
    launch_shared(x, y, split, parts, programs)
    return True


def programs_at_once(device: torch.device) -> int:
    """How many programs of `softmax_shared_kernel` the GPU runs at the same time."""
    if interpreting():
        return 4 * MOST_PARTS  # one after the other, so that any number will do
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def launch_shared(x: torch.Tensor, y: torch.Tensor, split: bool, parts: int, programs: int) -> None:
    """With `softmax_shared_kernel`: `parts` programs a row, of `programs` that run at once."""
    rows, columns = x.shape
    size = VECTOR_BYTES // x.itemsize
    chunk = triton.cdiv(triton.cdiv(columns, size), parts) * size
    tiles = triton.cdiv(chunk, SHARED_BLOCK)
    pairs = torch.zeros(rows * parts, dtype=torch.int64, device=x.device)
    grid = (min(rows, programs // parts) * parts,)
    # Programs wait for each other: all have to be running, or some would wait forever. On a GPU a
    # cooperative launch sees to it. Interpreted they run one by one: first all publish, then all
    # write.
    for step in (1, 2) if interpreting() else (0,):
        softmax_shared_kernel[grid](
            *(x, y, pairs, rows, columns, x.stride(0), y.stride(0), parts, chunk),
            *(SHARED_BLOCK, tiles, size, split, triton.next_power_of_2(parts), step),
            num_warps=SHARED_WARPS,
            maxnreg=65536 // (PROGRAMS_PER_SM * SHARED_WARPS * 32),
            launch_cooperative_grid=True,
        )
