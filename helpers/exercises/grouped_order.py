"""The checker of exercise 09.1: the order in which programs take the tiles of a matmul."""

from collections.abc import Callable, Iterator

from helpers import block_order
from helpers.exercises.answers import is_whole, plain

Order = list[tuple[int, int]]  # the tile of each program, as (row, column)

# (rows of tiles, columns of tiles, rows in a group) -> blocks of A and B that nine programs load:
# the lecture's picture.
LOADS = {(9, 9, 3): 54, (9, 9, 1): 90}
FIRST_PROGRAMS, K_BLOCKS = 9, 9

# The first that fails is the hint: whole groups, then last groups that are shorter.
GRIDS = (
    *LOADS,
    (1, 1, 1),
    (6, 4, 2),
    (4, 6, 2),
    (5, 4, 1),
    (7, 5, 3),
    (5, 7, 4),
    (8, 3, 5),
    (1, 13, 1),
    (1, 13, 8),
    (13, 1, 1),
    (13, 1, 8),
    (3, 5, 8),
    (31, 37, 5),
    (37, 31, 8),
    (101, 3, 8),
    (3, 101, 8),
)


def grouped_order(answer: Callable) -> None:
    """AssertionError unless answer(pid, rows, columns, group) is the (row, column) of its tile.

    `group` rows of tiles are a group, the last one perhaps fewer. Groups follow one another;
    within one, a column is taken from top to bottom, then the next column.
    """
    for grid in GRIDS:
        rows, columns, group = grid
        where = f"for {rows} x {columns} tiles in groups of {group},"
        given = [
            _tile(answer(pid, *grid), f"{where} program {pid}") for pid in range(rows * columns)
        ]
        if wrong := _not_each_once(given, *grid) or _not_in_order(given, *grid):
            why = next((f": {hint}" for slip, hint in _slips(*grid) if slip == given), "")
            raise AssertionError(f"{where} {wrong}{why}")


def _tile(given: object, where: str) -> tuple[int, int]:
    numbers = plain(given)
    numbers = [plain(each) for each in numbers] if isinstance(numbers, tuple | list) else []
    if len(numbers) != 2 or not all(map(is_whole, numbers)):
        raise AssertionError(f"{where} needs two whole numbers, (row, column), not {given!r}")
    return int(numbers[0]), int(numbers[1])


def _not_each_once(given: Order, rows: int, columns: int, group: int) -> str:
    """What keeps the tiles from being computed once each; "" if they are."""
    first_program: dict[tuple[int, int], int] = {}
    for pid, tile in enumerate(given):
        if not (0 <= tile[0] < rows and 0 <= tile[1] < columns):
            return (
                f"program {pid} computes {tile}, which is not there: rows are 0 to {rows - 1} "
                f"and columns 0 to {columns - 1}"
            )
        if tile in first_program:
            return f"programs {first_program[tile]} and {pid} both compute {tile}"
        first_program[tile] = pid
    return ""


def _not_in_order(given: Order, rows: int, columns: int, group: int) -> str:
    loads = LOADS.get((rows, columns, group))
    found = sum(block_order.blocks_loaded(given[:FIRST_PROGRAMS], K_BLOCKS))
    if loads and found != loads:
        return (
            f"the first {FIRST_PROGRAMS} programs load {found} blocks of A and B, {K_BLOCKS} a row "
            f"and {K_BLOCKS} a column, and should load {loads}"
        )
    for pid, (tile, right) in enumerate(zip(given, _right(rows, columns, group), strict=True)):
        if tile != right:
            return f"program {pid} computes {right}, not {tile}"
    return ""


def _right(rows: int, columns: int, group: int) -> Order:
    return list(map(tuple, block_order.tiles_in_order(rows, columns, group).tolist()))


def _slips(rows: int, columns: int, group: int) -> Iterator[tuple[Order, str]]:
    """Orders that are often written, and what to say to each; some have tiles twice or outside."""
    pids, right = range(rows * columns), _right(rows, columns, group)
    yield (
        [divmod(pid, columns) for pid in pids],
        "that is row by row, whatever the group: go down its columns",
    )
    yield (
        [(pid % rows, pid // rows) for pid in pids],
        "that is column by column through all rows, whatever the group",
    )
    yield (
        [(column, row) for row, column in right],
        "rows and columns are exchanged: a group is of rows, and the pair is (row, column)",
    )
    tail = f"the last group has {rows % group or group} of {group} rows"
    full = [_in_full_groups(pid, group, columns) for pid in pids]
    yield full, tail
    yield [(min(row, rows - 1), column) for row, column in full], tail
    yield [(row % rows, column) for row, column in full], tail
    exchanged = [_in_full_groups(pid, group, rows) for pid in pids]
    yield exchanged, f"a group has group * columns = {group * columns} tiles, not group * rows"
    places = [divmod(pid, group * columns) for pid in pids]
    heights = [min(group, rows - index * group) for index, _ in places]
    yield (
        [
            (index + place % height, place // height)
            for (index, place), height in zip(places, heights, strict=True)
        ],
        f"the second group begins {group} rows down, not one",
    )
    taken = [
        (pid, index * group, max(1, min(group, rows - index * group)))
        for pid, (index, _) in enumerate(places)
    ]
    yield (
        [
            (first + pid % (height * columns) % height, pid % (height * columns) // height)
            for pid, first, height in taken
        ],
        "the groups before this one have `group` rows: take the rest by group * columns",
    )


def _in_full_groups(pid: int, group: int, tiles_in_row: int) -> tuple[int, int]:
    index, place = divmod(pid, group * tiles_in_row)
    return index * group + place % group, place // group
