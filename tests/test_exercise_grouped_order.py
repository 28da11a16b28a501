"""The checker of exercise 09.1 takes what is right, and says what is wrong."""

import functools
import re

import numpy as np
import pytest
from verdicts import verdict

from helpers.exercises.grouped_order import GRIDS, K_BLOCKS


def solution(pid, rows, columns, group):  # the notebook's
    first = pid // (group * columns) * group
    height = min(group, rows - first)
    within = pid % (group * columns)
    return first + within % height, within // height


def by_loops(pid, rows, columns, group):
    left = pid
    for first in range(0, rows, group):
        for column in range(columns):
            for row in range(first, min(first + group, rows)):
                if left == 0:
                    return row, column
                left -= 1


@functools.cache
def table(rows, columns, group):
    tiles = [(row, column) for row in range(rows) for column in range(columns)]
    return sorted(tiles, key=lambda tile: (tile[0] // group, tile[1], tile[0]))


def by_table(pid, rows, columns, group):
    return table(rows, columns, group)[pid]


def in_numpy(pid, rows, columns, group):
    return np.array(solution(pid, rows, columns, group)).tolist()


def numpy_scalars(pid, rows, columns, group):
    return tuple(map(np.int64, solution(pid, rows, columns, group)))


def as_an_array(pid, rows, columns, group):
    return np.array(solution(pid, rows, columns, group))


RIGHT = (
    *(solution, by_loops, by_table),
    *(in_numpy, numpy_scalars, as_an_array),
)


@pytest.mark.parametrize("answer", RIGHT, ids=lambda answer: answer.__name__)
def test_right_orders(capsys, answer):
    assert verdict(capsys, "09.1", answer) == "correct."


def test_the_lecture_s_numbers():
    for group, blocks in ((1, 9 + 81), (3, 27 + 27)):
        tiles = [solution(pid, 9, 9, group) for pid in range(9)]
        rows, columns = map(set, zip(*tiles, strict=True))
        assert K_BLOCKS * len(rows) + K_BLOCKS * len(columns) == blocks


def test_the_grids_have_what_goes_wrong():
    shorter = [grid for grid in GRIDS if grid[0] % grid[2]]
    assert any(rows > group for rows, _, group in shorter)
    assert any(rows < group for rows, _, group in shorter)
    assert {1} < {rows for rows, _, _ in GRIDS} and {1} < {columns for _, columns, _ in GRIDS}


def row_major(pid, rows, columns, group):
    return divmod(pid, columns)


def column_major(pid, rows, columns, group):
    return pid % rows, pid // rows


def row_by_row_in_a_group(pid, rows, columns, group):
    first = pid // (group * columns) * group
    row, column = divmod(pid % (group * columns), columns)
    return first + row, column


def full_groups(pid, rows, columns, group):
    first, within = pid // (group * columns) * group, pid % (group * columns)
    return first + within % group, within // group


def full_groups_clamped(pid, rows, columns, group):
    row, column = full_groups(pid, rows, columns, group)
    return min(row, rows - 1), column


def full_groups_wrapped(pid, rows, columns, group):
    row, column = full_groups(pid, rows, columns, group)
    return row % rows, column


def ends_swapped(pid, rows, columns, group):
    return solution(pid, rows, columns, group)[::-1]


def groups_of_columns(pid, rows, columns, group):
    return solution(pid, columns, rows, group)[::-1]


def group_index_with_rows(pid, rows, columns, group):
    first, within = pid // (group * rows) * group, pid % (group * rows)
    return first + within % group, within // group


def group_index_with_rows_and_a_tail(pid, rows, columns, group):
    first, within = pid // (group * rows) * group, pid % (group * rows)
    height = max(1, min(group, rows - first))
    return first + within % height, within // height


def down_the_group_without_its_start(pid, rows, columns, group):
    row, column = solution(pid, rows, columns, group)
    return row % group, column


def tail_heights_everywhere(pid, rows, columns, group):
    return solution(pid, rows, columns, rows % group or group)


def group_one_more(pid, rows, columns, group):
    return solution(pid, rows, columns, group + 1)


def always_groups_of_3(pid, rows, columns, group):
    return solution(pid, rows, columns, 3)


def back_and_forth(pid, rows, columns, group):
    row, column = solution(pid, rows, columns, group)
    return row, column if row // group % 2 == 0 else columns - 1 - column


def last_row_first(pid, rows, columns, group):
    first, within = pid // (group * columns) * group, pid % (group * columns)
    height = min(group, rows - first)
    return first + height - 1 - within % height, within // height


def last_tile_twice(pid, rows, columns, group):
    return solution(min(pid, max(rows * columns - 2, 0)), rows, columns, group)


def real_numbers(pid, rows, columns, group):
    row, column = solution(pid, rows, columns, group)
    return row, column / 1


def true_division(pid, rows, columns, group):
    first = pid / (group * columns) * group
    return first, pid % (group * columns)


LOADS_90 = r"the first 9 programs load 90 blocks of A and B, .*, and should load 54: that is "
IN_3 = "for 9 x 9 tiles in groups of 3, "
FIRST_TAIL = "for 7 x 5 tiles in groups of 3, "
EXCHANGED = r"program 1 computes \(1, 0\), not \(0, 1\): rows and columns are exchanged"


def group_begins_one_row_down(pid, rows, columns, group):
    first, place = divmod(pid, group * columns)
    height = min(group, rows - first * group)
    return first + place % height, place // height


def rest_by_the_own_height(pid, rows, columns, group):
    first = pid // (group * columns) * group
    height = min(group, rows - first)
    place = pid % (height * columns)
    return first + place % height, place // height


WRONG = {
    row_major: IN_3 + LOADS_90 + "row by row, whatever the group: go down its columns",
    column_major: IN_3 + LOADS_90 + "column by column through all rows, whatever the group",
    row_by_row_in_a_group: IN_3 + LOADS_90 + "row by row, whatever the group: go down its columns",
    full_groups: FIRST_TAIL
    + r"program 31 computes \(7, 0\), which is not there: rows are 0 to 6 and columns 0 to 4: "
    "the last group has 1 of 3 rows",
    full_groups_clamped: FIRST_TAIL
    + r"programs 30 and 31 both compute \(6, 0\): the last group has 1 of 3",
    full_groups_wrapped: FIRST_TAIL
    + r"programs 0 and 31 both compute \(0, 0\): the last group has 1 of 3",
    ends_swapped: IN_3 + EXCHANGED,
    groups_of_columns: IN_3 + EXCHANGED,
    group_index_with_rows: "for 6 x 4 tiles in groups of 2, .*: a group has group . columns = 8 t",
    group_index_with_rows_and_a_tail: "for 6 x 4 tiles in groups of 2, .*: a group has group",
    down_the_group_without_its_start: r"programs 0 and 27 both compute \(0, 0\)",
    group_begins_one_row_down: r"both compute \(1, 0\): the second group begins 3 rows down, not",
    rest_by_the_own_height: "the groups before this one have `group` rows: take the rest by group",
    tail_heights_everywhere: FIRST_TAIL + r"program 1 computes \(1, 0\), not \(0, 1\)",
    group_one_more: IN_3 + "the first 9 programs load 63 blocks of A and B, .*should load 54$",
    always_groups_of_3: r"in groups of 1, the first 9 programs load 54 blocks .*should load 90$",
    back_and_forth: IN_3 + r"program 27 computes \(3, 0\), not \(3, 8\)",
    last_row_first: IN_3 + r"program 0 computes \(0, 0\), not \(2, 0\)",
    last_tile_twice: r"programs 79 and 80 both compute \(7, 8\)",
    real_numbers: r"program 0 needs two whole numbers, \(row, column\), not \(0, 0.0\)",
    true_division: r"program 0 needs two whole numbers, \(row, column\), not \(0.0, 0\)",
    lambda pid, *_: pid: "needs two whole numbers, .*, not 0$",
    lambda pid, *_: (pid, 0, 0): r"needs two whole numbers, .*, not \(0, 0, 0\)",
    lambda *_: None: "needs two whole numbers, .*, not None",
    lambda *_: (True, False): r"needs two whole numbers, .*, not \(True, False\)",
    lambda pid, *_: (pid, 0): r"program 9 computes \(9, 0\), which is not there: rows are 0 to 8",
    lambda *_: (0, 0): r"programs 0 and 1 both compute \(0, 0\)",
    lambda pid, *_: (-1, 0): r"program 0 computes \(-1, 0\), which is not there",
    lambda pid, rows: (0, 0): "It raises TypeError",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_orders(capsys, wrong):
    said = verdict(capsys, "09.1", wrong)
    assert re.search(WRONG[wrong], said), said
    assert len(said) < 300
