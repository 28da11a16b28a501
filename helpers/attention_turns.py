"""Adding up dQ in a fixed order: who waits for whom, in a model of FlashAttention's backward pass.

Columns own the tiles of keys. A column visits its tiles of queries, the rows, one after the other:
one step for the products of a tile, then it adds to dQ of that row. So that the sum is the same in
every run, each row is added to in a fixed order, its turns; who is not yet on turn waits.

    live = tile_kinds(1024, 1024, 128, 128, causal=False) != SKIPPED  # of helpers.attention_io
    paths = cyclic_paths(live, first=lambda column: column)  # column j begins at row j
    visits = schedule(paths, arrival_turns(schedule(paths)), lag=1)
    makespan(visits), waiting(visits)

The unit of time is a step. Waiting alone is modelled: no memory, and no programs of other heads.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Visit:
    """A column's work on the tile in a row: products from start to ready, dQ is added at `added`.

    Between ready and added it waits for its turn; `added` is when its next tile starts.
    """

    column: int
    row: int
    start: float
    ready: float
    added: float

    @property
    def waited(self) -> float:
        return self.added - self.ready


def cyclic_paths(live: np.ndarray, first: Callable[[int], int] = lambda _: 0) -> list[list[int]]:
    """The rows that each column visits: its live ones from first(column) on, then from the top.

    live: (rows, columns) of bool, False where a tile is skipped. first(column) may exceed the
    number of rows and then counts around; where that row is not live, the next live one is first.
    """
    rows, columns = live.shape
    every = np.arange(rows)
    around = [(first(column) + every) % rows for column in range(columns)]
    return [rows_of[live[rows_of, column]].tolist() for column, rows_of in enumerate(around)]


def column_turns(paths: Sequence[Iterable[int]]) -> list[list[int]]:
    """Of each row, the columns that visit it, from the left to the right."""
    return _turns((row, column, column) for column, path in enumerate(paths) for row in path)


def arrival_turns(visits: Iterable[Visit]) -> list[list[int]]:
    """Of each row, the columns in the order in which these visits were ready, ties from the left.

    Of a schedule without turns: the order in which nobody would have to wait, were the lag 0.
    """
    return _turns((visit.row, visit.ready, visit.column) for visit in visits)


def schedule(
    paths: Sequence[Sequence[int]],
    turns: Sequence[Sequence[int]] | None = None,
    lag: float = 1.0,
    places: int | None = None,
) -> list[Visit]:
    """Every visit of every column, as early as possible; those of a column in their order.

    paths: the rows that each column visits, in order. turns: the columns that add to each row, in
    order; None: whoever is ready adds. lag: steps from one add to a row's dQ until the next may
    follow. places: how many columns run at once, all by default; they are launched in order, and
    a place is free again after its column's last add.

    ValueError where paths and turns differ in their tiles, and for a deadlock: running columns that
    wait for each other, or for one that has no place yet.
    """
    if not lag >= 0:
        raise ValueError(f"lag must not be negative, and is {lag}")
    if places is not None and places < 1:
        raise ValueError(f"places must be at least 1, not {places}")
    asked = sorted((row, column) for column, path in enumerate(paths) for row in path)
    given = [(row, column) for row, columns in enumerate(turns or ()) for column in sorted(columns)]
    if turns is not None and given != asked:
        raise ValueError("the turns are not those of the tiles that the columns visit")
    free = [0.0] * (len(paths) if places is None else places)  # a heap: when places become free
    may_add = dict.fromkeys((row for path in paths for row in path), 0.0)
    visits: list[list[Visit]] = [[] for _ in paths]
    left = None if turns is None else [list(reversed(row)) for row in turns]
    running: list[int] = []

    def go_on(column: int) -> bool:
        """Make the column's next visit, unless it is another's turn there."""
        row = paths[column][len(visits[column])]
        if left and left[row][-1] != column:
            return False
        start = visits[column][-1].added if visits[column] else begun[column]
        added = max(start + 1, may_add[row] if left else 0.0)
        visits[column].append(Visit(column, row, start, start + 1, added))
        may_add[row] = added + lag
        if left:
            left[row].pop()
        return True

    begun = []
    for column in range(len(paths)):
        # Who still waits then waits for a column that comes later, hence is not free any earlier.
        if not free:
            break
        begun.append(heapq.heappop(free))
        running.append(column)
        moved = True
        while moved:
            moved = False
            for each in tuple(running):
                while len(visits[each]) < len(paths[each]) and go_on(each):
                    moved = True
                if len(visits[each]) == len(paths[each]):
                    running.remove(each)
                    heapq.heappush(free, visits[each][-1].added if visits[each] else begun[each])
    if running:
        row = paths[running[0]][len(visits[running[0]])]
        other = left[row][-1]
        state = "waits as well" if other in running else "has no place yet"
        raise ValueError(
            f"deadlock: column {running[0]} waits at row {row} for column {other}, which {state}"
        )
    return [visit for done in visits for visit in done]


def step_matrix(visits: Iterable[Visit], rows: int, columns: int) -> np.ndarray:
    """When each tile's products start, (rows, columns); NaN for a tile that nobody visits."""
    steps = np.full((rows, columns), np.nan)
    for visit in visits:
        steps[visit.row, visit.column] = visit.start
    return steps


def makespan(visits: Iterable[Visit]) -> float:
    """Steps until the last add."""
    return max((visit.added for visit in visits), default=0.0)


def waiting(visits: Iterable[Visit]) -> float:
    """Steps that all columns together wait for their turns."""
    return sum(visit.waited for visit in visits)


def _turns(tiles: Iterable[tuple[int, float, int]]) -> list[list[int]]:
    """From (row, sort key, column) of every tile."""
    tiles = sorted(tiles)
    turns: list[list[int]] = [[] for _ in range(max((row for row, _, _ in tiles), default=-1) + 1)]
    for row, _, column in tiles:
        turns[row].append(column)
    return turns
