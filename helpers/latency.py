"""How long one access takes that nothing hides, level by level.

A pointer chase: every address is the value that the load before brought, so that the time of a step
is the latency of whichever level holds the chain. On a GPU one thread of kernels/memory.cu walks
and reads the SM's clock; on a CPU one thread of cpu_memory.cpp. A GPU's figures for a chain of
indices include the instruction that makes an address of an index (5 to 8 cycles on an H200); those
for a chain of addresses are of the load alone.
"""

import functools
import math
import time
from collections.abc import Iterable

import torch

from helpers import cuda, native, specs
from helpers.bench import measure
from helpers.device import device, has_cuda
from helpers.emulator import Unsupported
from helpers.memory import free_bytes
from helpers.memory_roofs import LEVELS, cpu_caches, plateaus, size_text
from helpers.rings import (
    INDEX_BYTES,
    STEPS,
    measured_on,
    ring,
    slices,
    typical,
    uncached_cpu_bytes,
)

GPU_LINE_BYTES, CPU_LINE_BYTES = 128, 64
GPU_STEPS, CPU_STEPS = 1 << 15, 1 << 14  # timed at once: 1 to 10 ms in memory
GPU_WARMUP_LINES = 1 << 20  # a whole ring up to 128 MB, for which one thread takes 0.4 s
L1_WARMUP_LINES = 1 << 12  # 512 KB: each launch begins with an empty L1
CPU_WARMUP_LINES = 1 << 16  # 4 MB: larger rings were just written, which is as good
MAX_SHARED_INDICES = 4096  # of the array in chase_shared
SHARED_STEPS = {"index": 1, "address": INDEX_BYTES}


def cycle_ns(where: str | torch.device | None = None) -> float:
    """One cycle of the clock that does the work, now: of a CPU's core, or of the GPU's SMs.

    A CPU's from integer additions that wait for each other, a cycle each on every CPU of today; a
    GPU's from a kernel that counts its own cycles, timed by events.
    """
    if measured_on(where).type == "cpu":
        return min(native.add_ns() for _ in range(5))
    y, cycles = torch.zeros(1, device=device()), torch.zeros(1, dtype=int, device=device())
    kernel = cuda.load("memory.cu", "chain_fma")
    run = functools.partial(kernel, 1, 1, y, 0.5, 1 << 20, cycles)
    return measure(run, clock="event", cache="warm").median_ms * 1e6 / cycles.item()


