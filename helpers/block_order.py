"""In which order a matmul's programs take the tiles of C, and what that costs in loads.

C = A B is cut into tiles, rows x columns of them, and A and B along k into blocks: a tile of C
needs the k_blocks blocks of its row of A and those of its column of B.

    first = tiles_in_order(9, 9, group=3)[:9]    # a square of 3 x 3 tiles
    blocks_loaded(first, k_blocks=9)             # (27, 27): 54 blocks, and 90 row by row
    reuse = replay(Grid(9, 9, 9), group=3)       # all 81 tiles, one after another
    reuse.missed_bytes(40)                       # what a cache of 40 blocks has to load

`helpers.kernels.matmul_tiles.tile_of` is the same order inside a kernel.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Grid:
    """A matmul cut into blocks: rows x columns tiles of C, and k_blocks steps for each.

    a_block_bytes, b_block_bytes: the size of a block of A and of one of B; with 1 and 1, what is
    given in bytes below is a number of blocks. Blocks at the edges count as whole ones.
    """

    rows: int
    columns: int
    k_blocks: int
    a_block_bytes: int = 1
    b_block_bytes: int = 1

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 1 or size % 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {size}")

    @property
    def asked_bytes(self) -> int:
        """What all programs together load: every tile its blocks of A and of B."""
        each = self.a_block_bytes + self.b_block_bytes
        return self.rows * self.columns * self.k_blocks * each

    @property
    def operand_bytes(self) -> int:
        """A and B, each once: less cannot be loaded."""
        of_k = self.rows * self.a_block_bytes + self.columns * self.b_block_bytes
        return of_k * self.k_blocks


def grid_of(m: int, n: int, k: int, tile_m: int, tile_n: int, tile_k: int, itemsize: int) -> Grid:
    """The grid of an (m, k) @ (k, n) with tiles of tile_m x tile_n and steps of tile_k."""
    sizes = dict(m=m, n=n, k=k, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, itemsize=itemsize)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    counts = (-(-m // tile_m), -(-n // tile_n), -(-k // tile_k))
    return Grid(*counts, tile_m * tile_k * itemsize, tile_k * tile_n * itemsize)


def tiles_in_order(rows: int, columns: int, group: int = 1) -> np.ndarray:
    """(row, column) of the tile that each program takes: an int array of (rows * columns, 2).

    Tiles are taken in groups of `group` rows, the last of which may have fewer; within a group
    down the first column, then down the next. Group 1 is row by row.
    """
    for name, size in (("rows", rows), ("columns", columns), ("group", group)):
        if size < 1 or size % 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {size}")
    program = np.arange(rows * columns)
    first = program // (group * columns) * group
    height = np.minimum(rows - first, group)
    within = program % (group * columns)
    return np.stack([first + within % height, within // height], axis=1)


def blocks_loaded(tiles, k_blocks: int) -> tuple[int, int]:
    """How many different blocks of A and of B these tiles need; tiles: pairs (row, column)."""
    rows, columns = (set(each) for each in zip(*map(tuple, tiles), strict=True))
    return len(rows) * k_blocks, len(columns) * k_blocks


@dataclasses.dataclass(frozen=True)
class Reuse:
    """What a replay found, for caches of every size at once.

    distance_bytes, block_bytes: of each access that reaches the cache, sorted by distance: what a
    cache that drops the least recently used block must hold for the block to be found there (inf
    when it comes for the first time), and the size of the block.
    """

    grid: Grid
    distance_bytes: np.ndarray
    block_bytes: np.ndarray

    def missed_bytes(self, cache_bytes):
        """What has to be loaded from behind a cache of this size; an array for several sizes."""
        finite = np.minimum(cache_bytes, np.finfo(float).max)  # what is new misses in any cache
        hits = np.searchsorted(self.distance_bytes, finite, side="right")
        found = np.concatenate([[0], np.cumsum(self.block_bytes)])
        missed = found[-1] - found[hits]
        return missed if np.ndim(cache_bytes) else missed.item()

    def hit_rate(self, cache_bytes):
        """The share of what the programs ask for that is found in the cache."""
        return 1 - self.missed_bytes(cache_bytes) / self.grid.asked_bytes


def replay(grid: Grid, group: int = 1, programs: int = 1) -> Reuse:
    """All loads of a matmul whose tiles are taken in groups of `group` rows.

    `programs` run at once, in lockstep: in each step along k they touch all their blocks of A,
    from the top, then those of B, from the left; a block that several ask for comes once. When all
    are done, the next ones start. The cache is fully associative, and C is not in it.

    Distances of least recently used caches hold for every size in one pass: R. L. Mattson et al.,
    "Evaluation techniques for storage hierarchies", IBM Systems Journal 9, 1970. Here they are
    written down at once for all steps of a wave, since each of them touches the same rows and
    columns.
    """
    if programs < 1 or programs % 1:
        raise ValueError(f"programs must be a whole number of at least 1, not {programs}")
    # A row of A's blocks, or a column of B's, is a strip; this is the size of a block of each.
    bytes_each = np.repeat([grid.a_block_bytes, grid.b_block_bytes], [grid.rows, grid.columns])
    touched = _strips_of_waves(grid, group, programs)
    last = np.full(len(bytes_each), -1)  # the wave that touched a strip last
    steps = np.arange(grid.k_blocks)
    distances, sizes = [], []
    for wave, now in enumerate(touched):
        for before in np.unique(last[now]):
            strips = np.flatnonzero(now & (last == before))
            if before < 0:
                distance = np.full((len(strips), grid.k_blocks), math.inf)
            else:
                then, between = touched[before], touched[before + 1 : wave].any(axis=0)
                # From step k of then to step k of now: the later steps of then, all of the waves
                # between, the earlier steps of now; and of step k itself a part.
                later = bytes_each @ (then | between)
                earlier = bytes_each @ (between | now)
                below = np.cumsum((bytes_each * (then | between))[::-1])[::-1]
                above = np.cumsum(bytes_each * (between | now))
                own = (below + above - bytes_each)[strips]  # a strip is in then and in now
                along_k = (grid.k_blocks - 1 - steps) * later + steps * earlier
                distance = own[:, None] + along_k
            distances.append(distance.ravel().astype(float))
            sizes.append(np.repeat(bytes_each[strips], grid.k_blocks))
        last[now] = wave
    distance, size = np.concatenate(distances), np.concatenate(sizes)
    order = np.argsort(distance)
    return Reuse(grid, distance[order], size[order])


def _strips_of_waves(grid: Grid, group: int, programs: int) -> np.ndarray:
    """Which strips each wave of programs touches: bools of (waves, rows + columns)."""
    tiles = tiles_in_order(grid.rows, grid.columns, group)
    wave = np.arange(len(tiles)) // programs
    touched = np.zeros((wave[-1] + 1, grid.rows + grid.columns), dtype=bool)
    touched[wave, tiles[:, 0]] = True
    touched[wave, grid.rows + tiles[:, 1]] = True
    return touched
