"""Turns: against closed forms, and against a clock that ticks and lets columns do what they may."""

import itertools
import random

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from helpers import attention_plot
from helpers.attention_turns import (
    Visit,
    arrival_turns,
    column_turns,
    cyclic_paths,
    makespan,
    schedule,
    step_matrix,
    waiting,
)

EVERY = np.ones((8, 8), dtype=bool)
CAUSAL = np.tril(EVERY)


def ticking(paths, turns, lag, places):
    """`schedule` for a whole lag: at each tick every column that runs does what it may."""
    done, begun, added_at = [0] * len(paths), {}, {}
    served, running, visits = [0] * len(turns), [], []
    tick, to_come = 0, list(range(len(paths)))
    while running or to_come:
        moved = True
        while moved:  # within a tick an add may allow another, and an end a launch
            moved = False
            while to_come and len(running) < places:
                running.append(to_come.pop(0))
                begun[running[-1]] = tick
            for column in tuple(running):
                if done[column] < len(paths[column]):
                    row = paths[column][done[column]]
                    ready = begun[column] + 1
                    on_turn = turns[row][served[row]] == column
                    if ready > tick or not on_turn or added_at.get(row, -lag) + lag > tick:
                        continue
                    visits.append(Visit(column, row, begun[column], ready, tick))
                    begun[column] = added_at[row] = tick
                    served[row] += 1
                    done[column] += 1
                    moved = True
                if done[column] == len(paths[column]):
                    running.remove(column)
                    moved = True
        tick += 1
        if tick > 500:
            return None
    return sorted(visits, key=lambda visit: (visit.column, visit.start))


@pytest.mark.parametrize("seed", range(60))
def test_schedules_are_those_of_a_clock(seed):
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 7), draw.randint(1, 7)
    live = np.array([[draw.random() < 0.8 for _ in range(columns)] for _ in range(rows)])
    paths = cyclic_paths(live, lambda column: draw.randrange(20))
    if draw.random() < 0.3:
        paths = [draw.sample(path, len(path)) for path in paths]
    lag, places = draw.randint(0, 3), draw.randint(1, columns)
    any_turns = [draw.sample(row, len(row)) for row in column_turns(paths)]
    by_arrival = arrival_turns(schedule(paths, places=places))
    turns = draw.choice((column_turns(paths), by_arrival, any_turns))
    expected = ticking(paths, turns, lag, places)
    if expected is None:
        assert turns == any_turns  # the others can always be kept
        with pytest.raises(ValueError, match="deadlock"):
            schedule(paths, turns, lag, places)
    else:
        assert schedule(paths, turns, lag, places) == expected


@pytest.mark.parametrize("lag", [0, 0.5, 1, 3])
def test_all_from_the_top_make_a_staircase(lag):
    paths = cyclic_paths(EVERY)
    visits = schedule(paths, column_turns(paths), lag)
    assert makespan(visits) == 8 + 7 * lag
    assert waiting(visits) == lag * 7 * 8 / 2
    assert arrival_turns(schedule(paths)) == column_turns(paths)


def test_nobody_waits_when_starts_are_apart_by_the_lag():
    for rows, columns, shift in itertools.product((6, 12), (1, 2, 5, 6), (1, 2, 3)):
        if shift * columns > rows:
            continue
        paths = cyclic_paths(np.ones((rows, columns), dtype=bool), lambda j, shift=shift: j * shift)
        turns = arrival_turns(schedule(paths))
        for lag in (0, 0.5, 1, 2, 3, 4):
            visits = schedule(paths, turns, lag)
            apart = min(shift, rows - shift * (columns - 1))
            nobody = columns == 1 or lag <= apart
            assert (waiting(visits) == 0, makespan(visits) == rows) == (nobody, nobody)


def test_causal_columns_are_staggered_and_need_the_right_turns():
    paths = cyclic_paths(CAUSAL)
    assert paths == cyclic_paths(CAUSAL, lambda column: column)  # the diagonal is the first live
    by_arrival = arrival_turns(schedule(paths))
    assert by_arrival == [list(range(row, -1, -1)) for row in range(8)]
    visits = schedule(paths, by_arrival)
    assert (makespan(visits), waiting(visits)) == (8, 0)
    visits = schedule(paths, column_turns(paths))
    assert (makespan(visits), waiting(visits)) == (15, 56)
    upwards = [path[::-1] for path in paths]
    visits = schedule(upwards, column_turns(upwards))
    assert (makespan(visits), waiting(visits)) == (8, 28)


