"""The checker of exercise 11.1 takes every honest loop, and says what is wrong with another."""

import functools
import itertools
import math
import re

import pytest
import torch
from verdicts import verdict

INF = float("inf")


def solution(q, tiles):  # the notebook's
    scale = 1 / math.sqrt(q.shape[1])
    m, total, o = q.new_full((len(q),), -INF), q.new_zeros(len(q)), torch.zeros_like(q)
    for k, v, visible in tiles:
        s = torch.where(visible, scale * q @ k.T, -INF)
        m_new = torch.maximum(m, s.amax(1))
        base = torch.where(m_new == -INF, 0, m_new)
        rescale = torch.exp(m - base)
        p = torch.exp(s - base[:, None])
        total = total * rescale + p.sum(1)
        o = o * rescale[:, None] + p @ v
        m = m_new
        yield m, total, o


# Honest variants


def exp2_with_the_scale_folded(q, tiles):
    q = q * (math.log2(math.e) / q.shape[1] ** 0.5)
    m = torch.full((len(q), 1), -1e300, dtype=q.dtype)
    total, o = torch.zeros_like(m), 0.0
    for k, v, visible in tiles:
        s = (q @ k.T).masked_fill(~visible, -INF)
        m, m_old = torch.maximum(m, s.amax(1, keepdim=True)), m
        p, rescale = torch.exp2(s - m), torch.exp2(m_old - m)
        total, o = total * rescale + p.sum(1, keepdim=True), o * rescale + p @ v
        yield m * math.log(2), total, o


def in_place(q, tiles):
    m, total, o = q.new_full((len(q),), -INF), q.new_zeros(len(q)), q.new_zeros(q.shape)
    for k, v, visible in tiles:
        s = torch.einsum("id,jd->ij", q, k).mul_(q.shape[1] ** -0.5)
        s.masked_fill_(~visible, -INF)
        m_new = torch.maximum(m, s.amax(1))
        rescale = (m - m_new).exp_().nan_to_num_(0)
        m.copy_(m_new)
        p = s.sub_(m[:, None]).exp_().masked_fill_(~visible, 0)
        total.mul_(rescale).add_(p.sum(1))
        o.mul_(rescale[:, None]).addmm_(p, v)
        yield [m, total, o]


def row_by_row_in_numbers(q, tiles):
    rows, dim = q.shape
    m, total, o = [-INF] * rows, [0.0] * rows, [[0.0] * dim for _ in range(rows)]
    for k, v, visible in tiles:
        scores, values = (q @ k.T / dim**0.5).tolist(), v.tolist()
        for i in range(rows):
            for j in range(len(k)):
                if visible[i, j]:
                    new = max(m[i], scores[i][j])
                    rescale, p = math.exp(m[i] - new), math.exp(scores[i][j] - new)
                    m[i], total[i] = new, total[i] * rescale + p
                    o[i] = [a * rescale + p * b for a, b in zip(o[i], values[j], strict=True)]
        yield tuple(torch.tensor(each, dtype=q.dtype) for each in (m, total, o))


def rescaled_only_where_it_matters(q, tiles):  # as FlashAttention-4: m may lag by 8
    m, total, o = q.new_full((len(q),), -1e300), q.new_zeros(len(q)), torch.zeros_like(q)
    for k, v, visible in tiles:
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        top = s.amax(1)
        m_new = torch.where(top > m + 8, top, m)
        rescale, m = torch.exp(m - m_new), m_new
        p = torch.exp(s - m[:, None])
        total, o = total * rescale + p.sum(1), o * rescale[:, None] + p @ v
        yield m, total, o


def merged_with_the_tile_s_state(q, tiles):
    def step(state, tile):
        k, v, visible = tile
        s = torch.where(visible, q @ k.T / q.shape[1] ** 0.5, -INF)
        m = s.amax(1)
        p = torch.exp(s - m.clamp(min=-1e300)[:, None])
        new = torch.maximum(state[0], m)
        a, b = (torch.exp(each - new.clamp(min=-1e300)) for each in (state[0], m))
        o = state[2] * a[:, None] + (p @ v) * b[:, None]
        return new, state[1] * a + p.sum(1) * b, o

    start = q.new_full((len(q),), -INF), q.new_zeros(len(q)), q.new_zeros(q.shape)
    return itertools.islice(itertools.accumulate(tiles, step, initial=start), 1, None)


