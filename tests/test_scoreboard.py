"""The scoreboard: numbers as they were recorded, predictions as they are counted, all explained."""

import ast
import math
import re

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Text
from notebook_files import NOTEBOOKS, ROOT, read

from helpers import counted_records, levers, machines, predictions, scoreboard, scoreboard_plot
from helpers import traffic as t
from helpers.machines import Machine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def record(claim, op, value, unit="ms", clock="event", shape="", dtype="float32", **rest):
    given = dict(claim=claim, op=op, shape=shape, dtype=dtype, clock=clock, value=value, unit=unit)
    made = dict(p20=None, p80=None, profile="smoke", device="A CPU", torch="2", triton="")
    return {**made, "date": "2026-01-01", "notebook": "02_benchmarking", **given, **rest}


@pytest.fixture(scope="module")
def h200():
    return machines.recorded()


@pytest.fixture(scope="module")
def lecture():
    return machines.lecture()


@pytest.fixture(scope="module")
def predicted(h200):
    return predictions.predictions(h200)


@pytest.fixture
def cpu():
    """A few smoke records, as a machine without a GPU writes them."""
    on_host = dict(clock="host", shape="512x512")
    return Machine(
        "this run",
        (
            record("S20", "roof: memory, copy", 20.0, "GB/s", "host"),
            record("S20", "roof: matmul", 0.1, "TFLOP/s", "host"),
            record("L08", "add", 0.01, clock="host", shape="32x32"),
            record("L08", "add", 1.0, **on_host),
            record("L08", "matmul", 3.0, clock="host", shape="512x512x512"),
            record("L19", "copy", 0.2, **on_host),
            record("L19", "manual_gelu", 4.0, **on_host),
            record("L20", "compiled_gelu", 0.5, **on_host),
            record("S27", "gain, 8 sigmoids", 1.5, "x", "host", dtype=""),
        ),
    )


def row(frame, **wanted):
    for key, value in wanted.items():
        frame = frame[frame[key] == value]
    assert len(frame) == 1, frame
    return frame.iloc[0]


# ---- ways ----


def test_a_memory_bound_way_stands_beside_the_copy_that_was_timed_with_it(h200):
    ways = scoreboard.five_ways(h200)
    found = row(ways, operation="GeLU", way="Triton", clock="event")
    copy_ms = h200.value("L19", "copy")
    assert found["ms"] == h200.value("L19", "triton_gelu", clock="event")
    assert found["copies"] == found["ms"] / copy_ms and math.isnan(found["of_roof"])
    kernel = row(ways, operation="GeLU", way="manual", clock="kernel")
    assert kernel["ms"] == h200.value("L19", "manual_gelu", clock="kernel") / 1000


def test_a_compute_bound_way_stands_beside_the_matmuls_roof(h200):
    ways = scoreboard.five_ways(h200)
    found = row(ways, operation="matmul, fp32", way="CUDA, registers")
    tflop_per_s = 2 * 4096**3 / h200.value("S37", "matmul_registers") / 1e9
    roof = h200.value("S20", "roof: matmul", dtype="float32")
    assert found["of_roof"] == pytest.approx(tflop_per_s / roof) and math.isnan(found["copies"])
    attention = row(ways, operation="attention", way="Triton")
    curve = h200.series("11_flash_attention", "lengths")
    ours = row(curve, backend="ours", n=4096, causal=False)
    assert (attention["ms"], attention["shape"]) == (ours["ms"], "4x16x4096x128")
    roof = h200.value("S20", "roof: matmul", dtype="bfloat16")
    assert attention["of_roof"] == pytest.approx(ours["tflop_per_s"] / roof)


