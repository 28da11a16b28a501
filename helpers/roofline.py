"""The roofline of the machine at hand: the model and its roofs.

A memory roof is a rate in GB/s, a compute roof a rate in TFLOP/s; an operation whose intensity is
I FLOPs per byte can reach min(compute roof, I x memory roof). Williams, Waterman and Patterson,
"Roofline: an insightful visual performance model for multicore architectures", 2009.
`helpers.memory_roofs` and `helpers.compute_roofs` measure the roofs.
"""

import dataclasses

from helpers import plots
from helpers.traffic import Work

FACTOR = 1.5  # the model explains a time that it misses by less, as in notebook 03


@dataclasses.dataclass(frozen=True)
class Roof:
    """A measured limit: GB/s for a memory, TFLOP/s (TOP/s for int8) for arithmetic."""

    name: str
    value: float
    how: str


def attainable_tflop_per_s(intensity: float, gb_per_s: float, tflop_per_s: float) -> float:
    """The roofline at `intensity` FLOPs per byte."""
    return min(tflop_per_s, intensity * gb_per_s / 1000)


def ridge_flop_per_byte(gb_per_s: float, tflop_per_s: float) -> float:
    """The intensity at which the two roofs meet."""
    return tflop_per_s / gb_per_s * 1000


def predict_ms(work: Work, gb_per_s: float, tflop_per_s: float, floor_ms: float = 0) -> float:
    """The model's time: whichever of moving and computing takes longer, and a floor.

    floor_ms: what the shortest operation takes, whatever it does.
    """
    return floor_ms + max(work.bytes / gb_per_s / 1e6, work.flops / tflop_per_s / 1e9)


def draw(ax, gb_per_s: float, peaks: dict[str, float], label: str | None = None, **look) -> None:
    """Draw a memory's slope and compute ceilings (name -> TFLOP/s) on log-log axes.

    The slope ends at the highest ceiling; each ceiling begins where it meets the slope. `look`
    goes to the lines (black if it has no color), `label` to the legend.
    """
    look = {"color": "black", **look}
    ridges = {name: ridge_flop_per_byte(gb_per_s, top) for name, top in peaks.items()}
    left, right = 1e-3, 1e6
    highest = max(ridges.values())
    ax.plot([left, highest], [left * gb_per_s / 1000, max(peaks.values())], label=label, **look)
    for name, top in peaks.items():
        ax.plot([ridges[name], right], [top, top], **look)
        if name:
            ax.annotate(
                name,
                (1, top),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=look.get("color"),
            )
    plots.loglog(
        ax, xlim=(0.05, 5000), xlabel="arithmetic intensity (FLOP per byte)", ylabel="TFLOP/s"
    )
