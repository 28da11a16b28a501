"""Chips drawn to scale: one byte of on-chip memory has the same area everywhere.

`draw_chip` draws every SM and the L2, `draw_sm` one SM from inside, `draw_memory` all on-chip
memory beside the card's memory. Lanes and tensor cores are counted, not to scale: nobody publishes
their area. Where each part lies on the real die is not known here either.
"""

import dataclasses
import math

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from helpers import plots, specs

REGISTERS, L1, L2, MEMORY, OFF = plots.BLUE, plots.GREEN, plots.ORANGE, "#E8E8E8", "#BBBBBB"
LANE, TENSOR = plots.SKY, plots.VERMILION
PARTITIONS = 4  # of an SM, from Volta on: each has a scheduler, registers and lanes of its own
LANES_ACROSS = 8
GOLDEN = 0.618034  # whose multiples, modulo 1, spread evenly

# From NVIDIA's architecture whitepapers. Volta and Turing have twice as many, smaller tensor cores.
_FOUR_TENSOR_CORES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
_TENSOR_CORES = dict.fromkeys(("7.0", "7.5"), 8) | dict.fromkeys(_FOUR_TENSOR_CORES, 4)
_FULL_DIE_SMS = {"7.0": 84, "8.0": 128, "9.0": 144}  # GV100, GA100, GH100: one die a generation


@dataclasses.dataclass(frozen=True)
class Memories:
    """On-chip memory in KB (of 1024 bytes), 0 where the datasheet is silent; `sm`: of each SM."""

    sm_registers_kb: float
    sm_l1_kb: float  # shared memory is a part of it
    l2_kb: float
    sms: int

    @property
    def sm_kb(self) -> float:
        """Registers and L1 of one SM."""
        return self.sm_registers_kb + self.sm_l1_kb

    @property
    def registers_kb(self) -> float:
        """The registers of all SMs."""
        return self.sms * self.sm_registers_kb

    @property
    def l1_kb(self) -> float:
        """The L1s of all SMs."""
        return self.sms * self.sm_l1_kb

    @property
    def total_kb(self) -> float:
        """All of it."""
        return self.registers_kb + self.l1_kb + self.l2_kb


def memories(gpu: specs.GPU) -> Memories:
    """The on-chip memories of a GPU; ValueError where not even its SMs' memory is known."""
    l1_kb = gpu.l1_kb_per_sm or gpu.shared_kb_per_sm or 0
    found = Memories(
        gpu.registers_kb_per_sm or 0, l1_kb, 1024 * (gpu.l2_mb or 0), int(gpu.sms or 0)
    )
    if not found.sms or not found.sm_kb:
        raise ValueError(f"{gpu.name}: the SMs and their memory are not known, so nothing to draw")
    return found


def tensor_cores_per_sm(gpu: specs.GPU) -> int | None:
    """Tensor cores in an SM, None where unknown."""
    return _TENSOR_CORES.get(gpu.compute_capability)


def full_die_sms(gpu: specs.GPU) -> int | None:
    """SMs on the die, of which a product has some switched off; None where unknown."""
    return None if gpu.partial else _FULL_DIE_SMS.get(gpu.compute_capability)


