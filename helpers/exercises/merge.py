"""The checker of exercise 08.2: two parts of a softmax's sum made one."""

import functools
import math
import random
from collections.abc import Callable, Iterator

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
INF = math.inf
TOLERANCE = 1e-5  # relative; forty merges round to some 1e-6
ROWS = 64
IDENTITY_HINT = (
    "-inf - (-inf) is NaN, so subtract something finite from a maximum of -inf: nothing comes out "
    "but exp(-inf) = 0"
)


def merge(answer: Callable) -> None:
    """AssertionError unless answer((m_a, d_a), (m_b, d_b)) is (m, d) of both parts together.

    For fp32 tensors of one shape, element by element: m the maximum of a part, d the sum of
    exp(x - m) over it; (-inf, 0) is a part with nothing in it. A d of NaN stays NaN.
    """
    for where, a, b in _pairs():
        _assert_right(_merged(answer, a, b, where), _reference(a, b), a, b, where)
    for where, x, bounds, tree in _trees():
        lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        parts = [_part(each) for each in x.split(lengths, dim=1)]
        result = tree(functools.partial(_merged, answer, where=where), parts)
        _assert_right(result, _part(x.double()), None, None, where)


def _part(x: torch.Tensor) -> Pair:
    """(m, d) of each row; of no columns, or of nothing but -inf, the identity."""
    m = x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -INF)
    return m, (x - m.where(m > -INF, 0)[:, None]).exp().sum(1)


def _reference(a: Pair, b: Pair) -> Pair:
    (ma, da), (mb, db) = ([each.double() for each in pair] for pair in (a, b))
    m = torch.maximum(ma, mb)
    base = m.where(m > -INF, 0)
    return m, da * (ma - base).exp() + db * (mb - base).exp()


def _pairs() -> Iterator[tuple[str, Pair, Pair]]:
    """The easiest first."""

    def pair(m, d):
        return torch.tensor(m), torch.tensor(d)

    for (ma, da), (mb, db) in (((1.0, 2.0), (3.0, 1.5)), ((2.0, 1.5), (-1.0, 3.0))):
        yield f"for ({ma}, {da}) and ({mb}, {db}),", pair([ma], [da]), pair([mb], [db])
    several = pair([1.0, 5.0, 2.0, -3.0], [1.5, 2.0, 1.0, 4.0])
    others = pair([4.0, 2.0, 2.0, -3.5], [2.0, 3.0, 1.25, 1.0])
    yield "for several elements at once,", several, others
    table = [tuple(each.view(2, 2) for each in pair_) for pair_ in (several, others)]
    yield "for tensors of two dimensions,", *table
    yield "for tensors without dimensions,", pair(1.0, 2.0), pair(3.0, 1.5)
    nothing = pair([-INF] * 4, [0.0] * 4)
    yield "for a part with nothing in it, a = (-inf, 0),", nothing, several
    yield "for a part with nothing in it, b = (-inf, 0),", several, nothing
    yield "for two parts with nothing in them, (-inf, 0) and (-inf, 0),", nothing, nothing
    some = pair([-INF, 1.0, -INF, 2.0], [0.0, 2.0, 0.0, 1.5])
    yield "where one part or both have nothing,", some, pair([-INF, -INF, 3.0, 4.0], [0.0, 0, 1, 2])
    for x, y in ((1e4, 9999.0), (-1e4, -9999.0), (1e4, -1e4), (3e38, -3e38), (-88.0, 88.0)):
        yield f"for maxima of {x:g} and {y:g},", pair([x], [1.5]), pair([y], [2.5])
    undefined = pair([1.0, 3.0, 2.0], [math.nan, 2.0, math.nan])
    yield "where a sum is NaN,", undefined, pair([2.0, 1.0, 1.0], [1.5, 2.5, math.nan])


