"""The checker of exercise 03.1."""

import dataclasses
from collections.abc import Callable

import torch

from helpers import specs, traffic

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# (op, shape, dtype, GPU, answer): small, thin and deep matmuls on both sides of the ridge; cases
# between the dense ridge and the sparse headline's; lanes and tensor cores; cards that differ.
CASES = (
    ("matmul", (4096, 4096, 4096), BF16, "H200 SXM", "compute"),
    ("matmul", (8192, 8192, 8192), F32, "H100 PCIe", "compute"),
    ("matmul", (8192, 1, 8192), BF16, "H200 SXM", "memory"),
    ("matmul", (8192, 1, 8192), F32, "RTX 4080", "memory"),
    ("matmul", (256, 256, 256), BF16, "H200 SXM", "memory"),
    ("matmul", (4096, 4096, 64), BF16, "A100 SXM4 80GB", "memory"),
    ("matmul", (64, 8192, 8192), F32, "A100 SXM4 80GB", "compute"),  # intensity 31, ridge 10
    ("matmul", (64, 8192, 8192), BF16, "A100 SXM4 80GB", "memory"),  # intensity 63, ridge 153
    ("matmul", (900, 900, 900), BF16, "H200 SXM", "compute"),  # intensity 300, sparse ridge 412
    ("matmul", (1200, 1200, 1200), F16, "H100 SXM", "compute"),  # 400, sparse ridge 590
    ("matmul", (350, 8192, 8192), F16, "RTX 4090", "compute"),  # 322; with fp16 sums 328 …
    ("matmul", (384, 384, 384), F16, "T4", "memory"),  # intensity 128, ridge 203
    ("matmul", (600, 600, 600), BF16, "A100 SXM4 80GB", "compute"),  # 200, ridge 153 …
    ("matmul", (600, 600, 600), BF16, "H100 SXM", "memory"),  # … and 295
    ("matmul", (640, 640, 640), BF16, "A100 SXM4 80GB", "compute"),  # 213, sparse ridge 306
    ("matmul", (1700, 1700, 1700), BF16, "L4", "compute"),  # 567, sparse ridge 807
    ("matmul", (128, 8192, 8192), F64, "A100 SXM4 80GB", "compute"),
    ("matmul", (84, 84, 84), F64, "A100 SXM4 80GB", "memory"),  # 7; lanes 4.8, tensor cores 9.6
    ("multiply_adds", (2**20, 56), F64, "A100 SXM4 80GB", "compute"),  # 7 on the lanes' 4.8
    ("relu", (2**26,), F16, "T4", "memory"),
    ("relu", (100,), F32, "H200 SXM", "memory"),
    ("softmax", (4096, 4096), F32, "L4", "memory"),
    ("softmax", (4096, 4096), BF16, "H200 SXM", "memory"),
    ("softmax", (4096, 4096), F64, "L4", "memory"),
    ("softmax", (4096, 4096), F64, "T4", "memory"),  # 0.31, ridge 0.8
    ("multiply_adds", (2**20, 4), F32, "H200 SXM", "memory"),
    ("multiply_adds", (2**20, 40), F32, "H200 SXM", "memory"),  # 10, ridge 14
    ("multiply_adds", (2**20, 80), F32, "H200 SXM", "compute"),  # 20: a multiply-add is two
    ("multiply_adds", (2**20, 512), F32, "H200 SXM", "compute"),  # not everything else is memory
    ("multiply_adds", (2**20, 64), F16, "H200 SXM", "compute"),  # 32 on fp32 lanes, not 206
    ("multiply_adds", (2**20, 40), F16, "A100 SXM4 80GB", "compute"),  # 20; fp32 10, fp16 lanes 38
    ("multiply_adds", (2**20, 40), F64, "RTX 4090", "compute"),  # 5 against 1.3 in fp64
)


def bound_by(answer: Callable) -> None:
    """AssertionError unless answer(op, shape, dtype, gpu) is right in all `CASES`.

    Also on a slice of a card whose bandwidth nobody states: "unknown".
    """
    for op, shape, dtype, name, expected in CASES:
        given = answer(op, shape, dtype, gpu := specs.get(name))
        if given != expected:
            kind = str(dtype).removeprefix("torch.")
            raise AssertionError(
                f"{op} {shape} in {kind} on the {name} is {expected}-bound, not {given!r}: "
                f"{_why(op, shape, dtype, gpu)}"
            )
    a100 = specs.get("A100 SXM4 80GB")
    no_bandwidth = dataclasses.replace(a100, memory_gb_per_s=None)
    no_lanes = dataclasses.replace(a100, fp32_tflops=None)
    for op, shape, dtype, gpu, lacking in (
        ("relu", (1000,), F32, no_bandwidth, "a bandwidth"),
        ("matmul", (4096, 4096, 4096), BF16, no_bandwidth, "a bandwidth"),
        ("relu", (1000,), BF16, no_lanes, "a peak for its fp32 lanes"),
        ("softmax", (64, 64), F32, no_lanes, "a peak for its fp32 lanes"),
        ("matmul", (4096, 4096, 4096), BF16, specs.get("V100 SXM2 32GB"), "a bfloat16 peak"),
    ):
        if (given := answer(op, shape, dtype, gpu)) != "unknown":
            raise AssertionError(
                f"for {op} on a {gpu.name} without {lacking} the answer is unknown, not {given!r}"
            )


def _why(op: str, shape: tuple[int, ...], dtype: torch.dtype, gpu: specs.GPU) -> str:
    if op == "matmul":
        ridge = gpu.ridge_flop_per_byte(dtype)
    else:
        ridge = gpu.ridge_flop_per_byte(F64 if dtype == F64 else F32, tensor_cores=False)
    intensity = getattr(traffic, op)(*shape, dtype).intensity
    return f"it has {intensity:.3g} FLOPs a byte, and the ridge is at {ridge:.3g}"