def staircase(
    footprints: Iterable[int] | None = None,
    order: str | None = None,
    budget_s: float = 1.2,
    where: str | torch.device | None = None,
    step: str = "index",
):
    """Time of a step by footprint: a frame with the columns footprint_bytes, cycles, ns.

    footprints: bytes; those that would take over half of the free memory are left out. By default
        powers of two, 8 KB to 2 GB on a GPU, 4 KB to 128 MB on a CPU (or past its largest cache).
    order: "sequential", the default on a GPU, where nothing prefetches; or "random", the default on
        a CPU. Random steps through much memory pay for the TLB as well.
    budget_s: for all of it, the rings included; five samples of each footprint are taken anyway.
    where: the "cpu" or the "cuda" device; by default the notebooks' own.
    step: what the chain holds. "index", or on a GPU "address", of which nothing must be computed.

    A ring that fits is walked once before; of a larger one, a part is walked that no cache holds.
    The rate is taken in slices, and the slice that 20% are faster than counts: other programs
    interrupt. Cycles are of the clock that `cycle_ns` finds; a GPU's are counted by the SM.
    """
    import pandas as pd

    where, end = measured_on(where), time.perf_counter() + budget_s
    on_gpu = where.type == "cuda"
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, not {step!r}")
    if step == "address" and not on_gpu:
        raise Unsupported("a CPU's load makes its address itself: only a GPU tells the steps apart")
    order = order or ("sequential" if on_gpu else "random")
    footprints = sorted(_default_footprints(where) if footprints is None else footprints)
    footprints = [f for f in footprints if f <= free_bytes(where) / 2]
    if not footprints:
        raise ValueError("there is no footprint to measure that fits in half of the free memory")
    ns_per_cycle, rows = cycle_ns(where), []
    # One piece of memory for all rings of a CPU, whose pages the system need not clear again.
    into = None if on_gpu else torch.empty(footprints[-1] // INDEX_BYTES, dtype=torch.int32)
    for left in range(len(footprints), 0, -1):  # the largest first: they take what they need
        footprint, share_s = footprints[left - 1], (end - time.perf_counter()) / left
        if on_gpu:
            cycles = typical(_gpu_cycles(footprint, order, step, share_s, where))
        else:
            cycles = typical(_cpu_ns(footprint, order, share_s, into)) / ns_per_cycle
        rows.append((footprint, cycles, cycles * ns_per_cycle))
    return pd.DataFrame(rows[::-1], columns=["footprint_bytes", "cycles", "ns"])


def _default_footprints(where: torch.device) -> list[int]:
    if where.type == "cuda":
        return [1 << k for k in range(13, 32)]
    return [1 << k for k in range(12, uncached_cpu_bytes().bit_length())]


def _cpu_ns(footprint_bytes: int, order: str, budget_s: float, into: torch.Tensor) -> list[float]:
    """Times of a step in slices, the making of the ring within the budget."""
    end = time.perf_counter() + budget_s
    chain, places = ring(footprint_bytes, order, CPU_LINE_BYTES, "cpu", into=into)
    at = places[:1].clone()
    native.chase(chain, at, min(places.numel(), CPU_WARMUP_LINES))
    # A small ring is walked many times, a large one not even once: no line is met again too early.
    walk_ns = slices(lambda: native.chase(chain, at, CPU_STEPS), end - time.perf_counter())
    return [ns / CPU_STEPS for ns in walk_ns]


def _gpu_cycles(
    footprint_bytes: int,
    order: str,
    step: str,
    budget_s: float,
    where: torch.device,
    steps: int = GPU_STEPS,
) -> list[float]:
    """The same on a GPU, in cycles; on a CPU by the emulator, whose cycles mean nothing."""
    end = time.perf_counter() + budget_s
    chain, places = ring(footprint_bytes, order, GPU_LINE_BYTES, where, step)
    lines, at = places.numel(), places[:1].clone()
    cycles = torch.zeros(1, dtype=torch.int64, device=where)
    kernel = cuda.load("memory.cu", "chase" if step == "index" else "chase_addresses")
    # The emulator moves the ring: its elements are no addresses before.
    relative = () if step == "index" else (0 if where.type == "cuda" else chain.numel(),)

    def walk(warmup: int) -> float:
        kernel(1, 1, chain, at, *relative, warmup, steps, cycles)
        return cycles.item() / steps

    walk(lines if lines <= GPU_WARMUP_LINES else L1_WARMUP_LINES)
    return slices(lambda: walk(min(lines, L1_WARMUP_LINES)), end - time.perf_counter())


def shared_latency_cycles(
    footprint_bytes: int = 16 << 10, steps: int = 1 << 15, step: str = "index"
) -> float:
    """Cycles of a step of a chain in a GPU's shared memory (16 KB at most).

    step: what the chain holds, as in `staircase`. Unsupported without a GPU: a CPU has no such
    memory.
    """
    if not has_cuda():
        raise Unsupported("shared memory's latency is measured on a GPU, and there is none here")
    return _shared_cycles(footprint_bytes, steps, step, device())


def _shared_cycles(footprint_bytes: int, steps: int, step: str, where: torch.device) -> float:
    if step not in STEPS:
        raise ValueError(f"step must be one of {', '.join(STEPS)}, not {step!r}")
    chain, places = ring(footprint_bytes, "sequential", INDEX_BYTES, where)
    if chain.numel() > MAX_SHARED_INDICES:
        raise ValueError(f"chase_shared holds 16 KB, not {size_text(footprint_bytes)}")
    kernel = cuda.load("memory.cu", "chase_shared", SHARED_STEP=str(SHARED_STEPS[step]))
    at, cycles = places[:1].clone(), torch.zeros(1, dtype=torch.int64, device=where)
    for _ in range(2):  # the first time, instructions come from memory
        kernel(1, 128, chain, chain.numel(), at, steps, cycles)
    return cycles.item() / steps


def levels(frame, where: str | torch.device | None = None):
    """The steps of a `staircase` frame: a frame with the columns level, cycles, ns, nearest first.

    level: "L1", ..., "memory". where: the device that the frame is of.

    Where the caches' sizes are known, a level is the median over footprints well inside it: more
    than the level before holds and at most half of what it holds itself; memory: at least twice
    the largest cache. Elsewhere, the plateaus of the rates, and the last is called memory.
    """
    import pandas as pd

    capacities, inside = _own_caches(measured_on(where)), {}
    if capacities:
        before = 0
        for name, capacity in (*capacities.items(), ("memory", math.inf)):
            least = 2 * before if name == "memory" else before + 1
            inside[name] = frame[frame["footprint_bytes"].between(least, capacity / 2)]
            before = capacity
    else:
        found = plateaus([1 / cycles for cycles in frame["cycles"]])
        names = [*LEVELS[: len(found) - 1], "memory"]
        for name, (first, last) in zip(names, found, strict=False):
            inside[name] = frame.iloc[first : last + 1]
    rows = [
        (name, part["cycles"].median(), part["ns"].median())
        for name, part in inside.items()
        if len(part)
    ]
    return pd.DataFrame(rows, columns=["level", "cycles", "ns"])


def _own_caches(where: torch.device) -> dict[str, int]:
    """Bytes of the caches that the one walking thread can use: {} where they are not known."""
    if where.type == "cpu":
        return cpu_caches(threads=1)
    gpu = specs.this_gpu()
    sizes = {"L1": (gpu.l1_kb_per_sm or 0) * 2**10, "L2": (gpu.l2_mb or 0) * 2**20}
    return {name: int(size) for name, size in sizes.items()} if all(sizes.values()) else {}