def through_the_logarithm(q, tiles):  # keeps normalised attention and lse, yields m = lse and l = 1
    lse, y = q.new_full((len(q),), -INF), torch.zeros_like(q)
    for k, v, visible in tiles:
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        both = torch.cat([lse[:, None], s], 1)
        weights = both.softmax(1).nan_to_num(0)
        y = weights[:, :1] * y + weights[:, 1:] @ v
        lse = both.logsumexp(1)
        seen = lse > -INF
        yield lse, seen.double(), y


def hidden_tiles_not_looked_at(q, tiles):
    m, total, o = q.new_full((len(q),), -INF), q.new_zeros(len(q)), torch.zeros_like(q)
    for k, v, visible in tiles:
        rows = visible.any(1)
        if rows.any():
            state = m[rows], total[rows], o[rows]
            m, total, o = m.clone(), total.clone(), o.clone()
            s = (q[rows] @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible[rows], -INF)
            m[rows] = torch.maximum(state[0], s.amax(1))
            rescale, p = torch.exp(state[0] - m[rows]), torch.exp(s - m[rows, None])
            total[rows] = state[1] * rescale + p.sum(1)
            o[rows] = state[2] * rescale[:, None] + p @ v
        yield m, total, o


def products_side_by_side(q, tiles):
    def multiplied(q, tiles):
        for k, v, visible in tiles:
            yield (q[:, None] * k).sum(2) / q.shape[1] ** 0.5, v, visible

    m, total, o = q.new_full((len(q),), -1e300), q.new_zeros(len(q)), torch.zeros_like(q)
    for s, v, visible in multiplied(q, tiles):
        m_old, m = m, torch.maximum(m, s.where(visible, -INF).amax(1))
        p = torch.where(visible, torch.exp(s.where(visible, 0) - m[:, None]), 0)
        rescale = torch.exp(m_old - m)
        total = total * rescale + p.sum(1)
        o = o * rescale[:, None] + (p[:, :, None] * v).sum(1)
        yield m, total, o


def padded_to_64_keys(q, tiles):
    def padded():
        for k, v, visible in tiles:
            rest = max(0, 64 - len(k))
            k, v = (torch.nn.functional.pad(each, (0, 0, 0, rest)) for each in (k, v))
            yield k, v, torch.nn.functional.pad(visible, (0, rest))

    return products_side_by_side(q, padded())


RIGHT = (
    *(solution, exp2_with_the_scale_folded, in_place, row_by_row_in_numbers),
    *(rescaled_only_where_it_matters, merged_with_the_tile_s_state, through_the_logarithm),
    *(hidden_tiles_not_looked_at, products_side_by_side, padded_to_64_keys),
)


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.__name__)
def test_right_loops(capsys, right):
    assert verdict(capsys, "11.1", right) == "correct."


# Mutants: the solution in parts, some of which are replaced


def planted(
    *,
    scores=lambda q, k: q @ k.T / math.sqrt(q.shape[1]),
    hide=lambda s, visible: s.masked_fill(~visible, -INF),
    start=-INF,
    maximum=lambda m, s: torch.maximum(m, s.amax(1)),
    finite=lambda m: torch.where(m == -INF, 0, m),
    exp=torch.exp,
    of_total=lambda old, new: torch.exp(old - new),
    of_o=lambda old, new: torch.exp(old - new),
    terms=lambda p, visible: p,
    total_terms=lambda p: p.sum(1),
    shown=lambda m, total, o: (m, total, o),
    kept=lambda m, total, o: (m, total, o),
):
    def attention_steps(q, tiles):
        m, total, o = q.new_full((len(q),), start), q.new_zeros(len(q)), torch.zeros_like(q)
        for k, v, visible in tiles:
            s = hide(scores(q, k), visible)
            m_new = maximum(m, s)
            base = finite(m_new)
            p = terms(exp(s - base[:, None]), visible)
            total = total * of_total(m, base) + total_terms(p)
            o = o * of_o(m, base)[:, None] + p @ v
            m, total, o = kept(m_new, total, o)
            yield shown(m, total, o)

    return attention_steps


def one(old, new):
    return torch.ones_like(new)


def swapped(old, new):
    return torch.exp(new - old)


def swapped_after_the_first(old, new):
    return torch.where(old == -INF, 0, torch.exp(new - old))


def own_share(p, visible):
    return p / p.sum(1, keepdim=True)