def test_the_lectures_kernel_is_compared_with_the_lectures_kernel(h200, lecture):
    of = {"operation": "softmax", "clock": "host", "way": "Triton"}
    ours, theirs = (row(scoreboard.five_ways(machine), **of) for machine in (h200, lecture))
    assert ours["ms"] == h200.value("L23", "row_softmax", clock="host")
    assert theirs["ms"] == lecture.value("L23", "triton_softmax")
    assert "Triton, tiles" not in set(scoreboard.five_ways(lecture)["way"])


def test_the_lecture_has_what_it_printed_and_no_more(lecture):
    ways = scoreboard.five_ways(lecture)
    assert set(ways["operation"]) == {"GeLU", "softmax"}
    assert set(ways["clock"]) == {"host", "kernel"}
    assert set(ways[ways["clock"] == "kernel"]["operation"]) == {"GeLU"}
    kernel = row(ways, operation="GeLU", way="PyTorch", clock="kernel")
    assert kernel["copies"] == pytest.approx(0.70156 / (8 * 2**28 / 3352e6))
    host = row(ways, operation="GeLU", way="Triton", clock="host")
    assert host["ms"] == lecture.value("L20", "triton_gelu")  # one printout has all five


def test_a_cpu_has_its_own_sizes(cpu, h200):
    ways = scoreboard.five_ways(cpu)
    assert ways[["way", "ms", "copies"]].values.tolist() == [
        ["manual", 4.0, 20.0],
        ["compiled", 0.5, 2.5],
    ]
    table = scoreboard.scoreboard_table([h200, cpu])
    place = ("GeLU", "manual", "host")
    assert table.loc[place, ("this run", "ms")] == "4 512x512"
    assert table.loc[place, ("this run", "beside the roof")] == "20.00 ×"
    assert table.loc[place, (h200.name, "ms")] == "5.62"
    assert table.loc[("GeLU", "Triton", "host"), ("this run", "ms")] == "–"
    assert table.loc[("matmul, fp32", "PyTorch", "event"), (h200.name, "beside the roof")] == "99%"


def test_without_roofs_times_stand_alone(cpu):
    bare = Machine(
        "bare", tuple(r for r in cpu.records if r["op"] not in ("copy",) + (cpu.records[0]["op"],))
    )
    assert scoreboard.five_ways(bare)["copies"].isna().all()
    assert set(scoreboard.scoreboard_table([bare])["bare", "beside the roof"]) == {"–"}
    assert predictions.predictions(bare).empty


def test_nothing_recorded_is_nothing_shown():
    nothing = Machine("nothing", ())
    assert scoreboard.five_ways(nothing).empty
    assert scoreboard.scoreboard_table([nothing]).empty and scoreboard.scoreboard_table([]).empty
    assert predictions.predictions(nothing).empty
    assert levers.levers([nothing])["nothing"].isna().all()


# ---- predictions ----


def test_the_model_by_hand(h200, predicted):
    copied, event = 4247.5e6, 0.003936
    assert h200.copy_gb_per_s() * 1e6 == copied  # if it is recorded anew, so are these
    relu = row(predicted, claim="S23", op="relu", dtype="float32")
    assert relu["predicted_ms"] == pytest.approx(event + 8 * 2**26 / copied)
    nine = row(predicted, claim="L19", op="manual_gelu", clock="kernel")
    assert nine["predicted_ms"] == pytest.approx(0.000865 + 22 * 4 * 2**28 / copied)
    matmul = row(predicted, claim="S37", op="cuBLAS")
    assert matmul["predicted_ms"] == pytest.approx(event + 2 * 4096**3 / 51.875e9)
    assert (nine["bound"], matmul["bound"]) == ("memory", "compute")
    assert set(predicted[predicted["shape"].isin(["32x32x32", "128x128x128"])]["bound"]) == {
        "launch"
    }


