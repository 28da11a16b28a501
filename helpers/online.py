"""Online softmax: the maximum of a row and the sum of its exponentials, found in one look.

    steps(row)                  # a row of numbers, one after the other, with every state
    merge(state(a), state(b))   # two parts of it, in tensors: the state of both together

The state of numbers x_j is m = max(x_j) and d = Σ exp(x_j - m); of no numbers, (-inf, 0). After
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from helpers import plots

State = tuple[torch.Tensor, ...]
RESCALED, CELL, LINE = "#FBE3B5", "#F2F2F2", "#BBBBBB"
BOX_WIDTH, BOX_HEIGHT = 0.86, 0.52


@dataclasses.dataclass(frozen=True)
class Step:
    """A row's state after the number x, and what made it: d = (d before) * scale + term."""

    x: float
    m: float
    scale: float
    term: float
    d: float


def steps(x: Iterable[float]) -> list[Step]:
    """The state after each number of x, which is looked at once; ValueError where not finite."""
    m, d, found = -math.inf, 0.0, []
    for number in x:
        if not math.isfinite(number):
            raise ValueError(f"only finite numbers can be stepped through, not {number}")
        m_old, m = m, max(m, number)
        scale = math.exp(m_old - m)  # 1 unless the maximum has risen
        term = math.exp(number - m)
        d = d * scale + term
        found.append(Step(number, m, scale, term, d))
    return found


def merge(a: State, b: State) -> State:
    """The state of two parts of a row together; (-inf, 0) changes nothing.

    A state is (m, d) or (m, d, o, ...): further sums of exp(x_j - m) times something. All are
    tensors of any shape in which m can be broadcast to each sum. As in PyTorch's softmax, a part
    with NaN or +inf makes d NaN.
    """
    (m_a, *sums_a), (m_b, *sums_b) = a, b
    m = torch.maximum(m_a, m_b)
    shift = torch.where(m == -torch.inf, 0, m)  # -inf - (-inf) would be NaN
    scale_a, scale_b = torch.exp(m_a - shift), torch.exp(m_b - shift)
    sums = zip(sums_a, sums_b, strict=True)
    return (m, *(of_a * scale_a + of_b * scale_b for of_a, of_b in sums))


