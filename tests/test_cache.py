"""Compiled things are kept whole, once, and apart from other users'."""

import getpass
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import cache
from helpers.results import ROOT


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path))
    return tmp_path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_environment_names_the_folder(parent):
    folder = cache.folder("kind")
    assert folder == parent / "kind"
    assert folder.is_dir()
    assert cache.folder("kind") == folder  # a second time as well


def test_by_default_in_the_project_where_git_ignores_it(monkeypatch):
    monkeypatch.delenv("LECTURES_CACHE", raising=False)
    if os.access(ROOT, os.W_OK):
        assert cache.folder("kind") == ROOT / "runs" / "cache" / "kind"
        (ROOT / "runs" / "cache" / "kind").rmdir()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "runs/" in ignored or "/runs/" in ignored


@pytest.mark.case("E11")
def test_a_folder_of_ones_own_where_the_project_cannot_be_written(tmp_path, monkeypatch):
    """Case E11: temporary files are shared by all users, so the user's name is in the path."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder can be made in a file")
    monkeypatch.setenv("LECTURES_CACHE", str(blocked))
    monkeypatch.setattr(cache, "ROOT", blocked)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folder = cache.folder("kind")
    assert folder.relative_to(tmp_path / "tmp").parts[-1] == "kind"
    assert getpass.getuser() in folder.parent.name


def test_a_folder_that_is_there_but_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    monkeypatch.setenv("LECTURES_CACHE", str(theirs))
    monkeypatch.setattr(cache, "ROOT", mine)
    allowed = os.access  # root may write anywhere, so permissions are simulated
    monkeypatch.setattr(
        cache.os,
        "access",
        lambda path, mode: theirs not in Path(path).parents and allowed(path, mode),
    )
    assert cache.folder("kind") == mine / "runs" / "cache" / "kind"


def test_no_folder_at_all_is_one_sentence_with_all_that_were_tried(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("LECTURES_CACHE", str(blocked))
    monkeypatch.setattr(cache, "ROOT", blocked)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(blocked))
    with pytest.raises(OSError, match="none of these folders can be written") as refusal:
        cache.folder("kind")
    assert str(refusal.value).count(str(blocked)) == 3


def test_a_file_is_made_once(parent):
    made = []

    def make(path):
        made.append(path)
        path.write_text("contents")

    first = cache.file("kind", "abc.so", make)
    assert first == parent / "kind" / "abc.so" == cache.file("kind", "abc.so", make)
    assert first.read_text() == "contents"
    assert len(made) == 1
    assert made[0] != first and made[0].suffix == ".so"  # compilers go by the ending
    assert left(parent / "kind") == ["abc.so"]


def test_a_file_whose_making_fails_is_not_there(parent):
    def fail(path):
        path.write_text("half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.file("kind", "abc", fail)
    assert left(parent / "kind") == []
    assert cache.file("kind", "abc", lambda path: path.write_text("whole")).read_text() == "whole"


def test_files_that_make_leaves_beside_its_own_are_removed(parent):
    def make(path):
        path.with_suffix(".o").write_text("object")
        path.write_text("library")

    cache.file("kind", "abc.so", make)
    assert left(parent / "kind") == ["abc.so"]


def test_a_file_that_another_process_has_made_meanwhile_is_no_obstacle(parent):
    def make(path):
        (parent / "kind" / "abc").write_text("theirs")
        path.write_text("mine")

    assert cache.file("kind", "abc", make).read_text() == "mine"


@pytest.mark.case("E11")
def test_two_processes_with_a_cold_cache_both_get_a_whole_file(parent):
    """Case E11. Each waits until the other has begun to write, so that they do overlap."""
    script = textwrap.dedent("""
        import sys, time, types
        from pathlib import Path
        sys.modules["helpers.results"] = types.SimpleNamespace(ROOT=Path())  # it loads PyTorch
        from helpers import cache
        mine, other, parent = sys.argv[1:]

        def make(path):
            with path.open("w") as file:
                file.write(mine * 50_000); file.flush()
                Path(parent, mine).touch()
                deadline = time.monotonic() + 20
                while not Path(parent, other).exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                file.write(mine * 50_000)

        found = cache.file("kind", "big", make).read_text()
        assert len(found) == 100_000 and len(set(found)) == 1, (len(found), set(found))
        assert Path(parent, other).exists(), "the two did not overlap"
    """)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *names, str(parent)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for names in ("ab", "ba")
    ]
    errors = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert left(parent / "kind") == ["big"]


def test_a_key_depends_on_every_part_and_on_where_it_ends():
    keys = [cache.key(*parts) for parts in (("a", "bc"), ("ab", "c"), ("abc",), ("a", "bc", ""))]
    assert len({*keys}) == 4 and all(re.fullmatch("[0-9a-f]{20}", key) for key in keys)
    assert cache.key("a", "bc") == keys[0]


def test_a_library_that_was_cut_off_is_told(tmp_path):
    whole = Path(sys.modules["_ctypes"].__file__).read_bytes()  # a shared library of Python's own
    library = tmp_path / "library.so"
    for size in (0, 10, 63, 64, len(whole) // 4, len(whole) // 2, len(whole) - 1):
        library.write_bytes(whole[:size])
        assert not cache.is_whole(library)
    library.write_bytes(whole)
    assert cache.is_whole(library)
    library.write_bytes(b"half" + whole[4:])
    assert not cache.is_whole(library)