def test_all_is_finite_and_says_where_it_comes_from(h200, predicted):
    assert (predicted[["predicted_ms", "ms", "ratio"]] > 0).all().all()
    assert predicted["ratio"].map(math.isfinite).all()
    assert set(predicted["notebook"]) <= {path.stem for path in NOTEBOOKS}
    rows = (ROOT / "data" / "lecture_map.csv").read_text(encoding="utf-8").splitlines()
    assert set(predicted["claim"]) <= {line.split(",")[0] for line in rows}
    assert not ((predicted["op"] == "add") & (predicted["shape"] == "32x32")).any()
    hosts = predicted[predicted["clock"] == "host"]
    others = predicted[predicted["clock"] != "host"]
    key = ["claim", "op", "shape", "dtype"]
    assert not set(map(tuple, hosts[key].values)) & set(map(tuple, others[key].values))


def test_notebook_03_predicted_the_same(h200, predicted):
    theirs = h200.series("03_roofline", "operations").set_index("op")
    ours = predicted[predicted["claim"] == "L04"].set_index("op")
    for op, old in theirs.iterrows():  # its smallest kernel had a cold cache
        assert ours.loc[op, "predicted_ms"] == pytest.approx(old["predicted_ms"], abs=0.001), op


def test_no_outlier_is_without_a_reason(predicted, lecture):
    for frame in (predicted, predictions.predictions(lecture)):
        outliers = predictions.is_outlier(frame["ratio"])
        assert not frame[outliers & (frame["note"] == "")][["op", "shape", "ratio"]].values.tolist()
        assert (frame[~outliers]["note"] == "").all()


def test_every_reason_is_needed_and_names_a_section(predicted, lecture):
    used = {*predicted["note"], *predictions.predictions(lecture)["note"]} - {""}
    assert used == {note for _, note in predictions.NOTES}
    for note in (*used, predictions.CPU_NOTE):
        places = re.findall(r"(\d\d) (§\d+(?:, §\d+)*)", note)
        assert places, note
        for number, sections in places:
            (path,) = (path for path in NOTEBOOKS if path.name.startswith(number))
            text = "\n".join(cell.source for cell in read(path).cells)
            for section in re.findall(r"\d+", sections):
                assert re.search(rf"^## {section}\. ", text, re.MULTILINE), (note, section)


@pytest.mark.parametrize(
    ("claim", "op", "shape", "dtype", "work", "arithmetic"),
    [
        ("L08", "add", "8x8", "float32", t.add(64, FP32), "float32"),
        ("L09", "matmul", "8x16x32", "float32", t.matmul(8, 16, 32, FP32), "float32"),
        ("L06", "matmul, TF32 allowed", "8x8x8", "float32", t.matmul(8, 8, 8, FP32), "tfloat32"),
        ("L10", "gelu(a+b)", "8x8", "float32", t.add(64, FP32) + t.gelu(64, FP32), "float32"),
        ("L08", "sum, cold", "16 MB", "float32", t.reduction(2**22, FP32), "float32"),
        ("S23", "relu", "64", "float64", t.relu(64, torch.float64), "float64"),
        ("S23", "relu", "64", "bfloat16", t.relu(64, BF16), "float32"),
        ("L12", "manual_gelu", "8x8", "float32", t.manual_gelu(64, FP32), "float32"),
        ("L15", "gelu_four, fast, blocks of 256", "64", "float32", t.gelu(64, FP32), "float32"),
        ("L15", "gelu_float, nothing, blocks of 256", "64", "float32", t.copy(64, FP32), "float32"),
        ("L23", "manual_softmax", "8x16", "float32", t.manual_softmax(8, 16, FP32), "float32"),
        ("L23", "row_softmax", "8x16", "float32", t.softmax(8, 16, FP32), "float32"),
        ("S37", "transpose, naive", "8x8", "float32", t.copy(64, FP32), "float32"),
        ("S29", "sin2 + cos2, eager", "64", "float32", t.Work(6 * 256, 5 * 256, 320), "float32"),
        ("S45Q", "matrix-vector, int8, compiled", "8x8", "",
         t.linear(1, 8, 8, BF16, weight=torch.int8), "float32"),
        ("S46", "one kernel, forward and backward", "1x2x8x4", "float16",
         t.attention(1, 2, 8, 4, FP16, causal=True)
         + t.attention_backward(1, 2, 8, 4, FP16, causal=True), "float16"),
    ],
)  # fmt: skip
def test_work_is_that_of_traffic(claim, op, shape, dtype, work, arithmetic):
    assert counted_records.work_of(claim, op, shape, dtype) == (work, arithmetic)


