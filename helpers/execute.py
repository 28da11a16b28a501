"""Execute one notebook in a process of its own, so that nothing it does harms the others.

`execute` starts `python -m helpers.execute` and follows it. The job goes down the process's
standard input, events come back on its standard output, one JSON object a line, and everything
that is printed goes to a log file. Whatever happens, no process of the notebook stays behind.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from helpers import engine

ROOT = Path(__file__).resolve().parent.parent
# An environment variable that a notebook's processes inherit: the file that they execute into.
MARK = "LECTURES_PROCESS_TREE"
COMMAND = [sys.executable, "-m", "helpers.execute"]
POLL_S = 0.2  # how soon an interruption is noticed
GRACE_S = 5.0  # to save and leave after a request to end, before the process is killed
LOG_TAIL_BYTES = 20_000


def execute(
    notebook: Path,
    output: Path,
    log: Path,
    parameters: dict,
    environment: dict[str, str],
    limit_s: float,
    on_cell: Callable[[dict], None],
    cancelled: threading.Event | None = None,
    folder: Path | None = None,
) -> dict:
    """Execute `notebook` into `output` within `limit_s` seconds of wall time.

    It runs in `folder`, its own unless given. `environment` is added to this process's own.
    `on_cell` gets {"index", "execution_count"} of each cell before it runs. Returns {"status",
    "error", "lines"}; the status is passed, failed, timeout, kernel died, or interrupted: without
    the others, soon after `cancelled` is set. An exception in here, such as KeyboardInterrupt, ends
    the notebook.
    """
    job = {
        "notebook": str(notebook),
        "output": str(output),
        "parameters": parameters,
        "folder": str(folder or notebook.parent),
    }
    mark = str(output.resolve())
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the debugger in every log
        engine.LOG: str(log),
        MARK: mark,
    }
    deadline = time.monotonic() + limit_s
    child = None
    try:
        log.unlink(missing_ok=True)
        with log.open("ab") as stderr:
            child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C must reach the runner only
            )
        events = queue.Queue()
        threading.Thread(target=_read_events, args=(child.stdout, events), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # it has died already: its log says why
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        outcome = _follow(child, events, deadline, on_cell, cancelled or threading.Event())
    finally:
        stop(child, mark)
    if outcome["status"] == "timeout":
        outcome["lines"] = [f"stopped by its time limit of {limit_s / 60:g} minutes"]
    elif outcome["status"] == "kernel died" or outcome.get("error") == "ProcessDied":
        outcome["lines"] += _log_tail(log)
    return outcome


def _read_events(stream: IO[str], events: queue.Queue) -> None:
    with contextlib.suppress(ValueError):  # a last line that was cut off
        for line in stream:
            events.put(json.loads(line))
    events.put(None)


def _follow(
    child: subprocess.Popen,
    events: queue.Queue,
    deadline: float,
    on_cell: Callable[[dict], None],
    cancelled: threading.Event,
) -> dict:
    while not cancelled.is_set():
        left = deadline - time.monotonic()
        try:
            event = events.get(timeout=min(max(0.0, left), POLL_S))
        except queue.Empty:
            if left > POLL_S:
                continue
            return {"status": "timeout", "error": "TimeLimit"}
        if event is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            words = engine.how_it_ended(child.returncode)
            return {"status": "failed", "error": "ProcessDied", "lines": [words]}
        if "status" in event:
            return event
        on_cell(event)
    return {"status": "interrupted"}


def _log_tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:  # a notebook has removed it
        return []
    # A crash's stack goes on with Jupyter's own calls, which all notebooks share.
    return engine.last_lines(
        re.sub(r'\n  File "[^"]*interactiveshell\.py".*', "", text, flags=re.S)
    )


def stop(child: subprocess.Popen | None, mark: str) -> None:
    """End a child and every process it started: asked first, killed after `GRACE_S` seconds."""
    if child is None:
        return
    _end(lambda: _living_processes(mark, child.pid))
    with contextlib.suppress(BrokenPipeError):  # it never read its job
        child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=GRACE_S)


def end_leftovers(folder: Path) -> None:
    """End what notebooks executed into this folder have left, their runner having been killed."""
    _end(lambda: _living_processes(f"{folder.resolve()}{os.sep}"))


def _end(find: Callable[[], list[psutil.Process]]) -> None:
    """Ask the processes to end until none is found; kill those that are there after `GRACE_S`."""
    kill_at = time.monotonic() + GRACE_S
    while processes := find():
        end = psutil.Process.terminate if time.monotonic() < kill_at else psutil.Process.kill
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        if time.monotonic() > kill_at + GRACE_S:
            break  # stuck in the operating system, where no signal arrives
        time.sleep(0.05)


def _living_processes(mark: str, pid: int | None = None) -> list[psutil.Process]:
    """The processes whose mark begins so, and process `pid` with its descendants; not this one."""
    found = set()
    if pid is not None:
        with contextlib.suppress(psutil.Error):
            found = {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK, "").startswith(mark):
                found.add(process)
    return [process for process in found if process.pid != os.getpid() and _is_living(process)]


def _is_living(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _leave(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: papermill saves on its way out
    sys.exit(1)


def _leave_with_the_runner(gone: threading.Event) -> None:
    # The runner's end of the pipe closes when the runner ends, however it does. os.read, because
    # a thread that waits in sys.stdin would hold its lock at exit.
    while os.read(0, 1024):
        pass
    gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * GRACE_S)
    _end_others()
    os._exit(1)  # what the main thread waits for does not come


def _end_others() -> None:
    """End what the notebook has started, in the place of a runner that is gone."""
    _end(lambda: _living_processes(os.environ[MARK]))


def main() -> None:
    """The process of one notebook: read the job, execute it, send events."""
    signal.signal(signal.SIGTERM, _leave)
    # Kernels inherit standard output, not this copy of it: only events go this way.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    gone = threading.Event()
    threading.Thread(target=_leave_with_the_runner, args=(gone,), daemon=True).start()

    def send(event: dict) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    try:
        outcome = engine.run(
            Path(job["notebook"]),
            Path(job["output"]),
            Path(job["folder"]),
            job["parameters"],
            lambda index, count: send({"index": index, "execution_count": count}),
        )
        send(outcome)
    finally:
        if gone.is_set():
            _end_others()


if __name__ == "__main__":
    main()
