"""Pictures of attention's tiles: score matrices, a pyramid of memories, schedules, owners."""

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from helpers import plots
from helpers.attention_io import FULL, MASKED, SKIPPED
from helpers.attention_turns import Visit
from helpers.memory_roofs import size_text
from helpers.waves import Placed

LIVE, DONE, WAITING, BORDER = plots.ORANGE, plots.SKY, "#F2F2F2", "#B8B8B8"
COLOURS = {SKIPPED: "white", MASKED: plots.YELLOW, FULL: plots.SKY}
RESULTS = {"once": plots.GREEN, "in any order": plots.VERMILION, "in turns": plots.BLUE, "": "none"}
MOST_NUMBERED = 16  # rows of a schedule whose bars have room for a number
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


def draw_owners(ax, steps: np.ndarray, at: float, dq: str = "", dkv: str = "once") -> None:
    """A backward pass at step `at`: which tiles are on the chip, and how results get written.

    steps: when each tile is computed, (rows, columns), NaN where it is skipped; the numbers in the
    tiles. dq, dkv: of `RESULTS`, how dQ (a box a row) and dK, dV (a box a column) are written; ""
    for not in this pass. Arrows are adds into memory, from the tiles on the chip.
    """
    rows, columns = steps.shape

    def colour(tile: tuple[int, int]) -> str:
        step = steps[tile]
        if np.isnan(step):
            return "white"
        return LIVE if step == at else DONE if step < at else WAITING

    _draw_cells(ax, steps.shape, colour)
    computed = [(i, j, step) for (i, j), step in np.ndenumerate(steps) if not np.isnan(step)]
    _draw_numbers(ax, ((j + 0.5, i + 0.5, f"{step:g}", "black") for i, j, step in computed))
    of_row = [((columns + 1, i), 1.3, 1, RESULTS[dq]) for i in range(rows)]
    of_column = [((j, rows + 0.6), 1, 1.3, RESULTS[dkv]) for j in range(columns)]
    boxes = [
        Rectangle(*place, facecolor=colour, edgecolor=BORDER, linewidth=0.7)
        for *place, colour in of_row + of_column
    ]
    ax.add_collection(PatchCollection(boxes, match_original=True))
    names = dict(fontsize=8, ha="left", va="center")
    ax.text(columns + 1.3, -0.6, "dQ", **names)
    ax.text(columns + 0.2, rows + 1.25, "dK, dV", **names)
    if dq in ("in any order", "in turns"):
        for i, j in np.argwhere(steps == at):
            arrow = dict(arrowstyle="->", color=RESULTS[dq], linewidth=1.2, shrinkA=0, shrinkB=0)
            ax.annotate("", (columns + 1, i + 0.5), (j + 0.85, i + 0.5), arrowprops=arrow)
    ax.set(xlim=(-0.05, columns + 2.4), ylim=(rows + 2, -1.1))


def owners_legend() -> list[Patch]:
    """What the colours of `draw_owners` mean, for a legend."""
    written = {"written once, by its owner": "once", "added to in memory, in any order":
               "in any order", "added to in memory, in turns": "in turns"}  # fmt: skip
    looks = {name: RESULTS[how] for name, how in written.items()}
    return [
        *progress_legend(),
        *(Patch(facecolor=c, edgecolor=BORDER, label=name) for name, c in looks.items()),
    ]


def draw_turns(ax, visits: Iterable[Visit]) -> None:
    """Visits as bars, a column of tiles a line, coloured and numbered by row; hatched: it waits."""
    visits = list(visits)
    rows = max(visit.row for visit in visits) + 1
    share = {visit: visit.row / max(1, rows - 1) for visit in visits}
    colours = [colormaps["viridis"](0.12 + 0.88 * share[visit]) for visit in visits]
    bars = [Rectangle((v.start, v.column - 0.43), v.ready - v.start, 0.86) for v in visits]
    waits = [Rectangle((v.ready, v.column - 0.43), v.waited, 0.86) for v in visits if v.waited]
    look = dict(facecolors=colours, edgecolors="white", linewidths=0.5)
    ax.add_collection(PatchCollection(bars, **look))
    look = dict(facecolors=WAITING, edgecolors=BORDER, linewidths=0.5, hatch="////")
    ax.add_collection(PatchCollection(waits, **look))
    if rows <= MOST_NUMBERED:
        tones = ["white" if share[visit] < 0.6 else "black" for visit in visits]
        middles = [(visit.start + visit.ready) / 2 for visit in visits]
        places = zip(middles, visits, tones, strict=True)
        _draw_numbers(ax, ((x, visit.column, visit.row, tone) for x, visit, tone in places))
    ax.autoscale_view()
    lines = max(visit.column for visit in visits) + 1
    ax.set(yticks=[], ylim=(lines - 0.4, -0.6), xlabel="steps")
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)


def _draw_numbers(ax, places: Iterable[tuple], points: float = 7) -> None:
    """Small numbers at places (x, y, number, colour): one collection, as texts take seconds."""
    x, y, numbers, colours = zip(*places, strict=True)
    ax.add_collection(
        PathCollection(
            [_outline(str(number), points / 72) for number in numbers],
            offsets=list(zip(x, y, strict=True)), offset_transform=ax.transData,
            transform=ax.figure.dpi_scale_trans, facecolors=colours, linewidths=0, zorder=4,
        )
    )  # fmt: skip


@functools.cache
def _outline(text: str, size: float) -> Path:
    path = TextPath((0, 0), text, size=size)
    return Path(path.vertices - path.get_extents().get_points().mean(axis=0), path.codes)


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
