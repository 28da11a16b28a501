"""Pictures of helpers.block_order: which blocks of A and B the first tiles of C need."""

from collections.abc import Sequence

from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from helpers import plots

NEEDED, EMPTY, BORDER = plots.SKY, "white", "#C4C4C4"
GAP = 0.7  # between the matrices, in blocks


def draw_tiles(
    ax, rows: int, columns: int, k_blocks: int, tiles: Sequence[tuple[int, int]]
) -> None:
    """A to the left of C and B above it, as for a multiplication by hand.

    tiles: (row, column) of the tiles of C that are computed, in order; they are numbered, and the
    blocks of A and B that they need are filled.
    """
    tiles = [tuple(map(int, tile)) for tile in tiles]
    needed_rows, needed_columns = {row for row, _ in tiles}, {column for _, column in tiles}
    right, below = k_blocks + GAP, k_blocks + GAP  # where C begins
    boxes = []
    for row in range(rows):
        boxes += [_box(k, below + row, row in needed_rows) for k in range(k_blocks)]
        boxes += [_box(right + column, below + row, False) for column in range(columns)]
    for column in range(columns):
        boxes += [_box(right + column, k, column in needed_columns) for k in range(k_blocks)]
    boxes += [_box(right + column, below + row, True, plots.ORANGE) for row, column in tiles]
    # One collection: as hundreds of artists they would take seconds.
    ax.add_collection(PatchCollection(boxes, match_original=True))

    for number, (row, column) in enumerate(tiles, start=1):
        ax.text(right + column + 0.5, below + row + 0.5, number, ha="center", va="center_baseline")
    names = dict(fontsize=13, fontweight="bold", ha="right", va="bottom")
    ax.text(-0.25, below, "A", **names | {"va": "top"})
    ax.text(right - 0.25, 0, "B", **names | {"va": "top"})
    ax.text(right + columns + 0.3, below, "C", **names | {"ha": "left", "va": "top"})
    ax.set(xlim=(-1.2, right + columns + 1.2), ylim=(below + rows + 0.1, -0.1), aspect="equal")
    ax.axis("off")


def _box(x: float, y: float, filled: bool, colour: str = NEEDED) -> Rectangle:
    return Rectangle(
        (x, y), 1, 1, facecolor=colour if filled else EMPTY, edgecolor=BORDER, linewidth=0.7
    )
