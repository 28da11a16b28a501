"""What pytest needs to know of this repository: the small profile, and how to run notebooks.

nbval makes every code cell of a notebook a test. Its defaults are for short notebooks whose kernel
never dies; the pieces below are for ours.
"""

import functools
import os
import time
from pathlib import Path
from queue import Empty

import nbval.kernel
import pytest
from nbval.plugin import IPyNbCell

ROOT = Path(__file__).resolve().parent
OUTPUT_TIMEOUT_S = 60  # nbval's 5 s are too few for a large figure on a busy machine
POLL_S = 0.5

# Kernels and child processes inherit these: the small sizes, and `helpers` without an installation.
os.environ["LECTURES_PROFILE"] = "smoke"
os.environ["LECTURES_PROGRESS"] = ""  # what tests answer is nobody's progress
# Two notebooks run at a time: with a thread for every core each, they would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)

_start_new_kernel = nbval.kernel.start_new_kernel
_await_reply = nbval.kernel.RunningKernel.await_reply
_broken_notebooks = set()


class KernelDied(RuntimeError):
    """The kernel ended in the middle of a cell."""


def start_new_kernel(*args, **kwargs):
    # ipykernel does not capture what a child process or C code prints when it sees this variable.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    # A figure is drawn once; for its margins (bbox_inches="tight") it would be drawn twice.
    whole = "--InlineBackend.print_figure_kwargs={'bbox_inches': None}"
    return _start_new_kernel(*args, env=env, extra_arguments=[whole], **kwargs)


def execute_cell_input(kernel, cell_input, allow_stdin=None):
    # nbval asks for store_history=False, which leaves In, Out and the execution counts empty.
    return kernel.kc.execute(
        cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
    )


def await_reply(kernel, msg_id, timeout=None):
    # A dead kernel never replies, and nbval would wait for it until the cell's timeout.
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while True:
        try:
            return _await_reply(kernel, msg_id, timeout=POLL_S)
        except Empty:
            if not kernel.is_alive():
                raise KernelDied("The kernel died while it ran this cell") from None
            if time.monotonic() > deadline:
                raise


nbval.kernel.start_new_kernel = start_new_kernel
nbval.kernel.RunningKernel.execute_cell_input = execute_cell_input
nbval.kernel.RunningKernel.await_reply = await_reply


def pytest_report_header():
    from helpers import toolchain

    return f"missing: {missing}" if (missing := toolchain.missing()) else None


# The longest files, in the order in which they start: xdist hands whole files out, and a long one
# that comes last would leave the second core with nothing to do. nbval's cells come before
# test_notebooks.py, which finds their compiled kernels in the cache.
LONGEST_FIRST = (
    *("test_older_triton.py", "test_run.py", "*.ipynb", "test_notebooks.py"),
    *("test_offline_triton.py", "test_cuda_kernels.py", "test_matmul.py", "test_softmax.py"),
    *("test_softmax_mutants.py", "test_triton_matmul.py", "test_exercise_softmax.py"),
    *("test_triton_matmul_mutants.py", "test_conftest.py"),
    *("test_exercise_cuda_gelu.py", "test_exercise_triton_gelu.py"),
)


def pytest_collection_modifyitems(items):
    @functools.cache
    def rank(path):
        places = [i for i, name in enumerate(LONGEST_FIRST) if path.match(name)]
        return places[0] if places else len(LONGEST_FIRST)

    items.sort(key=lambda item: rank(item.path))  # stable: keeps the order within a file
    for item in items:
        if isinstance(item, IPyNbCell):
            item.output_timeout = OUTPUT_TIMEOUT_S


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if isinstance(item, IPyNbCell) and item.path in _broken_notebooks:
        pytest.skip("an earlier cell of this notebook failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if isinstance(item, IPyNbCell) and report.failed:
        _broken_notebooks.add(item.path)
        if call.excinfo.errisinstance(KernelDied):
            report.longrepr = f"{call.excinfo.value}:\n\n{item.cell.source}"
    return report
