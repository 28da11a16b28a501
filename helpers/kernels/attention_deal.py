"""How blocks of queries are dealt to the programs of a persistent kernel.

A causal block sees more keys the later its queries are, so blocks differ in length. Programs take
them in a fixed order, in rounds, every second round backwards.
"""

import functools

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import numpy as np

from helpers.kernels.matmul_tiles import tile_of
from helpers.triton_mode import gl, gluon

LEAST_REUSE = 384  # FLOPs of a byte of keys and values: in 16 bits two for each query
MOST_BLOCKS = 2**16  # more are dealt evenly in any order


@gluon.jit
def block_of(number, sizes, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head, first query of a block of ROWS of them, and how many keys these see."""
    heads, group, pairs, queries, keys, section = sizes
    blocks, programs = gl.cdiv(queries, ROWS), gl.num_programs(0)
    if CAUSAL:  # always forwards, the first programs would always have the longest
        start = number // programs * programs
        if number // programs % 2 == 1:
            number = start + gl.minimum(programs, pairs * blocks - start) - 1 - number % programs
    pair, block = tile_of(number, pairs, blocks, section)
    if CAUSAL:  # the longest first
        block = blocks - 1 - block
        keys = gl.minimum(keys, gl.minimum(queries, (block + 1) * ROWS))
    return pair // heads, pair % heads, block * ROWS, keys


@functools.lru_cache(1024)
def section(pairs: int, blocks: int, programs: int, rows: int) -> int:
    """How many heads' causal blocks, of `rows` queries, are dealt together, the longest first.

    pairs: of batch and head. With few at a time one program may get more than its share. With many,
    the keys of many are on their way at once, each for few programs: memory answers instead of L2,
    and it cannot where there are less than `LEAST_REUSE` FLOPs a byte. On an H200, causal, 4096
    tokens, 64 heads of 128: 626 TFLOP/s one by one and 587 all together (attention_attempts.csv);
    in an experiment with 16,384 tokens and 16 heads 520 and 653. The least number with nearly the
    best balance is taken.
    """
    most = min(pairs, max(1, rows * programs // LEAST_REUSE))
    if pairs * blocks > MOST_BLOCKS:
        return 1
    worst = {
        size: imbalance(pairs, blocks, programs, size)
        for size in sorted({2**i for i in range(most.bit_length())} | {most})
    }
    return next(size for size in worst if worst[size] <= min(worst.values()) + 0.02)


def imbalance(pairs: int, blocks: int, programs: int, section: int) -> float:
    """The longest program's steps over the mean, as `block_of` deals blocks."""
    number = np.arange(pairs * blocks)
    row, place = np.divmod(number, programs)
    backwards = np.minimum(programs, pairs * blocks - row * programs) - 1 - place
    number = row * programs + np.where(row % 2 == 1, backwards, place)
    first = number // (section * blocks) * section
    rows = np.minimum(section, pairs - first)
    block = blocks - 1 - number % (section * blocks) // rows
    steps = np.bincount(place, weights=block + 2.0, minlength=programs)  # one a block for the rest
    return steps.max() / steps.mean()