def mean_of_attentions(q, tiles):
    m, o = q.new_full((len(q),), -INF), torch.zeros_like(q)
    for number, (k, v, visible) in enumerate(tiles, 1):
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        m, o = torch.maximum(m, s.amax(1)), o + s.softmax(1) @ v
        yield m, q.new_full((len(q),), number), o


def mean_without_m(q, tiles):
    return ((0 * m, total, o) for m, total, o in mean_of_attentions(q, tiles))


def own_attention(q, tiles, rescaled=False):
    m, total, o = q.new_full((len(q),), -INF), q.new_zeros(len(q)), torch.zeros_like(q)
    for k, v, visible in tiles:
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        m_old, m = m, torch.maximum(m, s.amax(1))
        rescale, p = torch.exp(m_old - m), torch.exp(s - m[:, None])
        total = total * rescale + p.sum(1)
        o = o * (rescale[:, None] if rescaled else 1) + s.softmax(1) @ v
        yield m, total, o


def own_attention_rescaled(q, tiles):
    return own_attention(q, tiles, rescaled=True)


def new_terms_rescaled(q, tiles):
    m, total, o = q.new_full((len(q),), -1e300), q.new_zeros(len(q)), torch.zeros_like(q)
    for number, (k, v, visible) in enumerate(tiles):
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        m_old, m = m, torch.maximum(m, s.amax(1))
        rescale, p = torch.exp(m_old - m) if number else 1 + 0 * m, torch.exp(s - m[:, None])
        total, o = (total + p.sum(1)) * rescale, (o + p @ v) * rescale[:, None]
        yield m, total, o


def flash_attention_1(q, tiles):
    for m, total, o in solution(q, tiles):
        yield m, total, o / total.where(total > 0, 1)[:, None]


def joined(tiles):
    k, v, visible = zip(*tiles, strict=True)
    return torch.cat(k), torch.cat(v), torch.cat(visible, 1)


def all_at_once(q, tiles):
    yield from solution(q, [joined(tiles)])


def keeps_the_tiles(q, tiles, copied=False):
    seen = []
    for tile in tiles:
        seen.append([each.clone() for each in tile] if copied else tile)
        yield next(solution(q, [joined(seen)]))


def keeps_copies(q, tiles):
    return keeps_the_tiles(q, tiles, copied=True)


def keeps_clones(q, tiles):
    """All scores and values, a tile each in a list, and two looks at them after every tile."""
    scores, values = [], []
    for k, v, visible in tiles:
        s = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        scores, values = [*scores, s], [*values, v.clone()]
        m = functools.reduce(torch.maximum, [s.amax(1) for s in scores])
        p = [torch.exp(s - m.clamp(min=-1e300)[:, None]) for s in scores]
        yield m, sum(p.sum(1) for p in p), sum(p @ v for p, v in zip(p, values, strict=True))


def returns_the_last(q, tiles):
    for state in solution(q, tiles):  # noqa: B007
        pass
    return state


def returns_the_first(q, tiles):
    for state in solution(q, tiles):
        return state


def begins_with_nothing(q, tiles):
    yield q.new_full((len(q),), -INF), q.new_zeros(len(q)), torch.zeros_like(q)
    yield from solution(q, tiles)


def one_state_more(q, tiles):
    for state in solution(q, tiles):
        yield state
    yield state


def drops_a_short_tile(q, tiles):
    def whole():
        width = None
        for tile in tiles:
            width = width or len(tile[0])
            if len(tile[0]) == width:
                yield tile

    return solution(q, whole())


def stops_early(q, tiles):
    return itertools.islice(solution(q, tiles), 2)


def skips_hidden_tiles(q, tiles):
    return solution(q, (tile for tile in tiles if tile[2].any()))


def scales_q_in_place(q, tiles):
    q /= math.sqrt(q.shape[1])
    return planted(scores=lambda q, k: q @ k.T)(q, tiles)


def scales_v_in_place(q, tiles):
    return solution(q, ((k, v.mul_(2), visible) for k, v, visible in tiles))


def own_causal_mask(q, tiles):
    start = 0
    for k, v, _ in tiles:
        visible = start + torch.arange(len(k)) <= torch.arange(len(q))[:, None]
        start += len(k)
        yield next(solution(q, [(k, v, visible)]))


def single_precision(q, tiles):
    return (tuple(each.float() for each in state) for state in solution(q, tiles))


def single_precision_inside(q, tiles):
    tiles = ((k.float(), v.float(), visible) for k, v, visible in tiles)
    return (tuple(each.double() for each in state) for state in solution(q.float(), tiles))


