"""The README's picture: `python -m helpers.cover` draws data/cover.png from recorded curves."""

import hashlib
import itertools

from matplotlib import rc_context
from matplotlib.figure import Figure

from helpers import machines, plots, results, scoreboard
from helpers import report_drawings as draw
from helpers.machines import Machine

PATH = results.ROOT / "data" / "cover.png"
CURVES = (  # what is drawn beside the scoreboard's records
    ("03_roofline", "operations"),
    ("10_wave_quantization", "crossing"),
    ("11_flash_attention", "lengths"),
)
WAYS = ("manual", "PyTorch", "compiled", "CUDA", "CUDA, float4", "Triton")
SHOWN = {  # of attention's backends
    "ours": "ours",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "standard": "matmul, softmax, matmul",
}
LABELLED = {machines.LECTURE: f"{machines.LECTURE} (its copy: the datasheet's)"}


def digest() -> str:
    """Of the numbers in the picture, which holds it as "Source"."""
    h200 = machines.recorded()
    frames = [h200.series(*curve) for curve in CURVES]
    frames += [_gelu(one) for one in (machines.lecture(), h200)]
    text = "".join(frame.round(6).to_csv() for frame in frames)
    return hashlib.sha256(text.encode()).hexdigest()


def draw_cover() -> Figure:
    """Four panels: the roofline, GeLU five ways, a matmul's teeth, attention."""
    h200 = machines.recorded()
    operations, sizes, lengths = (
        draw.Curve(h200, h200.series(*curve), plots.RECORDED) for curve in CURVES
    )
    figure = Figure((11, 7), layout="constrained")
    panels = itertools.chain.from_iterable(figure.subfigures(2, 2, wspace=0.03, hspace=0.03))
    for title, fill, panel in zip(
        (
            "Measured roofs explain most operations",
            "GeLU: a copy's time is the end of the road",
            "The matrix mystery: one tile too many",
            "FlashAttention: the matrix that is never written",
        ),
        (
            lambda panel: draw.operations(panel, [operations]),
            lambda panel: _draw_gelu(panel.add_subplot(), (machines.lecture(), h200)),
            lambda panel: draw.tooth(panel, [sizes]),
            lambda panel: _draw_attention(panel.add_subplot(), lengths.frame),
        ),
        panels,
        strict=True,
    ):
        fill(panel)
        panel.axes[0].set_title(title)
    plots.small_print(figure, plots.recorded_source(h200.records[:1]))
    return figure


def _gelu(one: Machine):
    """Each way's time in copies: by the kernels' own clock."""
    table = scoreboard.five_ways(one)
    rows = table[(table["operation"] == "GeLU") & (table["clock"] == "kernel")]
    return rows.set_index("way")["copies"].reindex(WAYS).dropna()


def _draw_gelu(ax, shown: tuple[Machine, ...]) -> None:
    for number, (one, colour) in enumerate(zip(shown, (plots.GREY, plots.BLUE), strict=True)):
        copies = _gelu(one)
        places = [WAYS.index(way) + 0.38 * number - 0.19 for way in copies.index]
        bars = ax.barh(places, copies, 0.36, color=colour, label=LABELLED.get(one.name, one.name))
        ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set(yticks=range(len(WAYS)), yticklabels=WAYS, xlabel="kernels' time, in copies")
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=8, loc="lower right")


def _draw_attention(ax, frame) -> None:
    rates = frame[~frame["causal"]].pivot_table(index="n", columns="backend", values="tflop_per_s")
    for name, label in SHOWN.items():
        colour, mark = draw.LOOKS[name]
        line = rates[name].dropna()
        ax.plot(line.index, line, mark, color=colour, label=label, markersize=4)
    ax.set_xscale("log", base=2)
    ax.set(ylim=0, ylabel="TFLOP/s", xlabel="n, the length of a sequence (16,384 tokens in all)")
    ax.set(xticks=rates.index, xticklabels=[f"{n:,}" for n in rates.index])
    ax.minorticks_off()
    ax.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 0.2))


if __name__ == "__main__":
    with rc_context():
        plots.style()
        draw_cover().savefig(PATH, dpi=110, metadata={"Source": digest(), "Software": None})
