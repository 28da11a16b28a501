"""The house style and the few figures that several notebooks share."""

import datetime
from collections.abc import Iterable

import matplotlib.pyplot as plt
import torch
from matplotlib import ticker

from helpers import device as machine
from helpers import results

# Okabe and Ito's palette: distinguishable with any colour vision and in print.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
COLOURS = (BLUE, GREEN, VERMILION, GREY, ORANGE, PURPLE, SKY)  # for lines of equal rank
LANES = {"host": ORANGE, "device": BLUE}

# One look for each source of numbers, in every figure of the collection.
LECTURE = dict(
    color=GREY, marker="s", linestyle="--", markerfacecolor="white", label="lecture, H100"
)
RECORDED = dict(color=BLUE, marker="o", linestyle="-", label="recorded, H200")
YOURS = dict(color=VERMILION, marker="D", linestyle="-", label="this machine")


def style() -> None:
    """Set the house style; once, in a notebook's setup cell."""
    plt.rcParams.update(
        {
            "figure.dpi": 100,
            "savefig.dpi": 100,
            "figure.figsize": (9, 3.6),
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",  # legible on a dark page as well
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E5E5E5",
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "font.size": 10,
            "legend.frameon": False,
            "lines.markersize": 5,
        }
    )


def loglog(ax, x=(1,), y=(1,), **settings) -> None:
    """Make both axes logarithmic, with ticks at these multiples of each power of ten.

    `settings` go to `ax.set`. A single multiple is labelled as a power, several as numbers.
    """
    ax.set(xscale="log", yscale="log", **settings)
    ax.minorticks_off()  # eight more a decade are slow to draw and say no more
    for axis, multiples in ((ax.xaxis, x), (ax.yaxis, y)):
        if len(multiples) > 1:
            axis.set_major_locator(ticker.LogLocator(subs=multiples))
            axis.set_major_formatter("{x:,g}")


def small_print(figure, source: str | None = None) -> None:
    """Say under a figure which machine its numbers come from (by default: this one, today)."""
    if source is None:
        source = f"{machine.device_name()} · torch {torch.__version__} · {datetime.date.today()}"
    figure.supxlabel(source, fontsize=7, color=GREY, x=0.99, ha="right")


def recorded_source(records: Iterable[dict]) -> str:
    """The small print for numbers that were recorded: their machine, version and date."""
    found = {(r["device"], r["torch"], r["date"]) for r in records}
    return "; ".join(f"{name} · torch {version} · {date}" for name, version, date in sorted(found))


def timeline(ax, spans: Iterable, unit: str = "µs", label: bool = True) -> None:
    """Draw spans (lane, name, start_us, end_us) as bars, the host's lane above the device's."""
    spans = list(spans)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    scale = {"µs": 1, "ms": 1000}[unit]
    width = max((span.end_us for span in spans), default=0)
    for span in spans:
        row = len(lanes) - lanes.index(span.lane)
        duration = span.end_us - span.start_us
        waiting = span.name == "queue full" or span.name.lower().endswith("synchronize")
        ax.barh(
            row,
            duration / scale,
            left=span.start_us / scale,
            height=0.6,
            color="white" if waiting else LANES[span.lane],
            edgecolor=LANES[span.lane] if waiting else "white",
            hatch="////" if waiting else None,
            linewidth=0.6,
        )
        if label and duration > 0.07 * width:
            ax.text(
                (span.start_us + duration / 2) / scale,
                row,
                span.name,
                ha="center",
                va="center",
                fontsize=8,
                color="black" if waiting or span.lane == "host" else "white",
                bbox=dict(facecolor="white", edgecolor="none", pad=1) if waiting else None,
            )
    ax.set_yticks([len(lanes) - i for i in range(len(lanes))], lanes)
    ax.set_xlabel(f"time ({unit})")
    ax.grid(axis="y", visible=False)


def three_sources(
    ax, x_of, claim: str, op: str, records: list[dict], y_of=None, clock="host", suffix="", **look
) -> None:
    """Plot one operation's lecture, recorded and own numbers over a size, each in its own look.

    x_of: from a record's shape to the x value, or None to leave the record out.
    y_of: from a record to the y value; by default its value.
    suffix, look: added to the labels, and put over the looks, to tell two operations apart.
    """
    sources = (
        (results.lecture(claim), LECTURE),
        (results.recorded(claim), RECORDED),
        ([r for r in records if r["claim"] == claim], YOURS),
    )
    for source, usual in sources:
        points = sorted(
            (x_of(r["shape"]), r["value"] if y_of is None else y_of(r))
            for r in source
            if r["op"] == op and r["clock"] == clock and x_of(r["shape"]) is not None
        )
        if points:
            shown = usual | look | {"label": usual["label"] + suffix}
            ax.plot(*zip(*points, strict=True), **shown)
