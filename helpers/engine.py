"""How papermill executes a notebook here: always with this Python, with bounded output, and
telling which cell runs. `helpers.execute` calls it in a process of its own."""

import helpers.light_nbformat  # noqa: F401

# isort: split
import ast
import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill
import zmq.asyncio
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers
from traitlets import default

STREAM_LIMIT = 1_000_000  # characters of printed output that are kept of one cell
ERROR_LINES = 15  # of a traceback: its end says what happened
SOURCE_LINES = 5  # of a failing cell
OUTPUT_TIMEOUT_S = 120  # for output still in the queue after a cell ended; nbclient gives up at 4
LOG = "LECTURES_LOG"  # the environment variable with the path of the processes' log
KERNEL_ARGUMENTS = [
    "--IPKernelApp.log_level=ERROR",  # its warnings are not about the notebook
    # Where a crash happened. A path, since ipykernel takes the standard error away for its cells.
    "--IPKernelApp.exec_lines=import os as _os, faulthandler as _faulthandler; "
    f"_faulthandler.enable(open(_os.environ['{LOG}'], 'a'), all_threads=False)",
]
ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _ThisPython(KernelSpecManager):
    """Every kernel name means the Python that runs this: an installed "python3" may be another."""

    def get_kernel_spec(self, kernel_name):
        return self.kernel_spec_class(resource_dir=RESOURCES, **get_kernel_dict())


class _Kernel(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _default_kernel_spec_manager(self):
        return _ThisPython()

    def client(self, **options):
        # The queue for output has no limit: one that is full loses messages, and the message
        # that ends a cell may be among them.
        context = zmq.asyncio.Context()
        context.rcvhwm = 0
        return super().client(context=context, **options)


class _Client(PapermillNotebookClient):
    """papermill's client that bounds what a cell prints and says how a kernel died."""

    printed = 0  # characters that the cell `printing` has printed so far
    printing = None
    notice = None  # the output that says how much was left out

    def start_new_kernel_client(self):
        try:
            return super().start_new_kernel_client()
        except RuntimeError:
            # It died or does not answer: another process took a port that it had found free.
            self.km = self.create_kernel_manager()
            self.start_new_kernel()
            return super().start_new_kernel_client()

    def output(self, outs, msg, display_id, cell_index):
        if msg["msg_type"] != "stream":
            return super().output(outs, msg, display_id, cell_index)
        if cell_index != self.printing or not outs or self.clear_before_next_output:
            self.printed, self.printing, self.notice = 0, cell_index, None
        out, text = None, msg["content"]["text"]
        room = max(0, STREAM_LIMIT - self.printed)
        self.printed += len(text)
        if room:
            msg["content"]["text"] = text[:room]
            out = super().output(outs, msg, display_id, cell_index)
            # Prints come as any number of messages: one output for all, as a notebook shows them.
            kinds = [(each.output_type, each.get("name")) for each in outs[-2:]]
            if out is not None and len(kinds) == 2 and kinds[0] == kinds[1]:
                outs[-2].text += outs.pop().text
        if self.printed > STREAM_LIMIT:
            if self.notice is None:
                self.notice = nbformat.v4.new_output("stream", name="stderr")
                outs.append(self.notice)
            left_out = self.printed - STREAM_LIMIT
            self.notice.text = f"\n[{left_out:,} characters of output are left out here]\n"
        return out

    def execute_cell(self, cell, cell_index, **options):
        if cell.cell_type == "code":
            self.save()  # what the cells before it have left; this one may be the last
        return super().execute_cell(cell, cell_index, **options)

    def papermill_execute_cells(self):
        try:
            super().papermill_execute_cells()
        except DeadKernelError:
            raise DeadKernelError(how_it_ended(self.km.provisioner.process.returncode)) from None


class _Engine(NBClientEngine):
    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **options):
        for unused in ("input_path", "start_timeout"):
            options.pop(unused, None)
        client = _Client(nb_man, kernel_name=kernel_name, **options)
        # papermill writes the whole file at the start and at the end of every cell, of text too:
        # seconds for a long notebook. Once before each code cell keeps as much.
        client.save, nb_man.save = nb_man.save, lambda **_: None
        try:
            return client.execute()
        finally:
            client.save()


papermill_engines.register("helpers", _Engine)


