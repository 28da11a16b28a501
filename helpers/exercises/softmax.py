"""The checker of exercise 08.1: what a softmax of five kernels moves, and how long that takes."""

import math
from collections.abc import Callable
from numbers import Real

import torch

from helpers import traffic
from helpers.exercises.answers import is_number, plain

LECTURE, GB_PER_S = (16384, 16384), 716.8  # the lecture's task, for an RTX 4080
# The first that fails is the hint. A few columns show what has one element a row.
SHAPES = (LECTURE, (1000, 3), (7, 1), (1, 4096), (0, 5))
INDEX_BYTES = 8  # torch.max also writes an int64 index a row, which may be counted or not

# (MN's factor, M's) in elements, the indices being two of fp32 -> what was forgotten.
FORGOTTEN = {
    factors: hint
    for hint, *several in (
        (
            "x - max[:, None] reads the M maxima and num / den[:, None] the M sums, and the "
            "lecture's comments count one of the two",
            (8, 3),
            (8, 5),
        ),
        (
            "the maxima and the sums, M elements each, are written and read as well",
            (8, 0),
            (8, 2),
        ),
        ("these are the reads alone, 7.49 ms", (5, 2), (5, 1), (5, 0)),
        ("these are the writes alone, 4.49 ms", (3, 2), (3, 4), (3, 0)),
        ("that is one kernel for all, 3.00 ms: here are five, which meet in memory", (2, 0)),
    )
    for factors in several
}


def manual_traffic(count_bytes: Callable, least_ms: Callable) -> None:
    """AssertionError unless both are right for the softmax of five kernels.

    count_bytes(rows, columns, itemsize): all that it reads and writes, the maxima's indices counted
    or not. least_ms(number_of_bytes, gb_per_s): the time that the memory needs for it.
    """
    cases = [(*shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    given = [
        _number(count_bytes(m, n, dtype.itemsize), "count_bytes", "bytes") for m, n, dtype in cases
    ]
    first = traffic.manual_softmax(*cases[0]).bytes
    indices = INDEX_BYTES if given[0] == first else 0
    for (m, n, dtype), value in zip(cases, given, strict=True):
        expected = int(traffic.manual_softmax(m, n, dtype).bytes) - (INDEX_BYTES - indices) * m
        if value != expected:
            kind = "fp32" if dtype == torch.float32 else "bf16"
            raise AssertionError(
                f"for {m:,} rows of {n:,} columns in {kind} it moves {expected:,} bytes, not "
                f"{value:,}: {_forgotten(m, n, dtype.itemsize, value, expected)}"
            )
    _assert_time(least_ms, int(first) - INDEX_BYTES * LECTURE[0])


def _number(given: object, name: str, unit: str) -> Real:
    number = plain(given)
    if not is_number(number):
        raise AssertionError(f"{name} needs a number of {unit}, not {given!r}")
    return number


def _forgotten(m: int, n: int, itemsize: int, value: Real, expected: int) -> str:
    """What a wrong number of bytes counts."""
    if value * itemsize == expected:
        return f"these are elements, and each has {itemsize} bytes"
    if value * itemsize == expected * torch.float32.itemsize:
        return f"an element has {itemsize} bytes, as the third argument says"
    if (m, n) == LECTURE and value % (itemsize * m) == 0:
        a, b = divmod(value // (itemsize * m), n)
        hint = FORGOTTEN.get((a, b), "go through the five kernels, what each reads and writes")
        instead = f" instead of 11.98 ms at {GB_PER_S} GB/s" if hint.endswith("ms") else ""
        return f"yours are {a:g} MN{f' + {b:g} M' if b else ''} elements; {hint}{instead}"
    if value < m * n * itemsize:
        return f"x alone, which the first kernel reads, has {m * n * itemsize:,}"
    return "what do the kernels read and write of M elements?"


def _assert_time(least_ms: Callable, lecture_bytes: int) -> None:
    for moved, gb_per_s in ((lecture_bytes, GB_PER_S), (10**9, 4000), (0, 500)):
        given = _number(least_ms(moved, gb_per_s), "least_ms", "milliseconds")
        expected = moved / gb_per_s / 1e6
        if math.isclose(given, expected, rel_tol=1e-6):
            continue
        hints = {
            1e-3: ": these are seconds",
            1e3: ": these are microseconds",
            1e9 / 2**30: ": a GB of a datasheet is 10^9 bytes, not 2^30",
        }
        ratio = given / expected if expected else math.nan
        hint = next((h for r, h in hints.items() if math.isclose(ratio, r, rel_tol=1e-6)), "")
        raise AssertionError(
            f"{moved:,} bytes at {gb_per_s} GB/s take {expected:.6g} ms, not {given:.6g}{hint}"
        )
