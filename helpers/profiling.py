"""torch.profiler into tables: which operators ran, which kernels they launched, when and how long.

All times are microseconds. A capture holds one run, so that a number in a table can be found again
in the trace. Event fields are those of Kineto's Chrome traces:
https://github.com/pytorch/kineto (libkineto/src/output_json.cpp).
"""

import contextlib
import gzip
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# Kineto reads this when the process first profiles. Below 6, torch 2.13 writes "USDT: ..." lines
# to the process's stderr at each start and stop, and they end up in notebooks.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from torch import profiler

from helpers import device
from helpers.kernel_names import short

if TYPE_CHECKING:
    import pandas as pd

# The annotation around the profiled call: what lies outside it is the profiler or the notebook.
RUN = "run"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
OTHER_CATEGORIES = ("user_annotation", "gpu_user_annotation", "overhead")


@dataclass(frozen=True)
class Capture:
    """One profiled run: torch's averages per name, and the Chrome trace as a dictionary."""

    averages: list
    trace: dict

    @property
    def events(self) -> list[dict]:
        """The trace's complete events (they have a start `ts` and a duration `dur`, in µs)."""
        return [event for event in self.trace["traceEvents"] if event.get("ph") == "X"]


def capture(run: Callable[[], object], warmups: int = 1, with_stack: bool = False) -> Capture:
    """Profile one call of `run`, after `warmups` calls that are not profiled.

    One more call before it runs under the profiler and is discarded: what the profiler sets up
    would otherwise slow the first launches by some hundred microseconds.
    A CPU build gives the CPU's table. With `with_stack` the trace also has Python frames, and every
    Python call costs about 1 µs more. ValueError when `warmups` is negative.
    """
    if warmups < 0:
        raise ValueError(f"warmups must be 0 or more, got {warmups}")
    for _ in range(warmups):
        run()
    device.synchronize()
    with profiler.profile(
        activities=sorted(profiler.supported_activities(), key=str),
        schedule=profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        with_stack=with_stack,
        acc_events=True,  # without it some versions warn that events are cleared after a cycle
    ) as prof:
        for _ in range(2):
            with profiler.record_function(RUN):
                run()
            # Inside the cycle: kernels that have not finished when it ends are missing from it.
            device.synchronize()
            prof.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    trace = {key: trace[key] for key in trace if key not in ("host_name", "traceName")}
    result = Capture(averages=list(prof.key_averages()), trace=trace)
    if launches_by_id(result) and not gpu_events(result):
        warnings.warn(
            "The profiler saw kernel launches but no kernels: CUPTI, which times them, is in use by"
            " another tool or not permitted here. Only the CPU's part of the tables is filled.",
            stacklevel=2,
        )
    return result


def device_time_us(event: object, own: bool = False) -> float:
    """GPU time of a profiler event or average; `own` leaves out the operators it called.

    The attribute was `cuda_time_total` before PyTorch 2.3 and is `device_time_total` since.
    """
    prefix = "self_" if own else ""
    for name in (f"{prefix}device_time_total", f"{prefix}cuda_time_total"):
        if hasattr(event, name):
            return float(getattr(event, name))
    raise AttributeError(f"{type(event).__name__} has neither device_time_total nor its old name")


def operations(capture: Capture, limit: int = 10) -> "pd.DataFrame":
    """The costliest operators, CUDA calls and kernels: one row per name, costliest first.

    With a GPU the order and the share are of GPU time. An operator is charged with the kernels it
    launched itself, and each of those kernels also has a row: the shares of the kernels add up to
    100 %, and so do those of the operators. Without a GPU order and share are of the CPU's time,
    and there is no GPU column. "own" leaves out the operators that a row called.
    """
    import pandas as pd

    if limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    others = {event["name"] for event in capture.events if event.get("cat") in OTHER_CATEGORIES}
    # A range may be named like an operator or a kernel, which must not be lost with it.
    others -= {e["name"] for e in capture.events if e.get("cat") in ("cpu_op", *GPU_CATEGORIES)}
    gpu_names = {event["name"] for event in gpu_events(capture)}
    others.add("ProfilerStep*")
    averages = [average for average in capture.averages if average.key not in others]
    table = pd.DataFrame(
        {
            "name": [short(a.key) if a.key in gpu_names else a.key for a in averages],
            "kind": ["kernel" if a.key in gpu_names else _host_kind(a.key) for a in averages],
            "calls": [average.count for average in averages],
            "CPU own (µs)": [float(average.self_cpu_time_total) for average in averages],
            "GPU own (µs)": [device_time_us(average, own=True) for average in averages],
        }
    )
    by, total = "GPU own (µs)", table.loc[table["kind"] == "kernel", "GPU own (µs)"].sum()
    if not total:
        table = table.drop(columns=by)
        by = "CPU own (µs)"
        total = table[by].sum() or 1.0
    table["share (%)"] = 100 * table[by] / total
    table = table.sort_values([by, "CPU own (µs)"], ascending=False, kind="stable")
    return table.head(limit).reset_index(drop=True)


