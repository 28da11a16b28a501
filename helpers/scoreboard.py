"""The scoreboard: ways to compute an operation, machine by machine.

Two more tables have modules of their own: `predictions` against measurements, and what the
`levers` gained.
"""

import math
import re
from collections.abc import Iterator

import torch

from helpers import results, traffic
from helpers.counted_curves import clock_of, half_of
from helpers.counted_records import MS
from helpers.levers import levers
from helpers.machines import RECORDED, Machine
from helpers.predictions import predictions

__all__ = ["five_ways", "levers", "predictions", "scoreboard_table"]

GELU, SOFTMAX, MATMUL = "GeLU", "softmax", "matmul, fp32"
FUSED, ATTENTION = "gelu(A @ B)", "attention"
ORDER = (GELU, SOFTMAX, MATMUL, FUSED, ATTENTION)
CLOCKS = ("host", "event", "kernel")
ALL_WAYS = (
    "manual",
    "PyTorch",
    "PyTorch, cuBLAS' epilogue",
    "PyTorch, cuDNN",
    "compiled",
    "CUDA, lanes along rows",
    "CUDA",
    "CUDA, float4",
    "CUDA, shared memory",
    "CUDA, registers",
    "Triton",
    "Triton, tiles",
)
# Operation -> way -> the records' op. Of the claims the first that has it counts.
WAYS = {
    GELU: {
        "manual": "manual_gelu",
        "PyTorch": "pytorch_gelu",
        "compiled": "compiled_gelu",
        "CUDA": "cuda_gelu",
        "CUDA, float4": "cuda_gelu, float4",
        "Triton": "triton_gelu",
    },
    SOFTMAX: {
        "manual": "manual_softmax",
        "PyTorch": "pytorch_softmax",
        "compiled": "compiled_softmax",
        "Triton": "row_softmax",  # the lecture's kernel, which calls it triton_softmax
        "Triton, tiles": "triton_softmax",
    },
    MATMUL: {
        "PyTorch": "cuBLAS",
        "CUDA, lanes along rows": "matmul_rows",
        "CUDA": "matmul_columns",
        "CUDA, shared memory": "matmul_shared",
        "CUDA, registers": "matmul_registers",
    },
}
CLAIMS = {GELU: ("L20", "L19", "L12", "L15"), SOFTMAX: ("L23",), MATMUL: ("S37",)}
# `helpers.peers`: operation -> its rows there, and way -> peer ("" is ours).
PEERS = {
    MATMUL: (("triton_matmul", "float32", "4096x4096x4096"), {"Triton": ""}),
    FUSED: (
        ("triton_matmul_gelu", "bfloat16", "8192x8192x1024"),
        {
            "PyTorch": "cuBLAS + GeLU",
            "PyTorch, cuBLAS' epilogue": "_addmm_activation",
            "compiled": "torch.compile",
            "Triton": "",
        },
    ),
}
BACKENDS = {  # of notebook 11's curve
    "manual": "standard",
    "PyTorch": "flash",
    "PyTorch, cuDNN": "cudnn",
    "compiled": "flex",
    "Triton": "ours",
}
ATTENTION_KEYS = 4096  # the length at which every backend was timed
COLUMNS = "operation way clock shape ms copies of_roof".split()


def five_ways(machine: Machine):
    """A pandas frame, an operation, way and clock a row; what was not measured has no row.

    ms. copies: ms as a multiple of a copy's of the same bytes, the one timed beside it by events
    or else bytes / the memory's roof; NaN for what arithmetic limits. of_roof: for that, the share
    of the matmul's rate in the same dtype. Attention is forward, unmasked, heads of 128.
    """
    import pandas as pd

    rows = [*_recorded_ways(machine), *_peer_ways(machine), *_attention_ways(machine)]
    rows.sort(key=lambda row: _place(row[:3]))
    return pd.DataFrame(rows, columns=COLUMNS).astype({"copies": float, "of_roof": float})


def _recorded_ways(machine: Machine) -> Iterator[tuple]:
    mine = [r for r in machine.records if r["device"] == machine.device and r["unit"] in MS]
    for operation, ways in WAYS.items():
        claims = CLAIMS[operation]
        found = [r for claim in claims for r in mine if r["claim"] == claim]
        ours = any(r["op"] == "row_softmax" for r in found)
        shapes = [r["shape"] for r in found if r["op"] in ways.values()]
        for way, op in ways.items():
            if operation == SOFTMAX and not ours and way.startswith("Triton"):
                op = {"Triton": "triton_softmax"}.get(way)
            for clock in CLOCKS:
                same = [r for r in found if (r["op"], r["clock"]) == (op, clock)]
                for record in [r for r in same if r["shape"] == shapes[0]][:1]:
                    ms = record["value"] * MS[record["unit"]]
                    placed = _placed(machine, operation, record["shape"], record["dtype"], ms)
                    yield operation, way, clock, record["shape"], ms, *placed


