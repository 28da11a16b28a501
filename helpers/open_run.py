"""The folder that a run writes to: chosen, made, locked against other runs, and mended."""

import contextlib
import datetime
import os
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import filelock

from helpers import execute, run_folder
from helpers.run_folder import ROOT, Refused

LOCK = ".lock"  # the operating system's lock on it ends with the process that has it
_held: dict[Path, filelock.FileLock] = {}


def open_folder(
    output: Path | None,
    resume: bool,
    slug: str,
    wanted: Collection[str] = (),
    runs: Path = ROOT / "runs",
) -> Path:
    """The folder to write to, made and tried. Refused when it is taken or cannot be written.

    Without `output` it is `runs/<slug>-<date>`, with -2, -3 … when that exists; to resume, the
    newest one of this slug that was to execute all notebooks of `wanted`, else the newest.
    """
    try:
        if output is not None:
            run = output.resolve()
            if _holds_run(run) and not resume:
                raise Refused(
                    f"{output} already holds a run: choose another folder or continue it with "
                    f"--resume"
                )
            if run.exists() and not _holds_run(run) and any(run.iterdir()):
                raise Refused(f"{output} is not empty and holds no run: choose another folder")
            run.mkdir(parents=True, exist_ok=True)
        else:
            run = (_newest(runs, slug, wanted) if resume else None) or _new(runs, slug)
        with tempfile.TemporaryFile(dir=run):  # permissions alone do not tell
            pass
        _lock(run)
        try:
            execute.end_leftovers(run)
            run_folder.make_folders(run)
            _mend(run)
        except BaseException:
            unlock(run)
            raise
    except OSError as error:
        reason = error.strerror if output else f"{error.strerror} (--output chooses another)"
        where = output or runs
        raise Refused(f"the output folder {where} cannot be written: {reason}") from None
    return run


def described(run: Path) -> str:
    """What a run that is continued holds, in a sentence."""
    entries = run_folder.read_status(run)["notebooks"].values()
    finished = sum(entry["status"] == "passed" for entry in entries)
    return f"Continues {run}: {finished} of its {len(entries)} notebooks are finished"


def unlock(run: Path) -> None:
    """Give the folder free for another run."""
    with contextlib.suppress(OSError):
        _held.pop(run).release()


def _lock(run: Path) -> None:
    if (run / LOCK).is_dir():
        run_folder.make_way(run / LOCK)
    lock = filelock.FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise Refused(f"{run} is in use by another run") from None
    _held[run] = lock


def _mend(run: Path) -> None:
    """Make status.json agree with the files beside it, whatever has happened to either."""
    try:
        status = run_folder.read_status(run)
    except Refused:
        print(f"{run / 'status.json'} is damaged: it is put together anew", file=sys.stderr)
        run_folder.make_way(run / "status.json")
        status = run_folder.read_status(run)
    entries = status["notebooks"]
    files = [*run.glob("*.ipynb"), *run.glob("*/*.ipynb")]
    found = {file.relative_to(run).with_suffix("").as_posix() for file in files}
    for name in sorted(found | {*entries}):
        entry = entries.get(name, {"notebook": name, **run_folder.ENTRY})
        entry = run_folder.borne_out(run, entry)
        if name in entries or entry["status"] == "passed":
            entries[name] = entry
    if entries:
        run_folder.write_status(run, status)


def _holds_run(run: Path) -> bool:
    return any(os.path.lexists(run / name) for name in ("status.json", LOCK, "records"))


def _newest(runs: Path, slug: str, wanted: Collection[str]) -> Path | None:
    name = re.compile(re.escape(slug) + r"-(\d{4}-\d\d-\d\d)(?:-(\d+))?")
    found = []
    for run in runs.glob("*"):
        if (match := name.fullmatch(run.name)) and _holds_run(run):
            found.append((match[1], int(match[2] or 1), run))
    newest_first = [run for *_, run in sorted(found, reverse=True)]
    whole = (run for run in newest_first if _known(run).issuperset(wanted))
    return next(whole, next(iter(newest_first), None))


def _known(run: Path) -> set[str]:
    with contextlib.suppress(Refused):
        return {*run_folder.read_status(run)["notebooks"]}
    return set()


def _new(runs: Path, slug: str) -> Path:
    base = f"{slug}-{datetime.date.today().isoformat()}"
    number = 1
    while True:
        run = runs / (base if number == 1 else f"{base}-{number}")
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            number += 1
