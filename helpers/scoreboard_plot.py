"""Pictures of the scoreboard; each takes the tables of `helpers.scoreboard` by machine's name."""

import math

from matplotlib import ticker
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from helpers import machines, plots
from helpers.predictions import FACTOR, is_outlier
from helpers.scoreboard import ALL_WAYS, CLOCKS, GELU, SOFTMAX

BOUNDS = {"memory": plots.BLUE, "compute": plots.GREEN, "launch": plots.ORANGE}
CLOCK_NAMES = {"host": "host's clock", "event": "events", "kernel": "kernels alone"}
EFFECTS = {  # colours of levers
    "moves right": plots.BLUE,
    "moves right, for more FLOPs": plots.SKY,
    "moves right, under a higher roof": plots.PURPLE,
    "moves right, for less precision": plots.YELLOW,
    "a higher roof": plots.ORANGE,
    "lifts towards the roof": plots.GREEN,
    "less time that no roof shows": plots.GREY,
}


def looks(names) -> dict[str, dict]:
    """The house's look of each machine, labelled by its name; the reader's own differ in colour."""
    own = iter((plots.VERMILION, plots.ORANGE, plots.PURPLE, plots.GREEN) * 9)
    known = {machines.LECTURE: plots.LECTURE, machines.RECORDED: plots.RECORDED}
    return {
        name: (known.get(name) or plots.YOURS | {"color": next(own)}) | {"label": name}
        for name in names
    }


def draw_predictions(ax, frames: dict) -> None:
    """Measured over predicted time; colours say what binds, numbers name the outliers' reasons.

    An outlier's number stands at the one of its reason that is farthest from the diagonal; the
    reasons stand under the picture. About 9 x 7 inches.
    """
    import pandas as pd

    frames = {name: frame for name, frame in frames.items() if len(frame)}
    if not frames:
        ax.text(0.5, 0.5, "No machine here has measured its roofs.", ha="center")
        return
    every = pd.concat(frames.values(), ignore_index=True)
    times = every[["predicted_ms", "ms"]]
    limits = {
        axis: (times[column].min() / 2, times[column].max() * 2)
        for axis, column in (("xlim", "predicted_ms"), ("ylim", "ms"))
    }
    ends = times.min().min() / 2, times.max().max() * 2
    ax.plot(ends, ends, color="black", linewidth=0.8)
    bottom, top = ([end * factor for end in ends] for factor in (1 / FACTOR, FACTOR))
    ax.fill_between(ends, bottom, top, color="#E8E8E8", zorder=0)
    shown = looks(frames)
    for name, frame in frames.items():
        hollow = {"markerfacecolor": "white"} if name == machines.LECTURE else {}
        for (bound, outlier), rows in frame.groupby(["bound", is_outlier(frame["ratio"])]):
            mark = {"marker": shown[name]["marker"], "color": BOUNDS[bound], **hollow}
            strength = {"markersize": 4.5} if outlier else {"markersize": 3, "alpha": 0.5}
            ax.plot(rows["predicted_ms"], rows["ms"], linestyle="", **mark, **strength)
    plots.loglog(ax, xlabel="predicted: ms", ylabel="measured: ms", **limits)
    inside = (~is_outlier(every["ratio"])).sum()
    ax.set_title(
        f"{inside} of {len(every)} times are within a factor of {FACTOR} of the prediction"
    )
    reasons = every[every["note"] != ""].groupby("note")["ratio"].agg(["max", "size", "idxmax"])
    reasons = reasons.sort_values("max", ascending=False)
    _keys(ax, shown, reasons)
    ax.figure.draw_without_rendering()  # numbers need to know how large the axes are
    farthest = every.loc[reasons["idxmax"], ["predicted_ms", "ms"]].itertuples(index=False)
    _number(ax, list(farthest), every.loc[is_outlier(every["ratio"]), ["predicted_ms", "ms"]])


def _keys(ax, shown: dict, reasons) -> None:
    """What colours and marks mean, inside; the reasons, numbered, in two columns below."""
    marks = [_mark("o", colour, f"limited by {bound}") for bound, colour in BOUNDS.items()]
    marks += [_mark(look["marker"], plots.GREY, name) for name, look in shown.items()]
    ax.legend(handles=marks, fontsize=8, loc="lower right")
    lines = [
        f"{number:>2}  {row.Index}: "
        + (f"{row.size}, to " if row.size > 1 else "")
        + f"{row.max:.1f} ×"
        for number, row in enumerate(reasons.itertuples(), start=1)
    ]
    half = math.ceil(len(lines) / 2)
    for x, column in ((-0.05, lines[:half]), (0.5, lines[half:])):
        text = "\n".join(column)
        ax.text(x, -0.13, text, transform=ax.transAxes, fontsize=7, va="top", linespacing=1.35)


