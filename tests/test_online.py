"""The recurrence, its merges and its error bound against float64; what the drawings show."""

import itertools
import math
import random

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pytest
import torch

from helpers import online
from helpers.check import TOLERANCE, assert_close
from helpers.device import device

INF = math.inf
ROWS = {
    "one": [0.3],
    "equal": [5.0] * 9,
    "rising": [float(i) for i in range(20)],
    "falling": [-float(i) for i in range(20)],
    "the lecture's": [0.0, 0.0, 100.0],
    "far apart": [-1e4, 3.0, -1e30, 1e30, 1e30],
    "all underflow": [-1e4, -1e4 - 1],
    "random": [random.Random(0).gauss(0, 5) for _ in range(300)],
}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(device(), dtype)


def reference(x):
    """(m, d) in float64, with d = 0 where there is nothing but -inf."""
    m = x.double().amax(-1)
    d = torch.exp(torch.logsumexp(x.double(), -1) - m)
    return m, torch.where(m == -INF, 0, d)


# One number after the other.


def check_steps(steps, row):
    found = steps(row)
    assert [step.x for step in found] == row
    for i, step in enumerate(found):
        seen = row[: i + 1]
        assert step.m == max(seen)
        terms = [math.exp(number - step.m) for number in seen]
        assert step.d == pytest.approx(math.fsum(terms), rel=1e-15 * (i + 2))
        assert step.term == terms[-1]
        before = found[i - 1].m if i else -INF
        assert step.scale == math.exp(before - step.m)


@each_row
def test_every_state_is_that_of_the_numbers_so_far(row):
    check_steps(online.steps, row)
    last = online.steps(iter(row))[-1]  # once is enough
    x = torch.tensor(row, dtype=torch.float64)
    assert_close(torch.exp(x - last.m) / last.d, torch.softmax(x, 0))


def wrong_steps(rescale=True, inverted=False, late=False, first=-INF):
    """The recurrence with a mistake; with none, `steps`."""

    def steps(x):
        m, d, found = first, 0.0, []
        for number in x:
            m_old, m = m, max(m, number)
            scale = math.exp(min(m - m_old if inverted else m_old - m, 700))
            term = math.exp(min(number - m, 700))
            scale = scale if rescale else 1.0
            d = (d + term) * scale if late else d * scale + term
            found.append(online.Step(number, m, scale, term, d))
        return found

    return steps