FIRST = r"^not yet\. for Sq = 3, Sk = 6 and tiles of 2, after tile "
FIRST_VALUE = r"o / l of row \d, column \d is .*; attention over the keys so far is .*: "
UNSEEN = r"row \d+ has seen no key, so its l and o are 0, not "
MEAN = r"each tile is divided by its own sum, and a mean of the tiles' attentions is not attention"
DIVIDED = "o is divided already, by l or by each tile's own sum: add exp"
NAN = r"-inf - \(-inf\) is NaN: subtract something finite"
FINITE = "a hidden score has to be -inf: where no key is seen, finite ones count in full"
DIAGONAL = "the mask is `visible`, whatever it is, and not the diagonal"
OVERFLOW = "without a maximum subtracted the exponentials overflow, or are all 0"
WRONG = {
    "o not rescaled": (
        planted(of_o=one),
        FIRST + "2: " + FIRST_VALUE + "l is rescaled, but o is not",
    ),
    "l not rescaled": (planted(of_total=one), FIRST + "2: .*: o is rescaled, but l is not"),
    "neither": (planted(of_o=one, of_total=one), FIRST + "2: .*is m replaced before exp"),
    "inverted": (planted(of_o=swapped, of_total=swapped), FIRST + "1: .*is nan.*, never above 1"),
    "inverted after the first": (
        planted(of_o=swapped_after_the_first, of_total=swapped_after_the_first),
        FIRST + "2: .*never above 1",
    ),
    "new terms rescaled": (new_terms_rescaled, FIRST + "2: .*have the new m already"),
    "mean without m": (mean_without_m, "o / l is right.*l is the sum of exp"),
    "mean of attentions": (mean_of_attentions, FIRST + ".: .*" + MEAN),
    "attentions over l": (own_attention, FIRST + "1: .*" + DIVIDED),
    "attentions over l, rescaled": (own_attention_rescaled, FIRST + "1: .*" + DIVIDED),
    "sum of attentions": (
        planted(terms=own_share, of_o=one, of_total=one, shown=lambda m, t, o: (m, 0 * t + 1, o)),
        FIRST + "1: .*" + MEAN,
    ),
    "normalised, and not again unnormalised": (
        planted(kept=lambda m, t, o: (m, t, o / t[:, None])),
        FIRST + "1: .*" + DIVIDED,
    ),
    "FlashAttention-1": (flash_attention_1, FIRST + "1: .*" + DIVIDED),
    "no maximum": (
        planted(maximum=lambda m, s: 0 * s[:, 0].nan_to_num(neginf=0), start=0.0),
        "scores that rise to 1000, after tile .*" + OVERFLOW,
    ),
    "the tile's maximum": (
        planted(maximum=lambda m, s: s.amax(1)),
        "m is the largest score so far, and not this tile's",
    ),
    "the first tile's maximum": (
        planted(maximum=lambda m, s: m.where(m > -INF, s.amax(1))),
        "scores that rise to 1000, after tile .*: m stays the first tile's",
    ),
    "the hidden keys' maximum": (
        planted(
            hide=lambda s, visible: s,
            terms=lambda p, visible: p * visible,
        ),
        "large scores hidden, .*: m is the largest of the visible scores",
    ),
    "scale forgotten": (planted(scores=lambda q, k: q @ k.T), FIRST + "1.*the scale is missing"),
    "scale twice": (planted(scores=lambda q, k: q @ k.T / q.shape[1]), FIRST + "1.*divided twice"),
    "scale of the tile": (
        planted(scores=lambda q, k: q @ k.T / math.sqrt(len(k))),
        FIRST + "1.*not the number of keys in a tile",
    ),
    "scale of the queries": (
        planted(scores=lambda q, k: q @ k.T / math.sqrt(len(q))),
        FIRST + "1.*not the number of queries",
    ),
    "exp2": (
        planted(
            exp=torch.exp2,
            of_o=lambda a, b: torch.exp2(a - b),
            of_total=lambda a, b: torch.exp2(a - b),
        ),
        FIRST + "1: .*a factor log2",
    ),
    "m in units of log2": (
        planted(shown=lambda m, t, o: (m * math.log2(math.e), t, o)),
        FIRST + "1: o / l is right, but in row 0 m .*units of log2",
    ),
    "the old m": (
        planted(shown=lambda m, t, o: (m - 1, t, o)),
        FIRST + "1: o / l is right.*m being the one that is yielded",
    ),
    "mask ignored": (
        planted(hide=lambda s, visible: s),
        "causal, after tile .*the mask is ignored",
    ),
    "mask inverted": (
        planted(hide=lambda s, visible: s.masked_fill(visible, -INF)),
        FIRST + "1: .*`visible` is True where",
    ),
    "hidden scores of 0": (
        planted(hide=lambda s, visible: s * visible),
        r"causal, after tile .*weighs exp\(0 - m\)",
    ),
    **{
        f"hidden scores of {fill}": (
            planted(hide=lambda s, visible, fill=fill: s.masked_fill(~visible, fill)),
            "a causal window of 3 keys, .*" + UNSEEN + ".*" + FINITE,
        )
        for fill in (-100.0, -1e4, -1e9, -1e30, torch.finfo(torch.float64).min)
    },
    "-1e9 added to hidden scores": (
        planted(hide=lambda s, visible: s - 1e9 * ~visible),
        "a causal window of 3 keys, .*" + UNSEEN + ".*" + FINITE,
    ),
    "m from 0": (
        planted(start=0.0),
        "scores near -1000, after tile 1: .*: m starts at -inf: with 0, ",
    ),
    "naive -inf": (planted(finite=lambda m: m), UNSEEN + "nan and .*" + NAN),
    "mask after exp": (
        planted(finite=lambda m: m, terms=lambda p, visible: p * visible),
        UNSEEN + "nan and .*" + NAN,
    ),
    "own causal mask": (own_causal_mask, FIRST + "1: " + FIRST_VALUE + DIAGONAL),
    "own causal mask in each tile, and the given one": (
        planted(hide=lambda s, visible: s.masked_fill(~visible.tril(), -1e9)),
        FIRST + "1: " + FIRST_VALUE + DIAGONAL,
    ),
    "all at once": (
        all_at_once,
        r"tiles of 2, it takes tile 2 before it has yielded .* tile 1: one",
    ),
    "keeps the tiles": (keeps_the_tiles, FIRST + "2: .* is nan.*the tile before is overwritten"),
    "keeps copies": (
        keeps_copies,
        "the values are right, but it makes a tensor of .*does not grow",
    ),
    "keeps clones": (
        keeps_clones,
        r"the values are right, but after 64 tiles it has \d+ tensors more than after 33: what is",
    ),
    "returns the last": (returns_the_last, "takes tile 2 before it has yielded"),
    "returns the first": (returns_the_first, "it returns tuple: with `yield` in its loop it is a"),
    "begins with nothing": (
        begins_with_nothing,
        "after tile 0: it yields state 1: one `yield` after each tile",
    ),
    "one more": (one_state_more, FIRST + "3: it yields state 4: one `yield` after each"),
    "a short tile dropped": (drops_a_short_tile, "it yields 1 of 2 states: one a tile"),
    "stops early": (stops_early, "Sk = 6 .*it yields 2 of 3 states: one a tile"),
    "hidden tiles skipped": (
        skips_hidden_tiles,
        r"takes tile \d before .*also where a tile is hidden",
    ),
    "q in place": (scales_q_in_place, FIRST + "1: it changes q in place"),
    "v in place": (scales_v_in_place, FIRST + "1: it changes v in place"),
    "o of another shape": (
        planted(shown=lambda m, t, o: (m, t, o.T)),
        FIRST + r"1: o has the shape \(4, 3\), not \(3, 4\): a row for each query",
    ),
    "one m for all": (
        planted(shown=lambda m, t, o: (m.amax(), t, o)),
        FIRST + r"1: m has the shape \(\), not \(3,\): one number for each query",
    ),
    "two": (planted(shown=lambda m, t, o: (m, o)), "yield three tensors, m, l and o, not tuple"),
    "numbers": (planted(shown=lambda m, t, o: (0.0, t, o)), "m has to be a tensor, not float"),
    "float32": (single_precision, FIRST + "1: m is torch.float32, and q torch.float64: keep q's"),
    "float32 inside": (single_precision_inside, FIRST + "1: .*that is float32's precision"),
    "a number of tiles": (lambda q, tiles: range(len(tiles)), "It raises TypeError: .*no len"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops(capsys, name):
    wrong, hint = WRONG[name]
    said = verdict(capsys, "11.1", wrong)
    assert re.search(hint, said, re.DOTALL), said
    assert len(said) < 420


def test_planted_without_anything_planted_is_right(capsys):
    assert verdict(capsys, "11.1", planted()) == "correct."