def _trees() -> Iterator[tuple[str, torch.Tensor, list[int], Callable]]:
    """Where, rows of many kinds, the bounds of their parts, and merged and parts -> one pair."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for kind, x in _rows(generator).items():
        columns = x.shape[1]
        for tree in TREES:
            cuts = sorted(rng.choices(range(columns + 1), k=10))  # some parts have no columns
            name = tree.__name__.replace("_", " ").strip()
            where = f"for rows {kind} in {len(cuts) + 1} parts, merged {name},"
            yield where, x, [0, *cuts, columns], functools.partial(tree, rng=rng)
        where = f"for rows {kind} in {columns} parts, merged from the left,"
        yield where, x, list(range(columns + 1)), functools.partial(_from_the_left, rng=rng)


def _rows(generator: torch.Generator) -> dict[str, torch.Tensor]:
    noise = torch.randn(ROWS, 40, generator=generator)
    ramp = torch.arange(40.0)
    masked = noise.clone()
    masked[torch.arange(40) < torch.arange(ROWS)[:, None]] = -INF  # the last rows have nothing left
    return {
        "whose values rise": noise + ramp,
        "whose values fall": noise - ramp,
        "of equal values": torch.full_like(noise, 3),
        "of values near 10,000": noise + 1e4,
        "of values near -10,000": noise - 1e4,
        "that begin with -inf": masked,
        "that end with -inf": masked.flip(1),
        "of random values": noise * 5,
    }


# A tree: it merges neighbours, or whatever comes, until one pair is left.


def _from_the_left(merged: Callable, parts: list[Pair], rng: random.Random) -> Pair:
    return functools.reduce(merged, parts)


def _from_the_right(merged: Callable, parts: list[Pair], rng: random.Random) -> Pair:
    return functools.reduce(lambda right, left: merged(left, right), reversed(parts))


def _by_halves(merged: Callable, parts: list[Pair], rng: random.Random) -> Pair:
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return merged(_by_halves(merged, parts[:half], rng), _by_halves(merged, parts[half:], rng))


def _in_any_order(merged: Callable, parts: list[Pair], rng: random.Random) -> Pair:
    parts = list(parts)
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(merged(a, b))
    return parts[0]


TREES = (_from_the_left, _from_the_right, _by_halves, _in_any_order)


def _merged(answer: Callable, a: Pair, b: Pair, where: str) -> Pair:
    """answer(a, b), if it is a pair of tensors like the inputs, and the inputs are as before."""
    before = [each.clone() for each in (*a, *b)]
    try:
        given = answer(a, b)
    except (RuntimeError, ValueError) as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise AssertionError(
            f"{where} an `if` or max() asks a whole tensor: choose for each element, with "
            "torch.maximum or torch.where"
        ) from error
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise AssertionError(f"{where} return a pair of tensors, m and d, not {given!r}")
    for name, each in zip("md", given, strict=True):
        if not isinstance(each, torch.Tensor) or each.shape != a[0].shape:
            raise AssertionError(f"{where} {name} has to be a tensor like its parts', not {each!r}")
        if each.dtype != a[0].dtype:
            raise AssertionError(f"{where} {name} has to be fp32 like its parts', not {each.dtype}")
    for old, new in zip(before, (*a, *b), strict=True):
        if not torch.equal(old.view(torch.int32), new.view(torch.int32)):  # NaN equals no NaN
            raise AssertionError(f"{where} it changes its inputs in place: make new tensors")
    return given[0], given[1]


def _assert_right(given: Pair, expected: Pair, a: Pair | None, b: Pair | None, where: str) -> None:
    """a, b: what was merged, where one slip explains a wrong sum."""
    (m, d), (right_m, right_d) = given, expected
    if (i := _first(m.double() != right_m)) is not None:
        nothing = right_m[i] == -INF
        hint = "the maximum of nothing is -inf" if nothing else "the larger of m_a and m_b"
        raise AssertionError(f"{where} m is {m[i]:.8g}, not {right_m[i]:.8g}: {hint}")
    close = torch.isclose(d.double(), right_d, rtol=TOLERANCE, atol=0, equal_nan=True)
    if (i := _first(~close)) is None:
        return
    said = f"{where} d is {d[i]:.6g}, not {right_d[i]:.6g}"
    if right_d[i].isnan():
        said += ": a row with NaN in it has no softmax, and replacing NaN would hide that"
    elif d[i].isnan() and ((a and -INF in (a[0][i], b[0][i])) or right_m[i] == -INF):
        said += f": {IDENTITY_HINT}"
    elif a:
        inputs = [each.double() for each in (*a, *b)]
        said += next(
            (f": {hint}" for slip, hint in _slips(*inputs, right_m) if _close(slip, d)), ""
        )
    raise AssertionError(said)


def _slips(ma, da, mb, db, m) -> Iterator[tuple[torch.Tensor, str]]:
    """What is often written for d, m being the larger maximum, and what to say to it."""
    yield da + db, "each sum has to be scaled from its own maximum to the common one"
    yield (
        da * (m - ma).exp() + db * (m - mb).exp(),
        "the scale is exp(m_a - m), never above 1, and not exp(m - m_a)",
    )
    yield (
        da * (mb - m).exp() + db * (ma - m).exp(),
        "each sum is scaled from the other's maximum and not from its own",
    )
    for own, other, factor in (("b", "a", (ma - m).exp()), ("a", "b", (mb - m).exp())):
        yield (da + db) * factor, f"{own}'s sum is scaled with {other}'s factor"
    for slip, name in ((da * (ma - mb).exp() + db, "m_b"), (da + db * (mb - ma).exp(), "m_a")):
        yield slip, f"it is scaled to {name}, which need not be the larger"


def _close(slip: torch.Tensor, d: torch.Tensor) -> bool:
    return torch.allclose(slip, d.double(), rtol=TOLERANCE, atol=0, equal_nan=True)


def _first(wrong: torch.Tensor) -> tuple[int, ...] | None:
    places = wrong.nonzero()
    return tuple(map(int, places[0])) if len(places) else None
