"""What the report's pictures show, one function a picture: a matplotlib figure, filled from curves.

Each gets the curves of one or two machines, the run's own first where it has one, and returns a
sentence on the first that is made from its numbers.
"""

import dataclasses

import numpy as np
from matplotlib.figure import Figure

from helpers import plots, roofline, wave_fit, waves
from helpers.machines import Machine
from helpers.memory_roofs import size_text

TILE = (256, 128)  # of notebook 10's kernel with fixed tiles
ROOFS = {"float32": "fp32", "bfloat16": "bf16"}
NAMED = {  # operations with a name beside their point, and where: points right and up
    "add": (6, -9), "softmax": (6, -9), "cross entropy": (6, -9), "matrix-vector": (6, -4),
    "small matmul": (6, -3), "attention": (-46, -9), "matmul": (-36, -5),
}  # fmt: skip
LOOKS = {  # as in notebooks 11 and 12
    "ours": (plots.BLUE, "o-"),
    "cudnn": (plots.VERMILION, "s-"),
    "flex": (plots.GREEN, "^-"),
    "flash": (plots.ORANGE, "D-"),
    "efficient": (plots.PURPLE, "v-"),
    "standard": (plots.GREY, "x--"),
    "math": (plots.GREY, "+:"),
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one machine has measured: `frame`, a series of its, in the machine's look."""

    machine: Machine
    frame: object
    look: dict

    @property
    def label(self) -> str:
        return self.look["label"]


def _far_apart(tops: list[float]) -> bool:
    """True when curves with these highest values need a logarithmic axis to be seen together."""
    return max(tops) > 4 * min(tops)


def operations(figure: Figure, curves: list[Curve]) -> str:
    """Roofs, and operations as points at their intensity and achieved rate (notebook 03)."""
    ax, rates = figure.add_subplot(), []
    for curve in reversed(curves):  # the run's own on top
        tops = {f"{short} matmul": curve.machine.matmul_tflop_per_s(dtype)
                for dtype, short in ROOFS.items()}  # fmt: skip
        tops = {name: top for name, top in tops.items() if top}
        copy = curve.machine.copy_gb_per_s()
        first = curve is curves[0]
        if copy and tops:
            shown = tops if first else {"": max(tops.values())}
            roofline.draw(ax, copy, shown, color=curve.look["color"], linewidth=1.2)
        points = curve.frame[curve.frame["flops"] > 0]
        points = points.assign(rate=points["flops"] / points["ms"] / 1e9)
        style = curve.look | {"linestyle": "", "alpha": 1 if first else 0.5}
        ax.plot(points["flop_per_byte"], points["rate"], **style)
        rates += [*points["rate"], *tops.values()]
    plots.loglog(ax, xlim=(0.05, 5000), ylim=(min(rates) / 4, max(rates) * 2.5), ylabel="TFLOP/s")
    ax.set_xlabel("arithmetic intensity (FLOP per byte)")
    ax.legend(fontsize=8, loc="upper left")
    _write_names(ax, points)
    ratio = curves[0].frame["ms"] / curves[0].frame["predicted_ms"]
    furthest = np.log(ratio).abs().idxmax()
    within = ratio.between(1 / roofline.FACTOR, roofline.FACTOR).sum()
    return (
        f"two measured roofs, memory and arithmetic, explain the time of {within} of {len(ratio)} "
        f"operations within a factor of {roofline.FACTOR}; the furthest off is "
        f"{curves[0].frame['op'][furthest]}, at {ratio[furthest]:.2g} times the prediction."
    )


def _write_names(ax, points) -> None:
    """Name the points of `NAMED`, without those whose name would lie on another's."""
    places = []
    for point in points[points["op"].isin(NAMED)].drop_duplicates("op").itertuples():
        at = point.flop_per_byte, point.rate
        place = ax.transAxes.inverted().transform(ax.transData.transform(at))
        if all((abs(place - other) > (0.25, 0.045)).any() for other in places):
            places.append(place)
            ax.annotate(
                point.op, at, xytext=NAMED[point.op], textcoords="offset points", fontsize=7.5
            )


def ladder(figure: Figure, curves: list[Curve]) -> str:
    """Read bandwidth over the footprint: each cliff is a cache that overflows (notebook 03)."""
    ax = figure.add_subplot()
    for curve in reversed(curves):
        for (path, rows), line in zip(curve.frame.groupby("path"), ("-", "--"), strict=False):
            style = curve.look | {"linestyle": line, "label": f"{curve.label}, {path}"}
            ax.plot(rows["footprint_bytes"] / 2**20, rows["gb_per_s"], **style)
    plots.loglog(ax, y=(1, 2, 5), xlabel="footprint (MiB)", ylabel="GB/s, reading")
    ax.legend(fontsize=8)
    best = curves[0].frame.loc[curves[0].frame["gb_per_s"].idxmax()]
    largest = curves[0].frame.loc[curves[0].frame["footprint_bytes"].idxmax()]
    return (
        f"{best['gb_per_s']:,.0f} GB/s from the caches at best, "
        f"{largest['gb_per_s']:,.0f} GB/s once {size_text(largest['footprint_bytes'])} are read: "
        f"a factor of {best['gb_per_s'] / largest['gb_per_s']:.1f}."
    )


def in_flight(figure: Figure, curves: list[Curve]) -> str:
    """Bandwidth over the bytes in flight, and Little's law (notebook 06)."""
    ax = figure.add_subplot()
    for curve in reversed(curves):
        frame = curve.frame
        x = frame["bytes_in_flight"] / 1e6
        ax.plot(x, frame["gb_per_s"], **curve.look | {"linestyle": ""})
    far = curves[0].machine.series("06_memory", "far")
    if far is not None and len(far):
        ends, latency_ns = np.array([x.min(), x.max()]), far["ns"].iloc[-1]
        label = f"bytes in flight / {latency_ns:.0f} ns"
        ax.plot(ends, ends * 1e6 / latency_ns, "--", color=plots.GREY, linewidth=1, label=label)
    plots.loglog(ax, x=(1, 3), y=(1, 2, 5), xlabel="MB in flight, all SMs", ylabel="GB/s")
    ax.set_ylim(top=2.2 * max(curve.frame["gb_per_s"].max() for curve in curves))
    ax.legend(fontsize=8)
    frame = curves[0].frame
    best = frame["gb_per_s"].max()
    enough = frame.loc[frame["gb_per_s"] >= 0.9 * best, "bytes_in_flight"].min()
    return (
        f"90% of the best {best:,.0f} GB/s needs {size_text(enough)} on their way at once; with "
        f"{size_text(frame['bytes_in_flight'].min())} it is {frame['gb_per_s'].min():,.0f} GB/s."
    )


def stairs(figure: Figure, curves: list[Curve]) -> str:
    """Time over the number of tiles, and the law of steps (notebook 10)."""
    sentences = []
    for ax, curve in zip(figure.subplots(len(curves), squeeze=False)[:, 0], curves, strict=True):
        slots = int(curve.frame["slots"].iloc[0])
        fixed = curve.frame[curve.frame["kernel"] == "fixed tiles"]
        data = fixed["tiles"].tolist(), fixed["ms"].tolist()
        steps, line = (wave_fit.fit(*data, slots=width) for width in (slots, 1))
        x = np.arange(1, int(fixed["tiles"].max()) + 1)
        law = f"{steps.t0_ms * 1e3:.0f} µs + waves · {steps.t_wave_ms * 1e3:.0f} µs"
        ax.plot(x, steps.ms(x) * 1e3, color=plots.GREY, linewidth=1.2, zorder=0, label=law)
        ax.plot(fixed["tiles"], fixed["ms"] * 1e3, **curve.look | {"linestyle": ""}, markersize=3.5)
        ax.set(ylabel="µs", ylim=(0, None), xticks=range(0, int(x[-1]) + slots, slots))
        ax.legend(fontsize=8, loc="upper left")
        sentences.append(
            f"each {slots} tiles more cost one wave of {steps.t_wave_ms * 1e3:.0f} µs; steps "
            f"explain {steps.r_squared:.1%} of the variance, a straight line {line.r_squared:.1%}."
        )
    ax.set_xlabel(f"tiles of {TILE[0]} x {TILE[1]}, K = 4096 (ticks: full waves)")
    return sentences[0]


def squares(figure: Figure, curves: list[Curve]) -> str:
    """The speed of a square matmul over its size, in multiples of 128 (notebook 10)."""
    ax = figure.add_subplot()
    middles = [curve.frame.groupby("n")["tflop_per_s"].median() for curve in curves]
    for curve, middle in reversed([*zip(curves, middles, strict=True)]):
        ax.plot(middle.index, middle, **curve.look)
    ax.set(xlabel="N", ylabel="TFLOP/s")
    if _far_apart([middle.max() for middle in middles]):
        plots.loglog(ax, x=(1, 2, 5), y=(1, 2, 5))
    else:
        ax.set_ylim(0)
    ax.legend(fontsize=8)
    middle = middles[0]
    smallest = middle.index.min()
    return (
        f"{middle.max():,.3g} TFLOP/s at best, at N = {middle.idxmax():,}; N = {smallest:,} "
        f"reaches {middle[smallest] / middle.max():.1%} of that."
    )


def tooth(figure: Figure, curves: list[Curve]) -> str:
    """The speed around the first size with more tiles than SMs (notebook 10)."""
    sentences = []
    for ax, curve in zip(figure.subplots(len(curves), squeeze=False)[:, 0], curves, strict=True):
        sms = int(curve.frame["sms"].iloc[0])
        tooth, falls = waves.first_tooth(sms, *TILE), {}
        for kernel, colour, mark in (
            ("cuBLAS", plots.GREY, ".-"),
            ("fixed tiles", curve.look["color"], f"{curve.look['marker']}-"),
        ):
            rows = curve.frame[(curve.frame["kernel"] == kernel) & (curve.frame["n"] % 8 == 0)]
            rate = rows.groupby("n")["tflop_per_s"].median()
            ax.plot(rate.index, rate, mark, color=colour, label=f"{curve.label}, {kernel}",
                    markersize=4)  # fmt: skip
            before, after = rate.index[rate.index < tooth], rate.index[rate.index >= tooth]
            if len(before) and len(after):
                falls[kernel] = rate[after.min()] / rate[before.max()], after.min()
        ax.axvline(tooth, color=plots.GREY, linewidth=1, linestyle=":")
        ax.set(ylabel="TFLOP/s", ylim=(0, None))
        ax.legend(fontsize=8, loc="lower left")
        told = [f"{kernel} {ratio:.2f} (N = {n:,})"
                for kernel, (ratio, n) in reversed(falls.items())]  # fmt: skip
        sentences.append(
            f"from N = {tooth:,} on there are more tiles than the {sms} SMs hold; the speed "
            f"there, as a share of that just before: {', '.join(told)}."
        )
    ax.set_xlabel("N, multiples of 8 (dotted: one tile too many)")
    return sentences[0]


def attention(figure: Figure, curves: list[Curve]) -> str:
    """The speed of attention over the length, of each way to compute it (notebooks 11 and 12)."""
    from helpers.attention_backends import LABELS

    axes, told = figure.subplots(2, sharex=True), []
    rates = [{causal: _by_backend(curve.frame, causal) for causal in (False, True)}
             for curve in curves]  # fmt: skip
    for ax, causal in zip(axes, (False, True), strict=True):
        own = rates[0][causal]
        for name in [name for name in LOOKS if name in own]:
            (colour, mark), line = LOOKS[name], own[name].dropna()
            ax.plot(line.index, line, mark, color=colour, label=LABELS[name],
                    linewidth=2 if name == "ours" else 1, markersize=4)  # fmt: skip
        for other in rates[1:]:
            line = other[causal]["ours"].dropna()
            ax.plot(line.index, line, ":", color=plots.BLUE, linewidth=1.5,
                    label=f"flash_attention, {curves[1].label}")  # fmt: skip
        ax.set_xscale("log", base=2)
        tops = [rate[causal]["ours"].max() for rate in rates]
        ax.set(yscale="log") if _far_apart(tops) else ax.set_ylim(0)
        ax.set(ylabel="TFLOP/s", xticks=own.index, xticklabels=[f"{n:,}" for n in own.index])
        ax.set_title("causal, FLOPs counted half" if causal else "full", fontsize=9)
        ax.minorticks_off()
        words = f"{own['ours'].max():,.3g} TFLOP/s {'causal' if causal else 'in full'}"
        if "flash" in own and (gain := (own["ours"] / own["flash"]).dropna()).size:
            words += f" ({gain.min():.2f} to {gain.max():.2f} times FlashAttention-2's speed)"
        told.append(words)
    axes[-1].set_xlabel("n, the length of a sequence")
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=7.5, ncols=2, loc="outside upper left"
    )
    return f"our flash_attention reaches up to {' and '.join(told)}."


def _by_backend(frame, causal: bool):
    if "dim" in frame:
        frame = frame[frame["dim"] == 128]
    part = frame[frame["causal"] == causal]
    return part.pivot_table(index="n", columns="backend", values="tflop_per_s")
