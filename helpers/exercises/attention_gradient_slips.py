"""What is often written in the loop of exercise 12.1, and what to say to it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch

from helpers.exercises.attention_loop import Case
from helpers.exercises.attention_slips import FLOAT32, TOLERANCE

INF = math.inf


@dataclasses.dataclass(frozen=True)
class Tile:
    """q and do (Sq, d), what is kept of each row (Sq, 1); k, v (T, d), visible (Sq, T)."""

    q: torch.Tensor
    do: torch.Tensor
    log_sum: torch.Tensor
    row_term: torch.Tensor  # D
    k: torch.Tensor
    v: torch.Tensor
    visible: torch.Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[1] ** -0.5

    @property
    def scores(self) -> torch.Tensor:
        """Before the mask."""
        return self.q @ self.k.T * self.scale

    def masked(self, factor: float = 1.0, fill: float = -INF) -> torch.Tensor:
        return (self.scores * factor).masked_fill(~self.visible, fill)

    @property
    def p(self) -> torch.Tensor:
        return (self.masked() - self.log_sum).exp()

    @property
    def dp(self) -> torch.Tensor:
        return self.do @ self.v.T

    @property
    def square(self) -> bool:
        """Whether every matrix is as its transpose in shape."""
        return len(self.q) == len(self.k) == self.q.shape[1]


Matrix = Callable[[Tile], torch.Tensor]

MASK_HINT = "the mask is lost: P of a hidden key is 0, in the backward loop too"
WEIGHTS: dict[str, tuple[Matrix, ...]] = {
    "P = exp(S - log_sum_exp): here nothing is subtracted": (lambda t: t.masked().exp(),),
    "log_sum_exp is a natural logarithm: P = exp(S - log_sum_exp), or exp2 of this times log2(e)": (
        lambda t: (t.masked() - t.log_sum).exp2(),
        lambda t: (t.masked() - t.log_sum * math.log(2)).exp(),
        lambda t: (t.masked(1 / math.log(2)) - t.log_sum).exp2(),
    ),
    "a softmax over this tile alone: P is of the whole row, exp(S - log_sum_exp)": (
        lambda t: t.masked().softmax(1),
        lambda t: t.masked().softmax(1).nan_to_num(0),
    ),
    "this subtracts the tile's maximum, and the sum l is left out: log_sum_exp has both, of the "
    "whole row": (lambda t: (t.masked() - t.masked().amax(1, keepdim=True)).exp(),),
    "the scores of P lack the scale 1 / sqrt(d)": (
        lambda t: (t.masked(1 / t.scale) - t.log_sum).exp(),
    ),
    "the scores of P are divided by sqrt(d) twice": (
        lambda t: (t.masked(t.scale) - t.log_sum).exp(),
    ),
    "log_sum_exp is one number a query: log_sum_exp[:, None]": (
        lambda t: (t.masked() - t.log_sum.T).exp() if t.square else t.p,
    ),
    # Before the lost mask, which gives the same NaN, but differs in earlier cases.
    "a hidden score may be far above log_sum_exp, and inf times 0 is NaN: hide before exp": (
        lambda t: (t.scores - t.log_sum).exp() * t.visible,
    ),
    "the score of a hidden key is -inf: any number may be above log_sum_exp": (
        lambda t: (t.masked(fill=-1e4) - t.log_sum).exp(),
    ),
    MASK_HINT: (
        lambda t: (t.scores - t.log_sum).exp(),
        lambda t: (t.masked(fill=0) - t.log_sum).exp(),
    ),
    "`visible` is True where a query sees a key: here the others count": (
        lambda t: (t.scores.masked_fill(t.visible, -INF) - t.log_sum).exp(),
    ),
    "exp(S) and exp(log_sum_exp) overflow, or are both 0: subtract before exp": (
        lambda t: t.masked().exp() / t.log_sum.exp(),
        lambda t: t.masked().exp() * (-t.log_sum).exp(),
    ),
    "a row may see nothing of a tile, whose softmax is NaN then: exp(S - log_sum_exp) is 0": (
        lambda t: t.masked().softmax(1) * (t.masked().logsumexp(1, True) - t.log_sum).exp(),
    ),
}
VALUES: dict[str, Matrix] = {
    "dV = Pᵀ dO: P is not transposed": lambda t: t.p @ t.do if t.square else t.p.T @ t.do,
    "dV = Pᵀ dO: here dP stands for P": lambda t: t.dp.T @ t.do,
    "dV = Pᵀ dO: here dS stands for P": lambda t: _ds(t).T @ t.do,
    "dV = Pᵀ dO has no factor 1 / sqrt(d)": lambda t: t.p.T @ t.do * t.scale,
}


def _ds(t: Tile) -> torch.Tensor:
    return t.p * (t.dp - t.row_term)


SCORES: dict[str, Matrix] = {
    "": _ds,
    "D is missing: dS = P ∘ (dP - D)": lambda t: t.p * t.dp,
    "D is of the whole row: the sum of P ∘ dP over this tile's keys is a part of it, dO ∘ O summed "
    "over d is all of it": lambda t: t.p * (t.dp - (t.p * t.dp).sum(1, keepdim=True)),
    "D is subtracted: dS = P ∘ (dP - D)": lambda t: t.p * (t.dp + t.row_term),
    "dS = P ∘ (dP - D): P multiplies D too": lambda t: t.p * t.dp - t.row_term,
    "dS = P ∘ (dP - D): the factor P is missing": lambda t: t.dp - t.row_term,
    "D is dO ∘ O summed over d, and not its mean": lambda t: (
        t.p * (t.dp - t.row_term / t.q.shape[1])
    ),
    "D is one number a query: D[:, None]": lambda t: (
        t.p * (t.dp - t.row_term.T) if t.square else _ds(t)
    ),
    "dP = dO Vᵀ: V is not transposed": lambda t: (
        t.p * (t.do @ t.v - t.row_term) if t.square else _ds(t)
    ),
    MASK_HINT: lambda t: (t.scores - t.log_sum).exp() * (t.dp - t.row_term),
}
SUMS: dict[str, Callable] = {
    "": sum,
    "dQ is the sum over all tiles, and this is the last one's: add, do not overwrite": (
        lambda parts: parts[-1]
    ),
    "dQ is the sum over all tiles, and this is the first one's": lambda parts: parts[0],
    "dQ is the sum over the tiles, and not their mean": lambda parts: sum(parts) / len(parts),
}


def why(
    name: str,
    found: torch.Tensor,
    right: torch.Tensor,
    case: Case,
    o: torch.Tensor,
    log_sum: torch.Tensor,
) -> str:
    """What explains that dv, dk or dq (name) is `found`, and not `right`; "" if nothing known does.

    dv is taken to be right where dk is asked for, and dk where dq is.
    """
    rows = case.q, case.do, log_sum[:, None], (case.do * o).sum(1, keepdim=True)
    tiles = [Tile(*rows, *tile) for tile in case.tiles()]
    candidates = {"dv": _dv, "dk": _dk, "dq": _dq}[name](tiles)
    for hint, candidate in candidates:
        if hint and not candidate.isnan().all() and _close(found, candidate):
            return hint
    if found.isnan().any() and (log_sum == INF).any():
        return (
            "NaN: a row without keys has log_sum_exp = inf, so that exp(-inf - inf) = 0 comes out"
        )
    if found.isnan().all() and len(tiles) > 1:
        return (
            "NaN: the tile before is overwritten, as shared memory is, so take from a tile what "
            "you need before you take the next"
        )
    if _close(found, right, FLOAT32):
        return "that is float32's precision: keep everything in q's dtype"
    times = float((found * right).sum() / right.square().sum())
    if _close(found, times * right):
        return f"all of {name} is {times:.6g} times what it should be"
    return ""


def _dv(tiles: list[Tile]) -> Iterator[tuple[str, torch.Tensor]]:
    for hint, variants in WEIGHTS.items():
        for weights in variants:
            yield hint, torch.cat([weights(t).T @ t.do for t in tiles])
    for hint, values in VALUES.items():
        yield hint, torch.cat([values(t) for t in tiles])


def _dk(tiles: list[Tile]) -> Iterator[tuple[str, torch.Tensor]]:
    ways = {
        "": lambda t, ds: ds.T @ t.q,
        "dK = dSᵀ Q: dS is not transposed": lambda t, ds: (ds if t.square else ds.T) @ t.q,
        "dK = dSᵀ Q: here K stands for Q": lambda t, ds: ds.T @ (t.k if t.square else t.q),
    }
    yield from _products("dK", tiles, ways, {"": torch.cat})


def _dq(tiles: list[Tile]) -> Iterator[tuple[str, torch.Tensor]]:
    ways = {
        "": lambda t, ds: ds @ t.k,
        "dQ = dS K: dS is transposed": lambda t, ds: (ds.T if t.square else ds) @ t.k,
        "dQ = dS K: here Q stands for K": lambda t, ds: ds @ (t.q if t.square else t.k),
    }
    yield from _products("dQ", tiles, ways, SUMS)


def _products(name: str, tiles: list[Tile], ways: dict, sums: dict) -> Iterator:
    """Every combination of slips and its hints, those with the fewest first."""
    powers = {
        "": 1,
        f"the scale 1 / sqrt(d) is lost in {name}": 0,
        f"the scale is twice in {name}": 2,
    }
    every = itertools.product(*(each.items() for each in (sums, ways, powers, SCORES)))
    for choice in sorted(every, key=lambda choice: sum(hint != "" for hint, _ in choice)):
        hints, (joined, product, power, scores) = zip(*choice, strict=True)
        parts = [product(t, scores(t)) * t.scale**power for t in tiles]
        yield "; and ".join(filter(None, hints)), joined(parts)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
