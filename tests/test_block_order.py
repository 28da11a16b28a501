"""The order of tiles against loops; the replay against a cache that holds real blocks."""

import inspect
import itertools
import math
from collections import OrderedDict

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from helpers import block_order, block_order_plot, plots
from helpers.block_order import Grid, blocks_loaded, grid_of, replay, tiles_in_order
from helpers.device import device, triton_version
from helpers.kernels import matmul_tiles
from helpers.triton_mode import on_device_of, tl, triton


def order_by_loops(rows, columns, group):
    for first in range(0, rows, group):
        for column in range(columns):
            for row in range(first, min(first + group, rows)):
                yield row, column


GRIDS = tuple(itertools.product((1, 2, 5, 7, 9), (1, 3, 9, 8), (1, 2, 3, 4, 20)))


@pytest.mark.parametrize("rows, columns, group", GRIDS)
def test_the_order_by_loops(rows, columns, group):
    found = [tuple(tile) for tile in tiles_in_order(rows, columns, group).tolist()]
    assert found == list(order_by_loops(rows, columns, group))
    assert sorted(found) == list(itertools.product(range(rows), range(columns)))


def test_group_1_is_row_by_row():
    expected = list(itertools.product(range(4), range(6)))
    assert [tuple(tile) for tile in tiles_in_order(4, 6)] == expected


def test_the_lecture_s_numbers():
    assert blocks_loaded(tiles_in_order(9, 9)[:9], 9) == (9, 81)
    assert blocks_loaded(tiles_in_order(9, 9, 3)[:9], 9) == (27, 27)
    assert blocks_loaded([(0, 0), (0, 0), (2, 5)], 4) == (8, 8)  # a block counts once


# A cache with blocks in it, and the programs' accesses one after another.


def accesses(grid, group, programs):
    tiles = list(order_by_loops(grid.rows, grid.columns, group))
    for begin in range(0, len(tiles), programs):
        wave = tiles[begin : begin + programs]
        for k in range(grid.k_blocks):
            for row in sorted({row for row, _ in wave}):
                yield ("a", row, k), grid.a_block_bytes
            for column in sorted({column for _, column in wave}):
                yield ("b", column, k), grid.b_block_bytes


def missed_by_cache(stream, cache_bytes):
    cache, held, missed = OrderedDict(), 0, 0
    for block, size in stream:
        if block in cache:
            cache.move_to_end(block)
            continue
        missed += size
        cache[block] = size
        held += size
        while held > cache_bytes:
            held -= cache.popitem(last=False)[1]
    return missed


CASES = (
    (Grid(9, 9, 9), 1, 1),
    (Grid(9, 9, 9), 3, 1),
    (Grid(9, 9, 9), 3, 9),
    (Grid(5, 4, 3), 2, 3),
    (Grid(5, 7, 4, 2, 3), 3, 4),  # blocks of two sizes, ragged groups and waves
    (Grid(6, 5, 4, 4, 1), 4, 7),
    (Grid(7, 3, 5, 1, 2), 20, 2),
    (Grid(3, 11, 2, 3, 5), 1, 5),
    (Grid(3, 3, 4), 2, 100),
    (Grid(1, 1, 1), 1, 1),
    (Grid(4, 6, 1, 2, 1), 2, 1),
)


@pytest.mark.parametrize("grid, group, programs", CASES)
def test_the_replay_is_a_least_recently_used_cache(grid, group, programs):
    stream = list(accesses(grid, group, programs))
    reuse = replay(grid, group, programs)
    assert len(reuse.distance_bytes) == len(stream)
    assert reuse.block_bytes.sum() == sum(size for _, size in stream)
    largest = max(grid.a_block_bytes, grid.b_block_bytes)
    sizes = range(largest, grid.operand_bytes + 3)
    expected = [missed_by_cache(stream, size) for size in sizes]
    assert reuse.missed_bytes(np.array(sizes)).tolist() == expected
    assert [reuse.missed_bytes(size) for size in sizes] == expected
    assert expected[-1] == grid.operand_bytes  # all is loaded once, whatever the order


def test_no_cache_and_the_share_found():
    grid = Grid(4, 6, 5, 2, 3)
    alone, together = replay(grid), replay(grid, programs=6)
    assert alone.missed_bytes(0) == grid.asked_bytes == 4 * 6 * 5 * (2 + 3)
    assert alone.hit_rate(0) == 0
    assert together.missed_bytes(0) == 4 * (1 * 2 + 6 * 3) * 5  # six share a block of A
    assert together.hit_rate(math.inf) == 1 - (4 * 2 + 6 * 3) * 5 / grid.asked_bytes


def test_the_missed_bytes_never_grow_with_the_cache():
    missed = replay(Grid(20, 30, 7, 3, 4), 4, 11).missed_bytes(np.arange(3000))
    assert (np.diff(missed) <= 0).all()


