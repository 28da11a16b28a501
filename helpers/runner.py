"""Execute the notebooks of a run, one or several at a time, and keep what is known of each."""

import concurrent.futures
import contextlib
import datetime
import os
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from helpers import device, engine, execute, report, run_folder
from helpers.engine import NotebookNode

ALONE = "alone"  # tag of a parameters cell: while this notebook runs, no other one does


def default_jobs() -> int:
    """Two where nobody's measurements share a GPU, and there are cores for two."""
    return 1 if device.has_cuda() else min(2, os.cpu_count() or 1)


class Progress:
    """A bar over the cells of all notebooks; where no terminal shows it, a line per notebook."""

    def __init__(self, cells: int):
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=cells, unit="cell", disable=not self.terminal, dynamic_ncols=True)
        self.done = {}  # cells, by notebook

    def line(self, text: str) -> None:
        if not self.terminal:
            print(text, file=sys.stderr, flush=True)

    def cells(self, stem: str, done: int, text: str = "") -> None:
        self.done[stem] = done
        self.bar.set_description_str(f"{stem} {text[:40]}", refresh=False)
        self.bar.n = sum(self.done.values())
        self.bar.refresh()


class Run:
    """What all notebooks of a run share; whoever changes it holds `lock`."""

    def __init__(self, folder: Path, profile: str, notebooks: dict[Path, NotebookNode]):
        self.folder, self.lock, self.cancelled = folder, threading.Lock(), threading.Event()
        # Of two kernels that look for free ports at once one may take the other's.
        self.starting = threading.Lock()
        self.status = run_folder.read_status(folder)
        self.status["profile"] = profile
        self.entries = self.status["notebooks"]
        for path in notebooks:
            self.entries.setdefault(path.stem, {"notebook": path.stem, **run_folder.ENTRY})
        run_folder.write_status(folder, self.status)
        self.progress = Progress(sum(len(notebook.cells) for notebook in notebooks.values()))

    def keep(self, stem: str, known: dict, line: str) -> None:
        """Add to what is known of a notebook."""
        with self.lock:
            self.entries[stem].update(known)
            run_folder.write_status(self.folder, self.status)
            self.progress.line(f"{stem}: {line}")


def run_all(
    notebooks: dict[Path, NotebookNode],
    parameters: dict[Path, dict],
    profile: str,
    folder: Path,
    limit_minutes: float,
    environment: dict[str, str],
    jobs: int = 1,
) -> tuple[list[dict], bool]:
    """Execute the notebooks. Returns their entries, and whether it was interrupted.

    They begin in their order, `jobs` at a time, each then with its share of the cores; one that
    is tagged `ALONE` begins when those before it have ended, and ends before the next begins.
    """
    run, interrupted, futures = Run(folder, profile, notebooks), False, []
    cores = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for path, notebook in notebooks.items():
                alone = jobs > 1 and engine.has_tag(notebook, ALONE)
                _wait(futures if alone else [])
                shared = {} if alone or jobs == 1 or "OMP_NUM_THREADS" in os.environ else cores
                futures.append(
                    pool.submit(
                        run_notebook, run, path, notebook, parameters[path], profile,
                        limit_minutes, environment | shared,
                    )
                )  # fmt: skip
                _wait(futures if alone else [])
            _wait(futures)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            run.cancelled.set()
    run_folder.write_status(folder, run.status)
    run.progress.bar.close()
    return [run.entries[path.stem] for path in notebooks], interrupted


def _wait(futures: list[concurrent.futures.Future]) -> None:
    # In pieces: on Windows nothing interrupts a wait without an end.
    while concurrent.futures.wait(futures, execute.POLL_S).not_done:
        pass
    for future in futures:
        future.result()


def run_notebook(
    run: Run,
    path: Path,
    notebook: NotebookNode,
    parameters: dict,
    profile: str,
    limit_minutes: float,
    environment: dict[str, str],
) -> None:
    """Execute one notebook, unless the run is cancelled or has it, and complete its entry."""
    stem, cells = path.stem, len(notebook.cells)
    inputs = run_folder.fingerprint(notebook, parameters, profile)
    if run.cancelled.is_set():
        return
    if run_folder.is_finished(run.folder, run.entries[stem], inputs):
        with run.lock:
            run.progress.line(f"{stem}: finished before")
            run.progress.cells(stem, cells)
        return
    started, clock = datetime.datetime.now().isoformat(timespec="seconds"), time.monotonic()
    with run.lock:
        run.entries[stem] = {"notebook": stem}
    known = {"status": "interrupted", "seconds": 0.0, "fingerprint": inputs, "started": started}
    run.keep(stem, known, f"started, {cells} cells")
    try:
        outcome = _execute(run, path, notebook, parameters, limit_minutes, environment)
    except OSError as error:  # a file of this notebook; the others have their own
        outcome = {"status": "failed", "error": type(error).__name__, "lines": [str(error)]}
    outcome["seconds"] = round(time.monotonic() - clock, 1)
    run.keep(stem, outcome, f"{outcome['status']}, {outcome['seconds'] / 60:.1f} minutes")
    with run.lock:
        report.write(run.folder)
        run.progress.cells(stem, cells)


def _execute(
    run: Run,
    path: Path,
    notebook: NotebookNode,
    parameters: dict,
    limit_minutes: float,
    environment: dict[str, str],
) -> dict:
    """What is known of a notebook after its execution; the files of an older one are kept until
    it has passed."""
    files = run_folder.paths(run.folder, path.stem)
    above, running, outcome = engine.headings(notebook), {}, {"status": "interrupted"}
    start = contextlib.ExitStack()

    def on_cell(event: dict) -> None:
        start.close()
        running.update(event)
        index = event["index"]
        with run.lock:
            run.progress.cells(path.stem, index, f"{index + 1}/{len(above)} {above[index]}")

    run_folder.make_folders(run.folder)
    run_folder.begin(run.folder, path.stem)
    try:
        start.enter_context(run.starting)
        outcome = execute.execute(
            path, files["partial"], files["log"], parameters, environment,
            limit_minutes * 60, on_cell, run.cancelled,
        )  # fmt: skip
        if outcome["status"] != "passed" and running:
            outcome["cell"] = engine.describe_cell(notebook, running)
    finally:
        start.close()
        run_folder.end(run.folder, path.stem, outcome["status"] == "passed")
    return outcome
