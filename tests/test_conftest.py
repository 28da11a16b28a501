"""What conftest.py adds to nbval, tried on small notebooks in a pytest of their own."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parent.parent
CHECK = {"tags": ["nbval-check-output"]}


def printed(text):
    return new_output("stream", text=text, name="stdout")


def cell(source, *outputs, **metadata):
    return new_code_cell(source, outputs=list(outputs), execution_count=1, metadata=metadata)


NOTEBOOKS = {
    "dies": [
        cell("import os, signal"),
        cell("os.kill(os.getpid(), signal.SIGKILL)"),
        cell("print('never')"),
        cell("print('never')"),
    ],
    "raises": [cell("1 / 0"), cell("print('never')")],
    "differs": [cell("print('new')", printed("old\n"), **CHECK), cell("print('never')")],
    "hangs": [cell("import time\ntime.sleep(60)"), cell("print('never')")],
    "passes": [
        cell("import time\nprint(time.time())", printed("1700000000.0\n")),  # case B05
        cell("print(In[1] == 'import time\\nprint(time.time())')", printed("True\n"), **CHECK),
        # the kernel reads what comes this way beside the cell: it needs a moment
        cell(
            "import os\nb = os.write(1, b'bytes\\n')\ntime.sleep(0.5)", printed("bytes\n"), **CHECK
        ),
        cell(
            "import subprocess, sys\n"
            "done = subprocess.run([sys.executable, '-c', 'print(\"child\")'])",
            printed("child\n"),
            **CHECK,
        ),
        cell("print(os.environ['LECTURES_PROFILE'])", printed("smoke\n"), **CHECK),
        cell("print('PYTEST_CURRENT_TEST' in os.environ)", printed("False\n"), **CHECK),
        cell(f"print(sys.executable == {sys.executable!r})", printed("True\n"), **CHECK),
    ],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """notebook -> [(outcome, message) of each cell], from a run of pytest."""
    folder = tmp_path_factory.mktemp("nbval")
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "notebooks").mkdir()
    for name, cells in NOTEBOOKS.items():
        # A kernel that is not there: the cells must run with this Python all the same.
        kernelspec = {"name": "missing", "display_name": "missing", "language": "python"}
        notebook = new_notebook(cells=cells, metadata={"kernelspec": kernelspec})
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--junitxml=report.xml", "-p", "no:cacheprovider"]
    environment = {name: text for name, text in os.environ.items() if name != "LECTURES_PROFILE"}
    done = subprocess.run(
        [*command, "--nbval-cell-timeout=3", "notebooks"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = {name: [] for name in NOTEBOOKS}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        result = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome, text = "passed", ""
        if result is not None:
            outcome, text = result.tag, f"{result.get('message')} {result.text}"
        name = re.search(r"(\w+)\.ipynb|notebooks\.(\w+)", case.get("classname") + case.get("name"))
        found[name[1] or name[2]].append((outcome, text))
    return found


def kinds(outcomes, name):
    return [outcome for outcome, _ in outcomes[name]]


@pytest.mark.case("B06")
def test_a_dead_kernel_is_noticed_at_once(outcomes):
    assert kinds(outcomes, "dies") == ["passed", "failure", "skipped", "skipped"]
    _, message = outcomes["dies"][1]
    # The time limit of a cell (3 s here) did not end the wait: its message is another.
    assert "kernel died" in message and "SIGKILL" in message


@pytest.mark.parametrize("name", ["raises", "differs", "hangs"])
def test_the_rest_of_a_notebook_is_skipped_after_a_failure(outcomes, name):
    assert kinds(outcomes, name) == ["failure", "skipped"]
    assert "earlier cell" in outcomes[name][1][1]


def test_failures_say_what_happened(outcomes):
    assert "ZeroDivisionError" in outcomes["raises"][0][1]
    assert "Cell outputs differ" in outcomes["differs"][0][1]
    assert "Timeout of 3 seconds" in outcomes["hangs"][0][1]


@pytest.mark.case("B05")
def test_what_must_pass_passes(outcomes):
    failed = [text for outcome, text in outcomes["passes"] if outcome != "passed"]
    assert not failed, "\n".join(failed)
    assert len(outcomes["passes"]) == len(NOTEBOOKS["passes"])
