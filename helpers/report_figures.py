"""The report's pictures: a run's own curves beside the recorded ones, as SVG in data: URIs.

A curve that the run has not measured is drawn as it was recorded with the collection, and its
caption says so. Sentences under the pictures are printed from the curves that they show.
"""

import base64
import dataclasses
import io
import math
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from helpers import device, plots, roofline
from helpers import report_drawings as draw
from helpers.machines import Machine
from helpers.report_drawings import Curve

ROOFLINE = "03_roofline"  # measures on a CPU too


@dataclasses.dataclass(frozen=True)
class Picture:
    """`read` gives a machine's frame or None. `draw` fills a figure from the curves of one or two
    machines, the run's first, and returns a sentence on the first."""

    title: str
    notebook: str
    read: Callable[[Machine], object]
    draw: Callable[[Figure, list[Curve]], str]
    inches: tuple[float, float] = (5.4, 3.6)
    wide: bool = False


def pictures(own: Machine, recorded: Machine | None) -> Iterator[dict]:
    """What the page shows of each of `PICTURES`, in order.

    {"title", "src", "sentence", "borrowed", "wide"}; borrowed: a sentence where nothing
    in it is the run's own. {"title", "problem"} where there is nothing to show or drawing failed.
    """
    for picture in PICTURES:
        try:
            yield _shown(picture, own, recorded)
        except Exception as error:  # whatever lies in the folder, the other pictures are drawn
            reason = f"It cannot be shown: {type(error).__name__}: {error}"
            yield {"title": picture.title, "problem": reason}


def sources(own: list[Machine], recorded: Machine | None) -> list[str]:
    """A line on each machine: its device, version and date."""
    newest = {
        machine.name: max(machine.records, key=lambda record: record["date"])
        for machine in (*own, recorded)
        if machine is not None and machine.records
    }
    return [f"{name}: {plots.recorded_source([record])}" for name, record in newest.items()]


def _shown(picture: Picture, own: Machine, recorded: Machine | None) -> dict:
    mine = plots.YOURS | {"label": own.name + ", smoke" * (own.profile == "smoke")}
    curves = []
    for machine, look in ((own, mine), (recorded, plots.RECORDED)):
        frame = picture.read(machine) if machine is not None else None
        if frame is not None and len(frame):
            curves.append(Curve(machine, frame, look))
    if not curves:
        return {"title": picture.title, "problem": f"{picture.notebook} has left no curve here."}
    with rc_context():
        plots.style()
        figure = Figure(picture.inches, layout="constrained")
        sentence = picture.draw(figure, curves)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    borrowed = ""
    if curves[0].machine is not own:
        missing = device.has_cuda() or picture.notebook == ROOFLINE
        reason = "has left no curve in this run" if missing else "measures it on a GPU"
        borrowed = f"Not this machine: {picture.notebook} {reason}."
    return {
        "title": picture.title,
        "src": f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}",
        "sentence": f"{curves[0].label[0].upper()}{curves[0].label[1:]}: {sentence}",
        "borrowed": borrowed,
        "wide": picture.wide,
    }


def _read_predictions(machine: Machine):
    """Predicted and measured times of a machine's operations."""
    from helpers.predictions import predictions

    return predictions(machine)


def _draw_predictions(figure: Figure, curves: list[Curve]) -> str:
    """Measured over predicted time of every operation of the course (notebook 13)."""
    from helpers import scoreboard_plot

    scoreboard_plot.draw_predictions(
        figure.add_subplot(), {curve.label: curve.frame for curve in curves}
    )
    ratio = curves[0].frame["ratio"]
    within = ratio.between(1 / roofline.FACTOR, roofline.FACTOR).sum()
    spread = math.exp(np.log(ratio).abs().median())
    return (
        f"of {len(ratio)} times that the model predicts {within} are within a factor of "
        f"{roofline.FACTOR}; half of them within a factor of {spread:.2f}."
    )


def _series(notebook: str, name: str) -> dict:
    return {"notebook": notebook, "read": lambda machine: machine.series(notebook, name)}


TALL, TALLER = (5.4, 4.4), (5.4, 5.4)
WAVES = "10_wave_quantization"
PICTURES = (
    Picture("Roofline", **_series(ROOFLINE, "operations"), draw=draw.operations, inches=TALL),
    Picture("Bandwidth", **_series(ROOFLINE, "ladder"), draw=draw.ladder, inches=TALL),
    Picture("Bytes in flight", **_series("06_memory", "in_flight"), draw=draw.in_flight),
    Picture("Size of a matmul", **_series(WAVES, "coarse"), draw=draw.squares),
    Picture("Staircase", **_series(WAVES, "stairs"), draw=draw.stairs, inches=TALL),
    Picture("Sawtooth", **_series(WAVES, "crossing"), draw=draw.tooth, inches=TALL),
    Picture(
        "Attention, forward",
        **_series("11_flash_attention", "lengths"),
        draw=draw.attention,
        inches=TALLER,
    ),
    Picture(
        "Attention, backward",
        **_series("12_flash_backward", "lengths"),
        draw=draw.attention,
        inches=TALLER,
    ),
    Picture(
        "Predicted and measured",
        "13_scoreboard",
        _read_predictions,
        _draw_predictions,
        inches=(9, 7),
        wide=True,
    ),  # fmt: skip
)