def lanes_per_sm(gpu: specs.GPU) -> int | None:
    """fp32 lanes (multiply-adds a clock) of an SM, None where unknown."""
    return specs.UNITS.get(gpu.compute_capability, {}).get("fp32")


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle of a drawing; areas are in KB, so lengths in √KB."""

    part: str  # "registers", "L1", "L2" or "off" (an SM that is not enabled)
    x: float
    y: float
    width: float
    height: float

    @property
    def area_kb(self) -> float:
        return self.width * self.height


def chip_boxes(gpu: specs.GPU, gap: float = 0.22) -> list[Box]:
    """The boxes of `draw_chip`, the lower left corner of the chip at (0, 0).

    SMs stand in two halves with the L2 between them, as on an A100's die. gap: between SMs, as a
    share of an SM's side.
    """
    has, die = memories(gpu), max(full_die_sms(gpu) or 0, int(gpu.sms))
    side = math.sqrt(has.sm_kb)
    pitch = side * (1 + gap)

    def rows(columns: int) -> int:
        return 2 * math.ceil(die / (2 * columns))

    def badness(columns: int) -> float:  # far from 2 : 1 without the L2, or with a ragged last row
        ragged = rows(columns) * columns / die - 1
        return abs(math.log(columns / rows(columns) / 2)) + 10 * ragged

    columns = min(range(2, die + 2), key=badness)
    width = columns * pitch - side * gap
    l2_height, half = has.l2_kb / width, rows(columns) // 2
    boxes = [Box("L2", 0, half * pitch, width, l2_height)] if l2_height else []
    registers_height = has.sm_registers_kb / side
    # Which SMs are switched off differs from chip to chip: here they are scattered.
    off = sorted(range(die), key=lambda sm: sm * GOLDEN % 1)[: die - has.sms]
    for sm in range(die):
        row, column = divmod(sm, columns)
        x, y = column * pitch, row * pitch
        if row >= half and l2_height:
            y += l2_height + side * gap
        if sm in off:
            boxes.append(Box("off", x, y, side, side))
            continue
        if registers_height:
            boxes.append(Box("registers", x, y, side, registers_height))
        if has.sm_l1_kb:
            boxes.append(Box("L1", x, y + registers_height, side, side - registers_height))
    return boxes


_COLOURS = {"registers": REGISTERS, "L1": L1, "L2": L2}


def draw_chip(ax: Axes, gpu: specs.GPU) -> None:
    """Every SM (registers below, L1 and shared memory above) and the L2 between the halves.

    Dotted: SMs that are on the die and switched off. Give several axes the same limits, and the
    chips can be compared.
    """
    boxes = chip_boxes(gpu)
    for box in boxes:
        if box.part == "off":
            look = dict(facecolor="none", edgecolor=OFF, linestyle=":", linewidth=0.8)
        else:
            look = dict(facecolor=_COLOURS[box.part], linewidth=0)
        ax.add_patch(Rectangle((box.x, box.y), box.width, box.height, **look))
        if box.part == "L2":
            centre = (box.x + box.width / 2, box.y + box.height / 2)
            ax.text(*centre, f"L2, {gpu.l2_mb:g} MB", ha="center", va="center", fontsize=8)
    right, top = (max(b.x + b.width for b in boxes), max(b.y + b.height for b in boxes))
    _frame(ax, right, top)


def draw_sm(ax: Axes, gpu: specs.GPU) -> None:
    """One SM: its memories to scale, its lanes and tensor cores counted, in four partitions."""
    has, lanes, tensors = memories(gpu), lanes_per_sm(gpu), tensor_cores_per_sm(gpu)
    side = math.sqrt(has.sm_kb)
    gap = 0.02 * side
    width = (side - (PARTITIONS - 1) * gap) / PARTITIONS  # of a partition
    white = dict(ha="center", va="center", color="white", fontsize=8)

    def block(x: float, y: float, width: float, height: float, colour: str) -> None:
        ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, linewidth=0))

    l1_height = has.sm_l1_kb / side
    if l1_height:
        block(0, 0, side, l1_height, L1)
        label = f"L1 and shared memory, {has.sm_l1_kb:g} KB"
        if gpu.l1_kb_per_sm and gpu.shared_kb_per_sm:
            label += f"\n(at most {gpu.shared_kb_per_sm:g} KB shared)"
        ax.text(side / 2, l1_height / 2, label, **white)

    registers_height = has.sm_registers_kb / PARTITIONS / width
    cell = width / LANES_ACROSS
    lanes_height = math.ceil((lanes or 0) / PARTITIONS / LANES_ACROSS) * cell
    lanes_y = l1_height + registers_height + 2 * gap
    tensors_y = lanes_y + lanes_height + gap
    for partition in range(PARTITIONS):
        x = partition * (width + gap)
        block(x, l1_height + gap, width, registers_height, REGISTERS)
        if registers_height:
            text = f"registers\n{has.sm_registers_kb / PARTITIONS:g} KB"
            ax.text(x + width / 2, l1_height + gap + registers_height / 2, text, **white)
        for lane in range((lanes or 0) // PARTITIONS):
            row, column = divmod(lane, LANES_ACROSS)
            block(x + column * cell, lanes_y + row * cell, 0.8 * cell, 0.8 * cell, LANE)
        many = (tensors or 0) // PARTITIONS
        for core in range(many):
            share = width / many
            block(x + core * share, tensors_y, share - gap * (many > 1), 2.5 * cell, TENSOR)
    beside = dict(x=1.03 * side, va="center", fontsize=9)
    if lanes:
        ax.text(y=lanes_y + lanes_height / 2, s=f"{lanes} fp32 lanes", **beside)
    if tensors:
        ax.text(y=tensors_y + 1.25 * cell, s=f"{tensors} tensor cores", **beside)
    _frame(ax, 1.35 * side, tensors_y + 2.5 * cell)


def draw_memory(ax: Axes, gpu: specs.GPU) -> None:
    """The card's memory as a square, with all registers, L1s and the L2 to the same scale in it."""
    if not gpu.memory_gb:
        raise ValueError(f"{gpu.name}: the size of its memory is not known")
    has = memories(gpu)
    side, inner = math.sqrt(gpu.memory_gb * 2**20), math.sqrt(has.total_kb)
    ax.add_patch(Rectangle((0, 0), side, side, facecolor=MEMORY, linewidth=0))
    y, corner = 0.0, 0.05 * side
    for part, kb in (("registers", has.registers_kb), ("L1", has.l1_kb), ("L2", has.l2_kb)):
        height = kb / inner
        ax.add_patch(
            Rectangle((corner, corner + y), inner, height, color=_COLOURS[part], linewidth=0)
        )
        y += height
    text = f"all on-chip memory,\n{has.total_kb / 1024:.0f} MB"
    ax.text(corner + 1.3 * inner, corner, text, fontsize=8, linespacing=0.95)
    ax.text(side / 2, 0.6 * side, f"memory, {gpu.memory_gb:g} GB", ha="center", fontsize=9)
    _frame(ax, side, side)


def _frame(ax: Axes, right: float, top: float) -> None:
    ax.set(xlim=(-0.01 * right, 1.01 * right), ylim=(-0.01 * top, 1.01 * top), aspect="equal")
    ax.axis("off")
