"""A warp's 32 lanes painted on the sectors and lines of memory that one access touches."""

from collections import defaultdict

import matplotlib.pyplot as plt
from matplotlib import colormaps
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from helpers import access, plots

FETCHED, BORDER, INK = "#FBE3B5", "#C4C4C4", "#444444"
WORD_BYTES = 4
LANES = colormaps["viridis"]
UNITS = {"sector": access.SECTOR_BYTES, "line": access.LINE_BYTES}
MAX_LINES = 8
ROW_INCHES, HEAD_INCHES = 0.34, 0.62


def draw(
    ax,
    addresses: access.Addresses,
    element_bytes: int = 4,
    unit: str = "sector",
    max_lines: int = MAX_LINES,
    name: str = "",
) -> None:
    """Draw the touched lines of 128 bytes, one a row; at most `max_lines` of them.

    A cell is a word of 4 bytes. A word that lanes want has their colour and number, or × and how
    many want it; the others are shaded if they are fetched all the same.
    unit: what a GPU fetches, "sector" or "line". name: what the title begins with.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {unit!r}")
    lines = access.lines(addresses, element_bytes)
    shown = lines[:max_lines]
    fetched = access.sections(addresses, UNITS[unit], element_bytes)
    pieces = _pieces(addresses, element_bytes)

    boxes = []
    for row, line in enumerate(shown):
        for section in fetched:
            begin = section * UNITS[unit] - line * access.LINE_BYTES
            if 0 <= begin < access.LINE_BYTES:
                boxes.append(_box(begin, row, UNITS[unit], facecolor=FETCHED, linewidth=0))
        for begin in range(0, access.LINE_BYTES, WORD_BYTES):
            boxes.append(_box(begin, row, WORD_BYTES, fill=False, edgecolor=BORDER, linewidth=0.5))
            boxes += _word(ax, begin, row, pieces[line * access.LINE_BYTES + begin])
        for begin in range(0, access.LINE_BYTES, access.SECTOR_BYTES):
            border = dict(fill=False, edgecolor=INK, linewidth=1.3)
            boxes.append(_box(begin, row, access.SECTOR_BYTES, **border))
    # One collection: as hundreds of artists they would take seconds.
    ax.add_collection(PatchCollection(boxes, match_original=True))

    more = len(lines) - len(shown)
    if more:
        text = f"… and {more} more line" + "s" * (more > 1)
        ax.text(64, len(shown) + 0.5, text, ha="center", va="center", color=plots.GREY)
    _axes(ax, shown, more)
    ax.set_title((name + "  →  " if name else "") + _summary(addresses, element_bytes, unit))


def paint(
    *patterns,
    element_bytes: int = 4,
    offset_bytes: int = 0,
    unit: str = "sector",
    max_lines: int = MAX_LINES,
):
    """A figure with one drawing for each pattern, as `helpers.access.addresses` takes them."""
    drawn = [
        access.addresses(pattern, element_bytes=element_bytes, offset_bytes=offset_bytes)
        for pattern in patterns
    ]
    counts = [len(access.lines(where, element_bytes)) for where in drawn]
    rows = [max(1, min(n, max_lines) + (n > max_lines)) for n in counts]
    inches = [HEAD_INCHES + ROW_INCHES * n for n in rows]
    figure, axes = plt.subplots(
        len(drawn), squeeze=False, figsize=(9, sum(inches)), height_ratios=inches
    )
    for ax, pattern, where in zip(axes[:, 0], patterns, drawn, strict=True):
        name = pattern if isinstance(pattern, str) else getattr(pattern, "__name__", "")
        draw(ax, where, element_bytes, unit, max_lines, name)
    shading = "shaded: fetched, and wanted by no lane"
    figure.supxlabel(shading, fontsize=8, color=plots.GREY, x=0.99, ha="right")
    return figure


def _pieces(addresses: access.Addresses, element_bytes: int) -> dict[int, list[tuple]]:
    """The address of each word -> which lanes want it, and which of its bytes: (lane, from, to)."""
    pieces = defaultdict(list)
    for lane, address in enumerate(addresses):
        if address is not None:
            end = address + element_bytes
            for word in range(address // WORD_BYTES, (end - 1) // WORD_BYTES + 1):
                begin = word * WORD_BYTES
                inside = (max(address, begin) - begin, min(end, begin + WORD_BYTES) - begin)
                pieces[begin].append((lane, *inside))
    return pieces


def _word(ax, begin: int, row: int, pieces: list[tuple]) -> list[Rectangle]:
    """Colour one word as the lanes do, the first lane on top, and say which they are."""
    if not pieces:
        return []
    boxes = [
        _box(begin + start, row, stop - start, facecolor=LANES(lane / 31), linewidth=0)
        for lane, start, stop in reversed(pieces)
    ]
    lanes = [lane for lane, *_ in pieces]
    runs = lanes == list(range(lanes[0], lanes[-1] + 1))
    label = f"{lanes[0]}–{lanes[-1]}" if runs and len(lanes) > 1 else f"×{len(lanes)}"
    covered = sum({(start, stop): stop - start for _, start, stop in pieces}.values())
    ax.text(
        begin + WORD_BYTES / 2,
        row + 0.52,
        lanes[0] if len(lanes) == 1 else label,
        ha="center",
        va="center",
        in_layout=False,
        fontsize=8 if len(lanes) == 1 else 5.5 if len(label) > 4 else 6.5,
        color="white" if covered >= WORD_BYTES and lanes[0] < 20 else "black",
    )
    return boxes


def _box(begin: int, row: int, width: int, **look) -> Rectangle:
    return Rectangle((begin, row), width, 1, **look)


def _axes(ax, shown: tuple[int, ...], more: int) -> None:
    """Lines as rows from the top, sectors as columns, and nothing of a plot's usual frame."""
    ax.set(xlim=(-0.5, access.LINE_BYTES + 0.5), ylim=(max(1, len(shown) + (more > 0)), 0))
    ax.set_yticks([row + 0.5 for row in range(len(shown))], [f"line {line}" for line in shown])
    centres = range(access.SECTOR_BYTES // 2, access.LINE_BYTES, access.SECTOR_BYTES)
    ax.set_xticks(centres, [f"sector {i}" for i in range(len(centres))])
    ax.tick_params(length=0, labelsize=8, labelcolor=plots.GREY, pad=1)
    ax.xaxis.tick_top()
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def _summary(addresses: access.Addresses, element_bytes: int, unit: str) -> str:
    num_sectors = len(access.sectors(addresses, element_bytes))
    num_lines = len(access.lines(addresses, element_bytes))
    if not num_sectors:
        return "no lane takes part"
    used = access.efficiency(addresses, element_bytes, UNITS[unit])
    sectors = f"{num_sectors} sector" + "s" * (num_sectors > 1)
    lines = f"{num_lines} line" + "s" * (num_lines > 1)
    return f"{sectors} in {lines}, {100 * used:.3g} % of the bytes fetched are wanted"
