"""What is often written in the loop of exercise 11.1, and what to say to it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

INF = math.inf
TOLERANCE = 1e-8  # relative and absolute; scores of 1000 in float64 round to some 1e-13
FLOAT32 = 1e-4  # what rounding to float32 on the way explains
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # m, l and o


@dataclasses.dataclass(frozen=True)
class Seen:
    """A tile: scores q·k / sqrt(d) before the mask, (Sq, T); who sees what; values (T, d)."""

    scores: torch.Tensor
    visible: torch.Tensor
    v: torch.Tensor
    head_dim: int

    def masked(self, scores: torch.Tensor | None = None, fill: float = -INF) -> torch.Tensor:
        """The scores, or others, with hidden ones replaced."""
        return (self.scores if scores is None else scores).masked_fill(~self.visible, fill)


Step = Callable[[State, torch.Tensor, Seen], State]  # the state, a tile's scores, the tile
Scores = Callable[[Seen], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Slip:
    """A loop that is not right, and what to say to it."""

    hint: str
    step: Step
    scores: Scores = Seen.masked


def shown(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """m + ln(l) and o / l, whatever m is; 0 where l and o are."""
    m, total, o = state
    nothing = (total[:, None] == 0) & (o == 0)
    return m + total.log(), torch.where(nothing, 0, o / total[:, None])


def why(
    states: Sequence[State], seen: Sequence[Seen], log_sum: torch.Tensor, attention: torch.Tensor
) -> str:
    """What explains the last of these states, one a tile; "" where nothing known does.

    log_sum, attention: what ln(sum of exp(score)) and o / l of the last one should be.
    """
    m, total, o = states[-1]
    undefined = total.isnan() | o.isnan().any(1)
    if undefined.any() and (log_sum[undefined] == -INF).all():
        return NAN_HINT
    given = [shown(state) for state in states]
    if _close(o, attention) and not _close(given[-1][1], attention):
        return DIVIDED_HINT
    for slip in SLIPS:
        pairs = zip(given, map(shown, _run(slip, seen)), strict=True)
        if all(_close(x, y) for pair in pairs for x, y in zip(*pair, strict=True)):
            return slip.hint
    counted = (log_sum == -INF) & (o != 0).any(1)
    if (counted & (m > -INF) & (m < math.log(TOLERANCE))).any():  # larger ones show earlier
        return "a hidden score has to be -inf: where no key is seen, finite ones count in full"
    if undefined.all() and len(seen) > 1:
        return (
            "NaN from the second tile on: the tile before is overwritten, as shared memory is, so "
            "keep m, l and o alone"
        )
    result_right = _close(given[-1][1], attention)
    if result_right and _close(m * math.log(2) + total.log(), log_sum):
        return "this m is in units of log2: give it times ln 2"
    if result_right:
        return "l is the sum of exp(score - m), m being the one that is yielded with it"
    if _close(given[-1][1], attention, FLOAT32) and _close(given[-1][0], log_sum, FLOAT32):
        return "that is float32's precision: keep everything in q's dtype"
    return ""


def _run(slip: Slip, seen: Sequence[Seen]) -> Iterator[State]:
    like = seen[0].scores
    rows, dim = len(like), seen[0].v.shape[1]
    state = like.new_full((rows,), -INF), like.new_zeros(rows), like.new_zeros(rows, dim)
    for tile in seen:
        state = slip.step(state, slip.scores(tile), tile)
        yield state


def _parts(state: State, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new maximum, the factor for what was before, the terms of this tile."""
    new = torch.maximum(state[0], s.amax(1))
    base = new.where(new > -INF, 0)
    return new, (state[0] - base).exp(), (s - base[:, None]).exp()


def _sums(state: State, m, of_l, of_o, p: torch.Tensor, tile: Seen) -> State:
    """The state with l and o times these factors, and the terms p added."""
    _, total, o = state
    return m, total * of_l + p.sum(1), o * of_o[:, None] + p @ tile.v


def _right(state: State, s: torch.Tensor, tile: Seen) -> State:
    m, factor, p = _parts(state, s)
    return _sums(state, m, factor, factor, p, tile)


def _factors(of_l: Callable, of_o: Callable) -> Step:
    """The right step, but for what multiplies l and o, as functions of the right factor."""

    def step(state: State, s: torch.Tensor, tile: Seen) -> State:
        m, factor, p = _parts(state, s)
        return _sums(state, m, of_l(factor), of_o(factor), p, tile)

    return step


def _new_terms_too(state: State, s: torch.Tensor, tile: Seen) -> State:
    m, factor, p = _parts(state, s)
    factor = factor.where(state[0] > -INF, 1)
    m, total, o = _sums(state, m, torch.ones_like(m), torch.ones_like(m), p, tile)
    return m, total * factor, o * factor[:, None]


def _own_attention(of_total: Callable) -> Step:
    """Each tile divided by its own sum; of_total(l) is the next l."""

    def step(state: State, s: torch.Tensor, tile: Seen) -> State:
        m, _, p = _parts(state, s)
        return m, of_total(state[1]), state[2] + (p / p.sum(1, keepdim=True)) @ tile.v

    return step


