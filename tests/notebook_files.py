"""The notebooks as the tests see them, and the rules that every one keeps."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from helpers import colab

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MAX_BYTES = 1_500_000
MAX_CELL_LINES = 40
# An absolute path of the machine that ran the notebook; "/tmp" or "/root" alone may be prose.
HOMES = r"(?<![\w.~-])(?:/home/|/root/|/Users/|/tmp/|/var/folders/|[A-Z]:\\Users\\)"
PROGRESS_BAR = re.compile(r"\d+%\|.*\||\d+/\d+ \[\d\d:\d\d<")


def read(path: Path) -> NotebookNode:
    """The notebook as it stands in the file; nbformat.read would repair it on the way."""
    return nbformat.reader.reads(path.read_text(encoding="utf-8"))


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def output_texts(cell: NotebookNode) -> Iterator[str]:
    """Every text in a cell's outputs; figures are left out."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        for mime_type, content in output.get("data", {}).items():
            if mime_type.startswith("text/") or mime_type == "image/svg+xml":
                yield content


def problems(path: Path, names: list[str]) -> list[str]:
    """What is wrong with a notebook file, given the names of all notebook files in order."""
    notebook = read(path)
    found = [
        *_format_problems(path, notebook),
        *_opening_problems(path, notebook, names),
        *_execution_problems(notebook),
        *_cleanliness_problems(notebook),
        *_exercise_problems(notebook),
    ]
    return [f"{path.name}: {problem}" for problem in found]


def _format_problems(path: Path, notebook: NotebookNode) -> Iterator[str]:
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        yield "not in notebook format 4.5"
        return  # cells have no ids before
    kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    if notebook.metadata.get("kernelspec") != kernelspec:
        yield "the kernelspec is not the plain python3"
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name):
        yield "the name is not of the form 01_words.ipynb"
    ids = [cell.id for cell in notebook.cells]
    if len(set(ids)) < len(ids):
        yield "an id stands twice"  # nbformat.validate would give it a new one
    else:
        try:
            nbformat.validate(notebook)
        except nbformat.ValidationError as error:
            yield f"invalid: {error.message}"
    for cell_id in ids:
        if not re.fullmatch(rf"{path.name[:2]}-[a-z0-9-]+", cell_id):
            yield f"the id {cell_id} is not of the form {path.name[:2]}-words"
    if path.stat().st_size > MAX_BYTES:
        yield f"larger than {MAX_BYTES / 1e6} MB"
    for cell in code_cells(notebook):
        lines = cell.source.count("\n") + 1
        if lines > MAX_CELL_LINES and not any(tag.startswith("mirror:") for tag in tags(cell)):
            yield f"{cell.id} has {lines} lines"


def _opening_problems(path: Path, notebook: NotebookNode, names: list[str]) -> Iterator[str]:
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not re.match(rf"# {path.name[:2]}\. \S", first.source):
        yield f"the first cell does not start with '# {path.name[:2]}. Title'"
    links = re.findall(r"\]\((?:\./)?([^)/]+\.ipynb)", first.source)
    place = names.index(path.name)
    for neighbour in names[max(place - 1, 0) : place] + names[place + 1 : place + 2]:
        if neighbour not in links:
            yield f"the first cell has no link to {neighbour}"
    for link in links:
        if link not in names:
            yield f"the first cell links to {link}, which does not exist"
    yield from _colab_problems(path.name[:2], notebook)
    parameters = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    if len(parameters) != 1:
        yield f"{len(parameters)} cells are tagged parameters"
    elif not re.search(r'^profile = "auto"', parameters[0].source, re.MULTILINE):
        yield 'the parameters cell does not set profile = "auto"'


def _colab_problems(number: str, notebook: NotebookNode) -> Iterator[str]:
    cell = code_cells(notebook)[0]
    name = f"{number}-colab"
    if cell.get("id", name) != name or tags(cell) != [colab.TAG]:
        yield f"the first code cell is not {name}, tagged {colab.TAG}"
    elif not cell.metadata.get("jupyter", {}).get("source_hidden", False):
        yield f"{cell.id} is not collapsed"
    elif cell.outputs:
        yield f"{cell.id} shows an output"


def _execution_problems(notebook: NotebookNode) -> Iterator[str]:
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"not run from top to bottom in a fresh kernel: execution counts {counts}"
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                yield f"{cell.id} ended in {output.ename}"
            if output.get("execution_count", cell.execution_count) != cell.execution_count:
                yield f"{cell.id} shows the result of another run"
    images = ("image/png", "image/svg+xml")
    outputs = [output.get("data", {}) for cell in cells for output in cell.outputs]
    if not any(image in data for data in outputs for image in images):
        yield "no output is a picture"


def _cleanliness_problems(notebook: NotebookNode) -> Iterator[str]:
    for name in sorted(set(notebook.metadata) - {"kernelspec", "language_info"}):
        yield f"metadata of the notebook: {name}"
    paths = re.compile(rf"{HOMES}|/site-packages/|{re.escape(_folder(ROOT.parent))}")
    for cell in notebook.cells:
        for name in sorted(set(cell.metadata) - {"tags", "jupyter"}):
            yield f"{cell.id} has metadata: {name}"
        for text in (cell.source, *output_texts(cell)):
            if match := paths.search(text):
                line = text[text.rfind("\n", 0, match.start()) + 1 :].splitlines()[0]
                yield f"{cell.id} holds a path of one machine: {line.strip()[:100]}"
        for text in output_texts(cell):
            if PROGRESS_BAR.search(text):
                yield f"{cell.id} shows a progress bar"
        for output in cell.get("outputs", []):
            if any("widget" in mime_type for mime_type in output.get("data", {})):
                yield f"{cell.id} shows a widget"


def _folder(path: Path) -> str:
    # A clone directly under / would make every absolute path a match.
    return f"{path}/" if path != Path(path.anchor) else tempfile.gettempdir() + "/"


def _exercise_problems(notebook: NotebookNode) -> Iterator[str]:
    cells = code_cells(notebook)
    for cell in cells:
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        if "solution" in tags(cell) and not hidden:
            yield f"{cell.id} is a solution that is not collapsed"
    starts = [place for place, cell in enumerate(cells) if "exercise" in tags(cell)]
    for start, end in zip(starts, [*starts[1:], len(cells)], strict=True):
        after = cells[start + 1 : end]
        checks = [place for place, cell in enumerate(after) if "check_exercise(" in cell.source]
        solutions = [place for place, cell in enumerate(after) if "solution" in tags(cell)]
        if not checks or not solutions or checks[0] > solutions[0]:
            yield f"{cells[start].id} is not followed by its check and then its solution"
