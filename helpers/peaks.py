"""A datasheet's peaks, rebuilt: how many x how much each does per clock x the clock."""

import math

from helpers import specs


def l1_bytes_per_clock(gpu: specs.GPU) -> float:
    """Bytes that an SM reads from its L1 or shared memory per clock; NaN where unknown.

    32 banks of 4 bytes (CUDA C++ Programming Guide); Turing's L1 half of it (GA102 whitepaper).
    """
    capability = gpu.compute_capability
    if capability not in specs.UNITS or not capability[0].isdigit():  # AMD's start with "gfx"
        return math.nan
    return 64 if capability == "7.5" else 128


def from_parts(gpu: specs.GPU):
    """A frame with a row for each peak: parts (a text), rebuilt and datasheet, NaN where unknown.

    Rows: "L1, TB/s" (on no datasheet), "fp32 lanes, TFLOP/s", "fp16 matmul, TFLOP/s" (dense, with
    the fastest sums that the chip has) and "memory, GB/s".
    """
    import pandas as pd

    units = specs.UNITS.get(gpu.compute_capability, {})
    sms, lanes, tensor = (
        value or math.nan for value in (gpu.sms, units.get("fp32"), units.get("fp16"))
    )
    ghz = (gpu.boost_mhz or math.nan) / 1e3
    tensor_ghz = (gpu.tensor_boost_mhz or gpu.boost_mhz or math.nan) / 1e3
    bits, mtps = gpu.memory_bus_bits or math.nan, gpu.memory_mtps or math.nan
    l1_bytes = l1_bytes_per_clock(gpu)
    rows = {
        "L1, TB/s": (
            f"{sms:g} SMs x {l1_bytes:g} bytes x {ghz:.3f} GHz",
            sms * l1_bytes * ghz / 1e3,
            None,
        ),
        "fp32 lanes, TFLOP/s": (
            f"{sms:g} SMs x {lanes:g} multiply-adds x 2 x {ghz:.3f} GHz",
            sms * lanes * 2 * ghz / 1e3,
            gpu.fp32_tflops,
        ),
        "fp16 matmul, TFLOP/s": (
            f"{sms:g} SMs x {tensor:g} multiply-adds x 2 x {tensor_ghz:.3f} GHz",
            sms * tensor * 2 * tensor_ghz / 1e3,
            gpu.fp16_fp16_accumulate_tflops or gpu.fp16_tflops,
        ),
        "memory, GB/s": (
            f"{bits:g} bits / 8 x {mtps / 1e3:.3f} GT/s",
            bits / 8 * mtps / 1e3,
            gpu.memory_gb_per_s,
        ),
    }
    frame = pd.DataFrame(rows, index=["parts", "rebuilt", "datasheet"]).T
    frame.loc[frame["rebuilt"].isna(), "parts"] = "not known"
    return frame.astype({"rebuilt": float, "datasheet": float})