def _mark(marker: str, colour: str, label: str):
    return Line2D([], [], linestyle="", marker=marker, color=colour, label=label)


def _number(ax, farthest: list, points) -> None:
    """Write 1, 2, 3 … beside points, each in the nearest place that is free."""
    scale = ax.figure.dpi / 72
    taken = ax.transData.transform(points.to_numpy()) / scale
    turns = [math.radians(degrees) for degrees in (135, 110, 160, 90, 180, 200, 70)]
    for number, (x, y) in enumerate(farthest, start=1):
        point = ax.transData.transform((x, y)) / scale
        places = [
            (radius * math.cos(turn), radius * math.sin(turn))
            for radius in (9, 14, 20, 27, 35, 44, 54)
            for turn in turns
        ]
        free = (
            place for place in places if all(math.dist(point + place, other) > 9 for other in taken)
        )
        place = next(free, places[0])
        # A number is as large as two points: it takes the place of its ends as well.
        taken = [*taken, *(point + place + (side, 0) for side in (-4, 0, 4))]
        line = {
            "arrowstyle": "-",
            "color": plots.GREY,
            "linewidth": 0.5,
            "shrinkA": 0,
            "shrinkB": 2,
        }
        ax.annotate(
            number,
            (x, y),
            xytext=place,
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="center",
            arrowprops=line if math.hypot(*place) > 12 else None,
        )


def draw_levers(ax, frame) -> None:
    """Gains as bars, the largest on top; of several machines the first with most has the bars."""
    names = [name for name in frame.columns[5:] if frame[name].notna().any()]
    if not names:
        ax.text(0.5, 0.5, "No gain has been measured yet.", ha="center")
        return
    main = max(names, key=lambda name: frame[name].notna().sum())
    frame = frame[frame[names].notna().any(axis=1)]
    order = frame[main].fillna(frame[names].max(axis=1)).sort_values().index
    frame = frame.loc[order]
    labels = frame["lever"] + ": " + frame["what"] + " (" + frame["notebook"].str[:2] + ")"
    ax.barh(labels, frame[main] - 1, left=1, color=frame["effect"].map(EFFECTS), height=0.7)
    for row, (gain, end) in enumerate(zip(frame[main], frame[names].max(axis=1), strict=True)):
        if gain == gain:
            beside = dict(xytext=(6, 0), textcoords="offset points", va="center")
            ax.annotate(f"{gain:.1f}", (end, row), fontsize=8, **beside)
    for name, look in looks(names).items():
        if name != main:
            ax.plot(frame[name], labels, **{**look, "linestyle": ""}, zorder=3)
    ax.set(
        xscale="log",
        xlim=(min(0.9, frame[names].min().min() / 1.1), None),
        xlabel=f"times as fast (bars: {main})",
    )
    _tick(ax.xaxis)
    ax.tick_params(axis="y", labelsize=8)
    ax.grid(axis="y", visible=False)
    used = set(frame["effect"])
    handles = [Patch(color=colour, label=name) for name, colour in EFFECTS.items() if name in used]
    handles += ax.get_legend_handles_labels()[0]
    ax.legend(handles=handles, fontsize=8, loc="lower right")
    ax.set_title("What each lever gained")


def _tick(axis) -> None:
    """1, 2, 5, 10 … on a logarithmic axis."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def draw_five_ways(fig, frames: dict) -> None:
    """GeLU and softmax: a row each; a column a clock. Times as multiples of a copy's."""
    operations = (GELU, SOFTMAX)
    axes = fig.subplots(len(operations), len(CLOCKS), sharex=True, squeeze=False)
    shown = looks(frames)
    for row, operation in zip(axes, operations, strict=True):
        known = [frame[frame["operation"] == operation] for frame in frames.values()]
        named = {way for frame in known for way in frame.dropna(subset="copies")["way"]}
        ways = [way for way in ALL_WAYS if way in named]
        for ax, clock in zip(row, CLOCKS, strict=True):
            for name, frame in frames.items():
                mine = frame[(frame["operation"] == operation) & (frame["clock"] == clock)]
                mine = mine.dropna(subset="copies")
                places = [ways.index(way) for way in mine["way"]]
                ax.plot(mine["copies"], places, **{**shown[name], "linestyle": ""})
            ax.axvline(1, color="black", linewidth=0.8)
            ax.set(xscale="log", yticks=range(len(ways)), ylim=(max(len(ways), 1) - 0.5, -0.5))
            ax.set_yticklabels(ways if ax is row[0] else [])
            _tick(ax.xaxis)
            ax.set_title(f"{operation}, {CLOCK_NAMES[clock]}")
    axes[0, -1].legend(fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel("× a copy's time (the lecture's: by its datasheet)", fontsize=8)
