"""Every lever of the course, and what it gained where it was measured."""

import re
from typing import NamedTuple

from helpers.counted_records import MS
from helpers.machines import Machine

# What a lever does on the roofline; slide 21's are called as in notebook 03's table.
RIGHT, UP, LATER = "moves right", "lifts towards the roof", "moves right, for more FLOPs"
HIGHER, LESS = "moves right, under a higher roof", "moves right, for less precision"
TENSOR_CORES, NO_LAUNCHES = "a higher roof", "less time that no roof shows"
FLASH = "standard / flash_attention, time"
BACKWARD = "operations, P kept / flash_attention, backward, time"


class Lever(NamedTuple):
    """The gain is a record in "x" whose op matches `before`; with `after` it is a ratio of times.

    Ops, shapes and dtypes are patterns. Of several records that match the last counts: notebooks
    end with the largest size.
    """

    lever: str
    effect: str
    notebook: str
    claim: str
    what: str  # was measured
    before: str
    after: str = ""
    shape: str = ".*"
    dtype: str = ".*"
    clock: str = ".*"


LEVERS = (
    Lever("less divergence", UP, "05_cuda_gelu", "S22", "32 branches, sorted by warp", "gain"),
    Lever("low precision", HIGHER, "03_roofline", "S23", "relu, 32 to 16 bits", "gain"),
    Lever(
        "low precision",
        HIGHER,
        "02_benchmarking",
        "L06",
        "matmul, fp32 as TF32",
        "matmul, event",
        "matmul, TF32 allowed",
    ),
    Lever(
        "tensor cores",
        TENSOR_CORES,
        "03_roofline",
        "S16",
        "bf16 matmul beside fp32 multiply-adds",
        "matmul / multiply-adds",
        dtype="bfloat16",
        clock="event",  # a CPU has none
    ),
    Lever("fusion", RIGHT, "04_fusion", "S27", "a chain of multiplications", "gain, .* mul.*"),
    Lever("fusion", RIGHT, "04_fusion", "S27", "a chain of sigmoids", "gain, .* sigmoids"),
    Lever("fusion", RIGHT, "04_fusion", "S29", "sin² + cos², five kernels as one", "gain"),
    Lever(
        "fusion",
        RIGHT,
        "04_fusion",
        "L12",
        "GeLU, nine kernels as one",
        "manual_gelu",
        "pytorch_gelu",
    ),
    Lever(
        "fusion",
        RIGHT,
        "08_softmax",
        "L23",
        "softmax, five kernels as one",
        "manual_softmax",
        "compiled_softmax",
    ),
    Lever("fusion", RIGHT, "09_matmul", "L27", "gelu(A @ B)", r"cuBLAS \+ GeLU / ours, time"),
    Lever("recomputation", LATER, "04_fusion", "S32", "three sigmoids, both passes", "gain"),
    Lever("coalescing", UP, "06_memory", "S34", "matmul, lanes along columns", "gain"),
    Lever("tiling", RIGHT, "06_memory", "S37", "matmul, tiles in registers", "gain"),
    Lever("tiling", RIGHT, "11_flash_attention", "S46", "attention", FLASH, shape=r"\S+"),
    Lever("tiling", RIGHT, "12_flash_backward", "S50B", "attention backward", BACKWARD),
    Lever("quantisation", LESS, "03_roofline", "S45Q", "matrix-vector, 16 to 8 bits", "gain"),
    Lever("block order", RIGHT, "09_matmul", "L26", "matmul in groups", "row by row / .*"),
    Lever(
        "padding",
        UP,
        "10_wave_quantization",
        "S41",
        "GPT-2's step, 50,304 words for 50,257",
        "training step, .*",
    ),
    Lever(
        "padding",
        UP,
        "10_wave_quantization",
        "S43",
        "our matmul, rows of 1,800 for 1,793",
        "rows of .*, ours",
    ),
    Lever(
        "no bank conflicts",
        UP,
        "06_memory",
        "S37",
        "transpose, a tile's rows padded",
        "transpose, tile, 32 wide",
        "transpose, tile, padded",
    ),
    Lever(
        "literals in fp32",
        UP,
        "05_cuda_gelu",
        "L15",
        "GeLU in CUDA",
        "gelu_naive, exact, blocks of 1024",
        "gelu_float, exact, blocks of 1024",
    ),
    Lever(
        "blocks of 256",
        UP,
        "05_cuda_gelu",
        "L15",
        "GeLU in CUDA, 1,024 before",
        "gelu_float, exact, blocks of 1024",
        "gelu_float, exact, blocks of 256",
    ),
    Lever(
        "float4",
        UP,
        "05_cuda_gelu",
        "L15",
        "GeLU in CUDA, blocks of 256",
        "gelu_float, exact, blocks of 256",
        "gelu_float4, exact, blocks of 256",
    ),
    Lever(
        "CUDA graph",
        NO_LAUNCHES,
        "02_benchmarking",
        "L07",
        "MLP of width 256",
        r"mlp forward\+backward",
        "mlp, CUDA graph",
        "steps=2 layers=4 batch=256 dim=256",
    ),
)


def levers(machines: list[Machine]):
    """A pandas frame, a lever and what it was tried on a row: lever, effect, notebook, claim, what.

    And a column for each machine: how many times as fast; NaN where that was not measured. The
    lecture's gains are those that it states or its times have, on whatever GPU it quotes.
    """
    import pandas as pd

    rows = [
        dict(zip(Lever._fields[:5], lever, strict=False))
        | {machine.name: gain(machine, lever) for machine in machines}
        for lever in LEVERS
    ]
    return pd.DataFrame(rows).astype({machine.name: float for machine in machines})


def gain(machine: Machine, lever: Lever) -> float | None:
    """How many times as fast this machine became; None where that was not measured."""
    if not lever.after:
        found = _matching(machine, lever, lever.before)
        return found[-1]["value"] if found else None
    for clock in ("event", "kernel", "host"):
        pair = [
            [r for r in _matching(machine, lever, op) if r["clock"] == clock and r["unit"] in MS]
            for op in (lever.before, lever.after)
        ]
        if all(pair):
            before, after = (found[-1]["value"] for found in pair)
            return before / after if after else None
    return None


def _matching(machine: Machine, lever: Lever, op: str) -> list[dict]:
    return [
        record
        for record in machine.records
        if record["claim"] == lever.claim
        and re.fullmatch(op, record["op"])
        and re.fullmatch(lever.shape, record["shape"])
        and re.fullmatch(lever.dtype, record["dtype"])
        and re.fullmatch(lever.clock, record["clock"])
    ]
