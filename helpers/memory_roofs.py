"""The bandwidth of every level of memory that can be told apart, measured.

The same memory is read again and again, so that after the first time it comes from the fastest
level that holds it. Where the rate falls as the footprint grows, a level has overflowed.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from helpers import specs
from helpers.bench import measure
from helpers.device import device, has_cuda
from helpers.memory import free_bytes, uncached_bytes
from helpers.roofline import Roof
from helpers.triton_mode import cannot_launch, tl, triton

PATHS = {"all caches": ".ca", "past the L1": ".cg"}  # and Triton's cache modifier for each
LEVELS = ("L1", "L2", "L3", "L4")
BLOCK = 2048  # elements: four programs have 32 KB in flight, enough to hide a memory's latency
PROGRAMS_PER_SM = 4
SAME_LEVEL = 1.25  # rates closer than this factor come from one level
READ_BYTES = {"cpu": 2**27, "cuda": 2**33}  # a call: long beside the cost of making it


@triton.jit
def read_repeatedly_kernel(x_ptr, out_ptr, chunk, steps, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Every program walks over its own `chunk` elements in blocks, round and round."""
    program = tl.program_id(0)
    start = x_ptr + program.to(tl.int64) * chunk
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    offset = 0
    for _ in range(steps):
        total += tl.load(start + offset + lanes, cache_modifier=CACHE)
        offset += BLOCK
        offset = tl.where(offset >= chunk, 0, offset)
    tl.store(out_ptr + program, tl.sum(total))


