"""What a machine lends to a cluster: a Dask worker for each of its GPUs.

    python -m helpers.worker tcp://SCHEDULER:8786

A worker takes one notebook at a time. It has the resource `GPU` and a CUDA_VISIBLE_DEVICES of its
own, so that measurements never share a device. Where a batch system chooses the GPU it is started
as `dask worker ADDRESS --nthreads 1 --resources GPU=1`. `helpers.cluster` is the other side.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from helpers import device, execute, run_folder
from helpers.results import ROOT

RESOURCE = "GPU"
DIED = "WorkerDied"  # what stands in place of an exception's name for a notebook that it cost
NEEDS = "a cluster needs Dask: python -m pip install -e '.[cluster]'"
CONNECT_S = 60  # a worker that finds no scheduler for so long ends


def gpus() -> list[str]:
    """This machine's GPUs in the words of CUDA_VISIBLE_DEVICES: numbers, UUIDs or MIG slices.

    Empty where the notebooks have none to use.
    """
    if not device.has_cuda():
        return []
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in visible.split(",")]
    # A process sees only the first of several MIG slices; with a worker each, all can be used.
    return names if names[0].startswith("MIG-") else names[:count]


def describe() -> dict:
    """What the other side has to know of a worker, asked for in the worker's process.

    "gpu" tells two workers on one GPU; "cores" is 0 where OMP_NUM_THREADS stands already.
    """
    digest = hashlib.sha256()
    for part in run_folder.code():
        digest.update(part)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpu = visible
    if device.has_cuda() and not visible.startswith("MIG-"):
        gpu = str(getattr(torch.cuda.get_device_properties(device.device()), "uuid", visible))
    return {
        "host": platform.node(),
        "device": device.device_name(),
        "slug": device.slug(),
        "gpu": gpu if device.has_cuda() else "",
        "visible": visible,
        "cores": 0 if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1,
        "torch": torch.__version__,
        "triton": device.triton_version(),
        "python": platform.python_version(),
        "code": digest.hexdigest(),
    }


class _Unwanted:
    """For `execute.execute`: set when nobody wants the task any more.

    It was cancelled, whoever asked for it is gone, or the worker has lost the scheduler.
    """

    def __init__(self, worker, key: str):
        self.worker, self.key = worker, key

    def is_set(self) -> bool:
        task = self.worker.state.tasks.get(self.key)
        return task is None or task.state != "executing" or self.worker.status.name != "running"


def perform(job: dict) -> dict:
    """Execute a notebook on this worker, as a task of Dask.

    `job`: "key" of the task and topic of its events, "name", "source" (bytes), "folder" (as
    `portable`), "parameters", "environment", "limit_s" and "records" (name -> bytes), those of
    the notebooks before. Events: "started", then each cell's. Returns "outcome" as `execute`
    does, "output" (bytes, or None) and "log", and of "records" what is new.
    """
    from distributed import get_worker  # the rest of this module does without Dask

    worker = get_worker()
    worker.log_event(job["key"], "started")
    with tempfile.TemporaryDirectory(
        dir=worker.local_directory, prefix="notebook-", ignore_cleanup_errors=True
    ) as name:
        scratch = Path(name)
        notebook, output, log = scratch / job["name"], scratch / "output.ipynb", scratch / "log"
        notebook.write_bytes(job["source"])
        records = scratch / "records"
        records.mkdir()
        given = _of_this_device(job["records"])
        for file, content in given.items():
            (records / file).write_bytes(content)
        folder = ROOT / job["folder"]
        outcome = execute.execute(
            notebook, output, log, job["parameters"],
            job["environment"] | {"LECTURES_RECORDS": name + "/records", "LECTURES_SCRATCH": name},
            job["limit_s"], lambda event: worker.log_event(job["key"], event),
            _Unwanted(worker, job["key"]), folder if folder.is_dir() else scratch,
        )  # fmt: skip
        left = {file.name: file.read_bytes() for file in records.glob("*.*") if file.is_file()}
        return {
            "outcome": outcome,
            "output": output.read_bytes() if output.exists() else None,
            "log": log.read_bytes() if log.exists() else b"",
            "records": {n: content for n, content in left.items() if given.get(n) != content},
        }


def _of_this_device(records: dict[str, bytes]) -> dict[str, bytes]:
    """The files of those notebooks whose records name this device: a run may have several."""
    mine = f'"device": "{device.device_name()}"'.encode()
    stems = {Path(n).stem for n, content in records.items() if n.endswith(".json")
             and mine in content}  # fmt: skip
    return {n: content for n, content in records.items() if n.split(".")[0] in stems}


def portable(folder: Path) -> str:
    """A folder's place in the checkout, which is elsewhere on another machine; else its path."""
    return folder.relative_to(ROOT).as_posix() if folder.is_relative_to(ROOT) else str(folder)


@contextlib.contextmanager
def started(address: str, visible: list[str | None]) -> Iterator[dict[subprocess.Popen, Path]]:
    """Worker processes of this machine and their logs, one for each entry: its
    CUDA_VISIBLE_DEVICES, or None to leave that as it is. `address` is the scheduler's, or its
    file's. They end with the block. Refused without Dask."""
    if importlib.util.find_spec("distributed") is None:
        raise run_folder.Refused(NEEDS)
    where = ["--scheduler-file", address] if Path(address).is_file() else [address]
    command = [sys.executable, "-m", "distributed.cli.dask_worker", *where, "--nthreads", "1"]
    command += ["--resources", f"{RESOURCE}=1", "--no-dashboard", "--memory-limit", "0"]
    command += ["--death-timeout", str(CONNECT_S)]
    # Dask's own look at the GPU, for a dashboard, fails where it does not know its name.
    common = os.environ | {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
    with tempfile.TemporaryDirectory(prefix="lectures-", ignore_cleanup_errors=True) as folder:
        workers = {}
        try:
            for number, gpu in enumerate(visible):
                own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
                path = Path(folder) / f"{number}.log"
                with path.open("wb") as log:
                    worker = subprocess.Popen(
                        [*command, "--local-directory", folder],
                        cwd=ROOT,  # where `helpers` is found
                        env=common | own | {execute.MARK: folder},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                workers[worker] = path
            yield workers
        finally:
            for worker in workers:
                execute.stop(worker, folder)


def ended(workers: dict[subprocess.Popen, Path]) -> str:
    """The end of the log of a worker that has ended by itself, "" while all of them work."""
    logs = [log for worker, log in workers.items() if worker.poll() is not None]
    return "\n".join(logs[0].read_text(errors="replace").splitlines()[-3:]) if logs else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line until it is interrupted. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="helpers.worker", description="Lend this machine's GPUs to a cluster, a worker each."
    )
    parser.add_argument("address", help="of the scheduler, such as tcp://host:8786, or its file")
    parser.add_argument("--workers", type=int, default=1, help="without a GPU: how many (1)")
    options = parser.parse_args(arguments)
    visible = gpus() or [None] * options.workers
    try:
        with started(options.address, visible) as workers:
            names = ", ".join(filter(None, visible)) or "none"
            print(f"{len(visible)} workers for {options.address}; GPUs: {names}", flush=True)
            while not (last := ended(workers)):
                time.sleep(execute.POLL_S)
        print(f"helpers.worker: a worker has ended:\n{last}", file=sys.stderr)
        return 1
    except run_folder.Refused as refusal:
        print(f"helpers.worker: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
