"""Chips to scale: areas are bytes, nothing overlaps, and every SM is there."""

import dataclasses
import itertools

import matplotlib.pyplot as plt
import pytest

from helpers import anatomy, specs

CHIPS = specs.gpus()
FEW = ["T4", "V100 SXM2 16GB", "A100 SXM4 80GB", "H200 SXM", "B200", "RTX 4090", "MI300X"]
a_few = pytest.mark.parametrize("gpu", list(map(specs.get, FEW)), ids=FEW)
each_chip = pytest.mark.parametrize("gpu", CHIPS, ids=lambda gpu: gpu.name)


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def test_an_a100_by_hand():
    has = anatomy.memories(specs.get("A100 SXM4 80GB"))
    assert (has.sm_registers_kb, has.sm_l1_kb, has.sm_kb) == (256, 192, 448)
    assert has.registers_kb == 27 * 1024 and has.l1_kb == 20.25 * 1024 and has.l2_kb == 40 * 1024
    assert has.total_kb == 87.25 * 1024


@pytest.mark.parametrize(
    "name, lanes, tensor_cores, die",
    [
        ("V100 SXM2 16GB", 64, 8, 84),
        ("T4", 64, 8, None),
        ("A100 PCIe 40GB", 64, 4, 128),
        ("H100 PCIe", 128, 4, 144),
        ("RTX 4090", 128, 4, None),
        ("MI300X", 128, None, None),
    ],
)
def test_counts(name, lanes, tensor_cores, die):
    gpu = specs.get(name)
    assert anatomy.lanes_per_sm(gpu) == lanes
    assert anatomy.tensor_cores_per_sm(gpu) == tensor_cores
    assert anatomy.full_die_sms(gpu) == die


@each_chip
def test_a_tensor_core_does_the_same_everywhere_in_an_architecture(gpu):
    cores = anatomy.tensor_cores_per_sm(gpu)
    per_sm = specs.UNITS[gpu.compute_capability]["fp16"]
    assert cores is None or per_sm % cores == 0


@each_chip
def test_areas_are_bytes(gpu):
    boxes, has = anatomy.chip_boxes(gpu), anatomy.memories(gpu)
    area = {part: 0.0 for part in ("registers", "L1", "L2", "off")}
    for box in boxes:
        area[box.part] += box.area_kb
    assert area["registers"] == pytest.approx(has.registers_kb)
    assert area["L1"] == pytest.approx(has.l1_kb)
    assert area["L2"] == pytest.approx(has.l2_kb)
    off = (anatomy.full_die_sms(gpu) or has.sms) - has.sms
    assert off >= 0 and area["off"] == pytest.approx(off * has.sm_kb)
    assert sum(box.part == "L1" for box in boxes) == has.sms


@a_few
def test_nothing_overlaps_and_the_chip_is_compact(gpu):
    boxes = anatomy.chip_boxes(gpu)
    for a, b in itertools.combinations(boxes, 2):
        apart = (
            a.x + a.width <= b.x + 1e-6
            or b.x + b.width <= a.x + 1e-6
            or a.y + a.height <= b.y + 1e-6
            or b.y + b.height <= a.y + 1e-6
        )
        assert apart, (a, b)
    assert min(box.x for box in boxes) == min(box.y for box in boxes) == 0
    width, height = max(b.x + b.width for b in boxes), max(b.y + b.height for b in boxes)
    assert 0.4 < width / height < 3
    assert sum(box.area_kb for box in boxes) > 0.55 * width * height


@a_few
def test_what_is_drawn_is_what_was_computed(gpu, ax):
    anatomy.draw_chip(ax, gpu)
    drawn = sorted(patch.get_width() * patch.get_height() for patch in ax.patches)
    assert drawn == pytest.approx(sorted(box.area_kb for box in anatomy.chip_boxes(gpu)))
    assert ax.get_aspect() == 1  # else equal bytes would not be equal areas


@a_few
def test_an_sm_from_inside(gpu, ax):
    anatomy.draw_sm(ax, gpu)
    area = {}
    for patch in ax.patches:
        colour = patch.get_facecolor()
        area.setdefault(colour, []).append(patch.get_width() * patch.get_height())
    has = anatomy.memories(gpu)
    rgba = {name: plt.matplotlib.colors.to_rgba(getattr(anatomy, name)) for name in NAMES}
    assert sum(area[rgba["REGISTERS"]]) == pytest.approx(has.sm_registers_kb)
    assert sum(area[rgba["L1"]]) == pytest.approx(has.sm_l1_kb)
    assert len(area[rgba["LANE"]]) == anatomy.lanes_per_sm(gpu)
    assert len(area.get(rgba["TENSOR"], [])) == (anatomy.tensor_cores_per_sm(gpu) or 0)


NAMES = ("REGISTERS", "L1", "LANE", "TENSOR")


@a_few
def test_memory_to_the_same_scale(gpu, ax):
    anatomy.draw_memory(ax, gpu)
    whole, *parts = (patch.get_width() * patch.get_height() for patch in ax.patches)
    assert whole == pytest.approx(gpu.memory_gb * 2**20)
    assert sum(parts) == pytest.approx(anatomy.memories(gpu).total_kb)


def test_what_is_unknown_is_left_out(ax):
    unknown = ("l2_mb", "l1_kb_per_sm", "compute_capability", "fp32_tflops")
    gpu = dataclasses.replace(specs.get("H100 SXM"), **dict.fromkeys(unknown))
    assert {box.part for box in anatomy.chip_boxes(gpu)} == {"registers", "L1"}
    assert anatomy.memories(gpu).sm_l1_kb == gpu.shared_kb_per_sm  # all that is known of it
    assert anatomy.lanes_per_sm(gpu) is anatomy.tensor_cores_per_sm(gpu) is None
    anatomy.draw_chip(ax, gpu)
    anatomy.draw_sm(ax, gpu)


def test_a_slice_has_no_full_die():
    whole = specs.get("H100 SXM")
    part = dataclasses.replace(whole, name="H100 SXM MIG 1g.10gb", sms=16, part_of=whole.name)
    assert anatomy.full_die_sms(whole) == 144 and anatomy.full_die_sms(part) is None
    assert sum(box.part == "L1" for box in anatomy.chip_boxes(part)) == 16


@pytest.mark.parametrize("missing", [("sms",), ("registers_kb_per_sm", "l1_kb_per_sm")])
def test_nothing_to_draw(missing, ax):
    empty = dict.fromkeys((*missing, "shared_kb_per_sm"))
    gpu = dataclasses.replace(specs.get("T4"), **empty)
    with pytest.raises(ValueError, match="T4: the SMs and their memory are not known"):
        anatomy.draw_chip(ax, gpu)


def test_a_memory_of_unknown_size(ax):
    with pytest.raises(ValueError, match="size of its memory"):
        anatomy.draw_memory(ax, dataclasses.replace(specs.get("T4"), memory_gb=None))
