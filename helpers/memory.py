"""How much memory is left, and what to do when it runs out: sizes follow from the first."""

import gc
from collections.abc import Callable

import torch

from helpers.device import has_cuda

OUT_OF_MEMORY = "out of memory"


def free_bytes(where: torch.device | None = None) -> int:
    """Bytes that tensors can still take on a device, by default the notebooks' own.

    On a GPU: what the driver has left and what PyTorch's allocator holds unused, within the
    process's share (`torch.cuda.set_per_process_memory_fraction`). On a CPU: what the system can
    give without swapping.
    """
    if not has_cuda() or (where and where.type == "cpu"):
        import psutil

        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(where)
    allocated = torch.cuda.memory_allocated(where)
    unused = torch.cuda.memory_reserved(where) - allocated
    share = int(torch.cuda.get_per_process_memory_fraction(where) * total) - allocated
    return max(0, min(free + unused, share))


def uncached_bytes() -> int:
    """The size of a tensor that no cache holds, to measure memory with; several of them fit."""
    return min(2**30, free_bytes() // 8) if has_cuda() else 2**26


def release() -> None:
    """Give the GPU's memory that nothing refers to any more back to the driver."""
    if has_cuda():  # a CPU's allocator does so by itself
        gc.collect()
        torch.cuda.empty_cache()


def largest_power_of_2(limit: float) -> int:
    """The largest power of two up to `limit`; ValueError below 1."""
    if limit < 1:
        raise ValueError(f"there is no power of two up to {limit}")
    return 1 << (int(limit).bit_length() - 1)


def attempt(run: Callable):
    """`run()`, or the text "out of memory" where it does not fit; its memory is freed then.

    For a table whose other rows should still come. Any other error is raised.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        pass  # outside this block, so that the exception's frames let go of their tensors
    except RuntimeError as error:  # PyTorch's CPU allocator has no exception of its own
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
    release()
    return OUT_OF_MEMORY
