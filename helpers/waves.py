"""Tiles, waves and idle SMs: what the sizes of a launch cost, for any GPU of data/gpus.csv.

    num_tiles = tiles(1792, 1792, 256, 128)     # 98 tiles cover the result of a matmul
    waves(num_tiles, 108)                       # 1: an A100 runs them all at once
    utilisation(num_tiles, 108)                 # 0.91: ten SMs have nothing to do

A wave is as many blocks as the GPU holds at once. The last wave is rarely full.
"""

import dataclasses
import heapq
import itertools
import math
import sys
from collections.abc import Iterable

from helpers import specs

WARP = 32
MAX_THREADS_PER_BLOCK, MAX_REGISTERS_PER_THREAD = 1024, 255
# An SM is four partitions, each with a quarter of the registers; a warp stays in one.
PARTITIONS, REGISTER_UNIT = 4, 256
RESERVED_SHARED_BYTES = 1024  # of each block, from compute capability 8.0 on

# Compute capability -> threads and blocks that an SM holds at most. From the CUDA C++ Programming
# Guide, "Technical specifications per compute capability"; 7.0 from earlier editions.
RESIDENT = {
    "7.0": (2048, 32),
    "7.5": (1024, 16),
    "8.0": (2048, 32),
    "8.6": (1536, 16),
    "8.9": (1536, 24),
    "9.0": (2048, 32),
    "10.0": (2048, 32),
    "12.0": (1536, 24),
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of a matrix: its first row and column, and how many of them are in the matrix."""

    row: int
    column: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where and when a block runs: on an SM, in one of its places for blocks, from start to end."""

    block: int
    sm: int
    slot: int
    start: float
    end: float


def tiles(m: int, n: int, tile_m: int, tile_n: int) -> int:
    """How many tiles of tile_m x tile_n cover a matrix of m x n."""
    _positive(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return _ceil(m, tile_m) * _ceil(n, tile_n)


def tile_sizes(m: int, n: int, tile_m: int, tile_n: int) -> list[Tile]:
    """The tiles that cover a matrix of m x n, row by row, with the part of each that is used."""
    _positive(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return [
        Tile(row, column, min(tile_m, m - row), min(tile_n, n - column))
        for row in range(0, m, tile_m)
        for column in range(0, n, tile_n)
    ]


def cover_utilisation(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """The share of the tiles' area that lies in the matrix; 1 when the tiles fit exactly."""
    return m * n / (tiles(m, n, tile_m, tile_n) * tile_m * tile_n)


def waves(num_blocks: int, num_sms: int, blocks_per_sm: int = 1) -> int:
    """How often the GPU has to be filled; 0 without blocks."""
    _positive(num_sms=num_sms, blocks_per_sm=blocks_per_sm)
    _positive(0, num_blocks=num_blocks)
    return _ceil(num_blocks, num_sms * blocks_per_sm)


def utilisation(num_blocks: int, num_sms: int, blocks_per_sm: int = 1) -> float:
    """The share of the places for blocks, over all waves, that have one; 0 without blocks."""
    places = waves(num_blocks, num_sms, blocks_per_sm) * num_sms * blocks_per_sm
    return num_blocks / places if places else 0.0


def first_tooth(num_sms: int, tile_m: int, tile_n: int, blocks_per_sm: int = 1) -> int:
    """The smallest n whose n x n result has more tiles than the GPU holds at once."""
    _positive(num_sms=num_sms, tile_m=tile_m, tile_n=tile_n, blocks_per_sm=blocks_per_sm)
    # A row or column of tiles begins one above a multiple of its side.
    sizes = itertools.count(1, math.gcd(tile_m, tile_n))
    return next(n for n in sizes if tiles(n, n, tile_m, tile_n) > num_sms * blocks_per_sm)


def blocks_per_sm(
    threads: int, registers_per_thread: int, shared_bytes: int, gpu: specs.GPU
) -> tuple[int | None, str]:
    """How many blocks an SM holds at once, and what limits them.

    threads and shared_bytes are a block's. The limit is one or several, joined by "and", of
    threads, blocks, registers, shared memory; with 0 blocks, what one block needs too much of.
    (None, what is unknown) for a GPU whose limits are not known. ValueError for a block that no
    GPU takes.
    """
    _positive(threads=threads, registers_per_thread=registers_per_thread)
    _positive(0, shared_bytes=shared_bytes)
    if threads > MAX_THREADS_PER_BLOCK or registers_per_thread > MAX_REGISTERS_PER_THREAD:
        raise ValueError(
            f"a block has at most {MAX_THREADS_PER_BLOCK} threads, and a thread "
            f"{MAX_REGISTERS_PER_THREAD} registers, not {threads} and {registers_per_thread}"
        )
    if gpu.compute_capability not in RESIDENT:
        return None, f"unknown: the limits of compute capability {gpu.compute_capability}"
    if not (gpu.registers_kb_per_sm and gpu.shared_kb_per_sm):
        return None, f"unknown: registers or shared memory of an SM of the {gpu.name}"
    warps = _ceil(threads, WARP)
    max_threads, max_blocks = RESIDENT[gpu.compute_capability]
    limits = {
        "threads": max_threads // WARP // warps,
        "blocks": max_blocks,
        "registers": _by_registers(warps, registers_per_thread, gpu),
        "shared memory": _by_shared_memory(shared_bytes, gpu),
    }
    fewest = min(limits.values())
    return fewest, " and ".join(name for name, limit in limits.items() if limit == fewest)


def schedule(durations: Iterable[float], num_sms: int, blocks_per_sm: int = 1) -> list[Placed]:
    """A simulated run of blocks that last so long, in any unit of time.

    Each goes, in order, to the place that is free first; of several, to the lower slot and then to
    the SM with the lower number, so that the first blocks are dealt to the SMs in turn. Hardware's
    own order differs in detail, and blocks of one SM slow each other down: neither is modelled.
    """
    _positive(num_sms=num_sms, blocks_per_sm=blocks_per_sm)
    free = [(0.0, slot, sm) for slot in range(blocks_per_sm) for sm in range(num_sms)]
    placed = []
    for block, duration in enumerate(durations):
        if not 0 <= duration < math.inf:
            raise ValueError(f"block {block} lasts {duration}: 0 or more, please")
        start, slot, sm = free[0]
        heapq.heapreplace(free, (start + duration, slot, sm))
        placed.append(Placed(block, sm, slot, start, start + duration))
    return placed


def _by_registers(warps: int, registers_per_thread: int, gpu: specs.GPU) -> int:
    registers = int(gpu.registers_kb_per_sm * 1024 / 4)
    of_warp = _ceil(registers_per_thread * WARP, REGISTER_UNIT) * REGISTER_UNIT
    # Before a launch the hardware counts as if every partition had the same number of warps.
    if of_warp * _ceil(warps, PARTITIONS) * PARTITIONS > registers:
        return 0
    return registers // PARTITIONS // of_warp * PARTITIONS // warps


def _by_shared_memory(shared_bytes: int, gpu: specs.GPU) -> int:
    ampere = float(gpu.compute_capability) >= 8
    unit = 128 if ampere else 256
    of_block = _ceil(shared_bytes + RESERVED_SHARED_BYTES * ampere, unit) * unit
    return int(gpu.shared_kb_per_sm * 1024 // of_block) if of_block else sys.maxsize


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _positive(least: int = 1, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % 1:
            raise ValueError(f"{name} must be a whole number, not {size}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, not {size}")
