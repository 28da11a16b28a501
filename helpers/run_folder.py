"""The folder of one run: its name, what it says of each notebook, and what must not be lost.

runs/nvidia_h200-2026-01-31/
    02_benchmarking.ipynb           executed to its end
    03_roofline.partial.ipynb       executed until it failed
    records/02_benchmarking.json    the numbers that the notebook recorded
    scratch/02_benchmarking.log     what its processes printed outside of cells
    status.json, index.html         one entry per notebook; the report made from it
    results.json                    all records of the run, for others to read
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import psutil
import torch

from helpers import device
from helpers.engine import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
ENTRY = {"status": "not run", "seconds": 0.0, "fingerprint": ""}  # of a notebook in status.json
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
        entries = {stem: ENTRY | entry for stem, entry in status["notebooks"].items()}
        return status | {"notebooks": entries}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused(f"{file} is damaged: move it away, and its run is started anew") from None


def write_status(run: Path, status: dict) -> None:
    """Replace status.json as a whole, so that no moment leaves half of it."""
    temporary = run / "status.json.new"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(status, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the name without the content
    os.replace(temporary, run / "status.json")


def open_folder(output: Path | None, resume: bool, runs: Path = ROOT / "runs") -> Path:
    """The folder to write to, made and tried. Refused when it is taken or cannot be written.

    Without `output` it is `runs/<device>-<date>`, with -2, -3 … when that exists; to resume, the
    newest one of this device.
    """
    try:
        if output is not None:
            run = output.resolve()
            holds_run = (run / "status.json").exists()
            if holds_run and not resume:
                raise Refused(
                    f"{output} already holds a run: choose another folder or continue it with "
                    f"--resume"
                )
            if run.exists() and not holds_run and any(run.iterdir()):
                raise Refused(f"{output} is not empty and holds no run: choose another folder")
            run.mkdir(parents=True, exist_ok=True)
        else:
            run = (_newest(runs) if resume else None) or _new(runs)
        with tempfile.TemporaryFile(dir=run):  # permissions alone do not tell
            pass
        make_folders(run)
        read_status(run)
        _lock(run)
    except OSError as error:
        where = output or runs
        raise Refused(f"the output folder {where} cannot be written: {error.strerror}") from None
    return run


def make_folders(run: Path) -> None:
    """The folders that notebooks write to; a notebook may have removed them."""
    for name in ("records", "scratch"):
        (run / name).mkdir(exist_ok=True)


def _lock(run: Path) -> None:
    """Refused while another process that is alive runs notebooks into this folder."""
    lock = run / "scratch" / "runner.pid"
    with contextlib.suppress(OSError, ValueError):
        other = int(lock.read_text())
        if other != os.getpid() and psutil.pid_exists(other):
            raise Refused(f"{run} is in use by another run (process {other})")
    lock.write_text(str(os.getpid()))


def unlock(run: Path) -> None:
    """Give the folder free for another run."""
    (run / "scratch" / "runner.pid").unlink(missing_ok=True)


def _newest(runs: Path) -> Path | None:
    name = re.compile(re.escape(device.slug()) + r"-(\d{4}-\d\d-\d\d)(?:-(\d+))?")
    found = []
    for status in runs.glob("*/status.json"):
        if match := name.fullmatch(status.parent.name):
            found.append((match[1], int(match[2] or 1), status.parent))
    return max(found)[-1] if found else None


def _new(runs: Path) -> Path:
    base = f"{device.slug()}-{datetime.date.today().isoformat()}"
    number = 1
    while True:
        run = runs / (base if number == 1 else f"{base}-{number}")
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            number += 1


def fingerprint(notebook: NotebookNode, parameters: dict, profile: str) -> str:
    """A hash of what a notebook's results depend on, apart from the machine itself.

    `profile` is what the run resolved it to: it counts the same however it was chosen.
    """
    parameters = {name: value for name, value in parameters.items() if name != "profile"}
    cells = [
        [cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))]
        for cell in notebook.cells
    ]
    versions = [torch.__version__, device.triton_version()]
    inputs = json.dumps([cells, sorted(parameters.items()), profile, versions])
    digest = hashlib.sha256(inputs.encode())
    helpers = (f for f in (ROOT / "helpers").rglob("*") if f.suffix in SOURCES)
    for file in sorted([*helpers, *(ROOT / "data").glob("*.csv")]):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


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
    if files["finished"].exists() and files["records"].exists() and not files["kept"].exists():
        os.replace(files["records"], files["kept"])
    files["records"].unlink(missing_ok=True)


def end(run: Path, stem: str, passed: bool) -> None:
    """Put the new execution in the place of the old one when it passed, else keep the old one."""
    files = paths(run, stem)
    if passed:
        os.replace(files["partial"], files["finished"])
        files["kept"].unlink(missing_ok=True)
    elif files["kept"].exists():
        os.replace(files["kept"], files["records"])
