"""Execute the notebooks of a run, one or several at a time, and keep what is known of each."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat

from helpers import device, engine, execute, report, run_folder
from helpers.engine import NotebookNode
from helpers.run_progress import Progress
from helpers.worker import DIED

ALONE = "alone"  # tag of a parameters cell: while this notebook runs, no other one does


def default_jobs() -> int:
    """Two where nobody's measurements share a GPU, and there are cores for two."""
    return 1 if device.has_cuda() else min(2, os.cpu_count() or 1)


class Here:
    """A pool without a cluster: `jobs` notebooks at a time, in processes of this machine.

    A pool has places, and a place executes one notebook at a time. `helpers.cluster` has another
    pool, whose places are workers.
    """

    machine = None  # of a place: where it is, when that is another machine or one of several

    def __init__(self, jobs: int = 1):
        self.jobs = jobs
        # Of two kernels that look for free ports at once one may take the other's.
        self.starting = threading.Lock()

    profile = staticmethod(device.profile)

    def enlist(self, *_) -> None:
        pass  # threads take what is submitted in its order

    strike = enlist

    def devices(self) -> list[str]:
        return [device.slug()]

    def place(self, *_) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext(self)

    def environment(self, alone: bool) -> dict[str, str]:
        """Each notebook's share of the cores: all for one that runs alone."""
        if alone or self.jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs))}

    def execute(self, *arguments) -> dict:
        return execute.execute(*arguments)


@dataclasses.dataclass(frozen=True)
class Job:
    """One notebook, on a device of a cluster where that is chosen."""

    number: int  # jobs begin in this order
    path: Path
    notebook: NotebookNode
    parameters: dict
    device: str | None  # its slug

    @property
    def name(self) -> str:
        """What its entry and its files are called in the run's folder."""
        return f"{self.device}/{self.path.stem}" if self.device else self.path.stem

    @property
    def alone(self) -> bool:
        return engine.has_tag(self.notebook, ALONE)


class Run:
    """What all notebooks of a run share; whoever changes it holds `lock`."""

    def __init__(self, folder: Path, profile: str, jobs: list[Job], pool: Here):
        self.folder, self.lock, self.cancelled = folder, threading.Lock(), threading.Event()
        self.pool = pool
        self.status = run_folder.read_status(folder)
        self.status["profile"] = profile
        self.entries = self.status["notebooks"]
        for job in jobs:
            self.entries.setdefault(job.name, {"notebook": job.name, **run_folder.ENTRY})
        run_folder.write_status(folder, self.status)
        self.progress = Progress(sum(len(job.notebook.cells) for job in jobs))

    def keep(self, name: str, known: dict, line: str) -> None:
        """Add to what is known of a notebook."""
        with self.lock:
            self.entries[name].update(known)
            run_folder.write_status(self.folder, self.status)
            self.progress.line(f"{name}: {line}")


def run_all(
    notebooks: dict[Path, NotebookNode],
    parameters: dict[Path, dict],
    profile: str,
    folder: Path,
    limit_minutes: float,
    pool: Here,
    devices: Sequence[str | None] = (None,),
) -> tuple[list[dict], bool]:
    """Execute the notebooks. Returns their entries, and whether it was interrupted.

    They begin in their order, as the pool has places; one that is tagged `ALONE` begins when those
    before it have ended, and ends before the next begins. With the slugs of a cluster's `devices`
    each notebook is executed on each of them.
    """
    each = [(path, slug) for path in notebooks for slug in devices]
    jobs = [
        Job(number, path, notebooks[path], parameters[path], slug)
        for number, (path, slug) in enumerate(each)
    ]
    run, interrupted, futures = Run(folder, profile, jobs, pool), False, []
    with concurrent.futures.ThreadPoolExecutor(pool.jobs or len(jobs)) as threads:
        try:
            for _, same in itertools.groupby(jobs, lambda job: job.path):
                same = list(same)
                alone = pool.jobs != 1 and same[0].alone
                _wait(futures if alone else [])
                for job in same:
                    pool.enlist(job.number, job.device)
                    futures.append(threads.submit(run_notebook, run, job, limit_minutes))
                _wait(futures if alone else [])
            _wait(futures)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            run.cancelled.set()
    run_folder.write_status(folder, run.status)
    run.progress.bar.close()
    return [run.entries[job.name] for job in jobs], interrupted


