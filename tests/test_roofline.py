"""The model, and the picture of it."""

import math

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pytest
import torch

from helpers import roofline, traffic
from helpers.roofline import attainable_tflop_per_s, predict_ms, ridge_flop_per_byte
from helpers.traffic import Work

GB_PER_S, TFLOP_PER_S = 4800.0, 989.4  # an H200's datasheet in bfloat16


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def test_numbers_worked_out_by_hand():
    assert ridge_flop_per_byte(GB_PER_S, TFLOP_PER_S) == pytest.approx(206.125)
    assert ridge_flop_per_byte(1000, 1) == 1  # 10^12 FLOPs and 10^12 bytes a second
    assert attainable_tflop_per_s(10, GB_PER_S, TFLOP_PER_S) == pytest.approx(48)
    assert attainable_tflop_per_s(1000, GB_PER_S, TFLOP_PER_S) == TFLOP_PER_S
    assert attainable_tflop_per_s(0, GB_PER_S, TFLOP_PER_S) == 0
    assert attainable_tflop_per_s(math.inf, GB_PER_S, TFLOP_PER_S) == TFLOP_PER_S


def test_the_line_rises_to_the_ridge_and_stays():
    ridge = ridge_flop_per_byte(GB_PER_S, TFLOP_PER_S)
    intensities = [ridge * 2**k for k in range(-9, 10)]
    rates = [attainable_tflop_per_s(i, GB_PER_S, TFLOP_PER_S) for i in intensities]
    assert rates == sorted(rates)
    assert rates[9] == pytest.approx(TFLOP_PER_S)
    assert rates[:9] == pytest.approx([TFLOP_PER_S * 2**k for k in range(-9, 0)])
    assert rates[10:] == [TFLOP_PER_S] * 9


@pytest.mark.parametrize("n", [1, 64, 617, 619, 8192])  # the ridge is at n = 618.4
def test_the_predicted_time_is_that_of_the_attainable_rate(n):
    work = traffic.matmul(n, n, n, torch.bfloat16)
    rate = attainable_tflop_per_s(work.intensity, GB_PER_S, TFLOP_PER_S)
    ms = predict_ms(work, GB_PER_S, TFLOP_PER_S)
    assert work.flops / (ms / 1000) / 1e12 == pytest.approx(rate, rel=1e-12)
    memory_ms = work.bytes / (GB_PER_S * 1e9) * 1000
    assert ms == pytest.approx(memory_ms, rel=1e-12) if n < 618 else ms > memory_ms


def test_predicted_times_by_hand():
    assert predict_ms(Work(3e9, 1e9, 1), 2000, 100) == pytest.approx(2)
    assert predict_ms(Work(1, 1, 5e12), 2000, 100) == pytest.approx(50)
    assert predict_ms(Work(3e9, 1e9, 1), 2000, 100, floor_ms=0.5) == pytest.approx(2.5)
    assert predict_ms(Work(4e9, 0, 0), 2000, 100) == pytest.approx(2)  # a copy
    assert predict_ms(Work(0, 0, 1e12), 2000, 100) == pytest.approx(10)
    assert predict_ms(Work(0, 0, 0), 2000, 100, floor_ms=0.25) == 0.25


def segments(ax) -> list[list[tuple[float, float]]]:
    return [[tuple(point) for point in line.get_xydata()] for line in ax.get_lines()]


def test_the_slope_and_the_ceiling_meet_at_the_ridge(ax):
    roofline.draw(ax, GB_PER_S, {"bf16": TFLOP_PER_S}, label="H200", color="#123456", linewidth=3)
    slope, ceiling = segments(ax)
    ridge = (ridge_flop_per_byte(GB_PER_S, TFLOP_PER_S), TFLOP_PER_S)
    assert slope[1] == pytest.approx(ridge) and ceiling[0] == pytest.approx(ridge)
    for intensity, rate in slope + ceiling:
        assert rate == pytest.approx(attainable_tflop_per_s(intensity, GB_PER_S, TFLOP_PER_S))
    assert slope[0][0] < 0.05 and ceiling[1][0] > 5000  # beyond both ends of the picture
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "FLOP per byte" in ax.get_xlabel() and ax.get_ylabel() == "TFLOP/s"
    assert {(line.get_color(), line.get_linewidth()) for line in ax.get_lines()} == {("#123456", 3)}


@pytest.mark.parametrize("order", [("fp32", "bf16", "fp8"), ("fp8", "fp32", "bf16")])
def test_each_ceiling_begins_on_the_slope_which_ends_at_the_highest(ax, order):
    tops = {"fp32": 52.0, "bf16": 770.0, "fp8": 1500.0}
    roofline.draw(ax, 4000.0, {name: tops[name] for name in order}, label="measured")
    slope, *ceilings = segments(ax)
    assert slope[1] == pytest.approx((375, 1500))
    for name, ceiling in zip(order, ceilings, strict=True):
        assert ceiling[0] == pytest.approx((tops[name] / 4, tops[name]))
        assert ceiling[1][1] == tops[name]
    labels = {text.get_text(): text for text in ax.texts}
    assert set(labels) == set(order)
    assert all(text.xy == (1, tops[name]) for name, text in labels.items())


def test_the_legend_has_one_entry_a_machine(ax):
    roofline.draw(ax, 4000.0, {"fp32": 52.0, "bf16": 770.0}, label="H200")
    roofline.draw(ax, 1000.0, {"fp32": 80.0}, label="RTX 4090")
    assert ax.get_legend_handles_labels()[1] == ["H200", "RTX 4090"]


def test_a_ceiling_without_a_name_is_drawn_without_one(ax):
    roofline.draw(ax, 4000.0, {"": 52.0})
    assert len(segments(ax)) == 2 and not ax.texts
    assert ax.get_legend_handles_labels()[1] == []
