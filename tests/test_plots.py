"""Figures are drawn from what they are given."""

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pytest

from helpers import plots
from helpers.virtual_device import VirtualDevice


@pytest.fixture
def ax():
    plots.style()
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def test_timeline_draws_every_span_to_scale(ax):
    gpu = VirtualDevice(launch_us=20, first_call_us=0)
    for _ in range(3):
        gpu.launch("k", 100)
    gpu.synchronize()
    plots.timeline(ax, gpu.spans, unit="ms")
    drawn = sorted((bar.get_x(), bar.get_width()) for bar in ax.patches)
    expected = sorted((s.start_us / 1000, (s.end_us - s.start_us) / 1000) for s in gpu.spans)
    assert all(a == pytest.approx(b) for a, b in zip(drawn, expected, strict=True))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["host", "device"]


def test_three_sources_draws_the_lecture_and_this_machine(ax):
    mine = [
        {"claim": "L06", "op": "matmul", "clock": "host", "shape": f"{n}x{n}x{n}", "value": n / 1e3}
        for n in (512, 256)
    ]
    plots.three_sources(ax, lambda shape: int(shape.split("x")[0]), "L06", "matmul", mine)
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert lines["lecture, H100"][-1] == [16384, 162.94]
    assert lines["this machine"] == [[256, 0.256], [512, 0.512]]


def test_small_print_names_the_machine(ax):
    plots.small_print(ax.figure)
    assert "torch" in ax.figure._supxlabel.get_text()
    record = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-29"}
    assert plots.recorded_source([record, record]) == "NVIDIA H200 · torch 2.11.0 · 2026-11-29"


def test_loglog_labels_decades_or_the_multiples_asked_for(ax):
    ax.plot([1, 1000], [2000, 40_000])
    plots.loglog(ax, y=(1, 2, 5), xlabel="size", ylim=(1500, 60_000))
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    labels = [
        text.get_text() for text in ax.get_yticklabels() if low <= text.get_position()[1] <= high
    ]
    assert labels == ["2,000", "5,000", "10,000", "20,000", "50,000"]
    assert ax.get_xlabel() == "size" and not list(ax.xaxis.get_minorticklocs())
    assert ax.get_xscale() == ax.get_yscale() == "log"
