"""helpers.colab: the badge, and the project's address in every notebook."""

import re
import shutil

import pytest
from notebook_files import NOTEBOOKS, ROOT

from helpers import colab, record

ADDRESS = "https://github.com/ada/gpu-lectures"
TEXT = "# 01. Know your GPU\n\n**What is it?**\n\nMore.\n"
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/ada/gpu-lectures/blob/main/notebooks/01_a.ipynb)"
)


@pytest.mark.parametrize("address", [ADDRESS, ADDRESS + "/", ADDRESS + ".git"])
def test_the_badge_stands_below_the_title(address):
    got = colab.with_badge(TEXT, "01_a.ipynb", address)
    assert got == TEXT.replace("\n\n", f"\n\n{BADGE}\n\n", 1)
    assert colab.with_badge(got, "01_a.ipynb", address) == got
    assert colab.with_badge(got, "01_a.ipynb", "") == TEXT


@pytest.mark.parametrize("address", ["", "file:///srv/lectures", "https://gitlab.com/ada/gpu"])
def test_colab_opens_what_is_on_github_only(address):
    assert colab.with_badge(TEXT, "01_a.ipynb", address) == TEXT


def test_the_address_is_that_of_pyproject(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\n', encoding="utf-8")
    assert colab.repository(tmp_path) == ""
    file.write_text(f'[project]\n[project.urls]\nRepository = "{ADDRESS}"\n', encoding="utf-8")
    assert colab.repository(tmp_path) == ADDRESS


def test_normalising_adds_and_removes_both(tmp_path, monkeypatch):
    file = tmp_path / NOTEBOOKS[0].name
    shutil.copy(NOTEBOOKS[0], file)
    before = file.read_text(encoding="utf-8")
    monkeypatch.setattr(colab, "repository", lambda: ADDRESS)
    assert record.main(["--normalise-only", str(file)]) == 0
    after = file.read_text(encoding="utf-8")
    assert f"/ada/gpu-lectures/blob/main/notebooks/{file.name}" in after
    assert re.search(rf'repository, here = \\"{re.escape(ADDRESS)}\\"', after)
    monkeypatch.setattr(colab, "repository", lambda: "")
    assert record.main(["--normalise-only", str(file)]) == 0
    without = file.read_text(encoding="utf-8")
    assert ADDRESS not in without and "Open in Colab" not in without
    monkeypatch.undo()
    assert record.main(["--normalise-only", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == before


def test_readme_has_the_badge_that_the_address_asks_for():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = colab.with_badge(text, "01_specs.ipynb", colab.repository())
    assert text == expected, "python -m helpers.colab"
