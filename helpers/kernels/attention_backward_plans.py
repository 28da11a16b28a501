"""Which kernels compute the gradients of attention, and with which tiles."""

from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.device import interpreting
from helpers.kernels.attention_backward import (
    launch_delta,
    launch_keys_gradient,
    launch_queries_gradient,
)
from helpers.kernels.attention_backward_deal import shift_of
from helpers.kernels.attention_backward_hopper import launch_one_pass
from helpers.kernels.attention_plans import SMALLEST, WIDTHS, empty_as, has_descriptor, launch_first
from helpers.kernels.attention_tiles import Config
from helpers.kernels.matmul_persistent import UNIT_BYTES, sms
from helpers.kernels.matmul_plans import precision

INTERPRETED = Config(64, 64)  # few steps: each takes milliseconds
# By the width of a head: the least of these that holds it. For dK and dV, then for dQ.
SIXTEEN_BITS = (
    {64: Config(32, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(32, 32, 8, 2)},
    {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 1)},
)
HOPPER = (
    {64: Config(64, 64, 4, 2), 128: Config(32, 128, 8, 3), 256: Config(64, 32, 8, 1)},
    {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 64, 8, 2)},
)
BLACKWELL = HOPPER[0] | {64: Config(64, 64, 8, 2), 128: Config(64, 64, 8, 1)}, HOPPER[1]
# Rows that are no multiple of 16 elements are read element by element, with an address for each.
UNEVEN = (
    {64: Config(64, 32, 4, 2), 128: Config(32, 32, 8, 2), 256: Config(16, 32, 8, 1)},
    {64: Config(64, 64, 4, 2), 128: Config(64, 32, 8, 1), 256: Config(32, 32, 8, 1)},
)
TF32 = (
    {64: Config(64, 32, 4, 2), 128: Config(32, 32, 8, 2), 256: Config(16, 16, 8, 1)},
    {64: Config(64, 32, 4, 2), 128: Config(32, 32, 8, 2), 256: Config(32, 16, 8, 1)},
)
FP32 = (
    {64: Config(32, 32, 4, 2), 128: Config(32, 16, 8, 1), 256: Config(16, 32, 8, 1)},
    {64: Config(64, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
)
TURING = (
    {64: Config(32, 32, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 2, 1)},
    {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 16, 2, 1)},
)


def launch_attention_backward(q, k, v, o, lse, do, dq, dk, dv, causal: bool, scale: float) -> None:
    """dq, dk and dv by the first kernels that the GPU has room for; what is None is not computed.

    As `attention_backward`; RuntimeError where no kernel fits.
    """
    if all(x is not None for x in (dq, dk, dv)) and in_one_pass(q, k, causal):
        _launch_one_pass(q, k, v, o, lse, do, dq, dk, dv, causal, scale)
        return
    delta = torch.empty_like(lse)
    launch_delta(o, do, delta)
    given = q, k, v, do, lse, delta
    if dk is not None or dv is not None:
        dk, dv = (torch.empty_like(x) if d is None else d for x, d in ((k, dk), (v, dv)))
        _launch(launch_keys_gradient, 0, (*given, dk, dv), causal, scale)
    if dq is not None:
        _launch(launch_queries_gradient, 1, (*given, dq), causal, scale)


def in_one_pass(q: torch.Tensor, k: torch.Tensor, causal: bool) -> bool:
    """Whether Hopper's kernel takes these: 16 bits, heads of whole units of 16 bytes, up to 128.

    Without a mask only where no two programs would begin at the same queries.
    """
    if interpreting() or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    possible = q.itemsize == 2 and q.shape[3] * q.itemsize % UNIT_BYTES == 0 and q.shape[3] <= 128
    return possible and (causal or shift_of(q.shape[2], k.shape[2], sms(q.device)) > 0)


def _launch_one_pass(q, k, v, o, lse, do, dq, dk, dv, causal: bool, scale: float) -> None:
    q, k, v, do = (x if has_descriptor(x) else _copied(x) for x in (q, k, v, do))
    dq_sum = empty_as(dq, torch.float32)
    written = [x if has_descriptor(x) else empty_as(x) for x in (dk, dv)]
    launch_one_pass(q, k, v, o, lse, do, dq_sum, *written, causal, scale)
    torch.mul(dq_sum, scale, out=dq)
    for x, found in zip((dk, dv), written, strict=True):
        if found is not x:
            x.copy_(found)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _launch(launch: Callable, which: int, tensors: tuple, causal: bool, scale: float) -> None:
    q = tensors[0]
    if interpreting():
        launch(*tensors, INTERPRETED, causal, scale)
        return
    capability = torch.cuda.get_device_capability(q.device)
    multiplied = precision(q.dtype, q.device)
    found = configs(capability, q.dtype, q.shape[3], multiplied)[which]
    launch_first(launch, tensors, found, causal, scale, multiplied)


def configs(capability: tuple[int, int], dtype: torch.dtype, dim: int, precision: str) -> tuple:
    """The configurations for dK and dV, and those for dQ, each to be tried in this order.

    As `attention_plans.configs`, but for up to 80 bytes a thread, which spill for dK and dV where
    dims are not 64, 128 or 256, and on Hopper where heads share keys.
    """
    if capability < (8, 0):
        tables = TURING
    elif dtype == torch.float32:
        tables = TF32 if precision == "tf32" and dim % 16 == 0 else FP32
    elif dim % 16:
        tables = UNEVEN
    else:
        tables = {9: HOPPER, 10: BLACKWELL}.get(capability[0], SIXTEEN_BITS)
    width = min(width for width in WIDTHS if width >= dim)
    return tuple((found[width], SMALLEST) for found in tables)