MISTAKES = {
    "never rescaled": dict(rescale=False),
    "by the inverse": dict(inverted=True),
    "the new term rescaled too": dict(late=True),
    "from 0 instead of -inf": dict(first=0.0),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_recurrence_is_noticed(mistake):
    for row in ROWS.values():
        check_steps(wrong_steps(), row)
    with pytest.raises(AssertionError):
        for row in ROWS.values():
            check_steps(wrong_steps(**mistake), row)


def test_no_step_for_what_is_not_finite():
    assert online.steps([]) == []
    for number in (INF, -INF, math.nan):
        with pytest.raises(ValueError, match="finite"):
            online.steps([1.0, number])


# Parts of a row.


def check_merge(merge):
    """Every cut of rows with tiles of -inf, the two parts in either order."""
    x = randn(40, 24, scale=6)
    x[:10, :8], x[5:15, 16:], x[14] = -INF, -INF, -INF
    expected_m, expected_d = reference(x)
    for cut in range(1, 24):
        a, b = online.state(x[:, :cut]), online.state(x[:, cut:])
        for m, d in (merge(a, b), merge(b, a)):
            assert torch.equal(m, expected_m)
            assert_close(d, expected_d, 1e-14)


def test_merge_in_float64():
    check_merge(online.merge)


def unguarded(a, b):
    m = torch.maximum(a[0], b[0])
    return m, a[1] * torch.exp(a[0] - m) + b[1] * torch.exp(b[0] - m)


WRONG_MERGES = {
    "no guard": unguarded,
    "sums not scaled": lambda a, b: (torch.maximum(a[0], b[0]), a[1] + b[1]),
    "one side not scaled": lambda a, b: (
        torch.maximum(a[0], b[0]),
        a[1] + b[1] * torch.exp((b[0] - a[0]).nan_to_num(0)),
    ),
    "scales exchanged": lambda a, b: online.merge((a[0], b[1]), (b[0], a[1])),
    "the maximum of the first": lambda a, b: (a[0], online.merge(a, b)[1]),
    "not below -1e4": lambda a, b: tuple(part.clamp(min=-1e4) for part in online.merge(a, b)),
}


@pytest.mark.parametrize("wrong", WRONG_MERGES.values(), ids=WRONG_MERGES)
def test_a_wrong_merge_is_noticed(wrong):
    with pytest.raises(AssertionError):
        check_merge(wrong)


@each_dtype
def test_identity_changes_nothing(dtype):
    m, d = online.state(randn(50, 7, dtype=dtype, scale=20))
    nothing = torch.full_like(m, -INF), torch.zeros_like(d)
    for found in (online.merge((m, d), nothing), online.merge(nothing, (m, d))):
        assert torch.equal(found[0], m) and torch.equal(found[1], d)
        assert found[0].dtype == found[1].dtype == dtype
    both = online.merge(nothing, nothing)
    assert torch.equal(both[0], nothing[0]) and torch.equal(both[1], nothing[1])


def test_a_merge_with_one_number_is_a_step():
    number = torch.tensor(ROWS["random"], dtype=torch.float64)
    states = itertools.accumulate(zip(number, torch.ones_like(number), strict=True), online.merge)
    for (m, d), step in zip(states, online.steps(ROWS["random"]), strict=True):
        assert m.item() == step.m and d.item() == pytest.approx(step.d, rel=1e-13)


def merged_at_random(leaves, order):
    """The state of all leaves, any two merged at a time, and the merges on the longest way."""
    parts = [(leaf, 0) for leaf in leaves]
    while len(parts) > 1:
        (a, i), (b, j) = (parts.pop(order.randrange(len(parts))) for _ in range(2))
        parts.append((online.merge(a, b), max(i, j) + 1))
    return parts[0]


@each_dtype
def test_any_order_keeps_the_bound(dtype):
    x = randn(200, 60, dtype=dtype, scale=3)
    x[:, ::7] = -INF
    expected_m, expected_d = reference(x)
    leaves = [(column, (column > -INF).to(dtype)) for column in x.unbind(1)]
    depths = set()
    for seed in range(10):
        (m, d), merges = merged_at_random(leaves, random.Random(seed))
        assert torch.equal(m.double(), expected_m)
        error = (d.double() / expected_d - 1).abs().max().item()
        assert error <= online.sum_error_bound(60, merges, dtype)
        depths.add(merges)
    assert len(depths) > 1


def test_the_bound_is_not_for_wrong_sums():
    """In a row whose maximum rises at the end, a factor left out is far beyond the bound."""
    x = torch.tensor([0.0] * 63 + [0.01], device=device())
    m, d = x.max(), torch.tensor(64.0, device=device())
    error = (d.double() / reference(x)[1] - 1).abs().item()
    assert m == x[-1] and error > 100 * online.sum_error_bound(64, 63)


def test_the_bound_counts_what_is_rounded():
    u = 2.0**-24
    assert online.sum_error_bound(1, 0) == 0
    assert online.sum_error_bound(1, 3) == 3 * 6 * u
    assert online.sum_error_bound(2, 1, exp_ulp=0.5) == pytest.approx((math.log(2) + 3) * u)
    twice = online.sum_error_bound(8, 0, torch.float16, argument_roundings=2)
    assert twice == pytest.approx(2 * math.log(8) * 2.0**-11)
    for n, merges in ((0, 1), (1, -1)):
        with pytest.raises(ValueError):
            online.sum_error_bound(n, merges)


@pytest.mark.parametrize("scale", [0, 1, 10, 100])
def test_weighted_distances_from_the_maximum_are_at_most_ln_n(scale):
    """What the bound needs of the rounded exponents."""
    x = randn(500, 40, scale=scale)
    distances = (torch.softmax(x, -1) * (x.amax(-1, keepdim=True) - x)).sum(-1)
    assert distances.max() <= math.log(40)


def test_accumulators_merge_as_the_sum_does():
    """softmax(x) @ V from tiles of x and V, one of them masked off; m and d with an axis for V."""
    x, V = randn(5, 48, scale=5), randn(48, 3, seed=1)
    x[:, 16:24] = -INF
    parts = []
    for tile, values in zip(x.split(8, -1), V.split(8), strict=True):
        m, d = online.state(tile, keepdim=True)
        weights = torch.exp(tile - torch.where(m == -INF, 0, m))
        parts.append((m, d, weights @ values))
    ((m, d, o),) = online.tree(parts)[-1]
    assert m.shape == d.shape == (5, 1)
    assert_close(o / d, torch.softmax(x, -1) @ V)
    with pytest.raises(ValueError):
        online.merge((m, d), (m, d, o))


def test_infinity_and_nan_as_in_pytorch():
    for special in (INF, math.nan):
        x = torch.tensor([[1.0, 2, special, 0], [-INF, special, -INF, -INF]], device=device())
        m, d = online.merge(online.state(x[:, :2]), online.state(x[:, 2:]))
        assert d.isnan().all() and torch.softmax(x, -1)[:, 0].isnan().all()
        assert torch.equal(m.isnan(), torch.amax(x, -1).isnan())


@each_dtype
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_state_along_any_axis(dtype, dim):
    x = randn(6, 5, 7, dtype=dtype, scale=3).transpose(0, 2)[::2]
    x[:, 1], x[1], x[..., 3] = -INF, -INF, -INF
    m, d = online.state(x, dim)
    expected_m, expected_d = reference(x.movedim(dim, -1))
    assert m.dtype == d.dtype == dtype and torch.equal(m.double(), expected_m)
    assert_close(d, expected_d, TOLERANCE[dtype])
    kept = online.state(x, dim, keepdim=True)
    assert torch.equal(kept[0].squeeze(dim), m) and torch.equal(kept[1].squeeze(dim), d)


# Trees.


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_tree_merges_neighbours(n):
    x = randn(n, 4)
    levels = online.tree([online.state(row) for row in x])
    sizes = [len(level) for level in levels]
    assert sizes[0] == n and sizes[-1] == 1
    assert all(after == math.ceil(before / 2) for before, after in itertools.pairwise(sizes))
    m, d = levels[-1][0]
    expected_m, expected_d = reference(x.flatten())
    assert m == expected_m and d.item() == pytest.approx(expected_d.item())


def test_no_tree_without_leaves():
    with pytest.raises(ValueError, match="leaf"):
        online.tree([])


# Drawings.


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_draw_steps_shows_every_number_and_shades_the_rises(ax):
    found = online.steps([1.0, 0, 2, 2, -1, 3, 1])
    online.draw_steps(ax, found, also={"o": [0.5] * 7})
    rows = [texts(ax)[start : start + 7] for start in range(0, 42, 7)]
    assert rows[0] == ["1", "0", "2", "2", "−1", "3", "1"]
    assert rows[1] == ["1", "1", "2", "2", "2", "3", "3"]
    assert rows[2] == ["0", "1", "0.37", "1", "1", "0.37", "1"]
    assert rows[4][-1] == "2.07" and rows[5] == ["0.5"] * 7
    colour = matplotlib.colors.to_rgba(online.RESCALED)
    shaded = [box for box in ax.patches if box.get_facecolor() == colour]
    columns = {round(box.get_x() + box.get_width() / 2) for box in shaded}
    assert columns == {2, 5} and len(shaded) == 2 * 5
    with pytest.raises(ValueError):
        online.draw_steps(ax, found, also={"o": [0.5]})


def test_draw_terms_stacks_up_to_the_sum(ax):
    found = online.steps([1.0, 0, 2, 2, -1, 3, 1])
    online.draw_terms(ax, found)
    bars = [bar for container in ax.containers for bar in container]
    for column, step in enumerate(found):
        mine = [bar for bar in bars if round(bar.get_x() + bar.get_width() / 2) == column]
        assert sum(bar.get_height() for bar in mine) == pytest.approx(step.d)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_draw_tree_shows_states_and_factors(ax, n):
    tiles = torch.tensor([[1.0, 0], [2, 2], [-INF, -INF], [2, 1], [0, 3], [3, 3], [1, 1], [0, 0]])
    states = [online.state(tile) for tile in tiles[:n]]
    online.draw_tree(ax, states)
    shown = texts(ax)
    boxes = [text for text in shown if text.startswith("m")]
    assert len(boxes) == sum(map(len, online.tree(states)))
    assert boxes[0] == "m  1\nd  1.37"
    assert ("m  −∞\nd  0" in boxes) == (n > 2)
    factors = {1: 0, 2: 1, 5: 2, 8: 4}
    assert sum(text.startswith("×") for text in shown) == factors[n]
    orange = [line for line in ax.lines if line.get_color() == online.plots.ORANGE]
    assert len(orange) == factors[n]


def test_the_state_of_no_numbers_is_the_identity():
    for x, dim in ((torch.empty(3, 0), 1), (torch.empty(0, 3), 0)):
        m, d = online.state(x, dim)
        assert m.tolist() == [-math.inf] * 3 and d.tolist() == [0] * 3
