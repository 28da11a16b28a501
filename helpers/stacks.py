"""Host call stacks from a Chrome trace: what ran inside what, on each thread.

On one thread, an interval that lies inside another was called by it.
"""

import bisect
import re
from dataclasses import dataclass, replace

from helpers.profiling import RUN, Capture

# Machinery of the measurement: dropped with everything inside.
HIDDEN = re.compile(
    r"torch[/\\](profiler[/\\]|autograd[/\\]profiler\.py)"
    r"|profiler::_record_function|helpers[/\\]profiling\.py\(\d+\): annotate"
)
# Wrappers that tell a reader nothing: dropped, and what they call moves up.
SKIPPED = re.compile(
    r"module\.py\(\d+\): _(wrapped_)?call_impl|torch[/\\]_ops\.py|contextlib\.py|threading\.py"
    r"|autograd[/\\](__init__\.py\(\d+\): backward|graph\.py\(\d+\): _engine_run_backward)"
)
# At equal times the first of these is the outer one.
KINDS = {"python_function": "Python", "user_annotation": "annotation", "cpu_op": "operator"}
ROUNDING_US = 0.01
BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class Frame:
    """One call on the host; `parent` is its caller's index in the thread's frames."""

    name: str
    kind: str  # "Python", "annotation", "operator" or "backward"
    start_us: float
    end_us: float
    parent: int | None


@dataclass(frozen=True)
class Thread:
    """A thread's frames by start time; `name` is None for the thread that made the run."""

    name: str | None
    frames: list[Frame]

    def path(self, frame: Frame) -> list[tuple[str, str]]:
        """(name, kind) of the frame and its callers, outermost first, below the thread's name."""
        callers = [frame]
        while callers[-1].parent is not None:
            callers.append(self.frames[callers[-1].parent])
        kind = self.frames[0].kind  # a thread of its own runs operators, or backward
        prefix = [(self.name, kind)] if self.name else []
        return prefix + [(frame.name, frame.kind) for frame in reversed(callers)]

    def innermost(self, time_us: float) -> Frame | None:
        """The innermost frame that was running at a time."""
        index = bisect.bisect_right(self.frames, time_us, key=lambda frame: frame.start_us) - 1
        while index is not None and index >= 0:
            if self.frames[index].end_us >= time_us:
                return self.frames[index]
            index = self.frames[index].parent
        return None


def run_event(capture: Capture) -> dict | None:
    """The event around the profiled call; None in a trace that `capture` did not make."""
    runs = (e for e in capture.events if e["name"] == RUN and e.get("cat") == "user_annotation")
    return min(runs, key=lambda event: event["ts"], default=None)


def threads(capture: Capture) -> dict[int, Thread]:
    """Each thread's frames inside the run, by thread id.

    Python frames of other threads are left out: they belong to the notebook's kernel.
    """
    run = run_event(capture)
    events: dict[int, list[dict]] = {}
    for event in capture.events:
        if event.get("cat") not in KINDS or event is run:
            continue
        if run:
            inside = run["ts"] <= event["ts"] < run["ts"] + run["dur"]
            foreign = event["cat"] == "python_function" and event["tid"] != run["tid"]
            if foreign or not inside:
                continue
        events.setdefault(event["tid"], []).append(event)
    end_us = run["ts"] + run["dur"] if run else float("inf")
    result = {}
    for tid, own in events.items():
        frames = _nest(own, end_us)
        backward = all(frame.kind == "backward" for frame in frames)
        name = "autograd thread" if backward else "other thread"
        result[tid] = Thread(name if run and tid != run["tid"] else None, frames)
    return result


def _nest(events: list[dict], end_us: float) -> list[Frame]:
    rank = list(KINDS)
    events = sorted(events, key=lambda e: (e["ts"], -e["dur"], rank.index(e["cat"])))
    frames: list[Frame] = []
    running: list[int] = []
    hidden_until = float("-inf")
    for event in events:
        start, end = event["ts"], min(event["ts"] + event["dur"], end_us)
        if end <= hidden_until or SKIPPED.search(event["name"]):
            continue
        if HIDDEN.search(event["name"]):
            hidden_until = end
            continue
        while running and frames[running[-1]].end_us <= start:
            running.pop()
        if event["cat"] == "user_annotation":
            # A range outlasts the call that opens it (__enter__): cut that call short, so that
            # what runs in the range nests inside the range.
            while running and frames[running[-1]].end_us < end - ROUNDING_US:
                opener = running.pop()
                frames[opener] = replace(frames[opener], end_us=start)
        parent = running[-1] if running else None
        kind = KINDS[event["cat"]]
        if kind == "operator":
            inside = parent is not None and frames[parent].kind == "backward"
            kind = "backward" if inside or event["name"].startswith(BACKWARD) else kind
        if parent is not None:
            # Clocks are rounded: a callee that seems to outlast its caller ends with it.
            end = min(end, frames[parent].end_us)
        frames.append(Frame(frame_name(event["name"]), kind, start, end, parent))
        running.append(len(frames) - 1)
    return frames


def frame_name(name: str) -> str:
    """A frame as a reader knows it, without paths: "linear.py(130): forward", "Linear", "matmul".

    Functions of a notebook's cell are given by their name alone.
    """
    module = re.fullmatch(r"nn\.Module: (\w+?)_\d+", name)
    built_in = re.match(r"<built-in (?:function|method) (\S+?)(?: of .*)?>$", name)
    python = re.fullmatch(r"(.*)\((\d+)\): (.*)", name)
    if module or built_in:
        return (module or built_in)[1]
    if not python:
        return name
    path, line, function = python.groups()
    if re.search(r"ipykernel_\d+|<ipython-input", path):
        return "cell" if function == "<module>" else function
    file = re.split(r"[/\\]", path)[-1]
    return f"{file}({line}): {function}"
