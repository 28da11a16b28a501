"""Every notebook keeps the rules of the collection; one runs through `python -m helpers.run`.

nbval executes every one (conftest.py).
"""

import importlib.util
import json
import re
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_files import NOTEBOOKS, ROOT, problems, read

from helpers import colab, engine
from helpers.normalise import normalise

NAMES = [path.name for path in NOTEBOOKS]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# It is executed here too. nbval has executed all with the same sizes, and `helpers.record` has made
# the committed outputs of all through this runner, so that one shows that it still works: this one
# compiles, starts processes and prints from C.
THROUGH_THE_RUNNER = ROOT / "notebooks" / "05_cuda_gelu.ipynb"


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_takes_the_runners_profile(path):
    assert "profile" in engine.parameter_names(engine.read(path))


def test_runs_through_the_runner(tmp_path):
    path, folder = THROUGH_THE_RUNNER, tmp_path / "run"
    command = [sys.executable, "-m", "helpers.run", path.name, "--profile", "smoke"]
    done = subprocess.run(
        [*command, "--output", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((folder / "status.json").read_text())
    assert status["notebooks"][path.stem]["status"] == "passed"
    executed = read(folder / path.name)
    assert [cell.source for cell in executed.cells if "injected-parameters" in cell.metadata.tags]
    assert (folder / path.with_suffix(".html").name).exists()


@each_notebook
def test_keeps_the_rules(path):
    found = problems(path, NAMES)
    assert not found, "\n".join(found)


@each_notebook
def test_is_in_normal_form(path):
    notebook = normalise(read(path))
    colab.refresh(notebook, path.name, colab.repository())
    expected = nbformat.writes(notebook) + "\n"
    assert path.read_text(encoding="utf-8") == expected, (
        f"python -m helpers.record --normalise-only {path.relative_to(ROOT)}"
    )


@pytest.mark.skipif(not importlib.util.find_spec("ruff"), reason="ruff is not installed")
def test_code_cells_pass_ruff():
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "notebooks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The rules themselves, on a small notebook that keeps them all.


def good_notebook():
    def code(name, source, count, *tags, outputs=(), **metadata):
        metadata = metadata | ({"tags": list(tags)} if tags else {})
        return new_code_cell(
            source, id=name, execution_count=count, metadata=metadata, outputs=list(outputs)
        )

    picture = new_output("display_data", data={"image/png": "aGk=\n", "text/plain": "<Figure>"})
    result = new_output("execute_result", data={"text/plain": "3"}, execution_count=3)
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(
        metadata={"kernelspec": kernelspec, "language_info": {"name": "python"}},
        cells=[
            new_markdown_cell("# 02. Title\n[back](01_a.ipynb) [on](03_c.ipynb)", id="02-title"),
            code("02-colab", "pass", 1, "colab", jupyter={"source_hidden": True}),
            code("02-parameters", 'profile = "auto"\nsize = 3', 2, "parameters"),
            code("02-size", "size", 3, outputs=[result, picture]),
            code("02-stub", "def answer(): ...", 4, "exercise"),
            code("02-check", "check_exercise(answer)", 5),
            code("02-solution", "42", 6, "solution", jupyter={"source_hidden": True}),
            new_code_cell("", id="02-empty"),
        ],
    )


def found_in(notebook, folder, name="02_b.ipynb"):
    path = folder / name
    path.write_text(nbformat.v4.writes(notebook), encoding="utf-8")
    return problems(path, sorted(["01_a.ipynb", name, "03_c.ipynb"]))


def test_a_good_notebook_has_no_problems(tmp_path):
    assert found_in(good_notebook(), tmp_path) == []


def set_metadata(cell, name):
    return lambda notebook: notebook.cells[cell].metadata.update({name: {}})


def set_source(cell, source):
    return lambda notebook: notebook.cells[cell].update(source=source)


def print_text(text, name="stdout"):
    output = new_output("stream", text=text, name=name)
    return lambda notebook: notebook.cells[3].outputs.append(output)


def show(mime_type, content):
    output = new_output("display_data", data={mime_type: content})
    return lambda notebook: notebook.cells[3].outputs.append(output)


MUTANTS = {
    "format 4.5": lambda n: n.update(nbformat_minor=4) or [c.pop("id") for c in n.cells],
    "invalid": lambda n: n.cells[3].metadata.update(tags=["core", "core"]),
    "kernelspec": lambda n: n.metadata.kernelspec.update(display_name="mine"),
    "stands twice": lambda n: n.cells[3].update(id="02-stub"),
    "02-words": lambda n: n.cells[3].update(id="a1b2c3"),
    "larger than": show("image/jpeg", "A" * 1_500_000),
    "41 lines": set_source(3, "\n".join(["size"] * 41)),
    "does not start with": set_source(0, "# Title\n[back](01_a.ipynb) [on](03_c.ipynb)"),
    "no link to 03": set_source(0, "# 02. Title\n[back](01_a.ipynb)"),
    "no link to 01": set_source(0, "# 02. Title\n[on](03_c.ipynb)"),
    "does not exist": lambda n: n.cells[0].update(source=n.cells[0].source + " [x](09_x.ipynb)"),
    "first code cell is not 02-colab": lambda n: n.cells[1].update(id="02-begin"),
    "not 02-colab, tagged": lambda n: n.cells[1].metadata.update(tags=["core"]),
    "02-colab is not collapsed": lambda n: n.cells[1].metadata.pop("jupyter"),
    "02-colab shows": lambda n: n.cells[1].outputs.append(
        new_output("stream", text="installed", name="stdout")
    ),
    "0 cells are tagged": lambda n: n.cells[2].metadata.clear(),
    "2 cells are tagged": lambda n: n.cells[3].metadata.update(tags=["parameters"]),
    "does not set profile": set_source(2, 'profile = "smoke"'),
    "fresh kernel": lambda n: n.cells[4].update(execution_count=7),
    "another run": lambda n: n.cells[3].outputs[0].update(execution_count=7),
    "ended in ValueError": lambda n: n.cells[3].outputs.append(
        new_output("error", ename="ValueError", evalue="", traceback=[])
    ),
    "no output is a picture": lambda n: n.cells[3].outputs.pop(),
    "notebook: papermill": lambda n: n.metadata.update(papermill={}),
    "notebook: widgets": lambda n: n.metadata.update(widgets={}),
    "metadata: papermill": set_metadata(3, "papermill"),
    "metadata: execution": set_metadata(0, "execution"),
    "of one machine: /home": print_text("/home/ada/x"),
    "of one machine: Warning": print_text("a\nWarning in /tmp/x.py\n", "stderr"),
    "of one machine: <b>": show("text/html", "<b>/usr/lib/site-packages/torch/x.py"),
    "of one machine: open": set_source(3, "open('/root/x')"),
    f"machine: {ROOT.parent}": print_text(f"{ROOT.parent}/other"),
    "progress bar": print_text("\r 50%|█████     | 1/2 [00:01<00:01]", "stderr"),
    "widget": show("application/vnd.jupyter.widget-view+json", {"model_id": "1"}),
    "solution that is not collapsed": lambda n: n.cells[6].metadata.pop("jupyter"),
    "not followed": lambda n: n.cells.pop(6),
    "check and then": lambda n: (
        n.cells.pop(5) and [c.update(execution_count=c.execution_count - 1) for c in n.cells[5:6]]
    ),
}


@pytest.mark.parametrize("problem", MUTANTS)
def test_the_rules_find(problem, tmp_path):
    notebook = good_notebook()
    MUTANTS[problem](notebook)
    found = found_in(notebook, tmp_path)
    assert len(found) == 1 and problem in found[0]


def test_the_rules_find_a_wrong_name(tmp_path):
    found = found_in(good_notebook(), tmp_path, "02-B.ipynb")
    assert len(found) == 1 and "01_words" in found[0]


def test_a_mirrored_cell_may_be_long(tmp_path):
    notebook = good_notebook()
    set_source(3, "\n".join(["size"] * 41))(notebook)
    notebook.cells[3].metadata.tags = ["mirror:helpers.bench.benchmark"]
    assert found_in(notebook, tmp_path) == []


@pytest.mark.skipif(not importlib.util.find_spec("ruff"), reason="ruff is not installed")
@each_notebook
def test_every_section_works_after_the_setup_alone(path, tmp_path):
    """No section uses a name that another one defines."""
    parts = [[]]
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and re.search("^## ", cell.source, re.MULTILINE):
            parts.append([])
        if cell.cell_type == "code":
            parts[-1].append(cell.source)
    setup, *sections = ["\n".join(cells) for cells in parts]
    for number, section in enumerate(sections, start=1):
        (tmp_path / f"section_{number}.py").write_text(f"{setup}\n{section}\n", encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
