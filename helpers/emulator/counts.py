"""What a kernel did to memory, as a GPU's warps would do it."""

import dataclasses
import functools
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from helpers.emulator.library import KINDS


class Row(NamedTuple):
    """One line of the text and one kind of access: "load", "shared store", "atomic", ..."""

    line: int
    kind: str
    requests: int  # warp instructions
    threads: int
    bytes: int
    sectors: int  # of 32 bytes, summed over warp instructions; 0 for shared memory
    lines: int  # of 128 bytes, likewise
    bank_conflicts: int  # extra passes, shared memory only


class Access(NamedTuple):
    """One access of one thread, in the order of execution; `parameter` is "" for shared memory."""

    block: int  # x + gridDim.x * (y + gridDim.y * z)
    thread: int
    line: int
    kind: str
    parameter: str
    byte_offset: int  # from the tensor's first element, or from the start of shared memory
    size: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """Accesses of one launch. A request is a warp instruction, whatever number of lanes takes part.

    Sectors (32 bytes) and lines (128 bytes) are distinct within a request, summed over requests:
    traffic between L1 and L2 if nothing stayed in L1. Shared and global accesses are apart.
    Lanes are matched by place in the code and occurrence: one loop that different lanes are in at
    different times of an outer loop counts as converged.
    """

    loads: int  # by threads, global memory
    stores: int
    bytes_read: int
    bytes_written: int
    load_requests: int
    store_requests: int
    load_sectors: int
    store_sectors: int
    load_lines: int
    store_lines: int
    shared_loads: int  # by threads
    shared_stores: int
    shared_requests: int
    bank_conflicts: int  # passes beyond the first of each request (of half of it: 8 bytes a lane)
    atomics: int  # by threads, global and shared
    barriers: int  # __syncthreads, once a block
    shuffles: int  # warp instructions
    basic_blocks_executed: int | None = None  # by threads; None unless branches=True
    basic_blocks_issued: int | None = None  # by warps
    by_line: tuple[Row, ...] = ()  # () where addr2line (binutils) is missing
    accesses: tuple[Access, ...] = ()  # the first TRACE ones, with trace=True

    @property
    def active_lanes(self) -> float | None:
        """Lanes that take part in a basic block, on average: 32 without divergence."""
        issued = self.basic_blocks_issued
        return self.basic_blocks_executed / issued if issued else None

    @property
    def sectors_per_load_request(self) -> float | None:
        """4 when 32 lanes load 32 adjacent floats, 32 when each is in a sector of its own."""
        return self.load_sectors / self.load_requests if self.load_requests else None

    @property
    def sectors_per_store_request(self) -> float | None:
        """As `sectors_per_load_request`."""
        return self.store_sectors / self.store_requests if self.store_requests else None


def summarise(launch, line_of: dict[int, int], branches: bool, accesses: tuple) -> Counts:
    """The counts of a finished launch; `line_of` gives the line of each instruction's address."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    rows: dict[tuple[int, str], list[int]] = {}
    for site in launch.sites[: launch.site_count]:
        kind = KINDS[site.kind]
        numbers = [
            site.requests,
            site.threads,
            site.threads * site.size,
            site.sectors,
            site.lines,
            site.bank_conflicts,
        ]
        for name, number in zip(Row._fields[2:], numbers, strict=True):
            total[kind, name] += number
        if line_of.get(site.pc):
            row = rows.setdefault((line_of[site.pc], kind), [0] * 6)
            row[:] = [a + b for a, b in zip(row, numbers, strict=True)]
    shared = ("shared load", "shared store", "shared atomic")
    return Counts(
        loads=total["load", "threads"],
        stores=total["store", "threads"],
        bytes_read=total["load", "bytes"],
        bytes_written=total["store", "bytes"],
        **{
            f"{kind}_{name}": total[kind, name]
            for name in ("requests", "sectors", "lines")
            for kind in ("load", "store")
        },
        shared_loads=total["shared load", "threads"],
        shared_stores=total["shared store", "threads"],
        shared_requests=sum(total[kind, "requests"] for kind in shared),
        bank_conflicts=sum(total[kind, "bank_conflicts"] for kind in shared),
        atomics=total["atomic", "threads"] + total["shared atomic", "threads"],
        barriers=launch.barriers,
        shuffles=launch.shuffles,
        basic_blocks_executed=launch.blocks_executed if branches else None,
        basic_blocks_issued=launch.blocks_issued if branches else None,
        by_line=tuple(Row(*key, *row) for key, row in sorted(rows.items())),
        accesses=accesses,
    )


def lines(base: int, path: Path, name: str, addresses: set[int]) -> dict[int, int]:
    """Line of the kernel's text for each return address; {} without addr2line (binutils).

    base: where the library was loaded.
    """
    tool = shutil.which("addr2line")
    if not tool or not addresses:
        return {}
    found = _lines(tool, path, name, frozenset(address - base for address in addresses))
    return {base + offset: line for offset, line in found.items()}


@functools.lru_cache(maxsize=256)
def _lines(tool: str, path: Path, name: str, offsets: frozenset[int]) -> dict[int, int]:
    # The instruction lies before the address that it returns to. -i: from the function that was
    # inlined outwards; the first place in the kernel's text is where the access stands. -a prints
    # the address first: that separates the answers.
    order = sorted(offsets)
    command = [tool, "-a", "-i", "-e", str(path), *(hex(offset - 1) for offset in order)]
    output = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    answers = re.split(r"^0x[0-9a-f]+$", output, flags=re.M)[1:]
    # Where a macro such as threadIdx was expanded, g++ names the compiled file and not the #line's.
    names = "|".join(map(re.escape, (Path(name).name, f"{path.stem}.cpp")))
    place = re.compile(rf"^(?:.*/)?(?:{names}):(\d+)", flags=re.M)
    matches = {at: place.search(answer) for at, answer in zip(order, answers, strict=False)}
    return {offset: int(match.group(1)) for offset, match in matches.items() if match}


def accesses(launch, regions: list, line_of: dict[int, int]) -> tuple[Access, ...]:
    """The accesses that were kept; `regions`: where the tensors lay."""
    found = []
    for access in launch.trace[: launch.trace_count]:
        at, kind = access.address, KINDS[access.kind]
        owner = next((r for r in regions if r.begin <= at < r.end), None)
        if owner:
            parameter, offset = owner.name, at - owner.begin
        else:
            static = 0 <= at - launch.static_shared < launch.static_shared_bytes
            parameter = ""
            offset = at - (launch.static_shared if static else launch.dynamic_shared)
        line = line_of.get(access.pc, 0)
        found.append(
            Access(access.block, access.thread, line, kind, parameter, offset, access.size)
        )
    return tuple(found)
