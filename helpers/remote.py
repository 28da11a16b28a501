"""One notebook on a worker of a `helpers.cluster`."""

import contextlib
import logging
import queue
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import distributed

from helpers import execute, worker

SHOWN = "host device visible torch triton python".split()  # of a worker, in a notebook's entry
LOST = distributed.scheduler.KilledWorker, distributed.client.FutureCancelledError

if TYPE_CHECKING:
    from helpers.cluster import Cluster


class Place:
    """A worker, for the time of one notebook; "" is none, in a run that was cancelled."""

    def __init__(self, cluster: "Cluster", address: str):
        self.cluster, self.address = cluster, address
        self.facts = cluster.workers.get(address, {})
        self.machine = {name: self.facts[name] for name in SHOWN if name in self.facts}

    def environment(self, alone: bool) -> dict[str, str]:
        """A notebook's share of its machine's cores: all for one that runs alone."""
        if alone or not self.facts.get("cores"):
            return {}
        hosts = [facts["host"] for facts in self.cluster.workers.values()]
        share = self.facts["cores"] // max(1, hosts.count(self.facts["host"]))
        return {"OMP_NUM_THREADS": str(max(1, share))}

    def execute(
        self,
        notebook: Path,
        output: Path,
        log: Path,
        parameters: dict,
        environment: dict[str, str],
        limit_s: float,
        on_cell: Callable[[dict], None],
        cancelled: threading.Event,
        folder: Path | None = None,
    ) -> dict:
        """As `execute.execute`, on the worker.

        Failed with `worker.DIED` when that ends in the middle, with "NoWorker" where none came.
        """
        if not self.address:
            return {"status": "failed", "error": "NoWorker", "lines": ["no worker came"]}
        records = Path(environment["LECTURES_RECORDS"])
        job = {
            "key": f"{notebook.stem}-{uuid.uuid4().hex}",
            "name": notebook.name,
            "source": notebook.read_bytes(),
            "folder": worker.portable(folder or notebook.parent),
            "parameters": parameters,
            "environment": {
                name: value
                for name, value in environment.items()
                if name not in ("LECTURES_RECORDS", "LECTURES_SCRATCH")
            },
            "limit_s": limit_s,
            "records": {
                file.name: file.read_bytes()
                for ending in ("json", "csv")
                for file in records.glob(f"*.{ending}")
            },
        }
        try:
            done = self._follow(job, on_cell, cancelled)
        except Exception as error:  # of the worker itself, such as a full disk there
            return {"status": "failed", "error": type(error).__name__, "lines": [str(error)]}
        if cancelled.is_set():
            return {"status": "interrupted"}
        if done is None:
            lost = f"the connection to the worker on {self.machine['host']} was lost"
            return {"status": "failed", "error": worker.DIED, "lines": [lost]}
        log.write_bytes(done["log"])
        if done["output"] is not None:
            output.write_bytes(done["output"])
        for name, content in done["records"].items():
            (records / Path(name).name).write_bytes(content)
        return done["outcome"]

    def _follow(
        self, job: dict, on_cell: Callable[[dict], None], cancelled: threading.Event
    ) -> dict | None:
        """What `worker.perform` returns, None when it was cancelled or its worker died."""
        client, events, starts = self.cluster.client, queue.Queue(), 0
        client.subscribe_topic(job["key"], lambda event: events.put(event[1]))
        future = client.submit(
            worker.perform, job, key=job["key"], workers=[self.address],
            allow_other_workers=False, resources={worker.RESOURCE: 1},
        )  # fmt: skip
        future.add_done_callback(lambda _: events.put("done"))
        try:
            # Started twice: a worker that died and has come back under the same address.
            while not cancelled.is_set() and self.address in self.cluster.workers and starts < 2:
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=execute.POLL_S)
                    if event == "done":
                        return future.result()
                    if event == "started":
                        starts += 1
                    else:
                        on_cell({name: event[name] for name in ("index", "execution_count")})
        except LOST:
            pass
        finally:
            future.cancel()
            client.unsubscribe_topic(job["key"])
        return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Dask's own lines are about connections that end; what matters is said here."""
    names = [n for n in logging.root.manager.loggerDict if n.startswith(("distributed", "tornado"))]
    loggers = [logging.getLogger(name) for name in names if not logging.getLogger(name).disabled]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # versions that differ: the report names them
        try:
            for logger in loggers:
                logger.disabled = True
            yield
        finally:
            for logger in loggers:
                logger.disabled = False
