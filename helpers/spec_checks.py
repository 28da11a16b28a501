"""Check the datasheets of data/gpus.csv against each other and against the architectures."""

import re

from helpers.specs import UNITS

REQUIRED = ("architecture", "memory_gb", "memory_gb_per_s", "fp32_tflops", "fp16_tflops")
LANES = ("fp64", "fp32", "fp64_tensor")  # the units at the ordinary boost clock
MATRIX = tuple("tf32 fp16 bf16 int8 fp8 fp16_fp16_accumulate fp8_fp16_accumulate".split())


def inconsistencies(frame) -> list[str]:
    """Figures of a frame like `table()` that are over 3% off what the others and `UNITS` imply.

    Peaks are SMs x units x clock x 2 and keep the units' ratios; bandwidth is bus x data rate; KB
    per SM come from the compute capability. A finding names row, column, value and expected value.
    """
    findings = []
    for row in frame.astype(object).to_dict("records"):
        for column, expected in _expected(row):
            if _wrong(column, row[column], expected):
                findings.append(f"{row['name']}: {column} is {row[column]}, expected {expected}")
    return findings


def _wrong(column: str, value, expected) -> bool:
    if value != value:  # NaN: most figures may be unknown
        return column in REQUIRED
    exact = expected is None or isinstance(expected, str)
    return value != expected if exact else not abs(value / expected - 1) <= 0.03


def _expected(row: dict):
    """(column, expected value) pairs; None: there is no such unit, the field must be empty."""
    units = UNITS.get(row["compute_capability"], {})
    yield "compute_capability", row["compute_capability"] if units else f"one of {list(UNITS)}"
    yield "architecture", units.get("architecture")
    yield "memory_gb_per_s", row["memory_bus_bits"] * row["memory_mtps"] / 8 / 1000
    sizes = (8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 94, 96, 141, 180, 192)
    sold = re.search(r"(\d+)GB", row["name"])
    nearest = min(sizes, key=lambda size: abs(size - row["memory_gb"]))
    yield "memory_gb", int(sold[1]) if sold else nearest
    if row["tensor_boost_mhz"] == row["tensor_boost_mhz"]:  # rated lower, by up to a seventh
        slowest, fastest = 0.86 * row["boost_mhz"], row["boost_mhz"]
        yield "tensor_boost_mhz", min(fastest, max(slowest, row["tensor_boost_mhz"]))
    yield from ((f"{size}_kb_per_sm", units.get(size)) for size in ("l1", "shared", "registers"))
    rates = dict(units)
    if "GeForce" in row["torch_names"]:
        rates |= {f"{u}_fp16_accumulate": units[u] for u in ("fp16", "fp8") if u in units}
        rates |= {u: units[u] / 2 for u in ("tf32", "fp16", "bf16", "fp8") if u in units}
    for unit, rate in ((unit, rates.get(unit)) for unit in LANES + MATRIX):
        column = f"{unit}_tops" if unit == "int8" else f"{unit}_tflops"
        base, clock = ("fp32", "boost_mhz") if unit in LANES else ("fp16", "tensor_boost_mhz")
        mhz = row[clock] if row[clock] == row[clock] else row["boost_mhz"]
        yield column, rate and rate * row["sms"] * 2 * mhz / 1e6
        if rate and row[f"{base}_tflops"] == row[f"{base}_tflops"]:
            yield column, row[f"{base}_tflops"] * rate / rates[base]
