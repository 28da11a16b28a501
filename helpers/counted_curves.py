"""The work of the course's timed operations, from the curves of the notebooks.

Left out are the sweeps over strides, tiles, threads and widths: they vary how, not what.
"""

import functools
import math
from collections.abc import Iterator

import torch

from helpers import traffic
from helpers.counted_records import Timed, lanes
from helpers.machines import Machine
from helpers.traffic import Work

# Of notebook 03's operations: they compute in their dtype, the others on the ordinary lanes.
PRODUCTS = ("matmul", "matrix-vector", "convolution", "attention")
FUSED = {
    "ours": "flash_attention",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "flex": "FlexAttention",
    "efficient": "memory-efficient",
}
BACKWARD_BY_MEMORY = ("operations, P kept", "its D")  # of notebook 12's bill


def clock_of(machine: Machine) -> str:
    """Of the curves, which do not name it: the notebooks measure by events where there is a GPU."""
    return "event" if any(record["clock"] == "event" for record in machine.records) else "host"


def half_of(machine: Machine) -> str:
    """What the notebooks take for 16 bits on this machine; on a CPU fp32."""
    if clock_of(machine) == "host":
        return "float32"
    return "bfloat16" if machine.matmul_tflop_per_s("bfloat16") else "float16"


def of_curves(machine: Machine) -> Iterator[Timed]:
    for read in READERS:
        yield from read(machine)


def _rows(machine: Machine, notebook: str, name: str) -> list[dict]:
    """Without those that ran out of memory, which have no time."""
    frame = machine.series(notebook, name)
    return [] if frame is None else frame.dropna(subset="ms").to_dict("records")


def _operations(machine: Machine) -> Iterator[Timed]:
    for row in _rows(machine, "03_roofline", "operations"):
        product = any(word in row["op"] for word in PRODUCTS)
        arithmetic = row["dtype"] if product else lanes(row["dtype"])
        named = "03_roofline", "L04", row["op"], row["shape"], row["dtype"], clock_of(machine)
        yield Timed(*named, row["ms"], Work(row["bytes"], 0, row["flops"]), arithmetic)


def _from_intensity(row: dict) -> Work:
    flops = row["tflop_per_s"] * row["ms"] * 1e9
    return Work(flops / row["flop_per_byte"], 0, flops)


def _batches(machine: Machine) -> Iterator[Timed]:
    half = half_of(machine)
    for row in _rows(machine, "03_roofline", "batch"):
        named = "03_roofline", "L04", "matrix times a batch", f"{row['batch']}", half
        yield Timed(*named, clock_of(machine), row["ms"], _from_intensity(row), half)


def _chains(machine: Machine) -> Iterator[Timed]:
    for row in _rows(machine, "03_roofline", "chain"):
        if row["way"] == "compiled":
            named = "03_roofline", "S20", "multiply-adds", f"{row['multiply_adds']}", "float32"
            yield Timed(*named, clock_of(machine), row["ms"], _from_intensity(row), "float32")
    for row in _rows(machine, "04_fusion", "chains"):
        named = "04_fusion", "S27", f"{row['operations']}, {row['way']}", f"{row['k']}", "float32"
        work = Work(row["bytes"], 0, 0)
        yield Timed(*named, clock_of(machine), row["ms"], work, "float32")


def _gelus(machine: Machine) -> Iterator[Timed]:
    for row in _rows(machine, "07_triton_gelu", "odd"):
        count = traffic.copy if row["way"] == "copy" else traffic.gelu
        named = "07_triton_gelu", "L17", row["way"], f"{row['n']}", row["dtype"]
        work = count(row["n"], getattr(torch, row["dtype"]))
        yield Timed(*named, clock_of(machine), row["ms"], work, "float32")


def _matmul(machine, notebook, claim, op, m, n, k, dtype, ms, more=None) -> Timed:
    work = traffic.matmul(m, n, k, getattr(torch, dtype)) + (more or Work(0, 0, 0))
    return Timed(notebook, claim, op, f"{m}x{n}x{k}", dtype, clock_of(machine), ms, work, dtype)