@pytest.mark.parametrize(
    ("claim", "op", "shape", "dtype"),
    [
        ("L10", "cdist", "8x8", "float32"),
        ("L07", "mlp forward+backward", "steps=2 layers=4 batch=256 dim=256", "float32"),
        ("S24", "relu in place, stores where negative", "64, 0.5 negative", "float32"),
        ("L08", "measure, host", "copy 64 MB", "float32"),
        ("S46", "standard, forward and backward", "64x16x1024x64", "float16"),
        ("L05", "sleep", "50 ms", ""),
    ],
)
def test_what_cannot_be_counted_is_left_out(claim, op, shape, dtype):
    assert counted_records.work_of(claim, op, shape, dtype) is None


def test_three_sigmoids_move_what_notebook_04_counted(h200):
    curve = h200.series("04_fusion", "sigmoids")
    for way, accesses in zip(curve["way"] + ", " + curve["pass"], curve["accesses"], strict=True):
        assert sum(counted_records.SIGMOIDS[way]) == accesses


def test_attention_curves_have_the_flops_they_were_recorded_with(h200, predicted):
    curve = h200.series("12_flash_backward", "lengths")
    ours = row(curve, backend="ours", n=2048, causal=True, dim=64)
    found = row(predicted, op="attention backward, flash_attention", shape="8x32x2048x64 causal")
    computed_ms = ours["tflop_per_s"] * ours["ms"] / 710.26
    assert found["predicted_ms"] == pytest.approx(0.003936 + computed_ms, rel=1e-3)
    steps = row(predicted, claim="L25", op="matmul, persistent")
    assert steps["shape"] == "8192x32768x8192"  # found by its FLOPs


def test_a_cpu_is_predicted_by_its_own_roofs_and_clock(cpu):
    found = predictions.predictions(cpu)
    add = row(found, op="add")
    assert add["predicted_ms"] == pytest.approx(0.01 + 3 * 4 * 512**2 / 20e6)
    assert add["note"] == predictions.CPU_NOTE and add["bound"] == "memory"
    matmul = row(found, op="matmul")
    assert matmul["predicted_ms"] == pytest.approx(0.01 + 2 * 512**3 / 0.1e9)
    assert matmul["note"] == "" and len(found) == 5


def test_what_ran_out_of_memory_has_no_row(h200, tmp_path):
    curve = h200.series("11_flash_attention", "lengths")
    curve.loc[curve["backend"] == "standard", ["ms", "tflop_per_s"]] = math.nan
    curve.to_csv(tmp_path / "11_flash_attention.lengths.csv", index=False)
    machine = Machine("this run", h200.records, (f"{tmp_path}/",))
    assert predictions.predictions(machine)["ratio"].notna().all()
    ways = scoreboard.five_ways(machine)
    assert "manual" not in set(ways[ways["operation"] == "attention"]["way"])


def test_another_devices_numbers_do_not_stand_under_this_ones_roof(lecture):
    found = predictions.predictions(lecture)
    assert "S46" not in set(found["claim"])  # an A100's


# ---- levers ----


