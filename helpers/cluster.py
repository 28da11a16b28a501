"""Notebooks on the workers of a Dask cluster, for `helpers.runner`: `python -m helpers.run --help`.

The scheduler only hands over: which worker takes which notebook is decided here, so that a worker
has one at a time and every death of a worker is known. No file system is shared. The notebook goes
to the worker with the records of those before it; what it has become, its records and its log come
back. On a scheduler that others use as well, the resource `GPU` keeps the workers apart.

A fleet, without and with Slurm:

    dask scheduler                                      on one machine
    python -m helpers.worker tcp://FIRST:8786           on each machine with GPUs
    python -m helpers.run --scheduler tcp://FIRST:8786  wherever the results shall lie

    from dask_jobqueue import SLURMCluster
    fleet = SLURMCluster(queue="gpu", cores=1, processes=1, memory="64GB", walltime="01:00:00",
                         job_extra_directives=["--gres=gpu:1", "--cpus-per-task=8"],
                         worker_extra_args=["--resources GPU=1"])
    fleet.scale(jobs=4)
    print(fleet.scheduler_address)                      for --scheduler, while this runs
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import distributed
from tqdm import tqdm

from helpers import device, execute, worker
from helpers.remote import Place, quiet
from helpers.run_folder import Refused

WATCH_S = 0.5  # how soon a worker that came or went is noticed
CONNECT_S = 5  # for a scheduler to answer
WAIT_S = 300  # for a worker, where there is none
MINUTES = f"{WAIT_S / 60:g} minutes"


def say(text: str) -> None:
    """A line to the terminal, above the progress bar where there is one."""
    tqdm.write(text, file=sys.stderr)


class Cluster:
    """The pool of `helpers.runner` whose places are the workers that a scheduler knows.

    `starting` is held while a notebook starts, as in `helpers.runner.Here`. A worker whose `code`
    is another, as `worker.describe` has it, is refused; "" takes any.
    """

    jobs = None  # as many as there are workers, which come and go

    def __init__(
        self,
        client: distributed.Client,
        starting: contextlib.AbstractContextManager,
        code: str = "",
    ):
        self.client, self.starting, self.code = client, starting, code
        self.workers: dict[str, dict] = {}  # address -> what it says of itself
        self.refused: dict[str, str] = {}  # address -> why
        self.seen: dict[str | None, float] = {}  # when a device was last there; None: any
        self.busy, self.waiting = set(), {}  # addresses; number of a notebook -> device
        self.changed, self.closed = threading.Condition(), threading.Event()

    def look(self) -> None:
        """Learn which workers there are now."""
        try:
            there = self.client.scheduler_info()["workers"]
            new = [
                address
                for address, known in there.items()
                if address not in self.workers | self.refused
                and known["resources"].get(worker.RESOURCE, 0) >= 1
            ]
            told = self.client.run(worker.describe, workers=new, on_error="return") if new else {}
        except Exception:  # no scheduler any more, or a worker that went while it was asked
            there, told = {} if self.client.status != "running" else self.workers, {}
        with self.changed:
            before = {facts["device"] for facts in self.workers.values()}
            self.workers = {a: facts for a, facts in self.workers.items() if a in there}
            for address, facts in told.items():
                if isinstance(facts, OSError):  # it went while it was asked
                    continue
                if reason := self.objection(facts):
                    self.refused[address] = reason
                    say(f"The worker {address} is refused: {reason}")
                else:
                    self.workers[address] = facts
            for device_name in before - {facts["device"] for facts in self.workers.values()}:
                say(f"No worker with {device_name} is left: waiting up to {MINUTES} for one")
            now = time.monotonic()
            self.seen |= {facts["slug"]: now for facts in self.workers.values()}
            self.seen |= {None: now} if self.workers else {}
            self.changed.notify_all()

    def objection(self, facts: dict | Exception) -> str:
        """Why a worker cannot take part, "" when it can."""
        if isinstance(facts, Exception):
            return f"its copy of the helpers cannot be used: {type(facts).__name__}: {facts}"
        if self.code not in ("", facts["code"]):
            return f"the helpers or data on {facts['host']} differ from those here"
        shared = [a for a, other in self.workers.items() if facts["gpu"]
                  and (other["host"], other["gpu"]) == (facts["host"], facts["gpu"])]  # fmt: skip
        return f"its GPU is also that of {shared[0]}" if shared else ""

    def wait(self, number: int, ended: Callable[[], str] = str) -> None:
        """Until so many workers are there, then go on looking. Refused when there are fewer after
        `WAIT_S`, when all are refused, or as soon as `ended` tells of one that has gone."""
        end = time.monotonic() + WAIT_S
        self.look()
        if not self.workers | self.refused and ended is str:
            say(f"Waiting up to {MINUTES} for a worker: python -m helpers.worker ADDRESS")
        while len(self.workers) + len(self.refused) < number:
            if last := ended():
                raise Refused(f"a worker has ended: {last}")
            if time.monotonic() > end:
                raise Refused(f"no worker has come in {MINUTES}")
            time.sleep(execute.POLL_S)
            self.look()
        if not self.workers:
            raise Refused(f"no worker can take part: {'; '.join({*self.refused.values()})}")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.closed.wait(WATCH_S):
            self.look()

    def devices(self) -> list[str]:
        """The slugs of the workers' devices."""
        return sorted({facts["slug"] for facts in self.workers.values()})

    def profile(self, choice: str) -> str:
        """As `helpers.device.profile`, where the workers are the machine: full on GPUs."""
        if choice != "auto" or os.environ.get("LECTURES_PROFILE", "auto") not in ("", "auto"):
            return device.profile(choice)
        return "smoke" if "cpu" in self.devices() else "full"

    @contextlib.contextmanager
    def place(self, number: int, slug: str | None, cancelled: threading.Event) -> Iterator[Place]:
        """A free worker, on that device if one is named; notebooks get one in order of `number`.

        Where none was there for `WAIT_S` it is a place at which every notebook fails.
        """
        address = self._take(number, slug, cancelled)
        try:
            yield Place(self, address)
        finally:
            with self.changed:
                self.busy.discard(address)
                self.changed.notify_all()

    def enlist(self, number: int, slug: str | None) -> None:
        """Keep a notebook's turn, until it has a place or `strike` says that it needs none."""
        with self.changed:
            self.waiting[number] = slug

    def strike(self, number: int) -> None:
        with self.changed:
            self.waiting.pop(number, None)
            self.changed.notify_all()

    def _take(self, number: int, slug: str | None, cancelled: threading.Event) -> str:
        self.enlist(number, slug)
        with self.changed:
            try:
                while not cancelled.is_set():
                    fitting = [a for a, f in self.workers.items() if slug in (None, f["slug"])]
                    free = [address for address in fitting if address not in self.busy]
                    ahead = [n for n, other in self.waiting.items() if n < number and other == slug]
                    if len(free) > len(ahead):
                        self.busy.add(free[0])
                        return free[0]
                    if not fitting and time.monotonic() - self.seen[slug] > WAIT_S:
                        break
                    self.changed.wait(execute.POLL_S)
            finally:
                self.strike(number)
        return ""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The workers of the scheduler at this address or in this scheduler's file: one at least.

    Refused where no scheduler answers, or no worker can take part.
    """
    code = worker.describe()["code"]
    with quiet():
        try:
            if Path(address).is_file():
                client = distributed.Client(scheduler_file=address, timeout=CONNECT_S)
            else:
                client = distributed.Client(address, timeout=CONNECT_S)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Refused(f"no Dask scheduler answers at {address}: {reason}") from None
        # Of two kernels that look for free ports at once one may take the other's; on different
        # machines they do not, and a start that fails for it is tried again.
        with client, _of(client, contextlib.nullcontext(), code) as cluster:
            cluster.wait(1)
            yield cluster


@contextlib.contextmanager
def local(jobs: int) -> Iterator[Cluster]:
    """So many workers on this machine: one on each GPU, or without any sharing the cores.

    Refused where there are fewer GPUs.
    """
    visible = worker.gpus()
    if visible and jobs > len(visible):
        raise Refused(
            f"--jobs {jobs}: measurements must not share a GPU, and this machine has {len(visible)}"
        )
    with (
        quiet(),
        tempfile.TemporaryDirectory(prefix="lectures-") as folder,
        dask.config.set({"temporary-directory": folder}),
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as scheduler,
        distributed.Client(scheduler) as client,
        worker.started(scheduler.scheduler_address, (visible or [None] * jobs)[:jobs]) as workers,
        _of(client, threading.Lock()) as cluster,
    ):
        cluster.wait(jobs, lambda: worker.ended(workers))
        yield cluster


@contextlib.contextmanager
def _of(*arguments) -> Iterator[Cluster]:
    cluster = Cluster(*arguments)
    try:
        yield cluster
    finally:
        cluster.closed.set()
