"""Little's law: bytes in flight = latency x bandwidth, measured from one access up.

With too few bytes on their way at a time, a memory is as slow as its latency. Each experiment here
has a known number of accesses in flight, and the bandwidth rises with it until the memory is full.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterable

import torch

from helpers import cuda, native
from helpers.bench import measure
from helpers.latency import CPU_LINE_BYTES
from helpers.memory import uncached_bytes
from helpers.rings import MIN_SLICES, measured_on, ring, slices, typical, uncached_cpu_bytes

LANES, MAX_BLOCK_WARPS = 32, 32
VECTORS = {4: "float", 8: "float2", 16: "float4"}  # bytes of a lane's load -> its type in CUDA
# (bytes of a lane's load, loads of a thread in flight): registers of 64 warps hold all of these.
LOADS = ((4, 1), (16, 1), (16, 4))
CHAIN_STEPS = 1 << 13


def bytes_needed(latency_ns: float, gb_per_s: float) -> float:
    """Bytes that must be under way to reach a bandwidth with a latency: a GB/s is a byte a ns."""
    return latency_ns * gb_per_s


def in_flight(
    counts: Iterable[int] | None = None,
    footprint_bytes: int | None = None,
    loads: Iterable[tuple[int, int]] = LOADS,
    budget_s: float = 0.7,
    where: str | torch.device | None = None,
):
    """Bandwidth of reads from memory by what is in flight, one row an experiment.

    Columns: warps, on each SM, or the chains that a CPU's one thread follows; loads, of a thread at
    a time, 1 on a CPU; in_flight, warps x loads: on their way at a time in one SM or one CPU core;
    bytes_each, of one of them: what a warp's instruction loads, or a cache line; bytes_in_flight,
    in the whole device, which on a CPU is one core; gb_per_s.

    counts: on a GPU warps on each SM, each with the `loads` (bytes a lane, loads a thread) in
        flight; on a CPU chains that one thread follows in turn, 1 to 16.
    footprint_bytes: what is read, several times the caches; by default 1 GB or what fits on a GPU,
        on a CPU 128 MB or four times its largest cache.
    budget_s: for all of it, the ring included; five samples of each experiment are taken anyway.
    where: the "cpu" or the "cuda" device; by default the notebooks' own.
    """
    import pandas as pd

    where = measured_on(where)
    if where.type == "cuda":
        counts = _warp_counts(where) if counts is None else list(counts)
        # Random numbers: bits that never change would draw less power.
        x = torch.rand((footprint_bytes or uncached_bytes()) // 64 * 16, device=where)
        rows = _by_warps(x, counts, list(loads), budget_s)
    else:
        counts = [1, 2, 3, 4, 6, 8, 10, 12, 16] if counts is None else list(counts)
        rows = _by_chains(counts, footprint_bytes or uncached_cpu_bytes(), budget_s)
    frame = pd.DataFrame(rows, columns=["warps", "loads", "bytes_each", "cores", "gb_per_s"])
    frame.insert(2, "in_flight", frame["warps"] * frame["loads"])
    frame.insert(4, "bytes_in_flight", frame["in_flight"] * frame["bytes_each"] * frame["cores"])
    return frame.drop(columns="cores")


def cpu_stream(threads: int = 1, array_bytes: int = 1 << 26, samples: int = 4):
    """A CPU's memory bandwidth, as McCalpin's STREAM takes it: a frame, operation and gb_per_s.

    Operations: "read" (a sum), "copy" (y = x) and "triad" (y = x + 3 z), each byte that is read or
    written counted once. array_bytes: of each array, by default 64 MB.
    """
    import pandas as pd

    x, y, z = (torch.ones(array_bytes // 4) for _ in range(3))
    runs = {
        "read": (1, lambda: native.read(x, threads)[0]),
        "copy": (2, lambda: native.copy(x, y, threads)),
        "triad": (3, lambda: native.triad(x, z, y, 3.0, threads)),
    }
    rows = [
        (name, arrays * x.nbytes / typical([run() for _ in range(samples)]))
        for name, (arrays, run) in runs.items()
    ]
    return pd.DataFrame(rows, columns=["operation", "gb_per_s"])


def read_launch(x: torch.Tensor, warps_per_sm: int, lane_bytes: int, loads: int = 1):
    """A function that reads the fp32 `x` with that many warps on each SM: read_in_flight.

    lane_bytes: 4, 8 or 16, of one lane's load; x is a multiple of it. The partial sums are returned
    by the function. On CPU tensors the emulator runs it, as on a GPU of 2 SMs.
    """
    if lane_bytes not in VECTORS:
        raise ValueError(f"a lane loads {', '.join(map(str, VECTORS))} bytes, not {lane_bytes}")
    if x.nbytes % lane_bytes or loads < 1:
        raise ValueError(f"x must be whole loads of {lane_bytes} bytes, one a thread at least")
    blocks_per_sm = -(-warps_per_sm // MAX_BLOCK_WARPS)
    if warps_per_sm < 1 or warps_per_sm % blocks_per_sm:
        raise ValueError(
            f"{warps_per_sm} warps on an SM are not {blocks_per_sm} equal blocks of at most "
            f"{MAX_BLOCK_WARPS}"
        )
    grid, block = blocks_per_sm * _sms(x.device), warps_per_sm // blocks_per_sm * LANES
    kernel = cuda.load("memory.cu", "read_in_flight", VECTOR=VECTORS[lane_bytes], LOADS=str(loads))
    sums = torch.zeros(grid * block, device=x.device)

    def run() -> torch.Tensor:
        kernel(grid, block, x, sums, x.nbytes // lane_bytes)
        return sums

    return run


def _sms(where: torch.device) -> int:
    return (
        2 if where.type == "cpu" else torch.cuda.get_device_properties(where).multi_processor_count
    )


def _warp_counts(where: torch.device) -> list[int]:
    most = torch.cuda.get_device_properties(where).max_threads_per_multi_processor // LANES
    return [count for count in (1, 2, 4, 8, 16, 24, 32, 48, 64) if count <= most]


def _by_warps(x: torch.Tensor, counts: list, loads: list, budget_s: float) -> list[tuple]:
    rows, each_ms = [], 1e3 * budget_s / max(1, len(counts) * len(loads))
    for (lane_bytes, per_thread), warps in itertools.product(loads, counts):
        run = read_launch(x, warps, lane_bytes, per_thread)
        # The rest of x is read before its first bytes come again: no flush is needed.
        found = measure(run, x.nbytes, clock="event", cache="warm", budget_ms=each_ms)
        rows.append((warps, per_thread, LANES * lane_bytes, _sms(x.device), found.gb_per_s))
    return rows


def _by_chains(counts: list, footprint_bytes: int, budget_s: float) -> list[tuple]:
    if not all(1 <= count <= native.MAX_CHAINS for count in counts):
        raise ValueError(f"there can be 1 to {native.MAX_CHAINS} chains, not {counts}")
    end = time.perf_counter() + budget_s
    chain, places = ring(footprint_bytes, "random", CPU_LINE_BYTES, "cpu")
    rows, lines, begun = [], places.numel(), 0
    steps = min(CHAIN_STEPS, math.ceil(lines / native.MAX_CHAINS / MIN_SLICES))
    for number, count in enumerate(counts):
        # The chains go on where no one has been for a while: those lines have left the caches.
        at = places[(begun + torch.arange(count) * lines // count) % lines].clone()
        walk = functools.partial(native.chase, chain, at, steps)
        times_ns = slices(walk, (end - time.perf_counter()) / (len(counts) - number))
        begun += len(times_ns) * steps
        gb_per_s = count * steps * CPU_LINE_BYTES / typical(times_ns)
        rows.append((count, 1, CPU_LINE_BYTES, 1, gb_per_s))
    return rows