def test_gains_are_records_or_ratios_of_records(h200, lecture, cpu):
    frame = levers.levers([lecture, h200, cpu])
    of = row(frame, lever="less divergence")
    assert of[h200.name] == h200.value("S22", "gain")
    of = row(frame, lever="literals in fp32")
    assert of[h200.name] == pytest.approx(1.504 / 1.0016)
    of = row(frame, what="GeLU, nine kernels as one")
    assert of[h200.name] == pytest.approx(5.4848 / 0.50754)  # by events
    assert of[lecture.name] == pytest.approx(7669 / 701.56)  # by its kernels: it has no events
    of = row(frame, what="GPT-2's step, 50,304 words for 50,257")
    assert of[lecture.name] == 1.25
    of = row(frame, what="attention")
    assert of[h200.name] == h200.value("S46", levers.FLASH, shape="1x16x16384x128")
    assert frame[cpu.name].dropna().tolist() == [1.5]
    assert frame[h200.name].notna().all()


def test_every_recorded_gain_is_a_lever_of_its_notebook(h200):
    for found in (r for r in h200.records if r["op"].startswith("gain")):
        mine = [lever for lever in levers.LEVERS if lever.claim == found["claim"]]
        values = [levers.gain(h200, lever) for lever in mine]
        assert found["value"] in values, found
        assert {lever.notebook for lever in mine} >= {found["notebook"]}


def test_notebook_03_says_the_same_of_its_levers():
    (cell,) = (c for c in read(ROOT / "notebooks" / "03_roofline.ipynb").cells
               if c.source.startswith("LEVERS = "))  # fmt: skip
    theirs = ast.literal_eval(
        ast.get_source_segment(cell.source, ast.parse(cell.source).body[0].value)
    )
    ours = {(lever.lever, lever.claim, lever.notebook, lever.effect) for lever in levers.LEVERS}
    assert set(theirs) <= ours


# ---- pictures ----


@pytest.fixture
def axes():
    fig, ax = plt.subplots(figsize=(9, 7))
    yield ax
    plt.close(fig)


def test_every_reason_is_numbered_in_the_picture(axes, predicted, h200):
    scoreboard_plot.draw_predictions(axes, {h200.name: predicted})
    numbers = sorted(int(text.get_text()) for text in axes.texts if text.get_text().isdigit())
    reasons = set(predicted["note"]) - {""}
    assert numbers == list(range(1, len(reasons) + 1))
    keys = "\n".join(text.get_text() for text in axes.texts)
    assert all(reason in keys for reason in reasons)
    points = sum(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None")
    assert points == len(predicted)


def test_numbers_do_not_cover_each_other(axes, predicted, h200):
    scoreboard_plot.draw_predictions(axes, {h200.name: predicted})
    axes.figure.canvas.draw()
    boxes = [Text.get_window_extent(a) for a in axes.texts if a.get_text().isdigit()]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])


def test_levers_and_ways_are_drawn_for_all_machines(axes, h200, lecture, cpu):
    every = [lecture, h200, cpu]
    scoreboard_plot.draw_levers(axes, levers.levers(every))
    assert len(axes.patches) == len(levers.LEVERS)
    assert max(axes.patches, key=lambda bar: bar.get_width()).get_y() == max(
        bar.get_y() for bar in axes.patches
    )
    fig = plt.figure()
    scoreboard_plot.draw_five_ways(fig, {m.name: scoreboard.five_ways(m) for m in every})
    assert len(fig.axes) == 6
    plt.close(fig)


def test_looks_are_the_houses_and_readers_machines_differ():
    looks = scoreboard_plot.looks([machines.LECTURE, machines.RECORDED, "one", "two"])
    assert [look["label"] for look in looks.values()] == list(looks)
    assert len({look["color"] for look in looks.values()}) == 4


def test_nothing_to_draw_is_said(axes):
    nothing = Machine("nothing", ())
    scoreboard_plot.draw_predictions(axes, {"nothing": predictions.predictions(nothing)})
    scoreboard_plot.draw_levers(axes, levers.levers([nothing]))
    scoreboard_plot.draw_five_ways(axes.figure, {"nothing": scoreboard.five_ways(nothing)})
    assert len(axes.texts) == 2