def state(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> State:
    """(m, d) of the numbers along `dim`, in x's dtype."""
    if not x.shape[dim]:  # amax refuses; the sum of nothing is 0
        x = torch.full_like(x.sum(dim, keepdim=True), -torch.inf)
    m = x.amax(dim, keepdim=True)
    d = torch.exp(x - torch.where(m == -torch.inf, 0, m)).sum(dim, keepdim=True)
    return (m, d) if keepdim else (m.squeeze(dim), d.squeeze(dim))


def tree(states: Sequence[State]) -> list[list[State]]:
    """The levels of a tree: the states, their neighbours merged in pairs, and so on to one.

    A last one without a neighbour moves up as it is.
    """
    if not states:
        raise ValueError("a tree has at least one leaf")
    levels = [list(states)]
    while len(below := levels[-1]) > 1:
        pairs = [below[i : i + 2] for i in range(0, len(below), 2)]
        levels.append([merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs])
    return levels


def sum_error_bound(
    n: int,
    merges: int,
    dtype: torch.dtype = torch.float32,
    *,
    exp_ulp: float = 2,
    argument_roundings: int = 1,
) -> float:
    """A bound on d's relative error, when n single numbers become one state.

    merges: how many the number with the longest way goes through. With u the unit roundoff, each
    costs an exp, 2 exp_ulp u, a product and a sum, u each. (PyTorch's and CUDA's exp keep 2 ulp.)
    Besides, exp(t) of a rounded t is off by |t| u. Along a number's way the t add up to x_j - m,
    and Σ p_j |x_j - m|, p being the softmax, is at most ln n. Triton's exp rounds t three times:
    the difference, log2(e), their product. To first order in u, and without what underflows.
    """
    if n < 1 or merges < 0:
        raise ValueError(f"there is no state of {n} numbers after {merges} merges")
    u = torch.finfo(dtype).eps / 2
    return u * (argument_roundings * math.log(n) + merges * (2 * exp_ulp + 2))


def draw_steps(ax, found: Sequence[Step], also: dict[str, Sequence[float]] | None = None) -> None:
    """Draw the states as a table, a column a number; shaded where the sum so far is rescaled.

    also: further rows of numbers, one a step, such as the values and their accumulator.
    """
    rows = {
        "number  x": [step.x for step in found],
        "maximum so far  m": [step.m for step in found],
        "factor  exp(m old − m)": [step.scale for step in found],
        "new term  exp(x − m)": [step.term for step in found],
        "sum so far  d": [step.d for step in found],
        **(also or {}),
    }
    for row, (name, numbers) in enumerate(rows.items()):
        for column, (step, number) in enumerate(zip(found, numbers, strict=True)):
            rescaled = step.scale < 1 and column > 0
            colour = "white" if name.startswith("number") else RESCALED if rescaled else CELL
            corner = (column - 0.46, row - 0.42)
            ax.add_patch(Rectangle(corner, 0.92, 0.84, facecolor=colour, edgecolor="none"))
            bold = name.startswith(("number", "sum")) or (rescaled and "factor" in name)
            weight = "bold" if bold else "normal"
            ax.text(column, row, _short(number), ha="center", va="center", weight=weight)
    ax.set(yticks=range(len(rows)), yticklabels=list(rows), xticks=[])
    ax.set(xlim=(-0.5, len(found) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    _bare(ax)


def draw_terms(ax, found: Sequence[Step]) -> None:
    """Draw each sum as the terms of which it consists, in the columns of `draw_steps`."""
    for column, step in enumerate(found):
        bottom = 0.0
        for earlier in range(column + 1):
            height = math.exp(found[earlier].x - step.m)
            colour = plots.COLOURS[earlier % len(plots.COLOURS)]
            ax.bar(column, height, 0.5, bottom=bottom, color=colour, edgecolor="white")
            if height > 0.2:
                middle = bottom + height / 2
                name = _short(found[earlier].x)
                ax.text(column, middle, name, color="white", ha="center", va="center", fontsize=8)
            bottom += height
        if column and step.scale < 1:
            ax.axvspan(column - 0.46, column + 0.46, color=RESCALED, zorder=0)
    ax.set(xlim=(-0.5, len(found) - 0.5), xticks=[], ylabel="d")
    ax.grid(axis="x", visible=False)


def draw_tree(ax, states: Sequence[State]) -> None:
    """Draw `tree` of states of one row, the leaves below, at 0, 1, 2, … on the x axis.

    A line says by what its lower end's d is multiplied, and is coloured unless that is 1.
    """
    levels = tree(states)
    places = [list(map(float, range(len(states))))]
    for below in levels[:-1]:
        at = places[-1]
        pairs = [at[i : i + 2] for i in range(0, len(below), 2)]
        places.append([sum(pair) / len(pair) for pair in pairs])
    for height, level in enumerate(levels):
        for i, (m, d, *_) in enumerate(level):
            if height + 1 < len(levels):
                parent = levels[height + 1][i // 2]
                to = (places[height + 1][i // 2], height + 1)
                _edge(ax, (places[height][i], height), to, float(m), float(parent[0]))
            _box(ax, places[height][i], height, float(m), float(d))
    ax.set(xlim=(-0.6, len(states) - 0.4), ylim=(-0.4, len(levels) - 0.6), xticks=[], yticks=[])
    _bare(ax)


def _edge(ax, start: tuple, end: tuple, m: float, parent_m: float) -> None:
    scale = math.exp(m - parent_m) if m > -math.inf else None  # nothing to multiply
    colour = plots.ORANGE if scale is not None and scale < 1 else LINE
    (x0, y0), (x1, y1) = (start[0], start[1] + BOX_HEIGHT / 2), (end[0], end[1] - BOX_HEIGHT / 2)
    ax.plot([x0, x1], [y0, y1], color=colour, linewidth=1.8, zorder=1)
    if scale is not None and scale != 1:
        middle, box = ((x0 + x1) / 2, (y0 + y1) / 2), dict(facecolor="white", linewidth=0, pad=1)
        ax.text(*middle, f"× {_short(scale)}", fontsize=8, ha="center", va="center", bbox=box)


def _box(ax, x: float, y: float, m: float, d: float) -> None:
    nothing = m == -math.inf
    look = dict(facecolor="white" if nothing else CELL, edgecolor=plots.GREY if nothing else CELL)
    ax.add_patch(
        FancyBboxPatch(
            (x - BOX_WIDTH / 2 + 0.06, y - BOX_HEIGHT / 2 + 0.06),
            BOX_WIDTH - 0.12,
            BOX_HEIGHT - 0.12,
            boxstyle="round,pad=0.06",
            linestyle="--" if nothing else "-",
            zorder=2,
            **look,
        )
    )
    text = f"m  {_short(m)}\nd  {_short(d)}"
    ax.text(x, y, text, ha="center", va="center", fontsize=9, zorder=3)


def _short(number: float) -> str:
    """At most two decimals, and none for a whole number."""
    if math.isinf(number):
        return "−∞" if number < 0 else "∞"
    small = 0 < abs(number) < 0.005
    text = f"{number:.0e}" if small else f"{number:.2f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def _bare(ax) -> None:
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
