"""The checker of exercise 12.1 takes every honest loop, and says what is wrong with another."""

import itertools
import math
import re

import pytest
import torch
from verdicts import verdict

INF = float("inf")


def solution(q, o, log_sum_exp, do, tiles):  # the notebook's
    scale = q.shape[1] ** -0.5
    row_term = (do * o).sum(1, keepdim=True)  # D
    dq, dk, dv = torch.zeros_like(q), [], []
    for k, v, visible in tiles:
        s = torch.where(visible, scale * q @ k.T, -torch.inf)
        p = torch.exp(s - log_sum_exp[:, None])
        ds = p * (do @ v.T - row_term)
        dv.append(p.T @ do)
        dk.append(scale * ds.T @ q)
        dq += scale * ds @ k
    return dq, torch.cat(dk), torch.cat(dv)


# Honest variants


def einsum_and_base_2(q, o, log_sum_exp, do, tiles):
    log2e = math.log2(math.e)
    dq, dk, dv = 0, q.new_empty(0, q.shape[1]), q.new_empty(0, q.shape[1])
    for k, v, visible in tiles:
        s = torch.einsum("id,jd->ij", q, k) * (log2e / math.sqrt(q.shape[1]))
        p = torch.where(visible, torch.exp2(s - log_sum_exp[:, None] * log2e), 0)
        dp = torch.einsum("id,jd->ij", do, v)
        ds = p * dp - p * torch.einsum("id,id->i", do, o)[:, None]
        dq = dq + torch.einsum("ij,jd->id", ds, k)
        dk = torch.cat([dk, torch.einsum("ij,id->jd", ds, q) / math.sqrt(q.shape[1])])
        dv = torch.cat([dv, torch.einsum("ij,id->jd", p, do)])
    return [dq / math.sqrt(q.shape[1]), dk, dv]


def queries_in_tiles_too(q, o, log_sum_exp, do, tiles, rows=2):
    q = q / math.sqrt(q.shape[1])
    dq, dk, dv = torch.zeros_like(q), [], []
    for k, v, visible in tiles:
        dk.append(torch.zeros_like(k))
        dv.append(torch.zeros_like(v))
        for start in reversed(range(0, len(q), rows)):
            own = slice(start, start + rows)
            s = (q[own] @ k.T).masked_fill_(~visible[own], -INF)
            p = s.sub_(log_sum_exp[own, None]).exp_()
            dv[-1].addmm_(p.T, do[own])
            ds = p.mul_(do[own] @ v.T - (do[own] * o[own]).sum(1, keepdim=True))
            dk[-1].addmm_(ds.T, q[own])
            dq[own].addmm_(ds, k, alpha=q.shape[1] ** -0.5)
    return dq, torch.cat(dk), torch.cat(dv)


def transposed_and_backwards(q, o, log_sum_exp, do, tiles):
    scale, row_term, parts = 1 / math.sqrt(q.shape[1]), (o * do).sum(1), []
    for k, v, visible in tiles:
        p = torch.exp((k @ q.T * scale).masked_fill(~visible.T, -INF) - log_sum_exp)
        ds = p * (v @ do.T - row_term) * scale
        parts.insert(0, (ds.T @ k, ds @ q, p @ do))
    dq, dk, dv = zip(*parts, strict=True)
    return sum(dq), torch.cat(dk[::-1]), torch.cat(dv[::-1])


def dq_added_up_at_last(q, o, log_sum_exp, do, tiles):
    dq, dk, dv = [], [], []
    for tile in tiles:
        for all_parts, part in zip(
            (dq, dk, dv), solution(q, o, log_sum_exp, do, [tile]), strict=True
        ):
            all_parts.append(part)
    return torch.stack(dq).sum(0), torch.cat(dk), torch.cat(dv)


