"""Hardware counters of a GPU, read by Nsight Compute (`ncu`) in a process of its own."""

import io
import shutil
import subprocess
import sys

from helpers.device import has_cuda

DRAM_BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")


def ncu_command(script: str, metrics=DRAM_BYTES, kernel: str | None = None) -> list[str]:
    """The command line that profiles a Python script given as text.

    kernel: a regular expression; only kernels whose name matches are profiled.
    `--clock-control none` leaves the GPU's clocks alone: ncu would otherwise lock them to the
    base clock, and the durations would not be those of an ordinary run.
    """
    # Demangled names: the plain ones leave out the template arguments, which tell kernels apart.
    only = ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernel}"] if kernel else []
    options = ["--clock-control", "none", "--metrics", ",".join(metrics), "--csv", *only]
    return ["ncu", *options, sys.executable, "-c", script]


def read_counters(script: str, metrics=DRAM_BYTES, kernel: str | None = None):
    """Counters of every matching kernel that the script launches.

    Returns (frame, ""): a pandas frame with one kernel a row, one metric a column, in ncu's base
    units (bytes, ns); or (None, reason) where ncu is missing or may not read the counters.
    """
    if not has_cuda():
        return None, "there is no GPU here"
    if shutil.which("ncu") is None:
        return None, "ncu (Nsight Compute) is not installed or not on the PATH"
    command = ncu_command(script, metrics, kernel)
    command[1:1] = ["--print-units", "base"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"ncu could not be run: {error}"
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or not lines:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        return None, f"ncu could not read the counters; it said: {said[-1]}"
    return _frame("\n".join(lines)), ""


def _frame(text: str):
    import pandas as pd

    rows = pd.read_csv(io.StringIO(text), thousands=",")
    table = rows.pivot(index="ID", columns="Metric Name", values="Metric Value").astype(float)
    names = rows.drop_duplicates("ID").set_index("ID")["Kernel Name"]
    return table.assign(kernel=names).reset_index(drop=True).rename_axis(columns=None)