def test_each_row_is_added_to_in_its_order_and_never_within_the_lag():
    paths = cyclic_paths(CAUSAL[:, ::-1], lambda column: 3 * column)
    turns = [draw[::-1] for draw in column_turns(paths)]
    visits = schedule(paths, turns, 0.75)
    for row, order in enumerate(turns):
        added = sorted((visit.added, visit.column) for visit in visits if visit.row == row)
        assert [column for _, column in added] == order
        assert all(b - a >= 0.75 for (a, _), (b, _) in itertools.pairwise(added))


def test_deadlocks_are_named():
    crossed = [[0, 1], [1, 0]]
    assert makespan(schedule(crossed, [[0, 1], [1, 0]])) == 2
    with pytest.raises(ValueError, match="column 0 waits at row 0 for column 1, which waits as w"):
        schedule(crossed, [[1, 0], [0, 1]])
    paths = cyclic_paths(EVERY, lambda column: column)
    turns = arrival_turns(schedule(paths))
    with pytest.raises(ValueError, match="column 0 waits at row 4 for column 4, which has no pl"):
        schedule(paths, turns, places=4)
    for places in range(1, 9):  # turns that know of the places can always be kept
        turns = arrival_turns(schedule(paths, places=places))
        assert makespan(schedule(paths, turns, places=places)) >= 64 / places


def test_what_makes_no_sense_is_refused():
    for turns in ([[0]], [[0], [0], [0]], [[0, 1], [0]], [[0, 0], [0]]):
        with pytest.raises(ValueError, match="not those of the tiles"):
            schedule([[0, 1]], turns)
    with pytest.raises(ValueError, match="lag"):
        schedule([[0]], [[0]], lag=-1)
    with pytest.raises(ValueError, match="lag"):
        schedule([[0]], [[0]], lag=float("nan"))
    with pytest.raises(ValueError, match="places"):
        schedule([[0]], [[0]], places=0)


def test_without_tiles_nothing_takes_time():
    assert schedule([]) == schedule([[], []]) == schedule([[], []], []) == []
    assert (makespan([]), waiting([]), column_turns([[]])) == (0, 0, [])
    assert np.isnan(step_matrix([], 2, 3)).all()


def test_steps_are_starts():
    steps = step_matrix(schedule(cyclic_paths(CAUSAL)), 8, 8)
    assert np.array_equal(np.isnan(steps), ~CAUSAL)
    assert all(steps[i, j] == i - j for i, j in np.argwhere(CAUSAL))


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_bars_are_visits_and_waits(ax):
    paths = cyclic_paths(EVERY)
    visits = schedule(paths, column_turns(paths))
    attention_plot.draw_turns(ax, visits)
    bars, waits, numbers = ax.collections
    boxes = [[path.get_extents() for path in group.get_paths()] for group in (bars, waits)]
    assert [box.width for box in boxes[0]] == [1] * len(visits)
    assert sum(box.width for box in boxes[1]) == waiting(visits) and len(boxes[1]) == 7
    assert max(box.x1 for box in boxes[0]) == makespan(visits)
    middles = [(visit.start + 0.5, visit.column) for visit in visits]
    assert numbers.get_offsets().tolist() == [list(middle) for middle in middles]
    distinct = {bytes(path.vertices) for path in numbers.get_paths()}
    assert len(distinct) == 8  # of each row a digit of its own


def test_many_rows_have_no_numbers_and_nobody_waits_without_turns(ax):
    visits = schedule(cyclic_paths(np.ones((17, 3), dtype=bool)))
    attention_plot.draw_turns(ax, visits)
    assert [len(group.get_paths()) for group in ax.collections] == [51, 0]


@pytest.mark.parametrize("dq, arrows", [("", 0), ("once", 0), ("in any order", 6), ("in turns", 6)])
def test_owners_are_drawn_with_an_arrow_an_add(ax, dq, arrows):
    steps = step_matrix(schedule(cyclic_paths(CAUSAL)), 8, 8)
    attention_plot.draw_owners(ax, steps, 2, dq)
    assert [text.get_text() for text in ax.texts].count("") == arrows  # arrows have no text
    tiles, numbers, results = ax.collections
    assert len(tiles.get_paths()) == 64 and len(numbers.get_offsets()) == CAUSAL.sum()
    assert len(results.get_paths()) == 16  # eight boxes of dQ, eight of dK and dV
    live = np.argwhere(steps == 2)
    colours = tiles.get_facecolors().reshape(8, 8, 4)
    on_chip = matplotlib.colors.to_rgba(attention_plot.LIVE)
    assert [list(at) for at in np.argwhere((colours == on_chip).all(axis=-1))] == live.tolist()
    assert len(attention_plot.owners_legend()) == 7