def _wait(futures: list[concurrent.futures.Future]) -> None:
    # In pieces: on Windows nothing interrupts a wait without an end.
    while concurrent.futures.wait(futures, execute.POLL_S).not_done:
        pass
    for future in futures:
        future.result()


def run_notebook(run: Run, job: Job, limit_minutes: float) -> None:
    """Execute one notebook, unless the run is cancelled or has it, and complete its entry."""
    try:
        _run_notebook(run, job, limit_minutes)
    finally:
        run.pool.strike(job.number)


def _run_notebook(run: Run, job: Job, limit_minutes: float) -> None:
    name, cells, profile = job.name, len(job.notebook.cells), run.status["profile"]
    with run.lock:
        gathered = run_folder.gathered(job.notebook, name, run.entries)
    inputs = run_folder.fingerprint(job.notebook, job.parameters, profile, gathered)
    if run.cancelled.is_set():
        return
    if run_folder.is_finished(run.folder, run.entries[name], inputs):
        with run.lock:
            run.progress.line(f"{name}: finished before")
            run.progress.cells(name, cells)
        return
    for attempt in range(2):
        with run.pool.place(job.number, job.device, run.cancelled) as place:
            if run.cancelled.is_set():
                return
            started = datetime.datetime.now().isoformat(timespec="seconds")
            known = {"status": "interrupted", "seconds": 0.0, "fingerprint": inputs}
            known |= {"started": started} | ({"machine": place.machine} if place.machine else {})
            with run.lock:  # others read it: whole, or not there
                run.entries[name] = {"notebook": name, **known}
            run.keep(name, {}, f"started, {cells} cells")
            try:
                outcome = _execute(run, place, job, limit_minutes)
            except (OSError, ValueError) as error:  # a file of this notebook, not of the others
                outcome = {"status": "failed", "error": type(error).__name__, "lines": [str(error)]}
                outcome["seconds"] = 0.0
        if outcome.get("error") != DIED or attempt:
            break
        run.keep(name, outcome, "its worker died; once more")
    run.keep(name, outcome, f"{outcome['status']}, {outcome['seconds'] / 60:.1f} minutes")
    with run.lock:
        report.write(run.folder)
        run.progress.cells(name, cells)


def _execute(run: Run, place: Here, job: Job, limit_minutes: float) -> dict:
    """What is known of a notebook after its execution; the files of an older one are kept until
    it has passed."""
    files = run_folder.paths(run.folder, job.name)
    environment = place.environment(job.alone) | {
        "LECTURES_PROFILE": run.status["profile"],
        "LECTURES_RECORDS": str(files["records"].parent),
        "LECTURES_SCRATCH": str(files["log"].parent),
    }  # fmt: skip
    above, running, outcome = engine.headings(job.notebook), {}, {"status": "interrupted"}
    start = contextlib.ExitStack()

    def on_cell(event: dict) -> None:
        start.close()
        running.update(event)
        index = event["index"]
        with run.lock:
            run.progress.cells(job.name, index, f"{index + 1}/{len(above)} {above[index]}")

    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)  # a notebook may have removed it
    run_folder.begin(run.folder, job.name)
    clock = time.monotonic()
    try:
        nbformat.write(job.notebook, files["partial"])  # its own file may change, or go, meanwhile
        start.enter_context(run.pool.starting)
        outcome = place.execute(
            files["partial"], files["partial"], files["log"], job.parameters, environment,
            limit_minutes * 60, on_cell, run.cancelled, job.path.parent,
        )  # fmt: skip
        if outcome["status"] != "passed" and running:
            outcome["cell"] = engine.describe_cell(job.notebook, running)
    finally:
        start.close()
        outcome["seconds"] = round(time.monotonic() - clock, 1)
        run_folder.end(run.folder, run.entries[job.name] | outcome)
    return outcome