def number_by_number(q, o, log_sum_exp, do, tiles):
    scale, (rows, dim) = q.shape[1] ** -0.5, q.shape
    dq, dk, dv = torch.zeros_like(q), [], []
    for k, v, visible in tiles:
        for j in range(len(k)):
            dk.append(q.new_zeros(dim))
            dv.append(q.new_zeros(dim))
            for i in range(rows):
                if visible[i, j]:
                    p = torch.exp(q[i] @ k[j] * scale - log_sum_exp[i])
                    ds = p * (do[i] @ (v[j] - o[i]))
                    dv[-1] += p * do[i]
                    dk[-1] += ds * scale * q[i]
                    dq[i] += ds * scale * k[j]
    return dq, torch.stack(dk), torch.stack(dv)


RIGHT = (
    solution,
    einsum_and_base_2,
    queries_in_tiles_too,
    transposed_and_backwards,
    dq_added_up_at_last,
)


@pytest.mark.parametrize("right", (*RIGHT, number_by_number), ids=lambda right: right.__name__)
def test_right_loops(capsys, right):
    assert verdict(capsys, "12.1", right) == "correct."


# Mutants: the solution in parts, some of which are replaced


def planted(
    *,
    scores=lambda q, k: q @ k.T / math.sqrt(q.shape[1]),
    hide=lambda s, visible: s.masked_fill(~visible, -INF),
    weights=lambda s, log_sum: torch.exp(s - log_sum[:, None]),
    after=lambda p, visible: p,
    row_term=lambda do, o: (do * o).sum(1, keepdim=True),
    dp=lambda do, v: do @ v.T,
    ds=lambda p, dp, row_term: p * (dp - row_term),
    dv=lambda p, do, dp, ds: p.T @ do,
    dk=lambda ds, q, k, scale: ds.T @ q * scale,
    dq=lambda ds, q, k, scale: ds @ k * scale,
    added=lambda dq, term: dq + term,
    returned=lambda dq, dk, dv: (dq, torch.cat(dk), torch.cat(dv)),
):
    def attention_gradients(q, o, log_sum_exp, do, tiles):
        scale, total, dks, dvs = q.shape[1] ** -0.5, torch.zeros_like(q), [], []
        for k, v, visible in tiles:
            p = after(weights(hide(scores(q, k), visible), log_sum_exp), visible)
            a = dp(do, v)
            b = ds(p, a, row_term(do, o))
            dvs.append(dv(p, do, a, b))
            dks.append(dk(b, q, k, scale))
            total = added(total, dq(b, q, k, scale))
        return returned(total, dks, dvs)

    return attention_gradients


def single_precision(q, o, log_sum_exp, do, tiles):
    floats = ((k.float(), v.float(), visible) for k, v, visible in tiles)
    return solution(q.float(), o.float(), log_sum_exp.float(), do.float(), floats)


def single_precision_inside(*inputs):
    return [each.double() for each in single_precision(*inputs)]


def keeps_the_tiles(q, o, log_sum_exp, do, tiles):
    return solution(q, o, log_sum_exp, do, list(tiles))


def stops_early(q, o, log_sum_exp, do, tiles):
    return solution(q, o, log_sum_exp, do, itertools.islice(tiles, 1))


def mask_only_in_dv(*inputs):
    *rest, tiles = inputs
    kept = [[each.clone() for each in tile] for tile in tiles]
    lost = planted(hide=lambda s, visible: s)
    return *lost(*rest, kept)[:2], solution(*rest, kept)[2]


def all_tiles_at_once(q, o, log_sum_exp, do, tiles):
    k, v, visible = zip(*([each.clone() for each in tile] for tile in tiles), strict=True)
    return solution(
        q, o, log_sum_exp, do, [(torch.cat(k), torch.cat(v), torch.cat(visible, dim=1))]
    )


