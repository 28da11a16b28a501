"""What attention moves, tile by tile: which tiles there are, and the bytes of two loop orders.

    tile_kinds(1024, 1024, 128, 64)                  # of a causal mask: skipped, masked, full
    key_outer(64, 16, 1024, 64, dtype, 64, 384)      # FlashAttention-1: for keys, for queries
    query_outer(64, 16, 1024, 64, dtype, 128, 64)    # FlashAttention-2: for queries, for keys

Sequences are cut into tiles of tile_q queries and of tile_k keys, the last ones shorter. A causal
mask is aligned top left, as PyTorch's is_causal: query i sees the keys 0 to i.
"""

import math

import numpy as np
import torch

from helpers.traffic import Work

SKIPPED, MASKED, FULL = 0, 1, 2
KIND_NAMES = ("skipped", "masked", "full")
FP32_BYTES = 4  # of each of a row's numbers m, l, or log-sum-exp


def tile_kinds(
    sequence_q: int, sequence_k: int, tile_q: int, tile_k: int, causal: bool = True
) -> np.ndarray:
    """The kind of each tile of the score matrix, (rows of tiles, columns of tiles), int8.

    SKIPPED: nothing in it is visible. FULL: everything is. MASKED: some of it is hidden, by the
    causal mask or because the tile sticks out past the last key.
    """
    _at_least_1(sequence_q=sequence_q, sequence_k=sequence_k, tile_q=tile_q, tile_k=tile_k)
    first_row = np.arange(0, sequence_q, tile_q)[:, None]
    last_row = np.minimum(first_row + tile_q, sequence_q) - 1
    first_key = np.arange(0, sequence_k, tile_k)[None, :]
    last_key = first_key + tile_k - 1
    skipped = first_key > (last_row if causal else sequence_k)
    full = last_key < sequence_k
    if causal:
        full = full & (last_key <= first_row)
    kinds = np.where(skipped, SKIPPED, np.where(full, FULL, MASKED)).astype(np.int8)
    return np.broadcast_to(kinds, (len(first_row), first_key.shape[1])).copy()


def keys_read(
    sequence_q: int, sequence_k: int, tile_q: int, tile_k: int, causal: bool = False
) -> np.ndarray:
    """How many keys each tile of queries reads: those of its tiles that are not skipped."""
    live = tile_kinds(sequence_q, sequence_k, tile_q, tile_k, causal) != SKIPPED
    return live @ _sizes(sequence_k, tile_k)


def key_outer(
    batch: int,
    heads: int,
    sequence: int,
    dim: int,
    dtype: torch.dtype,
    tile_q: int,
    tile_k: int,
    causal: bool = False,
) -> Work:
    """FlashAttention-1's order (Dao et al. 2022, algorithm 1): for tiles of keys, for queries.

    O, m and l are filled first. Each tile of K and V is read once; for each of them the tiles of Q
    pass by, and O, m and l are read and written again. O has the inputs' dtype; m and l are fp32.
    FLOPs are the two matmuls' of all tiles that are not skipped, what a mask hides in them
    included.
    """
    _at_least_1(batch=batch, heads=heads, dim=dim)
    live = tile_kinds(sequence, sequence, tile_q, tile_k, causal) != SKIPPED
    visits = int((_sizes(sequence, tile_q) @ live).sum())  # rows of Q, over all tiles of keys
    row, state = dim * dtype.itemsize, 2 * FP32_BYTES  # bytes of a row of Q, K, V or O; of m and l
    read = 2 * sequence * row + visits * (2 * row + state)
    written = (sequence + visits) * (row + state)
    return _times(batch * heads, read, written, _flops(live, sequence, tile_q, tile_k, dim))


def key_outer_backward(
    batch: int, heads: int, sequence: int, dim: int, dtype: torch.dtype, tile_q: int, tile_k: int
) -> Work:
    """The backward pass in the same order (the same paper, algorithm 4), without a mask.

    dQ, dK and dV are filled first. Each tile of K and V is read, its dK and dV are written; for
    each of them Q, O, dO, dQ, m and l pass by, and dQ is written again. Five matmuls.
    """
    _at_least_1(batch=batch, heads=heads, dim=dim)
    live = tile_kinds(sequence, sequence, tile_q, tile_k, causal=False) != SKIPPED
    visits = int((_sizes(sequence, tile_q) @ live).sum())
    row, state = dim * dtype.itemsize, 2 * FP32_BYTES
    read = 2 * sequence * row + visits * (4 * row + state)
    written = (3 + 2) * sequence * row + visits * row
    flops = 2.5 * _flops(live, sequence, tile_q, tile_k, dim)
    return _times(batch * heads, read, written, flops)


