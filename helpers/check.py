"""Compare a result with a reference; check an exercise."""

import importlib
import math
from collections.abc import Callable

import torch

# Relative error ‖actual - expected‖ / ‖expected‖ that rounding alone explains, with some room.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

# Exercise -> "module:function". The function raises AssertionError with a hint for a wrong answer.
EXERCISES = {
    "01.1": "helpers.exercises.specs:rebuilt_peaks",
    "02.1": "helpers.exercises.benchmarking:repaired_benchmarks",
    "03.1": "helpers.exercises.roofline:bound_by",
    "04.1": "helpers.exercises.fusion:traffic",
    "04.2": "helpers.exercises.recomputation:three_sigmoids",
    "05.1": "helpers.exercises.cuda_gelu:global_index",
    "05.2": "helpers.exercises.cuda_gelu:repaired_gelu",
    "06.1": "helpers.exercises.memory:predicted_sectors",
    "06.2": "helpers.exercises.memory:tiled_transpose",
    "07.1": "helpers.exercises.triton_gelu:launched_kernels",
    "07.2": "helpers.exercises.triton_gelu:written_gelu",
    "07.3": "helpers.exercises.triton_gelu:three_sigmoids",
    "08.1": "helpers.exercises.softmax:manual_traffic",
    "08.2": "helpers.exercises.merge:merge",
    "08.3": "helpers.exercises.triton_softmax:wide_softmax",
    "09.1": "helpers.exercises.grouped_order:grouped_order",
    "10.1": "helpers.exercises.wave_steps:expected_teeth",
    "10.2": "helpers.exercises.wave_steps:next_step",
    "11.1": "helpers.exercises.attention_loop:attention_steps",
    "12.1": "helpers.exercises.attention_gradient:attention_gradients",
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ over all elements, in float64; inf where NaNs differ.

    Equal infinities, and NaN where the reference has NaN, count as equal.
    """
    if actual.is_complex() or expected.is_complex():
        raise TypeError("complex tensors are not compared: compare their parts")
    a, b = (tensor.detach().to("cpu", torch.float64).flatten() for tensor in (actual, expected))
    special = ~torch.isfinite(b)
    if not torch.equal(a.isnan(), b.isnan()) or not torch.isfinite(a[~special]).all():
        return math.inf
    infinite = b.isinf()
    if not torch.equal(a[infinite], b[infinite]):
        return math.inf
    difference = torch.linalg.vector_norm(a[~special] - b[~special]).item()
    size = torch.linalg.vector_norm(b[~special]).item()
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None
) -> None:
    """AssertionError unless `actual` equals the reference up to the rounding of its own dtype.

    `expected` is the reference, best computed in float64. `tolerance` is a relative error as
    `relative_error` gives it; by default that of `actual`'s dtype in `TOLERANCE`.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if tolerance is None:
        if actual.dtype not in TOLERANCE:
            raise TypeError(f"no tolerance is known for {actual.dtype}: give one")
        tolerance = TOLERANCE[actual.dtype]
    error = relative_error(actual, expected)
    if error <= tolerance:
        return
    gap = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs()
    worst = int(gap.nan_to_num(nan=math.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    raise AssertionError(
        f"relative error {error:.2g} is above {tolerance:.2g}; worst at {index}: "
        f"{actual[index].item()!r}, expected {expected[index].item()!r}"
    )


class CannotCheck(Exception):
    """Raised by a checker where this machine lacks what it takes to check."""


def check_exercise(exercise: str, *answers: Callable) -> bool | None:
    """Print one line on an exercise: not attempted yet, correct, or a hint at what is wrong.

    Returns True, also where this machine cannot check it; False; or None while a stub still raises
    NotImplementedError.
    ValueError for an exercise that does not exist.
    """
    if exercise not in EXERCISES:
        raise ValueError(f"there is no exercise {exercise!r}; there are {sorted(EXERCISES)}")
    module, function = EXERCISES[exercise].split(":")
    checker = getattr(importlib.import_module(module), function)
    try:
        if not all(map(callable, answers)):
            raise AssertionError("Pass the function itself, without calling it.")
        checker(*answers)
    except NotImplementedError:
        print(f"Exercise {exercise}: not attempted yet.")
        return None
    except CannotCheck as reason:
        print(f"Exercise {exercise}: it cannot be checked on this machine: {reason}")
        return True
    except AssertionError as hint:
        print(f"Exercise {exercise}: not yet. {hint}")
        return False
    except (Exception, SystemExit) as error:
        # The answer's own mistake: name it, do not stop the notebook.
        print(f"Exercise {exercise}: not yet. It raises {type(error).__name__}: {error}")
        return False
    print(f"Exercise {exercise}: correct.")
    return True
