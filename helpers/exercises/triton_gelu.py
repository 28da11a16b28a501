"""The checkers of exercises 07.1, 07.2 and 07.3."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from helpers import profiling
from helpers.check import relative_error
from helpers.compute_roofs import can_compile
from helpers.device import device, has_cuda, triton_version
from helpers.exercises.written_kernels import gelu_inputs
from helpers.exercises.written_triton import (
    Run,
    assert_compiles,
    assert_frugal,
    assert_values,
    run,
)
from helpers.kernel_names import short
from helpers.kernels.gelu import compiled_gelu, triton_gelu

# The easiest first: the first size that fails is the hint. The last shows a single block.
SIZES = (1024, 1, 2, 255, 1023, 1025, 10_007, 0)
HALF_SIZE = 1025
HALF_MAX = 65504
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4}  # relative, half's own rounding is 4.9e-4


# 07.1


class FirstCallDiffers:
    """Something else at the first call, as a function that torch.compile has wrapped."""

    def __init__(self, x: torch.Tensor):
        self._x, self._called = x, False

    def __call__(self):
        result = self._x.sin().exp() if not self._called else self._x.cos()
        self._called = True
        return result


def _programs() -> Iterator[tuple[str, Callable[[], object], list[str]]]:
    """What it is, the call, and the operations that it consists of, as a CPU's profile has them."""
    side = 2048 if has_cuda() else 256  # long enough to take longer than the short ones
    x = torch.linspace(0.1, 1, side * side, device=device()).view(side, side)
    few = x[:2, :2].clone()
    yield "for x.sin()", lambda: x.sin(), ["aten::sin"]
    yield (
        "for x.sin().cos().sin()",
        lambda: x.sin().cos().sin(),
        ["aten::sin", "aten::cos", "aten::sin"],
    )
    yield (
        "for a short exp, a long tanh, a short exp",
        lambda: (few.exp(), x.tanh(), few.exp()),
        ["aten::exp", "aten::tanh", "aten::exp"],
    )
    yield (
        "for x.softmax(1) + x",
        lambda: x.softmax(1) + x,
        ["aten::softmax", "aten::add"],
    )
    yield (
        "for a function that does something else at its first call",
        FirstCallDiffers(x),
        ["aten::cos"],
    )
    if has_cuda() and triton_version():
        yield "for triton_gelu", lambda: triton_gelu(x), []
    if has_cuda() and can_compile():
        yield "for compiled_gelu", lambda: compiled_gelu(x), []


