"""Flame graphs of one profiled run: which calls, inside which calls, the time went to.

The tree is built from a Chrome trace by nesting: on one thread, an interval that lies inside
another was called by it. Equal stacks are added up, so a width is a total, not a moment; modules
of one class share a frame (Linear_0 and Linear_1 are both "Linear"). The text format is the one of
https://github.com/brendangregg/FlameGraph, which speedscope.app reads too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from helpers.kernel_names import short
from helpers.profiling import RUN, Capture, gpu_events, launches_by_id
from helpers.stacks import BACKWARD, run_event, threads

COLORS = {
    "Python": "#a6c8e4",
    "annotation": "#d5d5d5",
    "operator": "#f6b26b",
    "backward": "#c5a5dd",
    "kernel": "#93c98f",
}


@dataclass
class Node:
    """Time in one call and all it called, added up over equal stacks; children by name."""

    name: str
    kind: str  # a key of COLORS
    value_us: float = 0.0
    children: dict[str, "Node"] = field(default_factory=dict)

    def add(self, path: list[tuple[str, str]], value_us: float) -> None:
        """Add time to the node at the end of `path`, (name, kind) pairs below this node."""
        node = self
        for name, kind in path:
            node = node.children.setdefault(name, Node(name, kind))
        node.value_us += value_us


def flame(capture: Capture, weight: str = "auto") -> Node:
    """The tree of a run, rooted at the profiled call.

    weight "cpu": the host's time; a wait for the GPU or for the autograd thread counts as the
    waiting call's. The root is the run plus the work of other threads, which have a frame of their
    own ("autograd thread": on a GPU, PyTorch runs backward there). weight "device": GPU time, each
    kernel counted under the host stack that launched it; the root is all GPU time. "auto" is
    "device" where kernels ran. ValueError on another weight, or on "device" without kernels.
    Python frames are there if the capture was made with_stack.
    """
    if weight not in ("cpu", "device", "auto"):
        raise ValueError(f'weight must be "cpu", "device" or "auto", not {weight!r}')
    gpu = gpu_events(capture)
    if weight == "auto":
        weight = "device" if gpu else "cpu"
    if weight == "device" and not gpu:
        raise ValueError('no kernels in this capture: use weight="cpu"')
    return _by_device(capture, gpu) if weight == "device" else _by_cpu(capture)


def collapsed(node: Node) -> str:
    """One line a stack, "run;a;b 1500": own time, without callees, in whole nanoseconds."""
    lines = []

    def visit(node: Node, stack: str) -> None:
        own_ns = round(1000 * (node.value_us - sum(c.value_us for c in node.children.values())))
        if own_ns > 0:
            lines.append(f"{stack} {own_ns}")
        for child in node.children.values():
            visit(child, f"{stack};{child.name.replace(';', ',')}")

    visit(node, node.name)
    return "\n".join(lines)


def depth(node: Node, min_share: float = 0.004) -> int:
    """Rows that `draw_flame` will draw: about 0.25 inch of figure height each reads well."""
    return 1 + max(row for _, row, _ in _boxes(node, min_share))


def draw_flame(ax: object, node: Node, min_share: float = 0.004) -> None:
    """Draw the tree on matplotlib axes: callers below callees, widths proportional to time.

    Children stand in the order in which they first ran. Frames below `min_share` of the total are
    left out, labels appear where they fit. The title, with the total, is the caller's.
    """
    from matplotlib.patches import Patch

    if node.value_us <= 0:
        raise ValueError("there is no time in this tree to draw")
    boxes = list(_boxes(node, min_share))
    ax.barh(
        y=[row for _, row, _ in boxes],
        width=[box.value_us for box, _, _ in boxes],
        left=[left for _, _, left in boxes],
        height=1.0,
        color=[COLORS[box.kind] for box, _, _ in boxes],
        edgecolor="white",
        linewidth=0.6,
    )
    ax.set_xlim(0, node.value_us)
    ax.set_ylim(-0.5, depth(node, min_share) - 0.5)
    ax.set_axis_off()
    size = 8.0
    letter_us = node.value_us * 0.56 * size * ax.figure.dpi / 72 / ax.get_window_extent().width
    for box, row, left in boxes:
        letters = int(box.value_us / letter_us) - 1
        label = box.name.replace(BACKWARD, "evaluate ")
        if len(label) + 6 <= letters:
            label += f"  {box.value_us / node.value_us:.0%}"
        if letters >= min(4, len(label)):
            text = label if len(label) <= letters else label[: letters - 1] + "…"
            ax.text(left + letter_us / 2, row, text, fontsize=size, va="center", clip_on=True)
    kinds = {box.kind for box, _, _ in boxes}
    handles = [Patch(color=COLORS[kind], label=kind) for kind in COLORS if kind in kinds]
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=len(handles),
        fontsize=size,
        frameon=False,
        handlelength=1.0,
    )


def _boxes(node: Node, min_share: float) -> Iterator[tuple[Node, int, float]]:
    """(node, row, left edge) of every box wide enough to draw."""
    waiting = [(node, 0, 0.0)]
    while waiting:
        box, row, left = waiting.pop()
        yield box, row, left
        for child in box.children.values():
            if child.value_us >= min_share * node.value_us:
                waiting.append((child, row + 1, left))
            left += child.value_us


def _by_cpu(capture: Capture) -> Node:
    run = run_event(capture)
    root = Node(RUN, "Python", run["dur"] if run else 0.0)
    for thread in threads(capture).values():
        for frame in thread.frames:
            duration_us = frame.end_us - frame.start_us
            path = thread.path(frame)
            root.add(path, duration_us)
            if frame.parent is None and thread.name:
                root.add(path[:1], duration_us)
            if frame.parent is None and (thread.name or not run):
                root.value_us += duration_us
    return root


def _by_device(capture: Capture, gpu: list[dict]) -> Node:
    by_id = threads(capture)
    launches = launches_by_id(capture)
    operators = {
        event["args"]["External id"]: event
        for event in capture.events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    root = Node(RUN, "Python")
    for event in sorted(gpu, key=lambda event: event["ts"]):
        args = event.get("args", {})
        path = []
        # The launch says where the host was. Without one, the operator that Kineto noted does.
        for host in (launches.get(args.get("correlation")), operators.get(args.get("External id"))):
            thread = by_id.get(host["tid"]) if host else None
            frame = thread.innermost(host["ts"] + host["dur"] / 2) if thread else None
            if frame:
                path = thread.path(frame)
                break
        path.append((short(event["name"]), "kernel"))
        for length in range(len(path) + 1):
            root.add(path[:length], event["dur"])
    return root
