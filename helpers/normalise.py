"""Bring a notebook into the form in which it is committed: no trace of when and where it ran."""

import copy
import re
import tempfile
from pathlib import Path

from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
NOTEBOOK_METADATA = ("kernelspec", "language_info")
CELL_METADATA = ("tags", "jupyter")  # not papermill's, not the times of each message
WIDGET = "application/vnd.jupyter.widget-view+json"
# A line, or what a carriage return overwrites, with "40%|████ " or "[00:03<00:05, " in it.
PROGRESS_BAR = re.compile(r"\r?[^\r\n]*(?:\d+%\||\[\d+:\d\d(?::\d\d)?[<,])[^\r\n]*\n?")


def normalise(notebook: NotebookNode, root: Path = ROOT, home: Path | None = None) -> NotebookNode:
    """A copy of an executed notebook that depends on its results alone.

    Keeps cell ids, execution counts, tags and figures (byte for byte). Drops papermill's and
    timing metadata, widgets, progress bars and empty outputs; in text, `root` becomes ".", `home`
    (default: this user's) "~", and other folders of this machine get a neutral name.
    Normalising twice changes nothing more.
    """
    notebook = copy.deepcopy(notebook)
    replacements = _replacements(root, home or Path.home())
    _keep(notebook.metadata, NOTEBOOK_METADATA)
    notebook.metadata["kernelspec"] = NotebookNode(KERNELSPEC)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        _keep(cell.metadata, CELL_METADATA)
        cell.source = _stripped(cell.source, each_line=cell.cell_type == "code")
        if cell.cell_type == "code":
            cell.outputs = _outputs(cell.outputs, replacements)
    return notebook


def _keep(metadata: NotebookNode, keys: tuple[str, ...]) -> None:
    for key in list(metadata):
        if key not in keys or metadata[key] in ([], {}):  # papermill adds empty lists of tags
            del metadata[key]


def _stripped(source: str, each_line: bool) -> str:
    if each_line:  # in Markdown two spaces at the end of a line mean something
        source = "\n".join(line.rstrip() for line in source.split("\n"))
    return source.rstrip()


def _outputs(outputs: list[NotebookNode], replacements: list) -> list[NotebookNode]:
    kept = []
    for output in _joined_streams(outputs):
        if output.output_type == "stream" and output.name == "stderr":
            output.text = _without_progress(output.text)
        if not _is_empty(output):
            _replace_paths(output, replacements)
            kept.append(output)
    return _joined_streams(kept)


def _joined_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    # How the text of one stream is cut into outputs depends on the kernel's timing.
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _without_progress(text: str) -> str:
    rest = PROGRESS_BAR.sub("", text)
    return rest if rest == text or rest.strip() else ""


def _is_empty(output: NotebookNode) -> bool:
    if output.output_type == "stream":
        return not output.text
    if output.output_type in ("display_data", "execute_result"):
        return not output.data or WIDGET in output.data
    return False


def _replace_paths(output: NotebookNode, replacements: list) -> None:
    def replaced(text: str) -> str:
        for pattern, name in replacements:
            text = pattern.sub(name, text)
        return text

    if output.output_type == "stream":
        output.text = replaced(output.text)
    elif output.output_type == "error":
        output.evalue = replaced(output.evalue)
        output.traceback = [replaced(line) for line in output.traceback]
    else:
        for mime_type, content in output.data.items():
            if mime_type.startswith("text/") or mime_type == "image/svg+xml":
                output.data[mime_type] = replaced(content)


def _replacements(root: Path, home: Path) -> list[tuple[re.Pattern, str]]:
    """Patterns of this machine's folders and their names, those that hold others last."""

    def folder(path: Path) -> re.Pattern:
        return re.compile(rf"(?<![\w./~-]){re.escape(str(path))}(?![\w.-])")

    named = [(root, "."), (home, "~"), (Path(tempfile.gettempdir()), "$TMPDIR")]
    return [
        (re.compile(r"[^\s'\"<>]*[/\\]ipykernel_\d+[/\\]\d+\.py"), "<cell>"),
        (re.compile(r"[^\s'\"<>]*[/\\](?:site|dist)-packages(?=[/\\])"), "site-packages"),
        *((folder(path), name) for path, name in named if path != Path(path.anchor)),
    ]
