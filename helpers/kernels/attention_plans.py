"""Which attention kernel runs, and with which tiles: by the GPU's generation, dtype and shape."""

from collections.abc import Callable, Sequence

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.device import interpreting
from helpers.kernels.attention_deal import section
from helpers.kernels.attention_hopper import HopperConfig, launch_hopper
from helpers.kernels.attention_tiles import Config, launch_tiles
from helpers.kernels.matmul_persistent import MOST_BYTES, UNIT_BYTES, sms
from helpers.kernels.matmul_plans import OutOfResources, precision
from helpers.triton_mode import on_device_of, triton

INTERPRETED = Config(64, 128)  # few steps: each takes milliseconds
WIDTHS = (64, 128, 256)
# By the width of a head: the least of these that holds it.
SIXTEEN_BITS = {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)}
# Rows that are no multiple of 16 elements are read element by element, with an address for each.
UNEVEN = {64: Config(128, 64, 8, 3), 128: Config(64, 32, 8, 1), 256: Config(32, 16, 8, 1)}
DATA_CENTRE = SIXTEEN_BITS | {256: Config(128, 64, 8, 2)}  # products find K and V in shared memory
TF32 = {64: Config(64, 64, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 1)}
FP32 = {64: Config(64, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(32, 16, 8, 1)}
TURING = {64: Config(32, 32, 4, 1), 128: Config(32, 16, 4, 1), 256: Config(16, 16, 4, 1)}
SMALLEST = Config(16, 16, 4, 1)


def launch_attention(q, k, v, o, causal: bool, scale: float, lse=None) -> None:
    """o = softmax(q kᵀ scale) v by the first kernel that the GPU has room for.

    As `attention_tiles.launch_tiles`.
    """
    with on_device_of(q):
        if interpreting():
            launch_tiles(q, k, v, o, INTERPRETED, causal, scale, lse=lse)
            return
        capability = torch.cuda.get_device_capability(q.device)
        if capability == (9, 0) and all(map(has_descriptor, (q, k, v, o))):
            config = hopper_config(q.shape[3], q.shape[2], causal)
            rows = config.groups * 64
            pairs, blocks = q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], rows)
            mixed = section(pairs, blocks, sms(q.device), rows) if causal else 1
            launch_hopper(q, k, v, o, config, causal, scale, mixed, lse)
            return
        multiplied = precision(q.dtype, q.device)
        found = configs(capability, q.dtype, q.shape[3], multiplied)
        launch_first(launch_tiles, (q, k, v, o), found, causal, scale, multiplied, lse)


def launch_first(launch: Callable, tensors: tuple, found: Sequence[Config], *choices) -> None:
    """launch(*tensors, config, *choices) with the first configuration that there is room for.

    RuntimeError where none fits.
    """
    for config in found:
        try:
            launch(*tensors, config, *choices)
        except OutOfResources:  # nothing was launched
            continue
        return
    gpu = torch.cuda.get_device_name(tensors[0].device)
    raise RuntimeError(f"no plan of attention fits {gpu}")


def empty_as(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dense, of x's shape (batch, heads, sequence, dim), and x's dtype unless another is given.

    Token by token in memory where x is, as a model's projections have it: otherwise what comes next
    would copy. Else head by head.
    """
    batch, heads, sequence, dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, sequence, heads, dim), dtype=dtype).transpose(1, 2)
    return x.new_empty(x.shape, dtype=dtype)


def has_descriptor(x: torch.Tensor) -> bool:
    """True when the TMA can read and write x (batch, heads, sequence, dim) as it is.

    16 bits, dense rows of whole units of 16 bytes, all of which begin at such a unit.
    """
    unit = UNIT_BYTES // x.itemsize
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return (
        x.itemsize == 2
        and x.stride(3) == 1
        and x.shape[3] % unit == 0
        and all(stride % unit == 0 for stride in strides[:-1])
        and all(0 < stride * x.itemsize < MOST_BYTES for stride in strides)
        and x.data_ptr() % UNIT_BYTES == 0
    )


def hopper_config(dim: int, queries: int, causal: bool) -> HopperConfig:
    """The Hopper kernel's configuration for heads of up to 256.

    Three groups have 192 queries, of which short causal sequences waste too much. On an H200 taking
    turns gave 3 to 6% with heads of 64; a second buffer for queries gave two groups 3 to 7% at 512
    tokens.
    """
    if dim > 128:
        return HopperConfig(2, 64, 3, turns=False, buffers=1)
    if dim > 64:
        return HopperConfig(2, 128, 4, turns=False, buffers=2)
    if causal and queries <= 2048:
        return HopperConfig(2, 128, 8, turns=True, buffers=2)
    return HopperConfig(3, 128, 8, turns=True, buffers=1)


def configs(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, precision: str
) -> tuple[Config, ...]:
    """The plain kernel's configurations for a GPU, to be tried in this order.

    The first fits the shared memory of its generation and, from Ampere on, does not spill where
    rows are dense; tests/triton_cases.py says which were compiled to see it.
    """
    if capability < (8, 0):
        found = TURING
    elif dtype == torch.float32:
        found = TF32 if precision == "tf32" and dim % 16 == 0 else FP32
    elif dim % 16:
        found = UNEVEN
    else:
        found = DATA_CENTRE if capability[0] in (9, 10) else SIXTEEN_BITS
    return (found[min(width for width in WIDTHS if width >= dim)], SMALLEST)