def query_outer(
    batch: int,
    heads: int,
    sequence: int,
    dim: int,
    dtype: torch.dtype,
    tile_q: int,
    tile_k: int,
    causal: bool = False,
) -> Work:
    """FlashAttention-2's order (Dao 2023, algorithm 1): for tiles of queries, for tiles of keys.

    Each tile of Q is read once, K and V pass by, and O and one fp32 log-sum-exp a row are written
    once. With a single tile of queries this is `traffic.attention`. FLOPs as for `key_outer`.
    """
    _at_least_1(batch=batch, heads=heads, dim=dim)
    live = tile_kinds(sequence, sequence, tile_q, tile_k, causal) != SKIPPED
    row, keys = dim * dtype.itemsize, int((live @ _sizes(sequence, tile_k)).sum())
    read = (sequence + 2 * keys) * row
    written = sequence * (row + FP32_BYTES)
    return _times(batch * heads, read, written, _flops(live, sequence, tile_q, tile_k, dim))


def dram_bytes(
    batch: int,
    heads: int,
    sequence: int,
    dim: int,
    dtype: torch.dtype,
    tile_q: int,
    tile_k: int,
    *,
    l2_bytes: float,
    programs: int,
    causal: bool = False,
    in_step: bool = True,
) -> float:
    """How many of the bytes that `query_outer` reads come from DRAM, beyond an L2 of `l2_bytes`.

    A model. `programs` run at once, each with one tile of queries; those of a head follow each
    other, so that programs / (tiles of queries) heads, rounded up, are worked on at a time. While
    their K and V fit into the L2, each byte comes from DRAM once. Of a larger set, the share that
    does not fit has to come again.

    How often? in_step: the programs of a head that run at once go over its keys side by side, and
    what one fetches serves all: once for each such group. Otherwise once for each program.
    """
    _at_least_1(batch=batch, heads=heads, dim=dim, programs=programs)
    if not l2_bytes >= 0:
        raise ValueError(f"l2_bytes must not be negative, and is {l2_bytes}")
    row, keys = dim * dtype.itemsize, keys_read(sequence, sequence, tile_q, tile_k, causal)
    heads_at_once = min(batch * heads, math.ceil(programs / len(keys)))
    working_set = heads_at_once * 2 * sequence * row
    missing = max(0.0, 1 - l2_bytes / working_set)
    together = min(len(keys), programs) if in_step else 1
    passes = np.maximum.reduceat(keys, np.arange(0, len(keys), together))  # keys of each group
    first = int(keys.max())  # each of these has to come once, whatever the cache
    again = missing * (int(passes.sum()) - first)
    return batch * heads * row * (sequence + 2 * (first + again))


def paper_tiles(sram_bytes: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(tile_q, tile_k) by FlashAttention-1's rule: tile_k = ceil(M / 4d), tile_q = min(tile_k, d).

    M is the SRAM of an SM in elements of dtype; the four are the tiles of Q, K, V and O.
    """
    _at_least_1(sram_bytes=sram_bytes, dim=dim)
    tile_k = math.ceil(sram_bytes // dtype.itemsize / (4 * dim))
    return min(tile_k, dim), tile_k


def _sizes(sequence: int, tile: int) -> np.ndarray:
    """How many elements each tile has; the last may have fewer."""
    first = np.arange(0, sequence, tile)
    return np.minimum(first + tile, sequence) - first


def _flops(live: np.ndarray, sequence: int, tile_q: int, tile_k: int, dim: int) -> int:
    """Q K^T and P V of the live tiles: 2 FLOPs for each multiply-add."""
    scores = _sizes(sequence, tile_q) @ live @ _sizes(sequence, tile_k)
    return 4 * int(scores) * dim


def _times(heads: int, read: float, written: float, flops: float) -> Work:
    return Work(heads * read, heads * written, heads * flops)


def _at_least_1(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1 or size % 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {size}")
