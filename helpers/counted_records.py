"""The work of the course's timed operations, from their records.

Work is counted by `helpers.traffic` as an operation is written: nine kernels move what nine kernels
move. What no function counts is left out: whole networks, `cdist`, an activation in place.
`helpers.counted_curves` does the same for curves.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from helpers import traffic
from helpers.machines import Machine
from helpers.traffic import Work

MS = {"ms": 1, "us": 1e-3}
SIGMOIDS = {  # three sigmoids: reads and writes an element, counted in notebook 04, section 6
    "eager, forward": (3, 3),
    "eager, backward": (6, 3),
    "keep, forward": (1, 3),
    "keep, backward": (4, 1),
    "recompute, forward": (1, 1),
    "recompute, backward": (2, 1),
    "torch.compile, both": (4, 2),
}


class Timed(NamedTuple):
    """A time and the work behind it; `arithmetic` is the dtype whose roof it computes under."""

    notebook: str
    claim: str
    op: str
    shape: str
    dtype: str
    clock: str
    ms: float
    work: Work
    arithmetic: str


def of_records(machine: Machine) -> Iterator[Timed]:
    """Times by the GPU's clocks, and by the host's where it alone has timed an operation."""
    records = [r for r in machine.records if r["device"] == machine.device and r["unit"] in MS]
    on_gpu = {(r["op"], r["shape"], r["dtype"]) for r in records if r["clock"] != "host"}
    for record in records:
        op, shape, dtype, clock = (record[key] for key in ("op", "shape", "dtype", "clock"))
        if clock == "host" and (op, shape, dtype) in on_gpu:
            continue
        counted = work_of(record["claim"], op, shape, dtype)
        if clock in ("host", "event", "kernel") and counted and (op, shape) != ("add", "32x32"):
            ms = record["value"] * MS[record["unit"]]
            named = record["notebook"], record["claim"], op, shape, dtype, clock
            yield Timed(*named, ms, *counted)


def work_of(claim: str, op: str, shape: str, dtype: str) -> tuple[Work, str] | None:
    """A record's work and the dtype it computes in; None where it cannot be counted."""
    kind = getattr(torch, dtype, None)
    if claim == "S45Q" and shape:
        return _matrix_vector(op, int(shape.split("x")[0]))
    megabytes = re.fullmatch(r"(\d+) MB", shape)
    if not isinstance(kind, torch.dtype) or not (megabytes or re.fullmatch(r"\d+(x\d+)*", shape)):
        return None
    sizes = [int(size) for size in re.findall(r"\d+", shape)]
    if re.match(r"matmul|cuBLAS", op) and len(sizes) == 3:
        arithmetic = "tfloat32" if "TF32" in op else dtype
        return traffic.matmul(*sizes, kind), arithmetic
    if op == "one kernel, forward and backward":
        passes = traffic.attention, traffic.attention_backward
        forward, backward = (work(*sizes, kind, causal=True) for work in passes)
        return forward + backward, dtype
    if megabytes and not op.startswith("sum"):
        return None
    n = sizes[0] * 2**20 // kind.itemsize if megabytes else math.prod(sizes)
    work = _elementwise(op, n, sizes, kind)
    return work and (work, lanes(dtype))


def lanes(dtype: str) -> str:
    """What an elementwise operation computes in: 16-bit numbers in fp32."""
    return "float64" if dtype == "float64" else "float32"


def _matrix_vector(op: str, side: int) -> tuple[Work, str] | None:
    stored = re.fullmatch(r"matrix-vector, (\w+), \w+", op)
    if not stored:
        return None
    kind = getattr(torch, stored[1])
    vector = torch.bfloat16 if kind == torch.int8 else kind
    return traffic.linear(1, side, side, vector, weight=kind), "float32"


def _elementwise(op: str, n: int, sizes: list[int], kind: torch.dtype) -> Work | None:
    if op.startswith("three sigmoids, "):
        passes = SIGMOIDS.get(op.removeprefix("three sigmoids, "))
        return passes and traffic.elementwise(n, kind, reads=passes[0], writes=passes[1])
    for pattern, count in {
        r"copy|transpose, .*|gelu_\w+, nothing, .*": traffic.copy,
        r"add": traffic.add,
        r"relu": traffic.relu,
        r"sum, .*": traffic.reduction,
        r"manual_gelu": traffic.manual_gelu,
        r"(pytorch|compiled|cuda|triton)_gelu\b.*|gelu_\w+, .*": traffic.gelu,
        r"sin2 \+ cos2, eager": functools.partial(traffic.elementwise, reads=6, writes=5, flops=5),
        r"sin2 \+ cos2, compiled": functools.partial(traffic.elementwise, flops=5),
        r"gelu\(a\+b\)": lambda n, kind: traffic.add(n, kind) + traffic.gelu(n, kind),
    }.items():
        if re.fullmatch(pattern, op):
            return count(n, kind)
    if len(sizes) != 2:
        return None
    if op == "manual_softmax":
        return traffic.manual_softmax(*sizes, kind)
    if op == "softmax(a+b)":
        return traffic.add(n, kind) + traffic.softmax(*sizes, kind)
    return traffic.softmax(*sizes, kind) if re.fullmatch(r"\w+_softmax", op) else None
