"""What is remembered of the reader's answers, what is not, and what cannot go wrong with it."""

import datetime
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from helpers import check, progress
from helpers.check import check_exercise, main

TODAY = "2026-01-31"


@pytest.fixture(autouse=True)
def today(monkeypatch):
    """One day for all tests: a run of them may last until the next."""

    class Date(datetime.date):
        @classmethod
        def today(cls):
            return cls.fromisoformat(TODAY)

    monkeypatch.setattr(progress, "datetime", types.SimpleNamespace(date=Date))


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    file = tmp_path / "new" / "progress.json"
    monkeypatch.setenv("LECTURES_PROGRESS", str(file))
    return file


def right(pid, rows, columns, group):
    first = pid // (group * columns) * group
    height = min(group, rows - first)
    within = pid % (group * columns)
    return first + within % height, within // height


def wrong(pid, rows, columns, group):
    return divmod(pid, columns)


def row(exercise="09.1") -> tuple[str, str, str]:
    found = progress.table().set_index("exercise").loc[exercise]
    return found["state"], found["when"], found["last"]


def test_tests_remember_nothing():
    assert progress.path() is None  # conftest.py: their answers are nobody's progress


def test_where_it_is_kept(monkeypatch):
    monkeypatch.delenv("LECTURES_PROGRESS", raising=False)
    assert progress.path() == progress.ROOT / "runs" / "progress.json"


def test_tried_then_solved_then_for_good(file, capsys):
    assert row() == ("open", "", "")
    check_exercise("09.1", wrong)
    assert row() == ("tried", TODAY, "rejected")
    check_exercise("09.1", right)
    assert row() == ("solved", TODAY, "accepted")

    def stub(*_):
        raise NotImplementedError

    before = file.read_bytes()
    check_exercise("09.1", stub)
    assert file.read_bytes() == before
    check_exercise("09.1", wrong)  # as after a check that has become stricter
    assert row() == ("solved", TODAY, "rejected")
    assert row("10.1") == ("open", "", "")


def test_the_day_of_the_first_right_answer_stays(file):
    old = {"last": "2026-01-31", "accepted": True, "solved": "2026-01-30"}
    file.parent.mkdir()
    file.write_text(json.dumps({"09.1": old, "99.9": old}))
    check_exercise("09.1", right)
    assert row() == ("solved", "2026-01-30", "accepted")
    assert json.loads(file.read_text())["99.9"] == old  # another version's exercise


def test_what_is_not_the_readers(file, monkeypatch):
    def solution_order(*tile):
        return right(*tile)

    class Solution:
        def __new__(cls, *tile):
            return wrong(*tile)

    def cannot(answer):
        raise check.CannotCheck("no GPU")

    def stub(*_):
        raise NotImplementedError

    assert check_exercise("09.1", solution_order) is True
    assert check_exercise("09.1", Solution) is False
    assert check_exercise("09.1", stub) is None
    monkeypatch.setattr("helpers.exercises.grouped_order.grouped_order", cannot)
    assert check_exercise("09.1", right) is True
    assert not file.parent.exists()


def test_nothing_is_written_where_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv("LECTURES_PROGRESS", "")
    monkeypatch.setattr(progress, "_replace", None)
    check_exercise("09.1", right)
    assert row() == ("open", "", "")
    assert main(["--forget"]) == 0


def test_a_file_that_cannot_be_written_fails_nothing(file, monkeypatch, capsys):
    file.parent.write_text("a file in the folder's place")
    assert check_exercise("09.1", right) is True
    file.parent.unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    check_exercise("09.1", wrong)
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert check_exercise("09.1", right) is True
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5 and sum("cannot be remembered" in line for line in said) == 2

    file.unlink()
    file.mkdir()
    assert check_exercise("09.1", right) is True
    assert row() == ("open", "", "")


