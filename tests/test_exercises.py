"""Every exercise of the ladder: its cells, its checker, and the tests of its checker."""

import functools
import importlib
import inspect
import itertools
import math
import re

import pytest
from nbformat import NotebookNode
from notebook_files import NOTEBOOKS, ROOT, code_cells, read, tags

from helpers import check
from helpers.check import check_exercise
from helpers.progress import LADDER, LEVELS

LEAST_WRONG = 5  # wrong answers that a checker is seen to reject
CHECK = re.compile(r'check_exercise\("(\d\d\.\d)", ([\w, ]+)\)')
each_exercise = pytest.mark.parametrize("exercise", LADDER)


@functools.cache
def cells_of(number: str) -> list[NotebookNode]:
    (path,) = (path for path in NOTEBOOKS if path.name.startswith(number))
    return read(path).cells


@functools.cache
def parts(exercise: str) -> tuple[NotebookNode, NotebookNode, list[NotebookNode]]:
    """The stub, the cell after it, and what follows up to the next exercise."""
    cells = [cell for cell in cells_of(exercise[:2]) if cell.source.strip()]
    stubs = [place for place, cell in enumerate(cells) if "exercise" in tags(cell)]
    (own,) = (place for place in stubs if f'"{exercise}"' in cells[place + 1].source)
    ends = [*(place for place in stubs if place > own), len(cells)]
    return cells[own], cells[own + 1], cells[own + 2 : ends[0]]


def num_answers(exercise: str) -> int:
    (found,) = CHECK.findall(parts(exercise)[1].source)
    return found[1].count(",") + 1


# The ladder


def test_the_ladder_and_the_notebooks_have_the_same_exercises():
    stubs = [
        re.search(CHECK, after.source)[1]
        for path in NOTEBOOKS
        for cell, after in itertools.pairwise(code_cells(read(path)))
        if "exercise" in tags(cell)
    ]
    assert stubs == list(LADDER) == sorted(LADDER) == list(check.EXERCISES)


@each_exercise
def test_its_row(exercise):
    rung = LADDER[exercise]
    assert 1 <= rung.level <= LEVELS and rung.minutes > 0 and rung.title and rung.practises
    earlier = [each for each in LADDER.values() if each.notebook == rung.notebook]
    levels = [each.level for each in earlier]
    assert levels == sorted(levels), "a notebook's later exercises are not easier"
    assert rung.builds_on
    for each in rung.builds_on:
        number, _, section = each.partition("#")
        if not section:
            assert each in LADDER and each < exercise
            continue
        assert number <= exercise[:2]
        text = "\n".join(c.source for c in cells_of(number) if c.cell_type == "markdown")
        assert re.search(rf"^## {section}\. ", text, re.MULTILINE)


# Its cells


@each_exercise
def test_its_title_stands_under_exercises(exercise):
    text = "\n".join(c.source for c in cells_of(exercise[:2]) if c.cell_type == "markdown")
    text = text.split("## Exercises\n")[1]
    (title,) = re.findall(rf"^(?:\*\*|### ){exercise} (.+?)\.?(?:\*\*|$)", text, re.MULTILINE)
    assert title.replace("`", "") == LADDER[exercise].title


@each_exercise
def test_the_untouched_stub_is_not_attempted_and_leaves_nothing(
    exercise, tmp_path, monkeypatch, capsys
):
    stub, checked, _ = parts(exercise)
    setup = "import torch\nfrom helpers.check import check_exercise\n"
    setup += "from helpers.triton_mode import tl, triton\n"
    module = tmp_path / f"stub_{exercise.replace('.', '_')}.py"  # a file: Triton reads its source
    module.write_text(f"{setup}{stub.source}\n\n{checked.source}\n", encoding="utf-8")
    monkeypatch.setenv("LECTURES_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(module.stem)
    assert capsys.readouterr().out == f"Exercise {exercise}: not attempted yet.\n"
    assert not (tmp_path / "progress.json").exists()
    assert re.sub(r";$", "", checked.source) == CHECK.search(checked.source)[0]


@each_exercise
def test_its_solution_is_explained_and_asserted(exercise):
    _, _, after = parts(exercise)
    assert after[0].source.startswith("<details><summary>A solution (the next cell")
    assert after[0].source.endswith("\n\n</details>")
    solutions = [cell.source for cell in after if "solution" in tags(cell)]
    found = [
        names.split(", ")
        for source in solutions
        for asserted, names in re.findall(
            rf'^assert (check_exercise\("{exercise}", ([\w, ]+)\))$', source, re.MULTILINE
        )
    ]
    assert len(found) == 1 and len(found[0]) == num_answers(exercise)
    # Else they would count as the reader's.
    assert all(name.lower().startswith("solution") for name in found[0])


# Its checker


def raises(*_):
    raise ValueError("no")


@each_exercise
@pytest.mark.parametrize(
    "wrong", [lambda *_: None, lambda *given: given[0] if given else "", raises],
    ids=["nothing", "its input", "raises"],
)  # fmt: skip
def test_it_never_accepts(exercise, wrong, capsys):
    assert check_exercise(exercise, *[wrong] * num_answers(exercise)) is False
    said = capsys.readouterr().out
    hint = said.removeprefix(f"Exercise {exercise}: not yet. ")
    assert hint != said and len(hint) > 20 and (wrong is not raises or "ValueError: no" in hint)


# The tests of its checker: test_wrong_… has wrong answers, one a case, and others right ones.


@functools.cache
def checker_tests() -> dict[str, tuple[str, int]]:
    """A test of a checker -> its source, and how many cases it is parametrised with."""
    names = [*(ROOT / "tests").glob("test_exercise_*.py"), ROOT / "tests" / "test_check.py"]
    found = {}
    for name in [*(path.stem for path in names), "test_peaks"]:
        for function in vars(importlib.import_module(name)).values():
            if inspect.isfunction(function) and function.__name__.startswith("test_"):
                marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
                cases = math.prod(len(list(mark.args[1])) for mark in marks)
                found[f"{name}.{function.__name__}"] = inspect.getsource(function), cases
    return found


@each_exercise
def test_its_checker_is_tested_with_right_and_wrong_answers(exercise):
    mine = {
        name: (source, cases)
        for name, (source, cases) in checker_tests().items()
        if f'"{exercise}"' in source
    }
    right = [n for n, (source, _) in mine.items() if re.search(' == "correct."| is True', source)]
    assert right
    wrong = {name: cases for name, (_, cases) in mine.items() if "wrong" in name and cases}
    assert sum(wrong.values()) >= LEAST_WRONG, wrong


def test_cases_are_counted():
    counts = {name: cases for name, (_, cases) in checker_tests().items()}
    assert counts["test_check.test_wrong_timers_are_rejected"] > 3 * LEAST_WRONG
    assert counts["test_exercise_grouped_order.test_wrong_orders"] > LEAST_WRONG
