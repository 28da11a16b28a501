"""The folder of one run: its name, what it says of each notebook, and what must not be lost.

runs/nvidia_h200-2026-01-31/
    02_benchmarking.ipynb           executed to its end
    03_roofline.partial.ipynb       executed until it failed
    records/02_benchmarking.json    the numbers that the notebook recorded
    scratch/02_benchmarking.log     what its processes printed outside of cells
    status.json, index.html         one entry per notebook; the report made from it
    results.json                    all records of the run, for others to read
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
import torch

from helpers import device, engine
from helpers.engine import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
ENTRY = {"status": "not run", "seconds": 0.0, "fingerprint": ""}  # of a notebook in status.json
GATHERS = "gathers"  # tag of a parameters cell: it reads what the notebooks before it recorded
SEAL = "helpers_run"  # a finished notebook's metadata: its entry, and which records belong to it
SOURCES = (".py", ".cu", ".h", ".cpp")  # of the helpers: what a notebook's results depend on


class Refused(Exception):
    """The run cannot start; the message says why in one sentence."""


def paths(run: Path, stem: str) -> dict[str, Path]:
    """Where a notebook's files are: finished, partial, log, records and kept (older records)."""
    return {
        "finished": run / f"{stem}.ipynb",
        "partial": run / f"{stem}.partial.ipynb",
        "log": run / "scratch" / f"{stem}.log",
        "records": run / "records" / f"{stem}.json",
        "kept": run / "records" / f"{stem}.json.kept",
    }


def read_status(run: Path) -> dict:
    """The content of status.json: device, profile and, by notebook, what is known of it."""
    file = run / "status.json"
    if not file.exists():
        return {"device": device.slug(), "profile": "auto", "notebooks": {}}
    try:
        status = json.loads(file.read_text(encoding="utf-8"))
        entries = {
            stem: {"notebook": stem, **ENTRY, **entry}
            for stem, entry in status["notebooks"].items()
        }
        for entry in entries.values():
            texts = isinstance(entry["status"], str) and isinstance(entry["fingerprint"], str)
            if not (texts and isinstance(entry["seconds"], int | float)):
                raise TypeError
        return {"profile": "auto"} | status | {"notebooks": entries}
    except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError):
        raise Refused(f"{file} is damaged: continue its run with --resume") from None


def write_status(run: Path, status: dict) -> None:
    """Replace status.json."""
    write_whole(run / "status.json", json.dumps(status, indent=1, ensure_ascii=False))


def write_whole(file: Path, text: str) -> None:
    """Replace a file as a whole, so that no moment leaves half of it."""
    temporary = file.with_name(f"{file.name}.new")
    for path in (temporary, file):
        if path.is_dir():
            make_way(path)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())  # else a power cut could leave the name without the content
    os.replace(temporary, file)


def make_way(path: Path) -> None:
    """Remove a file of the run; a folder in its place, which may be anybody's, is moved aside."""
    if path.is_dir() and not path.is_symlink():
        os.replace(path, Path(tempfile.mkdtemp(prefix="aside-", dir=path.parent)) / path.name)
    else:
        path.unlink(missing_ok=True)


def make_folders(run: Path) -> None:
    """The folders that notebooks write to; a notebook may have removed them."""
    for name in ("records", "scratch"):
        (run / name).mkdir(exist_ok=True)


def fingerprint(
    notebook: NotebookNode, parameters: dict, profile: str, gathered: Sequence = ()
) -> str:
    """A hash of what a notebook's results depend on, apart from the machine itself.

    `gathered` tells the executions of other notebooks whose records it reads. `profile` is what
    the run resolved it to: it counts the same however it was chosen.
    """
    parameters = {name: value for name, value in parameters.items() if name != "profile"}
    cells = [
        [cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))]
        for cell in notebook.cells
    ]
    versions = [torch.__version__, device.triton_version()]
    inputs = json.dumps([cells, sorted(parameters.items()), profile, versions, *gathered])
    digest = hashlib.sha256(inputs.encode())
    for part in code():
        digest.update(part)
    return digest.hexdigest()


def code() -> Iterator[bytes]:
    """The helpers and data that results depend on: of each file its name and what it holds."""
    helpers = (f for f in (ROOT / "helpers").rglob("*") if f.suffix in SOURCES)
    for file in sorted([*helpers, *(ROOT / "data").glob("*.csv")]):
        yield file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes()


def gathered(notebook: NotebookNode, name: str, entries: dict[str, dict]) -> list[list[str]]:
    """Which executions a notebook tagged `GATHERS` reads the records of: those before it."""
    device = name.rpartition("/")[0]
    before = [e for other, e in sorted(entries.items())
              if other < name and other.rpartition("/")[0] == device]  # fmt: skip
    passed = [[e["notebook"], e["started"]] for e in before if e["status"] == "passed"]
    return passed if engine.has_tag(notebook, GATHERS) else []


def is_finished(run: Path, entry: dict, inputs: str) -> bool:
    """True when the run holds this notebook, executed to its end with these inputs."""
    return (
        entry["status"] == "passed"
        and entry["fingerprint"] == inputs
        and paths(run, entry["notebook"])["finished"].exists()
    )


def begin(run: Path, stem: str) -> None:
    """Put the records of an earlier finished execution aside before the notebook writes its own."""
    files = paths(run, stem)
    if files["finished"].is_file() and files["records"].is_file() and not files["kept"].exists():
        os.replace(files["records"], files["kept"])
    for name in ("records", "partial", "log"):
        make_way(files[name])


def end(run: Path, entry: dict) -> None:
    """Put the new execution in the place of the old one when it passed, else keep the old one.

    What was kept of a finished notebook is kept in one step, its entry within the notebook.
    ValueError for a file that is no notebook any more.
    """
    files = paths(run, entry["notebook"])
    if entry["status"] == "passed":
        executed = engine.read(files["partial"])
        executed.metadata[SEAL] = entry | {"records": _digest(files["records"])}
        nbformat.write(executed, files["partial"])
        if files["finished"].is_dir():
            make_way(files["finished"])
        os.replace(files["partial"], files["finished"])
        make_way(files["kept"])
    elif files["kept"].exists():
        os.replace(files["kept"], files["records"])


def borne_out(run: Path, entry: dict) -> dict:
    """A notebook's entry as far as its files agree: what was damaged is not finished, and what is
    finished without the entry knowing it is. Records that a killed run has put aside come back."""
    files = paths(run, entry["notebook"])
    missing = {"notebook": entry["notebook"], **ENTRY}
    try:
        executed = json.loads(files["finished"].read_text(encoding="utf-8"))
        executed["cells"], seal = executed["cells"], executed["metadata"].get(SEAL)
        if seal and seal["notebook"] != entry["notebook"]:
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return missing if entry["status"] == "passed" else entry
    if files["kept"].exists():
        if seal is None or _digest(files["kept"]) == seal["records"]:
            make_way(files["records"])
            os.replace(files["kept"], files["records"])
        else:
            make_way(files["kept"])
    if seal is None:  # of a version that wrote none
        return entry
    if entry["status"] == "passed" or entry.get("started", "") <= seal["started"]:
        return seal if _digest(files["records"]) == seal["records"] else missing
    return entry


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
