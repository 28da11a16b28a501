"""Execute the notebooks and write a report: `python -m helpers.run --help`."""

# ruff: noqa: E402
import os
import signal

INTERRUPTIONS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
if __name__ == "__main__":  # before the seconds that the rest takes to load
    for number in INTERRUPTIONS:
        signal.signal(number, lambda *_: os._exit(130))

# isort: split
import argparse
import contextlib
import re
import sys
from pathlib import Path
from typing import TextIO

from helpers import (
    device,
    engine,
    open_run,
    report,
    report_compare,
    run_folder,
    runner,
    toolchain,
    worker,
)
from helpers.engine import NotebookNode
from helpers.run_folder import Refused

LIMIT_MINUTES = {"smoke": 10.0, "full": 20.0}  # wall time of one notebook
MOST_MINUTES = 100_000  # ten weeks; the clock of a wait has an end


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="helpers.run", description=__doc__.split(":")[0] + ".")
    add = parser.add_argument
    add("chosen", nargs="*", metavar="NOTEBOOK", help="number or name (default: all)")
    add("--profile", metavar="smoke|full|auto", help="the size of the run")
    add("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters",
        help="set a parameter in the notebooks that have it")  # fmt: skip
    add("--timeout", metavar="MINUTES", help="limit of one notebook (smoke: 10, full: 20)")
    add("--jobs", type=int, metavar="N",
        help="notebooks at a time, on a GPU each where there are GPUs; some run alone anyway "
        "(default: 1 with a GPU, else 2)")  # fmt: skip
    add("--scheduler", metavar="ADDRESS",
        help="hand the notebooks to the workers of this Dask scheduler (or of its file): "
        "helpers/cluster.py says how to start them")  # fmt: skip
    add("--each-device", action="store_true",
        help="every notebook on each kind of device that the workers have")  # fmt: skip
    add("--resume", action="store_true", help="continue the newest run: skip what is finished")
    add("--no-pages", action="store_true", help="make no HTML pages of notebooks, draw no curves")
    add("--output", type=Path, metavar="DIR", help="default: runs/<device>-<date>")
    add("--notebooks", type=Path, metavar="DIR", default=run_folder.ROOT / "notebooks")
    add("--compare", nargs=2, metavar=("A", "B"),
        help="run nothing: compare runs' folders, results.json, recorded, lecture")  # fmt: skip
    return parser.parse_args(arguments)


def choose(chosen: list[str], folder: Path) -> list[Path]:
    """The notebooks meant by numbers (2, 02) or names, in order; all when none is named."""
    partial = ".partial.ipynb"
    found = sorted(f.resolve() for f in folder.glob("*.ipynb") if not f.name.endswith(partial))
    if not found:
        raise Refused(f"there are no notebooks in {folder}")
    picked = set()
    for name in chosen:
        matching = [
            notebook
            for notebook in found
            if Path(name).name in (notebook.name, notebook.stem)
            or (number := re.match(r"\d+", notebook.name))
            and name.isdecimal()
            and int(number[0]) == int(name)
        ]
        if not matching:
            there = ", ".join(notebook.stem for notebook in found)
            raise Refused(f"there is no notebook {name!r} in {folder}, which has {there}")
        picked.update(matching)
    return sorted(picked) if chosen else found


def minutes(text: str | None, profile: str) -> float:
    """The time limit of a notebook."""
    if text is None:
        return LIMIT_MINUTES[profile]
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value <= MOST_MINUTES:
            return value
    raise Refused(f"--timeout must be a number of minutes up to {MOST_MINUTES}, not {text!r}")


def parameters_of(
    notebooks: dict[Path, NotebookNode], given: dict[str, object]
) -> dict[Path, dict]:
    """For each notebook those of the given parameters that it has."""
    names = {path: engine.parameter_names(notebook) for path, notebook in notebooks.items()}
    for name in given:
        if not any(name in has for has in names.values()) and name != "profile":
            known = ", ".join(sorted(set().union(*names.values()))) or "none"
            raise Refused(f"no chosen notebook has a parameter {name!r}; there are: {known}")
    return {
        path: {name: value for name, value in given.items() if name in has}
        for path, has in names.items()
    }


def pool_of(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Where the notebooks run, opened by `with`: this machine, or the workers of a cluster."""
    jobs = runner.default_jobs() if options.jobs is None else options.jobs
    if jobs < 1:
        raise Refused(f"--jobs must be at least 1, not {jobs}")
    if options.scheduler and options.jobs is not None:
        raise Refused("--jobs is for this machine: with --scheduler each worker has one notebook")
    if not options.scheduler and (options.jobs is None or jobs == 1):
        if options.each_device:
            raise Refused("--each-device is for the devices of a cluster: see --scheduler")
        return contextlib.nullcontext(runner.Here(jobs))
    try:
        from helpers import cluster
    except ImportError:
        raise Refused(worker.NEEDS) from None
    return cluster.connected(options.scheduler) if options.scheduler else cluster.local(jobs)


def say(text: str, file: TextIO) -> None:
    """Print, as long as somebody reads it: a pipe's end that is closed is no reason to fail."""
    try:
        print(text, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def refused(reason: Exception) -> int:
    say(f"helpers.run: {reason}", sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 (a failure), 2 (refused) or 130."""
    options = parse(arguments)
    try:
        if options.compare:
            return report_compare.main(*options.compare, options.output)
        paths = choose(options.chosen, options.notebooks)
        notebooks = {path: engine.read(path) for path in paths}
        given = {name: engine.parameter_value(text) for name, text in options.parameters}
        if options.profile and given.get("profile", options.profile) != options.profile:
            raise Refused("--profile and -p profile ask for different things")
        choice = options.profile or given.get("profile") or "auto"
        if options.profile:
            given["profile"] = choice
        minutes(options.timeout, device.profile(choice))
        parameters_of(notebooks, given)
        pool = pool_of(options)
    except (Refused, ValueError) as refusal:
        return refused(refusal)
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(pool)
            profile = pool.profile(choice)
            if "profile" in given:
                given["profile"] = profile
            parameters = parameters_of(notebooks, given)
            slugs = pool.devices()
            slug = slugs[0] if len(slugs) == 1 else "fleet"
            wanted = [path.stem for path in paths]
            folder = open_run.open_folder(options.output, options.resume, slug, wanted)
        except Refused as refusal:
            return refused(refusal)
        stack.callback(open_run.unlock, folder)
        if options.resume:
            say(open_run.described(folder), sys.stderr)
        if missing := toolchain.missing():
            say(f"On this machine: {missing}", sys.stderr)
        try:
            entries, interrupted = runner.run_all(
                notebooks, parameters, profile, folder, minutes(options.timeout, profile), pool,
                slugs if options.each_device else [None],
            )  # fmt: skip
            whole = not (interrupted or options.no_pages)
            page = report.write(folder, convert=whole, pictures=whole)
        except (OSError, Refused) as error:
            say(f"helpers.run: {folder} can no longer be written: {error}", sys.stderr)
            return 1
    say(f"{report.summary(entries)}\nReport: {page}", sys.stdout)
    if interrupted:
        say("Interrupted: --resume continues this run.", sys.stdout)
        return 130
    return int(any(entry["status"] != "passed" for entry in entries))


def _interrupt(*_) -> None:
    for number in INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)  # once: what follows must not be cut short
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in INTERRUPTIONS:
        signal.signal(number, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after the notebooks
        say("helpers.run: interrupted; --resume continues", sys.stderr)
        sys.exit(130)