def kernels(capture: Capture) -> "pd.DataFrame":
    """Every kernel, copy and fill that ran on the GPU, in launch order; empty on a CPU.

    launch_us is when the host made the call, start_us when the GPU began, both counted from the
    first of them; queue_us is the difference: how long the work waited behind its launch. In a
    CUDA graph all kernels have the launch of the graph. A value the trace lacks is missing.
    """
    import pandas as pd

    events = gpu_events(capture)
    args = [event.get("args", {}) for event in events]
    launches = launches_by_id(capture)
    table = pd.DataFrame(
        {
            "name": [short(event["name"]) for event in events],
            "launch_us": [launches.get(_correlation(e), {}).get("ts", math.nan) for e in events],
            "start_us": [event["ts"] for event in events],
            "queue_us": math.nan,
            "duration_us": [event["dur"] for event in events],
            "grid": [tuple(a["grid"]) if "grid" in a else None for a in args],
            "block": [tuple(a["block"]) if "block" in a else None for a in args],
            "registers": [a.get("registers per thread") for a in args],
            "shared_bytes": [a.get("shared memory") for a in args],
            "stream": [a.get("stream") for a in args],
            "full_name": [event["name"] for event in events],
        }
    )
    table["queue_us"] = table["start_us"] - table["launch_us"]
    times = ["launch_us", "start_us"]
    table[times] -= table[times].min().min()
    order = table["launch_us"].fillna(table["start_us"])
    return table.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def kernel_time_us(capture: Capture) -> float | None:
    """Summed duration of everything that ran on the GPU; None when nothing did (a CPU)."""
    durations = [event["dur"] for event in gpu_events(capture)]
    return float(sum(durations)) if durations else None


def host_timeline(capture: Capture) -> "pd.DataFrame":
    """What the host asked for and when the GPU did it; empty on a CPU.

    Lane "host" has the calls that launched the trace's kernels, and the waits (cuda...Synchronize);
    lane "device" the kernels, with their launch's correlation. Times count from the first row.
    """
    import pandas as pd

    events = gpu_events(capture)
    launched = {_correlation(event) for event in events}
    for event in capture.events:
        is_wait = event["name"].endswith("Synchronize")
        if event.get("cat") in HOST_CATEGORIES and (is_wait or _correlation(event) in launched):
            events.append(event)
    events.sort(key=lambda event: event["ts"])
    first = events[0]["ts"] if events else 0.0
    return pd.DataFrame(
        {
            "lane": ["device" if e["cat"] in GPU_CATEGORIES else "host" for e in events],
            "name": [short(event["name"]) for event in events],
            "start_us": [event["ts"] - first for event in events],
            "end_us": [event["ts"] - first + event["dur"] for event in events],
            "correlation": [_correlation(event) for event in events],
        }
    )


def export_trace(capture: Capture, path: str | Path) -> Path:
    """Write the trace for https://ui.perfetto.dev as gzipped JSON; `path` ends in .json.gz."""
    path = Path(path)
    if not path.name.endswith(".json.gz"):
        raise ValueError(f"the trace is gzipped JSON, so its name must end in .json.gz: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(capture.trace, file)
    return path


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Name a stretch of code: a range in the profiler's trace and, with a GPU, in Nsight (NVTX)."""
    nvtx = torch.cuda.nvtx.range(name) if device.has_cuda() else contextlib.nullcontext()
    with profiler.record_function(name), nvtx:
        yield


def gpu_events(capture: Capture) -> list[dict]:
    """The trace's kernels, copies and fills, in the trace's order."""
    return [event for event in capture.events if event.get("cat") in GPU_CATEGORIES]


def launches_by_id(capture: Capture) -> dict[int, dict]:
    """The host calls that put work on the GPU, by the correlation id that the work shares."""
    return {
        _correlation(event): event
        for event in capture.events
        if event.get("cat") in HOST_CATEGORIES
        and re.search("Launch|Memcpy|Memset", event["name"])
        and _correlation(event) is not None
    }


def _correlation(event: dict) -> int | None:
    return event.get("args", {}).get("correlation")


def _host_kind(name: str) -> str:
    return "CUDA call" if re.match(r"cu(da)?[A-Z]", name) else "operator"
