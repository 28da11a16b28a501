"""Run a CUDA C++ kernel on the CPU, check every access, and count what its warps do.

A kernel that a GPU would run gives the same result up to rounding (approximate intrinsics such as
__expf are as exact as the C library's). One that is wrong raises KernelFault with the block and
the thread. What the emulator cannot run is Unsupported, in one sentence.

build.py compiles the text with g++ against cuda.h; scheduler.cpp runs it, a fiber for each CUDA
thread; waiting.cpp lets them go on together at barriers and shuffles; memory.cpp checks accesses
and counts.cpp counts them.
"""

import ctypes
import math
from pathlib import Path

import torch

from helpers.cuda_source import check_memory, sizes
from helpers.emulator import arena, build, counts, faults, library
from helpers.emulator.counts import Access, Counts, Row
from helpers.emulator.errors import CompileError, KernelFault, Unsupported

__all__ = ["Access", "CompileError", "Counts", "KernelFault", "Row", "Unsupported", "run"]

TRACE = 100_000  # accesses that are kept
MAX_BLOCKS, MAX_SHUFFLED_BLOCKS = 1 << 31, 1 << 24  # a seed's order is kept in memory
MAX_STATIC_SHARED_BYTES = 48 << 10  # a GPU gives more only to dynamic shared memory
MAX_SHARED_BYTES = 227 << 10  # of an H100


def run(
    text: str,
    kernel: str,
    grid,
    block,
    arguments: dict,
    *,
    name: str = "kernel.cu",
    defines: dict[str, str] | None = None,
    shared_bytes: int = 0,
    order: str | int = "forward",
    branches: bool = False,
    trace: bool = False,
    timeout_s: float = 60.0,
) -> Counts:
    """Launch `kernel` of the CUDA C++ `text`; the tensors get its results.

    grid, block: 1 to 3 ints. arguments: in the kernel's order, by name; a CPU tensor for a pointer
        (to its first element, whatever its strides) or a ctypes number.
    name: the file's name in messages. defines: macros. shared_bytes: dynamic shared memory.
    order: of the blocks, and of the threads between barriers: "forward", "reverse" or a seed. A
        correct kernel's results do not depend on it, but for the rounding of atomic sums.
    branches: count basic blocks as well. trace: keep the first 100,000 accesses.

    KernelFault, and the tensors are as they were; CompileError; Unsupported; TypeError for
    arguments that do not fit the kernel; ValueError for a grid or a block that no GPU takes.
    """
    launch = library.Launch(shared_bytes=shared_bytes, count_branches=branches)
    launch.grid[:], launch.block[:] = sizes("grid", grid), sizes("block", block)
    launch.order = _order(order)

    blocks = math.prod(launch.grid)
    if blocks > (MAX_BLOCKS if launch.order < 0 else MAX_SHUFFLED_BLOCKS):
        raise Unsupported(
            f"the emulator runs at most {MAX_BLOCKS:,} blocks, and {MAX_SHUFFLED_BLOCKS:,} in the "
            f"order of a seed, not {blocks:,}"
        )

    path, loaded = _loaded(text, kernel, name, defines or {})
    static_bytes = loaded.static_shared_bytes
    if static_bytes > MAX_STATIC_SHARED_BYTES:
        raise Unsupported(f"__shared__ arrays are at most 48 KB a block, not {static_bytes} bytes")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES - static_bytes:
        raise Unsupported(f"shared memory is at most 227 KB a block, not {shared_bytes} bytes")
    _check_arguments(kernel, loaded.parameters, arguments)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    with arena.placed(tensors) as regions:
        pointers = {region.name: ctypes.c_uint64(region.begin) for region in regions}
        values = [pointers.get(key, value) for key, value in arguments.items()]
        launch.arguments = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        buffers = (library.Buffer * max(1, len(regions)))()
        for buffer, region in zip(buffers, regions, strict=False):
            buffer.begin, buffer.end = region.begin, region.end
        launch.buffers, launch.buffer_count = buffers, len(regions)
        kept = (library.Access * (TRACE if trace else 1))()
        launch.trace, launch.trace_capacity = kept, TRACE if trace else 0

        library.call(loaded, launch, timeout_s)
        fault = launch.fault
        addresses = {site.pc for site in launch.sites[: launch.site_count]} | {fault.pc} - {0}
        line_of = counts.lines(launch.image, path, name, addresses)
        if fault.kind:
            raise faults.fault(launch, kernel, name, regions, line_of, timeout_s)
        for buffer, region in zip(buffers, regions, strict=False):
            if buffer.written:
                arena.copy_back(region)
        accesses = counts.accesses(launch, regions, line_of)
    return counts.summarise(launch, line_of, branches, accesses)


def _loaded(*kernel) -> tuple[Path, ctypes.CDLL]:
    """The kernel's library, compiled again once if the one that was kept cannot be loaded."""
    path = build.build(*kernel)
    try:
        return path, library.load(path)
    except OSError:
        path.unlink(missing_ok=True)
    path = build.build(*kernel)
    try:
        return path, library.load(path)
    except OSError as error:  # a file system from which nothing may be executed
        raise Unsupported(f"the compiled kernel cannot be loaded: {error}") from None


def _order(order: str | int) -> int:
    if order in ("forward", "reverse"):
        return -1 if order == "forward" else -2
    if isinstance(order, int) and order >= 0:
        return order
    raise ValueError(f'order must be "forward", "reverse" or a seed from 0 on, not {order!r}')


def _check_arguments(kernel: str, parameters: list, arguments: dict) -> None:
    if len(parameters) != len(arguments):
        raise TypeError(f"{kernel} takes {len(parameters)} arguments, not {len(arguments)}")
    for parameter, (name, value) in zip(parameters, arguments.items(), strict=True):
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise TypeError(f"{name} must be a tensor on the CPU, not on {value.device}")
            check_memory(name, value)
            if not parameter.is_pointer:
                raise TypeError(f"{name} is a tensor, but {kernel} takes a number there")
        elif not isinstance(value, ctypes._SimpleCData):
            raise TypeError(f"{name} must be a tensor or a ctypes number, not {value!r}")
        elif parameter.is_pointer and not isinstance(value, ctypes.c_void_p):
            raise TypeError(f"{name} is a number, but {kernel} takes a pointer there")
        elif ctypes.sizeof(value) != parameter.bytes or parameter.is_floating != isinstance(
            value, ctypes.c_float | ctypes.c_double
        ):
            raise TypeError(
                f"{name} is a {type(value).__name__}, but {kernel} takes "
                f"{'a floating-point number' if parameter.is_floating else 'a number'} of "
                f"{parameter.bytes} bytes there"
            )