def test_a_matmul_in_blocks():
    assert grid_of(8192, 8192, 8192, 128, 256, 64, 2) == Grid(64, 32, 128, 2**14, 2**15)
    assert grid_of(129, 256, 65, 128, 256, 64, 4) == Grid(2, 1, 2, 2**15, 2**16)
    grid = grid_of(8192, 8192, 8192, 128, 256, 64, 2)
    assert grid.operand_bytes == 2 * 8192**2 * 2


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: tiles_in_order(0, 3), "rows must be"),
        (lambda: tiles_in_order(3, 3, 0), "group must be"),
        (lambda: tiles_in_order(3, 3, 1.5), "group must be"),
        (lambda: Grid(3, 3, 0), "k_blocks must be"),
        (lambda: Grid(3, 3, 1, 0), "a_block_bytes must be"),
        (lambda: replay(Grid(3, 3, 3), 1, 0), "programs must be"),
        (lambda: grid_of(3, 3, 3, 16, 16, 0, 2), "tile_k must be"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# The tests above can fail.


def check_order():
    for case in GRIDS:
        test_the_order_by_loops(*case)


def check_replay():
    for case in CASES:
        test_the_replay_is_a_least_recently_used_cache(*case)


def full_groups(rows, columns, group=1):
    program = np.arange(rows * columns)
    within = program % (group * columns)
    return np.stack([program // (group * columns) * group + within % group, within // group], 1)


def rows_within(rows, columns, group=1):
    tiles = block_order.tiles_in_order(rows, columns, group)
    return tiles[np.lexsort((tiles[:, 1], tiles[:, 0], tiles[:, 0] // group))]


@pytest.mark.parametrize("mutant", [full_groups, rows_within])
def test_wrong_orders_are_found(mutant, monkeypatch):
    check_order()
    monkeypatch.setitem(globals(), "tiles_in_order", mutant)
    with pytest.raises(AssertionError):
        check_order()


REPLAY_MUTANTS = {
    "the block itself is left out": (
        "below + above - bytes_each",
        "below + above - 2 * bytes_each",
    ),
    "later steps of now": ("later = bytes_each @ (then | between)", "later = bytes_each @ between"),
    "steps are counted once more": ("grid.k_blocks - 1 - steps", "grid.k_blocks - steps"),
    "the last wave is not kept": ("last[now] = wave", "pass"),
    "waves between are left out": ("touched[before + 1 : wave]", "touched[before + 1 : before]"),
    "one program less": ("// programs", "// max(1, programs - 1)"),
}


@pytest.mark.parametrize("old, new", REPLAY_MUTANTS.values(), ids=REPLAY_MUTANTS)
def test_wrong_replays_are_found(old, new, monkeypatch):
    source = inspect.getsource(block_order)
    assert source.count(old) == 1
    space = dict(vars(block_order))
    exec(source[source.index("def replay(") :].replace(old, new), space)
    monkeypatch.setitem(globals(), "replay", space["replay"])
    with pytest.raises(AssertionError):
        check_replay()


def test_the_picture_fills_what_is_needed():
    fig, ax = plt.subplots()
    tiles = tiles_in_order(5, 4, 2)[:3]
    block_order_plot.draw_tiles(ax, 5, 4, 6, tiles)
    (boxes,) = ax.collections
    colours = [tuple(colour) for colour in boxes.get_facecolor()]
    needed = matplotlib.colors.to_rgba(block_order_plot.NEEDED)
    assert colours.count(needed) == sum(blocks_loaded(tiles, 6)) == 2 * 6 + 2 * 6
    assert colours.count(matplotlib.colors.to_rgba(plots.ORANGE)) == 3
    assert len(colours) == 5 * 6 + 6 * 4 + 5 * 4 + 3
    assert [text.get_text() for text in ax.texts] == ["1", "2", "3", "A", "B", "C"]
    plt.close(fig)


# The kernel's order.


@triton.jit
def write_order(rows_ptr, columns_ptr, rows, columns, GROUP: tl.constexpr):
    program = tl.program_id(0)
    row, column = matmul_tiles.tile_of(program, rows, columns, GROUP)
    tl.store(rows_ptr + program, row)
    tl.store(columns_ptr + program, column)


@pytest.mark.skipif(not triton_version(), reason="needs Triton")
@pytest.mark.parametrize("rows, columns, group", [(7, 5, 3), (3, 4, 1), (2, 3, 8)])
def test_the_kernel_takes_tiles_in_this_order(rows, columns, group):
    found = torch.full((2, rows * columns), -1, dtype=torch.int32, device=device())
    with on_device_of(found):
        write_order[(rows * columns,)](found[0], found[1], rows, columns, GROUP=group)
    assert found.t().tolist() == tiles_in_order(rows, columns, group).tolist()
