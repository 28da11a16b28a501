"""Pictures of attention's tiles: a score matrix, a pyramid of memories, a schedule."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Polygon, Rectangle

from helpers import plots
from helpers.attention_io import FULL, MASKED, SKIPPED
from helpers.memory_roofs import size_text
from helpers.waves import Placed

LIVE, DONE, WAITING, BORDER = plots.ORANGE, plots.SKY, "#F2F2F2", "#B8B8B8"
COLOURS = {SKIPPED: "white", MASKED: plots.YELLOW, FULL: plots.SKY}
PYRAMID = ("#F6B26B", "#FFD98A", "#BFE3F5", "#DDDDDD")  # from the fastest level on


def draw_kinds(ax, kinds: np.ndarray) -> None:
    """A score matrix cut into tiles, coloured by kind (`attention_io.tile_kinds`)."""
    _draw_cells(ax, kinds.shape, lambda at: COLOURS[int(kinds[at])])


def draw_progress(ax, kinds: np.ndarray, at: tuple[int, int]) -> None:
    """The same while a kernel is at tile (row, column), and goes over them row by row."""

    def colour(tile: tuple[int, int]) -> str:
        if kinds[tile] == SKIPPED:
            return "white"
        return LIVE if tile == at else DONE if tile < at else WAITING

    _draw_cells(ax, kinds.shape, colour)


def progress_legend() -> list[Patch]:
    """What the colours of `draw_progress` mean, for a legend."""
    names = {"done, forgotten": DONE, "on the chip": LIVE, "to come": WAITING, "skipped": "white"}
    return [Patch(facecolor=c, edgecolor=BORDER, label=name) for name, c in names.items()]


def kinds_legend() -> list[Patch]:
    """What the colours of `draw_kinds` mean, for a legend."""
    names = {"full: no mask": FULL, "masked": MASKED, "skipped": SKIPPED}
    return [Patch(facecolor=COLOURS[c], edgecolor=BORDER, label=name) for name, c in names.items()]


def draw_pyramid(ax, levels: Sequence[tuple[str, float, float]]) -> None:
    """Levels (name, bytes, GB/s), the fastest above: the wider the larger, on a logarithmic scale.

    Bars on the left are the levels' bandwidths, on a linear scale. Infinite bytes: size unknown.
    """
    fastest = max(rate for _, _, rate in levels)
    for row, (name, nbytes, rate) in enumerate(levels):
        above, below = (_half_width(min(nbytes, 2**40) * factor) for factor in (0.1, 10))
        corners = [(-below, row + 0.94), (below, row + 0.94), (above, row), (-above, row)]
        ax.add_patch(Polygon(corners, facecolor=PYRAMID[row], edgecolor="none"))
        size = size_text(nbytes) if nbytes < 2**40 else f"{nbytes / 2**40:.3g} TB"
        text = name if math.isinf(nbytes) else f"{name}\n{size}"
        ax.text(0, row + 0.5, text, ha="center", va="center", fontsize=8.5)
        length = rate / fastest
        ax.add_patch(Rectangle((-1.15 - length, row + 0.32), length, 0.3, color=plots.GREY))
        ax.text(-1.15, row + 0.2, rate_text(rate), ha="right", va="center", fontsize=8.5)
    ax.set(xlim=(-2.2, 1), ylim=(len(levels), -0.1))
    ax.axis("off")


def _half_width(nbytes: float) -> float:
    return max(0.0, min(1.0, (math.log10(nbytes) - 3.5) / 9.5))  # 3 KB to 30 TB


def rate_text(gb_per_s: float) -> str:
    """ "19.5 TB/s", "12.8 GB/s": three digits, for a reader."""
    return f"{gb_per_s / 1000:.3g} TB/s" if gb_per_s >= 1000 else f"{gb_per_s:.3g} GB/s"


def draw_schedule(ax, placed: Iterable[Placed], height: float = 0.86) -> None:
    """Blocks as bars, an SM a row, the longer the darker."""
    placed = list(placed)
    longest = max(block.end - block.start for block in placed)
    for block in placed:
        length = block.end - block.start
        ax.barh(
            block.sm, length, height, left=block.start, color=plots.BLUE, edgecolor="white",
            alpha=0.25 + 0.75 * length / longest,
        )  # fmt: skip
    ax.set(yticks=[], ylabel="SMs", ylim=(max(block.sm for block in placed) + 0.6, -0.6))
    ax.grid(axis="y", visible=False)


def _draw_cells(ax, shape: tuple[int, int], colour_of) -> None:
    rows, columns = shape
    boxes = [
        Rectangle((j, i), 1, 1, facecolor=colour_of((i, j)), edgecolor=BORDER, linewidth=0.7)
        for i in range(rows)
        for j in range(columns)
    ]
    # One collection: as hundreds of artists they would take seconds.
    ax.add_collection(PatchCollection(boxes, match_original=True))
    ax.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal")
    ax.set(xticks=[], yticks=[], anchor="NW")
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