def launched_kernels(answer: Callable) -> None:
    """AssertionError unless answer(run) lists the kernels that one call of run launches, in order.

    run() is called before, so that compilation is over. Without a GPU: the operators that no other
    operator called; "aten::to", which often finds nothing to convert, may be there or not.
    """
    for where, call, operators in _programs():
        given = answer(call)
        if not isinstance(given, (list, tuple)) or not all(isinstance(n, str) for n in given):
            raise AssertionError(f"{where} it needs a list of names, not {given!r}")
        if has_cuda():
            captured = profiling.kernels(profiling.capture(call))["full_name"]
            expected, given = list(map(short, captured)), list(map(short, given))
        else:
            expected, given = operators, [name for name in given if name != "aten::to"]
        if given != expected:
            raise AssertionError(
                f"{where} it gives {_listed(given)}, and one call launches {_listed(expected)}"
                f"{_why(given, expected)}"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "nothing"


def _why(given: list[str], expected: list[str]) -> str:
    host = [name for name in given if name.startswith(("aten::", "cuda", "cuLaunch"))]
    if has_cuda() and host:
        return f": {host[0]} is what the host did; which events are the GPU's?"
    if len(given) > len(expected) and given[: len(given) // 2] == given[len(given) // 2 :]:
        return ": is more than one call profiled?"
    if set(given) == set(expected) and len(given) < len(expected):
        return ": a kernel counts each time it is launched"
    if sorted(given) == sorted(expected):
        return ": in the order in which they began"
    if not has_cuda() and len(given) > len(expected) and set(expected) <= set(given):
        return ": of an operator that was called by another, event.cpu_parent is not None"
    return ""


# 07.2


def written_gelu(answer: Callable) -> None:
    """AssertionError unless answer(x, y) writes GeLU of x to y with one Triton kernel.

    fp32 and fp16, any number of elements, nothing launched for none; GeLU in its tanh form,
    finite for every finite x.
    """
    cases = [*((n, torch.float32) for n in SIZES), (HALF_SIZE, torch.float16)]
    done = {}
    for n, dtype in cases:
        where = f"for n = {n}" + (" in fp16" if dtype == torch.float16 else "") + ","
        x = _values(n, dtype)
        done[n, dtype] = run(answer, {"x": x}, {"y": x.shape}, where)
        if not n:
            _assert_nothing_launched(done[n, dtype], where)
            continue
        expected = F.gelu(x.double(), approximate="tanh")
        # Element by element: beside the large ones, errors of the others would vanish in a norm.
        allowed = TOLERANCE[dtype] * expected.abs().clamp(min=1 if dtype == torch.float32 else 0.1)
        assert_values("y", done[n, dtype].outputs["y"], expected, allowed, x.double(), where)
        assert_frugal(done[n, dtype], where)
    largest = done[SIZES[-2], torch.float32]
    _assert_many_blocks(largest, "")
    assert_compiles(largest.launches)  # exp of fp16 is refused by the interpreter as well


def _values(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    x = gelu_inputs(n, seed)
    return x.clamp(-HALF_MAX, HALF_MAX).half() if dtype == torch.float16 else x


def _assert_nothing_launched(done: Run, where: str) -> None:
    if done.launches:
        grid = done.launches[0].grid
        raise AssertionError(
            f"{where} a grid of {grid} is launched: CUDA refuses a grid of no blocks; where there "
            "is nothing to do, launch nothing"
        )


def _assert_many_blocks(done: Run, what: str) -> None:
    if any(math.prod(launch.grid) < 2 for launch in done.launches):
        raise AssertionError(
            f"the values are right, but for n = {SIZES[-2]} {what}one block does it all, on one "
            "SM: give each block its part"
        )


# 07.3


def three_sigmoids(forward: Callable, backward: Callable) -> None:
    """AssertionError unless forward(x, y) and backward(x, grad, dx) are one good kernel each.

    y = s(s(s(x))), dx = grad dy/dx, in fp32; each reads its inputs once and writes once. backward
    is given x alone, of values that forward has not seen.
    """
    done = []
    for n in SIZES:
        where, x = f"for n = {n}, forward:", _values(n)
        done.append(run(forward, {"x": x}, {"y": x.shape}, where))
        if not n:
            _assert_nothing_launched(done[-1], where)
            continue
        expected = x.double().sigmoid().sigmoid().sigmoid()
        allowed = torch.full_like(expected, TOLERANCE[x.dtype])
        assert_values("y", done[-1].outputs["y"], expected, allowed, x.double(), where)
        assert_frugal(done[-1], where)
    for n in SIZES:
        where, x = f"for n = {n}, backward:", _values(n, seed=1)
        grad = torch.randn(n, generator=torch.Generator().manual_seed(n))
        done.append(run(backward, {"x": x, "grad": grad}, {"dx": x.shape}, where))
        if not n:
            _assert_nothing_launched(done[-1], where)
            continue
        expected = _gradient(x.double(), grad.double())
        allowed = TOLERANCE[x.dtype] * (expected.abs() + grad.double().abs() / 64)
        slope = _gradient(x.double(), torch.ones_like(x, dtype=torch.float64))
        if relative_error(done[-1].outputs["dx"], slope) < 1e-4:
            raise AssertionError(f"{where} dx lacks grad as a factor")
        assert_values("dx", done[-1].outputs["dx"], expected, allowed, x.double(), where)
        assert_frugal(done[-1], where)
    largest = [done[i] for i in (len(SIZES) - 2, 2 * len(SIZES) - 2)]
    for each, what in zip(largest, ("forward: ", "backward: "), strict=True):
        _assert_many_blocks(each, what)
    assert_compiles([launch for each in largest for launch in each.launches])


def _gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    return torch.autograd.grad(x.sigmoid().sigmoid().sigmoid(), x, grad)[0]