def autograd_of_all_tiles(q, o, log_sum_exp, do, tiles):
    kept = [[each.clone() for each in tile] for tile in tiles]
    k, v, visible = (
        torch.cat(each, dim) for each, dim in zip(zip(*kept, strict=True), (0, 0, 1), strict=True)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        s = (leaves[0] @ leaves[1].T / math.sqrt(q.shape[1])).masked_fill(~visible, -INF)
        p = s.softmax(1).where(visible.any(1, keepdim=True), 0)
        return torch.autograd.grad(p @ leaves[2], leaves, do)


def a_generator(q, o, log_sum_exp, do, tiles):
    yield from solution(q, o, log_sum_exp, do, tiles)


def changes(index):
    def attention_gradients(*inputs):
        result = solution(*inputs)
        inputs[index].mul_(2)
        return result

    return attention_gradients


def changes_in_a_tile(index):
    def attention_gradients(*inputs):
        *rest, tiles = inputs

        def changed():
            for tile in tiles:
                yield [each.clone() for each in tile]
                tile[index].copy_(~tile[index] if index == 2 else 2 * tile[index])

        return solution(*rest, changed())

    return attention_gradients


def other_bits(counter):
    """As where several programs add to dQ in any order."""

    def attention_gradients(*inputs):
        dq, dk, dv = solution(*inputs)
        return dq * (1 + 1e-13 * next(counter)), dk, dv

    return attention_gradients


SQUARE = r"for Sq = 3, Sk = 6 and tiles of 3, {}\[0, 0\] is \S+, not \S+: "
IN_DV, IN_DK, IN_DQ = (SQUARE.format(name) for name in ("dv", "dk", "dq"))
CAUSAL = r"for Sq = 6, Sk = 6 and tiles of 4, causal, dv\[\d, 0\] .*: "
DV, NO_D = r"dV = Pᵀ dO", r"dS = P ∘ \(dP - D\)"
WHOLE = (
    "the values are right, but it makes a tensor of .* elements for Sq = 16, .*P and dS are of one"
)
NATURAL = "log_sum_exp is a natural logarithm"

WRONG = {
    # P
    "nothing subtracted": (planted(weights=lambda s, log_sum: s.exp()), IN_DV + "P = exp.*nothing"),
    "base 2": (planted(weights=lambda s, log_sum: (s - log_sum[:, None]).exp2()), IN_DV + NATURAL),
    "base 2 taken for the kept": (
        planted(weights=lambda s, log_sum: (s - log_sum[:, None] * math.log(2)).exp()),
        IN_DV + NATURAL,
    ),
    "base 2 of the scores only": (
        planted(weights=lambda s, log_sum: (s * math.log2(math.e) - log_sum[:, None]).exp2()),
        IN_DV + NATURAL,
    ),
    "softmax over the tile": (
        planted(weights=lambda s, log_sum: s.softmax(1)),
        IN_DV + "a softmax over this tile alone",
    ),
    "softmax over the tile, 0 for NaN": (
        planted(weights=lambda s, log_sum: s.softmax(1).nan_to_num(0)),
        IN_DV + "a softmax over this tile alone",
    ),
    "softmax of the tile, rescaled": (
        planted(
            weights=lambda s, log_sum: s.softmax(1) * (s.logsumexp(1) - log_sum)[:, None].exp()
        ),
        r"dv\[\d+, 0\] is nan.*a row may see nothing of a tile, whose softmax is NaN",
    ),
    "the tile's maximum, without l": (
        planted(weights=lambda s, log_sum: (s - s.amax(1, keepdim=True)).exp()),
        IN_DV + "this subtracts the tile's maximum, and the sum l is left out",
    ),
    "exp before the difference": (
        planted(weights=lambda s, log_sum: s.exp() / log_sum.exp()[:, None]),
        "scores that rise to 1000, dv.*is nan.*overflow.*subtract before exp",
    ),
    "log-sum-exp of other queries": (
        planted(weights=lambda s, log_sum: torch.exp(s - log_sum)),
        IN_DV + r"log_sum_exp is one number a query: log_sum_exp\[:, None\]",
    ),
    "no scale in S": (planted(scores=lambda q, k: q @ k.T), IN_DV + "the scores of P lack the"),
    "scale twice in S": (
        planted(scores=lambda q, k: q @ k.T / q.shape[1]),
        IN_DV + r"the scores of P are divided by sqrt\(d\) twice",
    ),
    # The mask
    "mask lost": (planted(hide=lambda s, visible: s), CAUSAL + "the mask is lost"),
    "hidden scores 0": (
        planted(hide=lambda s, visible: s.masked_fill(~visible, 0)),
        CAUSAL + "the mask is lost",
    ),
    "mask lost in dS": (mask_only_in_dv, CAUSAL.replace("dv", "dk") + "the mask is lost"),
    "hidden scores -10000": (
        planted(hide=lambda s, visible: s.masked_fill(~visible, -1e4)),
        "scores near -20000, .*, dv.*: the score of a hidden key is -inf: any number",
    ),
    "mask inverted": (
        planted(hide=lambda s, visible: s.masked_fill(visible, -INF)),
        IN_DV + "`visible` is True where a query sees a key",
    ),
    "mask after exp": (
        planted(hide=lambda s, visible: s, after=lambda p, visible: p * visible),
        "large scores hidden, dv.*is nan.*hide before exp",
    ),
    "-inf kept for rows without keys": (
        planted(
            weights=lambda s, log_sum: torch.exp(s - log_sum.where(log_sum < INF, -INF)[:, None])
        ),
        "one tile all hidden, dv.* is nan, .*: NaN: a row without keys has log_sum_exp = inf",
    ),
    # dV
    "P not transposed": (
        planted(dv=lambda p, do, dp, ds: p @ do),
        IN_DV + DV + ": P is not transposed",
    ),
    "dP for P": (planted(dv=lambda p, do, dp, ds: dp.T @ do), IN_DV + DV + ": here dP"),
    "dS for P": (planted(dv=lambda p, do, dp, ds: ds.T @ do), IN_DV + DV + ": here dS"),
    "dV scaled": (
        planted(dv=lambda p, do, dp, ds: p.T @ do / math.sqrt(do.shape[1])),
        IN_DV + DV + " has no factor",
    ),
    # dS
    "no D": (planted(ds=lambda p, dp, row_term: p * dp), IN_DK + f"D is missing: {NO_D}"),
    "D of the tile": (
        planted(ds=lambda p, dp, row_term: p * (dp - (p * dp).sum(1, keepdim=True))),
        IN_DK + "D is of the whole row: the sum of P ∘ dP over this tile's keys",
    ),
    "D added": (planted(ds=lambda p, dp, row_term: p * (dp + row_term)), IN_DK + "D is subtracted"),
    "D outside": (planted(ds=lambda p, dp, row_term: p * dp - row_term), IN_DK + NO_D),
    "P missing": (planted(ds=lambda p, dp, row_term: dp - row_term), IN_DK + NO_D + ": the factor"),
    "D a mean": (
        planted(row_term=lambda do, o: (do * o).mean(1, keepdim=True)),
        IN_DK + "D is dO ∘ O summed over d, and not its mean",
    ),
    "D of other queries": (
        planted(row_term=lambda do, o: (do * o).sum(1)),
        IN_DK + r"D is one number a query: D\[:, None\]",
    ),
    "V not transposed": (
        planted(dp=lambda do, v: do @ v),
        IN_DK + "dP = dO Vᵀ: V is not transposed",
    ),
    # dK
    "no scale in dK": (
        planted(dk=lambda ds, q, k, scale: ds.T @ q),
        IN_DK + r"the scale 1 / sqrt\(d\) is lost in dK",
    ),
    "scale twice in dK": (
        planted(dk=lambda ds, q, k, scale: ds.T @ q * scale**2),
        IN_DK + "the scale is twice in dK",
    ),
    "another scale in dK": (
        planted(dk=lambda ds, q, k, scale: ds.T @ q * 2 * scale),
        IN_DK + "all of dk is 2 times what it should be",
    ),
    "dS not transposed": (
        planted(dk=lambda ds, q, k, scale: ds @ q * scale),
        IN_DK + "dK = dSᵀ Q: dS is not transposed",
    ),
    "K for Q": (
        planted(dk=lambda ds, q, k, scale: ds.T @ k * scale),
        IN_DK + "dK = dSᵀ Q: here K stands for Q",
    ),
    "no scale in dK, and no D": (
        planted(
            ds=lambda p, dp, row_term: p * dp,
            dk=lambda ds, q, k, scale: ds.T @ q,
        ),
        IN_DK + r"the scale 1 / sqrt\(d\) is lost in dK; and D is missing",
    ),
    # dQ
    "no scale in dQ": (
        planted(dq=lambda ds, q, k, scale: ds @ k),
        IN_DQ + r"the scale 1 / sqrt\(d\) is lost in dQ",
    ),
    "scale twice in dQ": (
        planted(dq=lambda ds, q, k, scale: ds @ k * scale**2),
        IN_DQ + "the scale is twice in dQ",
    ),
    "dS transposed": (
        planted(dq=lambda ds, q, k, scale: ds.T @ k * scale),
        IN_DQ + "dQ = dS K: dS is transposed",
    ),
    "Q for K": (
        planted(dq=lambda ds, q, k, scale: ds @ q * scale),
        IN_DQ + "dQ = dS K: here Q stands for K",
    ),
    "dQ overwritten": (
        planted(added=lambda dq, term: term),
        IN_DQ + "dQ is the sum over all tiles, and this is the last one's: add",
    ),
    "dQ of the first tile": (
        planted(added=lambda dq, term: dq if dq.any() else term),
        IN_DQ + "dQ is the sum over all tiles, and this is the first one's",
    ),
    "dQ overwritten, without scale": (
        planted(added=lambda dq, term: term, dq=lambda ds, q, k, scale: ds @ k),
        IN_DQ + r".*the last one's.*; and the scale 1 / sqrt\(d\) is lost in dQ",
    ),
    "other bits each time": (
        other_bits(itertools.count()),
        "a row hidden, .* but torch.autograd.gradcheck says: Backward is not reentrant",
    ),
    # What is given and returned
    "tiles kept": (keeps_the_tiles, r"dv\[0, 0\] is nan, .*the tile before is overwritten"),
    "all tiles at once": (all_tiles_at_once, WHOLE),
    "autograd of all tiles": (autograd_of_all_tiles, WHOLE),
    "first tile only": (
        stops_early,
        r"dk has the shape \(3, 3\), not \(6, 3\): a row for each key",
    ),
    "generator": (a_generator, "return three tensors, dq, dk and dv, not generator"),
    "two": (planted(returned=lambda dq, dk, dv: (dq, dk)), "return three tensors, .* not tuple"),
    "lists": (planted(returned=lambda *each: each), "dk has to be a tensor, not list: torch.cat"),
    "dq transposed": (
        lambda *inputs: [each.T for each in solution(*inputs)],
        r"Sk = 6.*dk has the shape \(3, 6\), not \(6, 3\)",
    ),
    "float32": (single_precision, "dq is torch.float32, and q torch.float64: keep q's dtype"),
    "float32 inside": (single_precision_inside, IN_DV + "that is float32's precision"),
    **{
        f"{name} in place": (changes(index), f"it changes {name} in place: make a new tensor")
        for index, name in enumerate(("q", "o", "log_sum_exp", "do"))
    },
    **{
        f"{name} in place": (changes_in_a_tile(index), f"it changes {name} in place")
        for index, name in enumerate(("k", "v", "visible"))
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops(capsys, name):
    wrong, hint = WRONG[name]
    said = verdict(capsys, "12.1", wrong)
    assert re.search(hint, said), said
    assert len(said) < 420


def test_planted_without_anything_planted_is_right(capsys):
    assert verdict(capsys, "12.1", planted()) == "correct."
