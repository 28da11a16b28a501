"""The checker of exercise 08.3: softmax of rows wider than a block, in Triton."""

import math
from collections.abc import Callable, Iterator

import torch

from helpers.exercises.written_triton import Run, assert_compiles, assert_frugal, constants, run

# Relative to each value: the sum's rounding, and that of x - m, which the exponential magnifies.
SUM_TOLERANCE, EXPONENT_TOLERANCE = 2e-5, 2**-22
SUBNORMAL = 1.2e-38  # a GPU's fast exponential makes 0 of what is smaller
WIDE, WIDEST = 2049, 5001  # columns
TWO_LOOKS = ", the maximum and the sum from one look and the values from another"


def wide_softmax(answer: Callable) -> None:
    """AssertionError unless answer(x, y) writes the softmax of x's rows to y in one Triton kernel.

    Contiguous fp32 of two dimensions, any number of rows and columns, in tiles that do not grow
    with the row; each element of x is read twice at most. A row has a maximum above -inf.
    """
    done = {}
    for what, x in _inputs():
        rows, columns = x.shape
        where = f"for {rows} row{'s' * (rows != 1)} of {columns} column{'s' * (columns != 1)}"
        where += f" {what}," if what else ","
        each = run(answer, {"x": x}, {"y": x.shape}, where)
        if not x.numel():
            continue
        _assert_softmax(each, x, where)
        assert_frugal(each, where, reads=2, why=TWO_LOOKS)
        if rows > 4 and math.prod(each.launches[0].grid) < 2:
            raise AssertionError(
                f"{where} the values are right, but one program does all rows, on one SM: give "
                "each row its own"
            )
        done[columns] = each
    _assert_tiles(_tile(done[WIDE]), _tile(done[WIDEST]))
    assert_compiles(done[WIDEST].launches)


def _inputs() -> Iterator[tuple[str, torch.Tensor]]:
    """Something on them, and rows; the easiest first: the first that fails is the hint."""
    generator = torch.Generator().manual_seed(0)

    def noise(rows, columns):
        return torch.randn(rows, columns, generator=generator)

    yield "(the lecture's)", torch.tensor([[5.0, 5, 5], [0, 0, 100]])
    for rows, columns in ((3, 256), (4, 1), (3, 255)):
        yield "", 3 * noise(rows, columns)
    last = torch.nn.functional.pad(3 * noise(3, 256), (0, 1), value=9.5)
    yield "of which the last is the largest", last
    yield "", 3 * noise(2, 1000)
    yield "", 3 * noise(16, 300)  # more rows than a program may well take at once
    ramp = torch.linspace(0, 40, WIDE)
    yield "whose values rise", noise(2, WIDE) + ramp
    yield "whose values fall", noise(2, WIDE) - 4 * ramp
    yield "whose values rise and fall", noise(2, WIDE) + 30 * (ramp / 5).sin()
    yield "of equal values", torch.full((2, 1025), 3.0)
    yield "of values below -100", noise(2, 1001).abs().neg() - 120
    yield "of huge values", torch.randint(-3, 4, (2, WIDE), generator=generator).sort().values * 1e4
    later, at_once = noise(2, WIDEST)
    later[:4200] = -math.inf  # more than a tile
    at_once[4200:] = -math.inf
    at_once[1:4200:7] = -math.inf
    yield "of which many values are -inf", torch.stack((later, at_once, noise(1, WIDEST)[0]))
    yield "of random values", 3 * noise(2, WIDEST)
    yield "", noise(1, 20_001)  # as wide as anyone likes
    yield "", noise(3, 0)
    yield "", noise(0, 256)


def _assert_softmax(done: Run, x: torch.Tensor, where: str) -> None:
    """AssertionError at the first wrong value, with what its row looks like."""
    y, x = done.outputs["y"], x.double()
    expected = x.softmax(1)
    depth = (x.amax(1, keepdim=True) - x).clamp(max=200)
    allowed = expected * (SUM_TOLERANCE + EXPONENT_TOLERANCE * depth) + SUBNORMAL
    wrong = ~((y.double() - expected).abs() <= allowed)
    if not wrong.any():
        return
    row, column = wrong.nonzero()[0].tolist()
    raise AssertionError(
        f"{where} y[{row}, {column}] is {y[row, column]:.6g} for x = {x[row, column]:g}, and "
        f"should be {expected[row, column]:.6g}{_why(y.double(), x, row, _tile(done))}"
    )


def _why(y: torch.Tensor, x: torch.Tensor, row: int, tile: int) -> str:
    """What one wrong row of y has in common with usual mistakes; "" where it has nothing."""
    given, values, expected = y[row], x[row], x.softmax(1)
    columns = len(values)
    if not given.isfinite().all():
        if values.isneginf().any():
            return (
                ": -inf - (-inf) is NaN, so subtract something finite while all values so far are "
                "-inf"
            )
        if values.max() < -80:
            return f": this row's maximum is {values.max():g}; is it mistaken for 0?"
        return ": does an exponential overflow? With the newest maximum subtracted none is above 1"
    padding = -columns % tile
    for beyond, hint in (
        (x.new_zeros(padding), "the last tile's padding counts as exp(0): other=-float('inf')"),
        (x[row + 1 :].flatten()[:padding], "the next row counts as well: mask the load"),
    ):
        if len(beyond) and _close(given, torch.cat((values, beyond)).softmax(0)[:columns]):
            return f": {hint}"
    if _close(given, (values - values.max()).exp()):
        return ": that is exp(x - m), divided by nothing or by 1"
    for other in range(len(x)):
        if other != row and _close(given, expected[other]):
            return f": that is the softmax of row {other}"
    total, tiles = float(given.sum()), math.ceil(columns / tile)
    if tiles > 1 and math.isclose(total, tiles, rel_tol=1e-4):
        return (
            f": the row sums to {tiles}, as many as it has tiles; is each divided by its own sum?"
        )
    if not math.isclose(total, 1, rel_tol=SUM_TOLERANCE) and _close(given, expected[row] * total):
        return (
            f": the row is in proportion but sums to {total:.4g}, not 1. The sum holds exp(x - m) "
            "for the newest m: where m rises, what it held is first multiplied by "
            "exp(old m - new m)"
        )
    if _close(given.sort().values, expected[row].sort().values):
        return ": the row has its values, but not in their columns"
    return ""


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-30)


def _tile(done: Run) -> int:
    """How many columns a program takes at once: seen, or else told by the kernel's constants."""
    if done.widest is not None:
        return done.widest
    values = [value for launch in done.launches for value in constants(launch).values()]
    blocks = [v for v in values if type(v) is int and v.bit_count() == 1]  # powers of two
    return max(blocks, default=1)


def _assert_tiles(wide: int, widest: int) -> None:
    """The tiles of rows of `WIDE` and of `WIDEST` columns."""
    if widest > wide:
        raise AssertionError(
            f"the values are right, but its block grows with the row, to {widest} for {WIDEST:,} "
            "columns, until it does not fit a program's registers: keep it, say at 256, and loop"
        )
    if widest >= WIDEST:
        raise AssertionError(
            f"the values are right, but a block of {widest} holds {WIDEST:,} columns whole: take a "
            "smaller one, say 256, and loop over the row"
        )
