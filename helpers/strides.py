"""Bandwidth against the pattern of the accesses: strides, misalignment, the width of a load.

Memory moves in pieces: sectors of 32 bytes between a GPU's SMs and its L2, one, two or four of them
between L2 and memory, a line of 64 bytes on a CPU. What of a piece is not used was moved for
nothing, and the useful bandwidth tells how large the pieces are.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator

import torch

from helpers import cuda, native
from helpers.bench import measure
from helpers.device import device, has_cuda
from helpers.emulator import Unsupported
from helpers.in_flight import read_launch
from helpers.memory import free_bytes
from helpers.memory_roofs import size_text
from helpers.rings import measured_on, slices, typical, uncached_cpu_bytes

FLOAT_BYTES = 4
STRIDES = (1, 2, 4, 8, 16, 32, 64)
OFFSETS = (0, 1, 2, 4, 8, 16, 31)
BLOCK = 512
MIN_READS_PER_THREAD = 4
MIN_SAMPLES = 3
SECTOR_FLOATS = 8
GRANULARITIES = (32, 64, 128)


def strides(
    strides: Iterable[int] = STRIDES,
    footprint_bytes: int | None = None,
    threads: int = 1,
    budget_s: float = 0.7,
    where: str | torch.device | None = None,
    rounds: int = 1,
):
    """Rate of the bytes that are asked for, one float in every `stride` floats.

    A frame with the columns stride_bytes, useful_gb_per_s. The footprint is the same for all, so
    that a stride of 8 reads an eighth of the floats.

    footprint_bytes: by default far more than the caches hold. A few MB on a GPU leave the data in
        the L2: then, with many rounds, the traffic between L2 and the SMs is what counts.
    threads: of a CPU; PyTorch's are not used.
    budget_s: for all of it; three samples of each stride are taken anyway.
    where: the "cpu" or the "cuda" device; by default the notebooks' own.
    rounds: how often a GPU reads the footprint in one launch, a stride beyond a sector as many
        times more often, so that each launch has as many sectors to read. A CPU has no launches.
    """
    import pandas as pd

    strides, end = list(strides), time.perf_counter() + budget_s
    if any(stride < 1 for stride in strides) or rounds < 1:
        raise ValueError(
            f"strides (in floats) and rounds are counted from 1 on, not {strides} and {rounds}"
        )
    x, rows = _numbers(footprint_bytes, measured_on(where)), []
    for number, stride in enumerate(strides):
        each_s = (end - time.perf_counter()) / (len(strides) - number)
        many = 1 if rounds == 1 else rounds * max(1, stride // SECTOR_FLOATS)
        rows.append((FLOAT_BYTES * stride, _rate(x, stride, 0, threads, each_s, rounds=many)))
    return pd.DataFrame(rows, columns=["stride_bytes", "useful_gb_per_s"])


def misaligned(
    offsets: Iterable[int] = OFFSETS,
    footprint_bytes: int | None = None,
    threads: int = 1,
    budget_s: float = 0.7,
    where: str | torch.device | None = None,
    rounds: int = 1,
):
    """Rate of reads of adjacent floats that begin `offset` floats after an aligned address.

    A frame with the columns offset_bytes, gb_per_s; the other arguments as those of `strides`.
    """
    import pandas as pd

    offsets, end = list(offsets), time.perf_counter() + budget_s
    if any(offset < 0 for offset in offsets):
        raise ValueError(f"offsets are counted in floats, from 0 on, not {offsets}")
    x, rows = _numbers(footprint_bytes, measured_on(where)), []
    n = x.numel() - max(offsets, default=0)  # all of them read as many floats
    if n < 1:
        raise ValueError(f"no offset may reach the end of {x.numel():,} floats: {offsets}")
    for number, offset in enumerate(offsets):
        each_s = (end - time.perf_counter()) / (len(offsets) - number)
        rows.append((FLOAT_BYTES * offset, _rate(x, 1, offset, threads, each_s, n, rounds)))
    return pd.DataFrame(rows, columns=["offset_bytes", "gb_per_s"])


def vector_widths(
    warps_per_sm: Iterable[int] = (4, 8, 16, 32),
    footprint_bytes: int | None = None,
    budget_s: float = 0.8,
):
    """Rate of reads by the bytes of a lane's load, float, float2 and float4, one in flight.

    A frame with the columns lane_bytes, warps_per_sm, gb_per_s. Unsupported without a GPU.
    """
    import pandas as pd

    if not has_cuda():
        raise Unsupported("the width of a lane's load is measured on a GPU, and there is none here")
    x, warps_per_sm = _numbers(footprint_bytes, device()), list(warps_per_sm)
    each_ms = 1e3 * budget_s / max(1, 3 * len(warps_per_sm))
    rows = []
    for lane_bytes in (4, 8, 16):
        for warps in warps_per_sm:
            run = read_launch(x, warps, lane_bytes)
            found = measure(run, x.nbytes, clock="event", cache="warm", budget_ms=each_ms)
            rows.append((lane_bytes, warps, found.gb_per_s))
    return pd.DataFrame(rows, columns=["lane_bytes", "warps_per_sm", "gb_per_s"])


@contextlib.contextmanager
def l2_fetch_granularity(nbytes: int) -> Iterator[int]:
    """Within this, the GPU's L2 fetches about `nbytes` from memory at a miss: 32, 64 or 128.

    Gives the number that the driver then reports: it takes the request as a hint. The driver's own
    choice is 64 on a H200, and comes back at the end. Unsupported where this cannot be set.
    Source: CUDA driver API, CU_LIMIT_MAX_L2_FETCH_GRANULARITY.
    """
    if nbytes not in GRANULARITIES:
        raise ValueError(f"the granularity is 32, 64 or 128 bytes, not {nbytes}")
    if not has_cuda():
        raise Unsupported("how much an L2 fetches at a time is set on a GPU, and there is none")
    try:
        from cuda.bindings import driver
    except ImportError:
        raise Unsupported(
            "setting how much the L2 fetches at a time needs cuda-bindings: pip install it"
        ) from None
    limit = driver.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY

    def done(status, *values):
        if status != driver.CUresult.CUDA_SUCCESS:
            raise Unsupported(
                f"this GPU does not let programs set how much its L2 fetches ({status.name})"
            )
        return values[0] if values else None

    torch.cuda.synchronize()  # PyTorch's context becomes this thread's
    before = done(*driver.cuCtxGetLimit(limit))
    done(*driver.cuCtxSetLimit(limit, nbytes))
    try:
        yield done(*driver.cuCtxGetLimit(limit))
    finally:
        torch.cuda.synchronize()
        done(*driver.cuCtxSetLimit(limit, before))


def strided_launch(
    x: torch.Tensor,
    n: int,
    stride: int,
    offset: int = 0,
    blocks: int | None = None,
    rounds: int = 1,
):
    """A function that sums n floats x[offset + stride * i] by kernels/memory.cu, and their sums.

    blocks: as many as the GPU holds at once by default; the emulator takes 2. rounds: how often
    they are read in a launch.
    """
    if n < 1 or offset + stride * (n - 1) >= x.numel():
        raise ValueError(f"{n:,} floats with a stride of {stride} do not fit in {x.numel():,}")
    if blocks is None and x.is_cuda:
        properties = torch.cuda.get_device_properties(x.device)
        per_sm = properties.max_threads_per_multi_processor // BLOCK
        # Few reads of many threads would be spent on starting them.
        reads = max(1, MIN_READS_PER_THREAD // rounds)
        enough = max(1, n // (BLOCK * reads))
        blocks = min(per_sm * properties.multi_processor_count, enough)
    blocks = blocks or 2
    kernel = cuda.load("memory.cu", "read_strided")
    sums = torch.zeros(blocks * BLOCK, device=x.device)

    def run() -> torch.Tensor:
        kernel(blocks, BLOCK, x, sums, n, stride, offset, rounds)
        return sums

    return run


def _numbers(footprint_bytes: int | None, where: torch.device) -> torch.Tensor:
    on_gpu = where.type == "cuda"
    footprint_bytes = footprint_bytes or (
        min(1 << 32, free_bytes(where) // 4) if on_gpu else uncached_cpu_bytes()
    )
    if footprint_bytes < 1 << 12:
        raise ValueError(f"{size_text(footprint_bytes)} are too few to measure: 4 KB at least")
    # Random on a GPU, where bits that never change would draw less power; on a CPU that takes long.
    return (torch.rand if on_gpu else torch.ones)(footprint_bytes // FLOAT_BYTES, device=where)


def _rate(
    x: torch.Tensor,
    stride: int,
    offset: int,
    threads: int,
    budget_s: float,
    n: int | None = None,
    rounds: int = 1,
) -> float:
    """GB/s of the n floats that are asked for; by default of as many as x has."""
    n = n or -(-x.numel() // stride)
    if x.is_cuda:
        run = strided_launch(x, n, stride, offset, rounds=rounds)
        # Warm: what does not fit in the L2 is not there, and what fits is to be there.
        budget_ms = max(1, 1e3 * budget_s)
        nbytes = FLOAT_BYTES * n * rounds
        return measure(run, nbytes, clock="event", cache="warm", budget_ms=budget_ms).gb_per_s
    part = x[offset : offset + stride * (n - 1) + 1]
    times_ns = slices(lambda: native.read(part, threads, stride)[0], budget_s, MIN_SAMPLES)
    return FLOAT_BYTES * n / typical(times_ns)