DAMAGED = {
    "half": b'{"09.1": {"solved": "2026-',
    "empty": b"",
    "zeros": b"\0" * 64,
    "a list": b"[]",
    "text for an entry": b'{"09.1": "solved"}',
    "no day": b'{"09.1": {"accepted": true}}',
    "a number for a day": b'{"09.1": {"last": 3, "accepted": true}}',
    "solved, a number": b'{"09.1": {"last": "2026-01-31", "accepted": true, "solved": 1}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_set_aside(file, capsys, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert check_exercise("09.1", right) is True
    assert row() == ("solved", TODAY, "accepted")
    assert file.with_name("progress.damaged.json").read_bytes() == content
    assert "progress.json was damaged" in capsys.readouterr().out


def test_many_processes_at_once_leave_a_whole_file(file):
    program = (
        "from helpers import progress\n"
        "for number in range(200):\n"
        "    progress.remember(f'{number % 40:02}.1', number % 3 == 0)\n"
        "assert progress._load(progress.path())\n"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, cwd=progress.ROOT) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(json.loads(file.read_text())) >= 40 - len(processes)
    assert list(file.parent.iterdir()) == [file]


def test_the_ladder_as_printed(file, capsys):
    progress.remember("04.1", True)
    progress.remember("05.1", True)
    progress.remember("05.1", False)
    progress.remember("01.1", False)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    total = len(progress.LADDER)
    assert lines[0].startswith(f"Exercises solved: 2 of {total}.")
    assert "04_fusion               [######......] 1/2" in lines
    place = lines.index("05_cuda_gelu            [######......] 1/2")
    assert lines[place + 1] == f"  05.1 {'Global index':42}*    5 min  solved {TODAY}"
    assert "The last answer was not accepted" in lines[place + 2]
    assert f"tried {TODAY}" in lines[2] and lines[3].endswith("0/1")
    assert lines[-2:] == [
        "Next: 01.1 Peaks from parts",
        "      notebooks/01_specs.ipynb, section Exercises",
    ]
    for exercise in progress.LADDER:
        progress.remember(exercise, True)
    progress.show()
    assert capsys.readouterr().out.endswith("All are solved.\n")


def test_one_exercise(file, capsys):
    progress.remember("05.2", True)
    for exercise in progress.LADDER:
        assert main([exercise]) == 0
        assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    main(["05.2"])
    said = capsys.readouterr().out
    assert said.startswith(f"05.2 Repair a GeLU: solved {TODAY}\n  level      2 of 3, about 15 min")
    assert "  builds on  notebook 05_cuda_gelu, section 2\n" in said
    assert "             05.1 Global index\n" in said
    assert said.endswith("  where      notebooks/05_cuda_gelu.ipynb, section Exercises\n")


@pytest.mark.parametrize(
    ("given", "shown"), [("5.2", ["05.2"]), ("05", ["05.1", "05.2"]), ("10", ["10.1", "10.2"])]
)
def test_numbers_as_people_write_them(file, capsys, given, shown):
    assert main([given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines if line[:1].isdecimal()] == shown


@pytest.mark.parametrize("given", ["99.9", "99", "4.", "0", ""])
def test_an_unknown_exercise(file, capsys, given):
    assert main([given]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(f"There is no exercise {given!r}; there are 01.1, ")
    assert said.err.count("\n") == 1


def test_forget(file, capsys):
    check_exercise("09.1", right)
    assert main(["--forget"]) == 0
    assert row() == ("open", "", "") and not file.exists()
    file.mkdir()
    assert main(["--forget"]) == 1
    assert "cannot be removed" in capsys.readouterr().err


def test_forgetting_takes_no_exercise(file):
    check_exercise("09.1", right)
    with pytest.raises(SystemExit) as refused:
        main(["--forget", "09.1"])
    assert refused.value.code == 2 and row()[0] == "solved"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_command(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check.py", "04.1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("helpers.check", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("04.1 Traffic of a program: open\n")
