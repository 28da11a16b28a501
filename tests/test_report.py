"""The report, from run folders made by hand."""

import html.parser
import importlib.util
import sys

import nbformat
import pytest

from helpers import report, results, run_folder

RECORD = {
    "claim": "L05", "op": "<matmul>", "shape": "", "dtype": "float32", "clock": "host",
    "value": 12.5, "p20": None, "p80": None, "unit": "ms", "profile": "smoke", "device": "cpu",
    "torch": "2", "triton": "3", "date": "2026-01-31", "notebook": "01_a",
}  # fmt: skip
FAILURE = {
    "notebook": "02_b", "status": "failed", "seconds": 90.0, "fingerprint": "",
    "error": "TypeError",
    "lines": ["first", "TypeError: <script>alert(1)</script>"],
    "cell": {"index": 4, "cells": 9, "execution_count": 3, "source": "a < b", "heading": "H & M"},
}  # fmt: skip


class Links(html.parser.HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src")]


@pytest.fixture
def folder(tmp_path):
    passed = {"notebook": "01_a", "status": "passed", "seconds": 30.0, "fingerprint": ""}
    waiting = {"notebook": "03_c", "status": "not run", "seconds": 0.0, "fingerprint": ""}
    entries = {entry["notebook"]: entry for entry in (waiting, FAILURE, passed)}
    run_folder.write_status(tmp_path, {"device": "cpu", "profile": "full", "notebooks": entries})
    results.save([RECORD], tmp_path / "records" / "01_a.json")
    source = nbformat.v4.new_code_cell("print(1)")
    for name in ("01_a", "02_b.partial"):
        nbformat.write(nbformat.v4.new_notebook(cells=[source]), tmp_path / f"{name}.ipynb")
    return tmp_path


def test_the_page_says_what_happened(folder):
    page = report.write(folder).read_text(encoding="utf-8")
    assert "1 of 3 notebooks passed" in page
    assert "cell 5 of 9, H &amp; M: TypeError" in page
    assert "a &lt; b" in page and "&lt;script&gt;" in page and "<script" not in page
    assert "<td>&lt;matmul&gt;</td>" in page and "12.5" in page
    assert "1.5</td>" in page  # minutes
    assert "PyTorch" in page and "<dd>full</dd>" in page  # the machine and the run's profile
    assert page.index('id="01_a"') < page.index('id="02_b"') < page.index('id="03_c"')
    assert "Nothing was executed" in page.split('id="03_c"')[1]


def test_the_page_stands_alone(folder):
    page = report.write(folder).read_text(encoding="utf-8")
    links = Links(page)
    assert "://" not in page
    assert not {"script", "link", "img"} & set(links.tags)
    files = [address for address in links.addresses if not address.startswith("#")]
    assert files == ["01_a.ipynb", "02_b.partial.ipynb"]
    assert all((folder / file).exists() for file in files)
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_executed_notebooks_become_pages(folder):
    if importlib.util.find_spec("nbconvert") is None:
        assert "Install nbconvert" in report.write(folder, convert=True).read_text()
        return
    files = Links(report.write(folder, convert=True).read_text(encoding="utf-8")).addresses
    assert "01_a.html" in files and "02_b.partial.html" in files
    assert "print" in (folder / "01_a.html").read_text(encoding="utf-8")
    # a notebook that cannot be converted is named, and costs nothing else
    (folder / "01_a.html").unlink()
    (folder / "01_a.ipynb").write_text("{}")
    page = report.write(folder, convert=True).read_text(encoding="utf-8")
    assert "No page could be made of 01_a.ipynb" in page
    assert "01_a.html" not in page and "02_b.partial.html" in page


def test_without_nbconvert_one_sentence_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbconvert", None)
    page = report.write(folder, convert=True).read_text(encoding="utf-8")
    assert page.count("Install nbconvert") == 1
    assert 'href="01_a.ipynb"' in page


def test_damaged_records_do_not_cost_the_report(folder):
    (folder / "records" / "01_a.json").write_text('[{"claim": "L05"}]')
    page = report.write(folder).read_text(encoding="utf-8")
    assert "cannot be shown: KeyError" in page


def test_summary_lines_up():
    passed = {"notebook": "10_longer", "status": "passed", "seconds": 12.0}
    lines = report.summary([FAILURE, passed]).splitlines()
    assert lines == [
        "notebook   status  minutes  where",
        "02_b       failed      1.5  cell 5 of 9, H & M: TypeError",
        "10_longer  passed      0.2",
    ]