def _matmuls(machine: Machine) -> Iterator[Timed]:
    half = half_of(machine)
    for row in _rows(machine, "06_memory", "edges"):
        sizes = row["m"], row["n"], row["k"]
        yield _matmul(machine, "06_memory", "S39", "matmul_registers", *sizes, "float32", row["ms"])
    wide = {}
    for row in _rows(machine, "09_matmul", "order"):
        sizes = row["m"], row["n"], row["k"]
        wide[2 * math.prod(sizes)] = sizes
        op = f"matmul, groups of {row['group']}"
        yield _matmul(machine, "09_matmul", "L26", op, *sizes, half, row["ms"])
    for row in _rows(machine, "09_matmul", "steps"):
        flops = row["tflop_per_s"] * row["ms"] * 1e9  # the curve does not name its sizes
        for sizes in (sizes for known, sizes in wide.items() if math.isclose(known, flops)):
            then = traffic.gelu(sizes[0] * sizes[1], getattr(torch, half))
            more = then if row["step"].endswith("then GeLU") else None
            if row["step"].startswith("a launch"):  # fetches fp32 sums, brings them back
                more = traffic.copy(sizes[0] * sizes[1] * (sizes[2] // 64), torch.float32)
            op = f"matmul, {row['step']}"
            yield _matmul(machine, "09_matmul", "L25", op, *sizes, half, row["ms"], more)
    for row in _rows(machine, "09_matmul", "depths"):
        side = math.isqrt(round(row["tflop_per_s"] * row["ms"] * 1e9 / 2 / row["k"]))
        sizes = side, side, row["k"]
        op = f"matmul, {row['kernel']}"
        yield _matmul(machine, "09_matmul", "L27", op, *sizes, half, row["ms"])
    for row in _rows(machine, "10_wave_quantization", "datasheet"):
        sizes = row["m"], row["n"], row["k"]
        named = machine, "10_wave_quantization", "X1", "matmul", *sizes, row["dtype"]
        yield _matmul(*named, row["ms"])
    for row in _rows(machine, "10_wave_quantization", "vocabulary"):
        whose = "" if row["kernel"] == "library" else f", {row['kernel']}"
        op = f"{row['matmul']}{whose}, rows of {row['row']}"
        sizes = row["tokens"], row["vocabulary"], row["width"]
        yield _matmul(machine, "10_wave_quantization", "S41", op, *sizes, half, row["ms"])


@functools.cache
def _standard(batch: int, heads: int, n: int, dim: int, causal: bool, backward: bool) -> Work:
    """Attention in separate operations, counted on shapes alone as notebooks 11 and 12 do."""
    from helpers import attention_backends
    from helpers.eager_traffic import count

    q = torch.empty(batch, heads, n, dim, dtype=torch.float16, device="meta")
    if backward:
        return count(attention_backends.backward_of("standard", q, q, q, q, causal))
    return count(lambda: attention_backends.standard(q, q, q, causal))


def _attention(machine: Machine) -> Iterator[Timed]:
    half, clock = half_of(machine), clock_of(machine)
    kind = getattr(torch, half)
    passes = (
        ("11_flash_attention", "S50", "", traffic.attention),
        ("12_flash_backward", "S50B", " backward", traffic.attention_backward),
    )
    for notebook, claim, suffix, fused in passes:
        products = 2 if not suffix else 5
        for row in _rows(machine, notebook, "lengths"):
            n, causal, dim = row["n"], row["causal"], row.get("dim", 128)
            flops = row["tflop_per_s"] * row["ms"] * 1e9 * (2 if causal else 1)
            rows = round(flops / (2 * products * n * dim))  # batch x heads x n
            heads = 2048 // dim
            shape = rows // n // heads, heads, n, dim
            if row["backend"] in FUSED:
                work = fused(*shape, kind, causal=causal)
            elif row["backend"] == "standard":
                work = _standard(*shape, causal, bool(suffix))
            else:
                continue
            op = f"attention{suffix}, {FUSED.get(row['backend'], 'standard')}"
            name = "x".join(map(str, shape)) + " causal" * causal
            yield Timed(notebook, claim, op, name, half, clock, row["ms"], work, half)


def _attention_steps(machine: Machine) -> Iterator[Timed]:
    for row in _rows(machine, "11_flash_attention", "operations"):
        product = row["step"] in ("Q Kᵀ", "P V", "one kernel")
        shape = f"{row['batch']}x16x{row['n']}x64"
        named = "11_flash_attention", "S46", f"attention: {row['step']}", shape, "float16"
        work = Work(row["bytes"], 0, row["flops"])
        arithmetic = "float16" if product else "float32"
        yield Timed(*named, "kernel", row["ms"], work, arithmetic)


def _bill(machine: Machine) -> Iterator[Timed]:
    """What the curve does not keep of the work follows from its prediction and the roofs of it."""
    for row in _rows(machine, "12_flash_backward", "bill"):
        moved, computed = (
            row["predicted_ms"] * row["gb_per_s"],
            row["predicted_ms"] * row["tflop_per_s"],
        )
        by_memory = row["way"] in BACKWARD_BY_MEMORY
        work = Work(moved * 1e6, 0, 0) if by_memory else Work(0, 0, computed * 1e9)
        half = half_of(machine)
        named = "12_flash_backward", "S50B", f"attention backward: {row['way']}", "", half
        yield Timed(*named, clock_of(machine), row["ms"], work, half)


READERS = (
    _operations,
    _batches,
    _chains,
    _gelus,
    _matmuls,
    _attention,
    _attention_steps,
    _bill,
)