def how_it_ended(returncode: int | None) -> str:
    """A process's exit status in words."""
    if returncode is None or returncode >= 0:
        return f"the process ended with exit status {returncode}"
    name = next((s.name for s in signal.Signals if s == -returncode), f"number {-returncode}")
    hint = "; running out of memory is the usual cause" if name == "SIGKILL" else ""
    return f"the process was ended by the signal {name}{hint}"


def read(path: Path) -> NotebookNode:
    """The notebook in format 4. ValueError, in one line, when the file holds none."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat has another class for each way to be wrong
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} cannot be read as a notebook: {reason}") from None


def has_tag(notebook: NotebookNode, tag: str) -> bool:
    """Whether the notebook's cell tagged `parameters` has this tag as well."""
    tags = (cell.metadata.get("tags", []) for cell in notebook.cells)
    return any("parameters" in each and tag in each for each in tags)


def parameter_names(notebook: NotebookNode) -> set[str]:
    """The names that the notebook's cell tagged `parameters` assigns."""
    notebook = nbformat.from_dict(notebook)
    notebook.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": ""}
    return set(papermill.inspect_notebook(notebook))


def parameter_value(text: str) -> object:
    """The value of `-p name text`: as papermill's command line has it, and lists, dictionaries."""
    from papermill.cli import _resolve_type  # loads the whole command line

    if text[:1] in ("[", "(", "{"):
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)
    return _resolve_type(text)


def headings(notebook: NotebookNode) -> list[str]:
    """For each cell the nearest heading above it."""
    above, heading = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.DOTALL | re.MULTILINE)
            found = re.findall(r"^#{1,6}\s+(.+?)[ #]*$", prose, flags=re.MULTILINE)
            heading = found[-1] if found else heading
        above.append(heading)
    return above


def describe_cell(notebook: NotebookNode, event: dict) -> dict:
    """What the report says of a cell; `event` is the last one of `execute`."""
    return {
        **event,
        "cells": len(notebook.cells),
        "source": "\n".join(notebook.cells[event["index"]].source.splitlines()[:SOURCE_LINES]),
        "heading": headings(notebook)[event["index"]],
    }


def last_lines(text: str) -> list[str]:
    """The end of an error, without the escapes that colour it in a terminal."""
    lines = [line.rstrip()[:500] for line in ANSI_ESCAPE.sub("", text).splitlines()]
    return [line for line in lines if line][-ERROR_LINES:]


def run(notebook: Path, output: Path, folder: Path, parameters: dict, on_cell: Callable) -> dict:
    """Execute a notebook in `folder`; save it to `output` before each code cell and last.

    `on_cell(index, execution_count)` is called before each cell; the index counts the cells of
    the source. Returns the status ("passed", "failed" or "kernel died") and, unless it passed,
    the error's name and last lines.
    """
    position = {"shift": 0, "count": 0}

    def cell_starts(cell, cell_index):
        if "injected-parameters" in cell.metadata.get("tags", []):
            position["shift"] = 1  # papermill adds this cell: the source does not have it
        position["count"] += cell.cell_type == "code" and bool(cell.source.strip())
        on_cell(cell_index - position["shift"], position["count"])

    def failure(status: str, error: str, text: str) -> dict:
        return {"status": status, "error": error, "lines": last_lines(text)}

    def literal(path: Path) -> str:  # papermill fills in {names} in paths
        return str(path).replace("{", "{{").replace("}", "}}")

    try:
        executed = papermill.execute_notebook(
            literal(notebook),
            literal(output),
            parameters=parameters,
            engine_name="helpers",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=str(folder),
            kernel_manager_class=_Kernel,
            on_cell_start=cell_starts,
            iopub_timeout=OUTPUT_TIMEOUT_S,
            extra_arguments=KERNEL_ARGUMENTS,
        )
    except DeadKernelError as error:
        return failure("kernel died", "DeadKernelError", str(error))
    except PapermillExecutionError as error:
        # papermill also raises for the errors of cells tagged raises-exception, which are wanted.
        executed = read(output)
        if executed.metadata.papermill.get("exception"):
            return failure("failed", error.ename, "\n".join(error.traceback) or error.evalue)
        nbformat.write(remove_error_markers(executed), output)
    except Exception as error:  # no kernel starts, the disk is full, output does not arrive, …
        return failure("failed", type(error).__name__, str(error))
    if executed.metadata.papermill.get("exception"):  # papermill lets sys.exit(0) pass
        return failure("failed", "SystemExit", "a cell ended the notebook before its last cell")
    return {"status": "passed"}
