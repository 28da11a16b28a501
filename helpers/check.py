"""Compare a result with a reference; check an exercise.

python -m helpers.check            the exercises, those that you have solved, and the next one
python -m helpers.check 04.1       one exercise, and where it is
python -m helpers.check --forget   start anew
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable

import torch

from helpers import progress

# Relative error ‖actual - expected‖ / ‖expected‖ that rounding alone explains, with some room.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

# Exercise -> "module:function". The function raises AssertionError with a hint for a wrong answer.
EXERCISES = {exercise: rung.checker for exercise, rung in progress.LADDER.items()}


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
    NotImplementedError. Whether an answer is correct is remembered as the reader's progress
    (`helpers.progress`), but not of one whose name begins with "solution".
    ValueError for an exercise that does not exist.
    """
    if exercise not in EXERCISES:
        raise ValueError(_unknown(exercise))
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
        said = str(hint) or "An assert in it fails."
    except (Exception, SystemExit) as error:
        # The answer's own mistake: name it, do not stop the notebook.
        said = f"It raises {type(error).__name__}: {error}"
    else:
        said = ""
    print(f"Exercise {exercise}: {f'not yet. {said}' if said else 'correct.'}")
    names = [str(getattr(answer, "__name__", "")) for answer in answers]
    if not any(name.lower().startswith("solution") for name in names):
        progress.remember(exercise, accepted=not said)
    return not said


def _unknown(exercise: str) -> str:
    return f"There is no exercise {exercise!r}; there are {', '.join(EXERCISES)}."


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers.check",
        description="The exercises, and which of them you have solved.",
    )
    parser.add_argument("exercise", nargs="?", help="show 04.1, or those of notebook 04")
    parser.add_argument("--forget", action="store_true", help="start anew: all are open")
    given = parser.parse_args(arguments)
    if given.forget and given.exercise:
        parser.error("--forget forgets all of them: name none")
    if given.forget:
        try:
            progress.forget()
        except OSError as error:
            print(f"What was remembered cannot be removed: {error}", file=sys.stderr)
            return 1
        print("Forgotten: all exercises are open.")
    elif given.exercise is None:
        progress.show()
    elif meant := _meant(given.exercise):
        for exercise in meant:
            progress.describe(exercise)
    else:
        print(_unknown(given.exercise), file=sys.stderr)
        return 2
    return 0


def _meant(text: str) -> list[str]:
    """The exercises that a number means: 04.1 or 4.1 one, 04 or 4 all of that notebook."""
    notebook, dot, number = text.partition(".")
    start = f"{notebook:0>2}.{number}"
    return [each for each in EXERCISES if (each == start if dot else each.startswith(start))]


if __name__ == "__main__":
    sys.exit(main())