def _from_maximum(maximum: Callable, finite: bool = False) -> Step:
    """The right step from maximum(old m, scores, tile), which need not be the running one.

    finite: 0 is subtracted in place of -inf.
    """

    def step(state: State, s: torch.Tensor, tile: Seen) -> State:
        m = maximum(state[0], s, tile)
        base = m.where(m > -INF, 0) if finite else m
        factor = (state[0] - base).exp()
        return _sums(state, m, factor, factor, (s - base[:, None]).exp(), tile)

    return step


def _base_2(state: State, s: torch.Tensor, tile: Seen) -> State:
    m = torch.maximum(state[0], s.amax(1))
    factor = (state[0] - m).exp2()
    return _sums(state, m, factor, factor, (s - m[:, None]).exp2(), tile)


def _times(factor: Callable[[Seen], float]) -> Scores:
    return lambda tile: tile.masked(tile.scores * factor(tile))


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


NAN_HINT = (
    "where a query has seen no key, m is -inf, and -inf - (-inf) is NaN: subtract something finite "
    "in its place, and exp(-inf) = 0 comes out"
)
DIVIDED_HINT = (
    "o is divided already, by l or by each tile's own sum: add exp(score - m) v undivided, and l "
    "divides o once, at the end"
)
AVERAGE_HINT = (
    "each tile is divided by its own sum, and a mean of the tiles' attentions is not attention: "
    "add exp(score - m) v, and l divides once, at the end"
)
INVERTED_HINT = "the factor is exp(m_old - m_new), never above 1, and not exp(m_new - m_old)"
SCALE_HINT = "the scale is 1 / sqrt(d), d being q's columns, and not the number of "


# The first that gives the same m + ln(l) and o / l is said.
SLIPS = (
    Slip(
        "scores are q·k / sqrt(d): the scale is missing", _right, _times(lambda t: t.head_dim**0.5)
    ),
    Slip(
        "scores are q·k / sqrt(d): here divided twice", _right, _times(lambda t: t.head_dim**-0.5)
    ),
    Slip(SCALE_HINT + "keys in a tile", _right, _times(lambda t: (t.head_dim / len(t.v)) ** 0.5)),
    Slip(SCALE_HINT + "queries", _right, _times(lambda t: (t.head_dim / len(t.scores)) ** 0.5)),
    Slip(
        "l is rescaled, but o is not: it too was summed with the old m",
        _factors(torch.clone, torch.ones_like),
    ),
    Slip(
        "o is rescaled, but l is not: it too was summed with the old m",
        _factors(torch.ones_like, torch.clone),
    ),
    Slip(
        "l and o are not rescaled: is m replaced before exp(m_old - m_new) is computed?",
        _factors(torch.ones_like, torch.ones_like),
    ),
    Slip(INVERTED_HINT, _factors(torch.reciprocal, torch.reciprocal)),
    Slip(INVERTED_HINT, _factors(*[lambda factor: torch.where(factor > 0, 1 / factor, 1)] * 2)),
    Slip("the new terms have the new m already: rescale before adding", _new_terms_too),
    Slip(AVERAGE_HINT, _own_attention(lambda total: total + 1)),
    Slip(AVERAGE_HINT, _own_attention(torch.ones_like)),
    Slip("exp2(x) is exp(x ln 2): the scores lack a factor log2(e)", _base_2),
    Slip("the mask is ignored", _right, lambda tile: tile.scores),
    Slip(  # one tile is enough: the first of the first case, where all is visible, differs
        "the mask is `visible`, whatever it is, and not the diagonal",
        _right,
        lambda tile: tile.scores.where(torch.ones_like(tile.visible).tril(), -INF),
    ),
    Slip(
        "m is the largest of the visible scores; beside a hidden one they all become 0",
        _from_maximum(lambda m, s, tile: torch.maximum(m, tile.scores.amax(1))),
    ),
    Slip(  # between others that make l and o 0: that above is right where this one fails first
        "m starts at -inf: with 0, far above these scores, all exponentials are 0",
        _from_maximum(lambda m, s, tile: torch.maximum(m, s.amax(1)).clamp(min=0)),
    ),
    Slip(
        "`visible` is True where a query sees a key: here the others count",
        _right,
        lambda tile: tile.scores.masked_fill(tile.visible, -INF),
    ),
    Slip("a hidden score of 0 weighs exp(0 - m): make it -inf", _right, lambda t: t.masked(fill=0)),
    Slip(
        "without a maximum subtracted the exponentials overflow, or are all 0",
        _from_maximum(lambda m, s, tile: torch.zeros_like(m)),
    ),
    *(
        Slip(
            "m is the largest score so far, and not this tile's",
            _from_maximum(lambda m, s, tile: s.amax(1), finite),
        )
        for finite in (False, True)
    ),
    Slip(
        "m stays the first tile's: take the larger of it and this tile's",
        _from_maximum(lambda m, s, tile: m.where(m > -INF, s.amax(1))),
    ),
)
