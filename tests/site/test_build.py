"""Building the site: what must fail, what an address of the repository adds, where MathJax is from.

The collection here is a tiny one: a README, a notebook, two tables.
"""

import base64
import io
import os
import re
import subprocess
import sys
import tarfile

import links
import mathjax
import nbformat
import pages
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image
from places import ROOT

README = """# Tiny

A course, with a [way to run it](#how-to-run).

## Notebooks

| | notebook | what you will see | CPU | H200 |
|---|---|---|---|---|
| 01 | [One](notebooks/01_one.ipynb) | a warp | 1 s | 2 s |

[All claims](data/lecture_map.csv).

## How to run

As you like.

## Licence

Free.
"""
PROSE = """# 01. One

Kernels run in warps; a kernel's warp is no `warp`. See [the map](../data/lecture_map.csv), [the
code](../helpers/code.py), [below](01_one.ipynb#2.-Where,-and-why?) and [numbers](../data/n.csv).
Costs: $x^2$.

## 2. Where, and why?

[A warp](#2.-Where,-and-why?) again.
"""
MAP = """id,part,claim,notebook,how,gpu,cpu,where,verdict
S01,one,"L = 2 * C^-0.05 | [x]",01,model,same,same,"01_one#2. Where, and why?","reproduced: 1"
"""
GLOSSARY = """group,term,russian,meaning,where
1,"warp, wavefront (W)",варп,32 threads,"01_one#2. Where, and why?"
1,kernel,ядро,a function,01_one#01. One
"""


def png():
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "white").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny"
    figure = new_output("display_data", data={"image/png": png()})
    hidden = {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    cells = [
        new_markdown_cell(PROSE),
        new_code_cell("install_on_colab()", metadata={"tags": ["colab"]}),
        new_code_cell("draw()", outputs=[figure]),
        new_code_cell("answer = 42", metadata=hidden),
    ]
    language = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    files = {
        "README.md": README,
        "LICENSE": "Free as in free.",
        "CONTRIBUTING.md": "# Contributing\n\nAll are welcome.\n",
        "tests/cases.md": "# Troubles\n\nNone.\n",
        "pyproject.toml": '[project]\nname = "tiny"\n',
        "data/lecture_map.csv": MAP,
        "data/glossary.csv": GLOSSARY,
        "data/n.csv": "n\n1\n",
        "helpers/code.py": "pass\n",
        "notebooks/01_one.ipynb": nbformat.writes(new_notebook(cells=cells, metadata=language)),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def build(root):
    """Exit code, what was said, and the folder of the site."""
    site = root.parent / "site"
    command = [sys.executable, str(ROOT / "docs" / "build.py"), str(site), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr, site


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_tiny_site(tiny):
    code, said, site = build(tiny)
    assert code == 0, said
    page = (site / "notebooks" / "01_one.html").read_text(encoding="utf-8")
    assert "install_on_colab" not in page
    assert "Show the solution" in page
    assert 'alt="Figure: 2. Where, and why?"' in page
    assert re.search(r'src="../_images/\w+\.webp"', page)
    assert page.count('class="term ') == 2, "warp and kernel, once each"
    assert 'title="32 threads"' in page
    assert 'href="../lecture_map.html"' in page
    for name in ("code.py", "n.csv"):
        assert re.search(rf'href="../_downloads/\w+/{name}"', page)
    assert "colab.research" not in page
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="running.html#how-to-run"' in front
    table = (site / "lecture_map.html").read_text(encoding="utf-8")
    assert "L = 2 * C^-0.05 | [x]" in table
    assert 'href="notebooks/01_one.html#' in table
    assert (site / "_sources" / "notebooks" / "01_one.ipynb").read_bytes() == (
        tiny / "notebooks" / "01_one.ipynb"
    ).read_bytes()


def test_broken_links_fail_the_build(tiny):
    notebook = tiny / "notebooks" / "01_one.ipynb"
    change(notebook, "../data/n.csv", "../data/gone.csv")
    change(notebook, "(01_one.ipynb#2.-Where", "(01_one.ipynb#3.-Where")
    change(tiny / "README.md", "#how-to-run", "#how-to-fly")
    change(tiny / "data" / "glossary.csv", "01_one#01. One", "02_two#02. Two")
    code, said, site = build(tiny)
    assert code != 0
    assert not site.exists()
    for target in ("../data/gone.csv", "3.-Where", "how-to-fly", "02_two.ipynb"):
        assert re.search(rf"WARNING: .*{re.escape(target)}", said), said


def test_an_address_of_the_repository(tiny):
    address = "https://github.com/someone/tiny"
    with open(tiny / "pyproject.toml", "a", encoding="utf-8") as file:
        file.write(f'[project.urls]\nRepository = "{address}.git"\n')
    code, said, site = build(tiny)
    assert code == 0, said
    page = (site / "notebooks" / "01_one.html").read_text(encoding="utf-8")
    colab = "https://colab.research.google.com/github/someone/tiny/blob/main/notebooks/01_one.ipynb"
    assert f'href="{colab}"' in page
    assert f'href="{address}"' in page
    assert f'href="{address}/blob/main/helpers/code.py"' in page
    assert re.search(r'href="../_downloads/\w+/n.csv"', page), "data stay downloads"
    assert not re.search(r'src="https?:', page), "no picture from elsewhere"


def test_mathjax_is_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    kept = mathjax.fetch(ROOT / "build")
    assert (kept / "mathjax" / "es5" / "tex-chtml.js").stat().st_size > 1e6
    with pytest.raises(SystemExit, match="need MathJax, which is not in .*: install npm"):
        mathjax.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="npm's stand-in is a shell script")
@pytest.mark.parametrize(
    "script, said",
    [
        ("echo 'npm error no network' >&2; exit 1", r"could not get it \(npm error no network\)"),
        ("printf x > $4/mathjax.tgz", "SHA-256"),
    ],
)
def test_mathjax_that_cannot_be_had(tmp_path, monkeypatch, script, said):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(SystemExit, match=said):
        mathjax.fetch(tmp_path / "build")
    assert list((tmp_path / "build").iterdir()) == []


def test_an_archive_gives_what_is_needed_only(tmp_path):
    archive = tmp_path / "m.tgz"
    with tarfile.open(archive, "w:gz") as files:
        for name in ("package/LICENSE", "package/es5/sre/x.js", "package/es5/tex-chtml.js"):
            files.addfile(tarfile.TarInfo(name))
    mathjax._unpack(archive, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").rglob("*.*")} == {"tex-chtml.js"}


def test_terms_are_words():
    rows = [{"term": "kernel"}, {"term": "operator fusion, kernel fusion"}]
    rows += [{"term": "streaming processor (SP), lane"}, {"term": "L2 cache, L1 cache"}]
    terms = links.Terms(rows)
    text = "Kernel fusion of kernels; an SP, not wasp or sp; airplanes, two lanes, an L1 cache."
    found = [(text[start:end], row["term"].split(",")[0]) for start, end, row in terms.find(text)]
    assert found == [
        ("Kernel fusion", "operator fusion"),
        ("kernels", "kernel"),
        ("SP", "streaming processor (SP)"),
        ("lanes", "streaming processor (SP)"),
        ("L1 cache", "L2 cache"),
    ]


def test_readme_that_misses_a_notebook_is_refused(tiny, tmp_path):
    second = tiny / "notebooks" / "02_two.ipynb"
    second.write_bytes((tiny / "notebooks" / "01_one.ipynb").read_bytes())
    with pytest.raises(ValueError, match="1 of 2 notebooks"):
        pages.gather(tiny, tmp_path / "source")