def _placed(machine: Machine, operation: str, shape: str, dtype: str, ms: float) -> tuple:
    """(copies, of_roof), None for what does not apply."""
    sizes, kind = [int(size) for size in shape.split("x")], getattr(torch, dtype)
    if operation in (GELU, SOFTMAX):
        claim = "L19" if operation == GELU else "L23"
        copy_ms = machine.value(claim, "copy", shape=shape)
        if copy_ms is None and machine.copy_gb_per_s():
            moved = traffic.copy(sizes[0] * sizes[1], kind).bytes
            copy_ms = moved / machine.copy_gb_per_s() / 1e6
        return ms / copy_ms if copy_ms else None, None
    count = traffic.attention if operation == ATTENTION else traffic.matmul
    roof = machine.matmul_tflop_per_s(dtype)
    return None, count(*sizes, kind).flops / ms / 1e9 / roof if roof else None


def _peer_ways(machine: Machine) -> Iterator[tuple]:
    """Of the recorded machine alone: `helpers.peers` is no part of a run of the notebooks."""
    import pandas as pd

    slug = re.sub(r"[^a-z0-9]+", "_", machine.device.lower())
    path = results.measurements_path(f"peers_{slug}").with_suffix(".csv")
    if machine.name != RECORDED or not path.exists():
        return
    table = pd.read_csv(path).fillna({"peer": ""})
    for operation, (case, ways) in PEERS.items():
        same = table[(table[["operation", "dtype", "shape"]] == list(case)).all(axis=1)]
        for way, peer in ways.items():
            times = same["ours_ms"] if not peer else same.loc[same["peer"] == peer, "peer_ms"]
            for ms in times[:1]:
                _, dtype, shape = case
                placed = _placed(machine, operation, shape, dtype, ms)
                yield operation, way, "event", shape, ms, *placed


def _attention_ways(machine: Machine) -> Iterator[tuple]:
    frame = machine.series("11_flash_attention", "lengths")
    if frame is None:
        return
    frame = frame[~frame["causal"]].dropna(subset="ms")  # out of memory
    frame = frame[frame["n"] == min(ATTENTION_KEYS, frame["n"].max())]
    for way, backend in BACKENDS.items():
        for row in frame[frame["backend"] == backend].itertuples():
            heads = round(row.tflop_per_s * row.ms * 1e9 / (4 * row.n**2 * 128))
            shape = f"{heads // 16}x16x{row.n}x128"
            placed = _placed(machine, ATTENTION, shape, half_of(machine), row.ms)
            yield ATTENTION, way, clock_of(machine), shape, row.ms, *placed


def scoreboard_table(machines: list[Machine]):
    """`five_ways` of machines side by side, as text for display; "–" where nothing was measured.

    Index: operation, way, clock. Columns: for each machine that has any, "ms" and "beside the
    roof", which is × a copy's time or % of the matmul's rate. A shape other than the first
    machine's stands behind the time.
    """
    import pandas as pd

    keys = ["operation", "way", "clock"]
    shapes, columns = {}, {}
    for machine in machines:
        for row in five_ways(machine).itertuples():
            key = row.operation, row.way, row.clock
            aside = "" if row.shape == shapes.setdefault(row.operation, row.shape) else row.shape
            columns.setdefault((machine.name, "ms"), {})[key] = f"{row.ms:.3g} {aside}".strip()
            columns.setdefault((machine.name, "beside the roof"), {})[key] = _beside(row)
    rows = sorted({key for column in columns.values() for key in column}, key=_place)
    index = pd.MultiIndex.from_tuples(rows, names=keys) if rows else None
    return pd.DataFrame(columns, index=index).fillna("–")


def _beside(row) -> str | None:
    if not math.isnan(row.copies):
        return f"{row.copies:.2f} ×"
    return None if math.isnan(row.of_roof) else f"{row.of_roof:.0%}"


def _place(key: tuple[str, str, str]) -> tuple[int, int, int]:
    operation, way, clock = key
    return ORDER.index(operation), CLOCKS.index(clock), ALL_WAYS.index(way)
