"""A teaching version of code stands in a notebook and in helpers: both must be the same text."""

import difflib
import importlib
import inspect

import pytest
from notebook_files import NOTEBOOKS, read, tags

from helpers.device import triton_version
from helpers.triton_mode import tl

TAG = "mirror:"
MIRRORS = [
    pytest.param(cell.source, tag.removeprefix(TAG), id=f"{path.stem}-{tag.removeprefix(TAG)}")
    for path in NOTEBOOKS
    for cell in read(path).cells
    for tag in tags(cell)
    if tag.startswith(TAG)
]


def source_of(dotted_name: str) -> str:
    """The source of an object in a module; AssertionError when there is none of this name."""
    module_name, _, name = dotted_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{dotted_name} does not exist: {error}") from error
    if isinstance(found, type(tl)) and not triton_version():
        pytest.skip("needs Triton")
    if not inspect.isfunction(found) and not inspect.isclass(found):
        found = found.fn  # a Triton kernel wraps its function
    return inspect.getsource(found)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def difference(cell: str, dotted_name: str) -> str:
    """The lines in which a cell differs from the object it mirrors; empty when they are the same.

    The cell's first line is a comment that says where the object lives.
    """
    place, *shown = lines_of(cell)
    if not place.startswith("#"):
        return f"the first line must be a comment that says where {dotted_name} lives"
    expected = lines_of(source_of(dotted_name))
    return "\n".join(difflib.unified_diff(expected, shown, dotted_name, "notebook", lineterm=""))


@pytest.mark.parametrize(("cell", "dotted_name"), MIRRORS)
def test_mirror_shows_the_same_text(cell, dotted_name):
    assert not (found := difference(cell, dotted_name)), found


# The comparison itself.
SOURCE = "def one(x):\n    return x + 1\n\n\nclass Kernel:\n    def __init__(self, fn):\n"
SOURCE += "        self.fn = fn\n\n\n@Kernel\ndef two(x):\n    return x + 2\n"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    (tmp_path / "mirror_sample.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def test_the_same_text_has_no_difference(sample):
    assert difference("# lives in a file\ndef one(x):\n    return x + 1", "mirror_sample.one") == ""
    assert difference("# here\ndef one(x):   \n    return x + 1\n\n", "mirror_sample.one") == ""


def test_a_kernel_is_compared_by_its_function(sample):
    cell = "# here\n@Kernel\ndef two(x):\n    return x + 2"
    assert difference(cell, "mirror_sample.two") == ""
    assert difference(cell.replace("2", "3"), "mirror_sample.two")


@pytest.mark.parametrize(
    "cell",
    [
        "# here\ndef one(x):\n    return x + 2",
        "# here\ndef one(x):\n     return x + 1",
        "# here\n\ndef one(x):\n    return x + 1",
        "# here\ndef one(x):\n    return x + 1\n\nx = 1",
        "# here",
        "def one(x):\n    return x + 1",
        "x = 1\ndef one(x):\n    return x + 1",
    ],
)
def test_a_difference_is_noticed(sample, cell):
    assert difference(cell, "mirror_sample.one")


@pytest.mark.parametrize("name", ["mirror_sample.three", "mirror_missing.one", "one"])
def test_a_missing_object_is_noticed(sample, name):
    with pytest.raises((AssertionError, ValueError)):
        difference("# here\ndef one(x):\n    return x + 1", name)