def read_repeatedly(footprint_bytes: int, path: str) -> tuple[Callable, int, float]:
    """A Triton kernel that reads the same `footprint_bytes` of fp32 again and again.

    path: a key of `PATHS`. Every SM runs four programs with a part of the footprint each, so that
    its L1 needs to hold its own share alone.
    Returns (run, the footprint in bytes, the bytes that one run reads).
    """
    sms = torch.cuda.get_device_properties(device()).multi_processor_count
    programs = PROGRAMS_PER_SM * sms
    chunk = max(1, footprint_bytes // 4 // programs // BLOCK) * BLOCK
    steps = max(chunk // BLOCK, READ_BYTES["cuda"] // 4 // programs // BLOCK)
    x = torch.rand(programs * chunk, device=device())
    out = torch.empty(programs, device=device())

    def run() -> torch.Tensor:
        read_repeatedly_kernel[(programs,)](x, out, chunk, steps, BLOCK, PATHS[path], num_warps=8)
        return out

    return run, x.nbytes, 4 * programs * steps * BLOCK


def sum_repeatedly(footprint_bytes: int) -> tuple[Callable, int, float]:
    """The same from PyTorch alone: sums of rows that a stride of 0 repeats.

    On a CPU every thread has rows of its own. On a GPU each byte is read once a call: two blocks
    that read the same row at the same time would share it, and short calls show the launch.
    """
    rows = 1 if has_cuda() else torch.get_num_threads()
    n = max(1, footprint_bytes // 4 // rows)
    repeats = 1 if has_cuda() else max(1, READ_BYTES["cpu"] // 4 // n // rows)
    x = torch.rand(rows, 1, n, device=device())
    return (lambda: x.expand(rows, repeats, n).sum(2)), x.nbytes, 4 * rows * repeats * n


def memory_ladder(footprints: Iterable[int], budget_ms: float = 20):
    """Read rate by footprint: a frame with the columns footprint_bytes, path, gb_per_s.

    Footprints (bytes) that would take more than half of the free memory are left out. The best
    sample counts: a roof is what can be reached.
    """
    import pandas as pd

    rows, by_kernel = [], has_cuda() and not cannot_launch()
    for path in PATHS if by_kernel else ["all caches"]:
        for wanted in sorted(footprints):
            if wanted > free_bytes() / 2:
                continue
            run, footprint, read = (
                read_repeatedly(wanted, path) if by_kernel else sum_repeatedly(wanted)
            )
            found = measure(run, cache="warm", budget_ms=budget_ms)
            rows.append((footprint, path, read / min(found.samples_ms) / 1e6))
    frame = pd.DataFrame(rows, columns=["footprint_bytes", "path", "gb_per_s"])
    return frame.drop_duplicates(["footprint_bytes", "path"], ignore_index=True)


def plateaus(rates: Sequence[float]) -> list[tuple[int, int]]:
    """Levels in rates by growing footprint: (first, last) index of each, fastest first.

    A level is at least two neighbours within the factor `SAME_LEVEL`, and slower by that factor
    than the level before. A single point between two levels is a mixture of both. A slow start is
    the cost of the call, not a level.
    """
    found: list[tuple[int, int]] = []
    for first, last in _runs(rates):
        if last == first:
            continue
        if found and max(rates[first : last + 1]) * SAME_LEVEL > max(
            rates[found[-1][0] : found[-1][1] + 1]
        ):
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def _runs(rates: Sequence[float]) -> list[tuple[int, int]]:
    runs, first = [], next((i for i, r in enumerate(rates) if r * SAME_LEVEL >= max(rates)), 0)
    for place in range(first, len(rates)):
        inside = rates[first : place + 1]
        if max(inside) > SAME_LEVEL * min(inside):
            runs.append((first, place - 1))
            first = place
    return [*runs, (first, len(rates) - 1)] if rates else []


def memory_roofs(ladder) -> list[Roof]:
    """The levels that a frame of `memory_ladder` tells apart, fastest first.

    The last plateau of a path is the memory itself, those before it are caches. A CPU's are named
    by their sizes, "L1, L2" where two are as fast as each other; a GPU's by their order, from the
    L2 on where reading past the L1 is as fast as through it.
    """
    found: dict[str, Roof] = {}
    past_l1 = ladder[ladder["path"] == "past the L1"]["gb_per_s"].max()  # NaN: not measured
    capacities = {} if has_cuda() else cpu_caches()
    for path, rows in ladder.groupby("path", sort=False):
        rates, sizes = rows["gb_per_s"].tolist(), rows["footprint_bytes"].tolist()
        names = LEVELS[1:] if max(rates) < SAME_LEVEL * past_l1 else LEVELS
        levels = plateaus(rates)
        for number, (first, last) in enumerate(levels):
            beyond_caches = sizes[last] > max(capacities.values(), default=0)
            if (first, last) == levels[-1] and beyond_caches:
                name = "memory, read"
            elif capacities:
                name = _holding(capacities, sizes[first], sizes[last])
            else:
                name = names[number] if number < len(names) else f"level {number + 1}"
            how = f"{path}, footprints {size_text(sizes[first])} to {size_text(sizes[last])}"
            roof = Roof(name, statistics.median(rates[first : last + 1]), how)
            if name not in found or roof.value > found[name].value:
                found[name] = roof
    return sorted(found.values(), key=lambda roof: -roof.value)


def _holding(capacities: dict[str, int], smallest: int, largest: int) -> str:
    names = list(capacities)
    first, last = (
        next((i for i, c in enumerate(capacities.values()) if size <= c), len(names) - 1)
        for size in (smallest, largest)
    )
    return ", ".join(names[first : last + 1])


def cache_bytes() -> dict[str, int]:
    """Bytes that each level of cache holds, all SMs or threads together, where that is known."""
    if not has_cuda():
        return cpu_caches()
    gpu = specs.this_gpu()
    found = {"all L1s": (gpu.sms or 0) * (gpu.l1_kb_per_sm or 0) * 2**10}
    found["L2"] = (gpu.l2_mb or 0) * 2**20
    return {name: int(size) for name, size in found.items() if size}


def cpu_caches(threads: int | None = None) -> dict[str, int]:
    """Bytes of each level of data cache that so many threads have together, smallest first.

    threads: one on each core; by default PyTorch's. Empty where Linux does not tell, as on other
    systems.
    """
    threads, found = threads or torch.get_num_threads(), {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size, shared = (
                (folder / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_map")
            )
            if kind != "Instruction":
                sharing = bin(int(shared.replace(",", ""), 16)).count("1")
                units = {"K": 2**10, "M": 2**20}[size[-1]]
                copies = max(1, threads // sharing)
                found[f"L{level}"] = int(size[:-1]) * units * copies
        except (OSError, ValueError, LookupError):  # a virtual machine may hide any of it
            continue
    return dict(sorted(found.items(), key=lambda item: item[1]))


def copy_roof(nbytes: int | None = None) -> Roof:
    """Reading and writing large tensors, the roof that most operations meet, in GB/s.

    nbytes: the size of one tensor, by default `uncached_bytes`.
    """
    nbytes = nbytes or uncached_bytes()
    source = torch.rand(nbytes // 4, device=device())
    target = torch.empty_like(source)
    found = measure(lambda: target.copy_(source), 2 * source.nbytes)
    how = f"{size_text(source.nbytes)} copied; {found.method}"
    ms = found.median_ms if has_cuda() else found.p20_ms  # other programs interrupt a CPU
    return Roof("memory, copy", found.bytes / ms / 1e6, how)


def host_link_roofs() -> list[Roof]:
    """Copies between the CPU's memory (pinned) and the GPU's, in GB/s; none without a GPU."""
    if not has_cuda():
        return []
    nbytes = min(2**28, free_bytes() // 8)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device())
    ways = {
        "CPU's memory to GPU": lambda: there.copy_(host, non_blocking=True),
        "GPU to CPU's memory": lambda: host.copy_(there, non_blocking=True),
    }
    how = f"{size_text(nbytes)} copied, pinned"
    return [
        Roof(name, measure(run, nbytes, clock="event", cache="warm").gb_per_s, how)
        for name, run in ways.items()
    ]


def size_text(nbytes: float) -> str:
    """ "16 KB", "1.5 GB": powers of 1024, for a reader."""
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 999.5:  # three digits, and no exponent
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GB"
