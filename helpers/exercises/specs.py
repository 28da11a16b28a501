"""The checker of exercise 01.1."""

import dataclasses
import math
from collections.abc import Callable

from helpers import anatomy, specs
from helpers.exercises.answers import is_number, plain

# Equal and different clocks, 4 and 8 tensor cores, HBM and GDDR, from 320 GB/s to 7.7 TB/s.
PRODUCTS = ("A100 SXM4 80GB", "H100 SXM", "H100 PCIe", "T4", "V100 SXM2 16GB", "RTX 4090", "B200")
ROUNDING = 0.03  # datasheets round, B200's most


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a GPU is made of. Units: MHz, bits, and millions of transfers a second per bit."""

    name: str
    sms: int
    lanes_per_sm: int
    tensor_cores_per_sm: int
    multiply_adds_per_tensor_core: int  # per clock, fp16
    clock_mhz: float
    tensor_clock_mhz: float
    bus_bits: int
    mtps: float


def parts(gpu: specs.GPU) -> Parts:
    """The parts of a product that is listed in full."""
    cores = anatomy.tensor_cores_per_sm(gpu)
    return Parts(
        gpu.name,
        int(gpu.sms),
        anatomy.lanes_per_sm(gpu),
        cores,
        specs.UNITS[gpu.compute_capability]["fp16"] // cores,
        gpu.boost_mhz,
        gpu.tensor_boost_mhz or gpu.boost_mhz,
        int(gpu.memory_bus_bits),
        gpu.memory_mtps,
    )


def rebuilt_peaks(answer: Callable) -> None:
    """AssertionError unless answer(parts) gives the datasheets' figures for all `PRODUCTS`.

    They are (fp32 TFLOP/s of the lanes, fp16 TFLOP/s of the tensor cores, memory's GB/s), within
    `ROUNDING`.
    """
    for gpu in map(specs.get, PRODUCTS):
        given = plain(answer(parts(gpu)))
        if not isinstance(given, tuple | list) or len(given) != 3:
            raise AssertionError("Return three numbers: fp32 TFLOP/s, fp16 TFLOP/s, GB/s.")
        fp16 = gpu.fp16_fp16_accumulate_tflops or gpu.fp16_tflops
        expected = (gpu.fp32_tflops, fp16, gpu.memory_gb_per_s)
        names = ("fp32 lanes: TFLOP/s", "fp16 matmul: TFLOP/s", "memory: GB/s")
        for name, value, printed in zip(names, map(plain, given), expected, strict=True):
            if not is_number(value) or not math.isfinite(value):
                raise AssertionError(f"{name} must be a number, not {value!r}.")
            if abs(value / printed - 1) > ROUNDING:
                raise AssertionError(
                    f"{gpu.name}, {name}: {value:,.5g}, and its datasheet has {printed:,.5g}"
                    f"{_why(value / printed, gpu)}"
                )


def _why(ratio: float, gpu: specs.GPU) -> str:
    """How far off a positive value is, and the likely cause if there is one."""
    if ratio <= 0:
        return "."
    times = max(ratio, 1 / ratio)
    text = f": {times:.3g} times too {'large' if ratio > 1 else 'small'}."
    clocks = gpu.boost_mhz / (gpu.tensor_boost_mhz or gpu.boost_mhz)
    causes = {
        2: "A multiply-add is two FLOPs.",
        8: "A byte is eight bits.",
        clocks: "Which clock do the tensor cores run at?",
    } | dict.fromkeys((1e3, 1e6, 1e9, 1e12), "TFLOP/s are 10^12, GB/s 10^9, MHz 10^6.")
    near = [cause for factor, cause in causes.items() if abs(times / factor - 1) < ROUNDING]
    return " ".join([text, *near[:1]])
