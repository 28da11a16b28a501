"""Where rows begin: the power of two in a size, the widest aligned access, padding.

A row-major matrix of `columns` elements begins its rows at multiples of columns x itemsize bytes.
A GPU loads up to 16 bytes a thread in one instruction, from multiples of that size only; its tensor
memory accelerator (TMA, from Hopper on) asks for row strides that are multiples of 16 bytes. So if
rows are dense, an odd number of 16-bit columns leaves 2 bytes at a time, and no TMA.
"""

import random

import matplotlib.pyplot as plt

VECTOR_BYTES = 16  # CUDA C++ Programming Guide: "Device memory accesses"; TMA: globalStrides
CLASSES = (1, 2, 4, 8, 16, 32, 64, 128)


def power_of_2_dividing(n: int) -> int:
    """The largest power of two that divides n; ValueError below 1."""
    if n < 1 or n % 1:
        raise ValueError(f"a size is a whole number of at least 1, not {n}")
    return n & -n


def widest_access_bytes(leading: int, itemsize: int) -> int:
    """The widest access, up to 16 bytes, that is aligned wherever a row begins.

    leading: the distance of two rows in elements (the leading dimension). The first row is taken
    to begin at a multiple of 16 bytes, as new tensors do.
    """
    return min(VECTOR_BYTES, power_of_2_dividing(leading * itemsize))


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, not {multiple}")
    return -(-n // multiple) * multiple


def class_of(n: int) -> int:
    """The largest of `CLASSES` that divides n."""
    return min(CLASSES[-1], power_of_2_dividing(n))


def sizes_by_class(least: int, most: int, per_class: int, seed: int = 0) -> list[int]:
    """Sizes from least to most, as many of each class, evenly spread but at random in detail.

    Few sizes are divisible by 128 and half of all are odd: drawn without classes, most points
    would say the same. Classes with fewer members than asked for give all they have.
    """
    if not 1 <= least <= most or per_class < 1:
        raise ValueError("sizes go from least >= 1 to most, and per_class is at least 1")
    rng, found = random.Random(seed), []
    for kind in CLASSES:
        members = [n for n in range(least, most + 1) if class_of(n) == kind]
        wanted = min(per_class, len(members))
        for part in range(wanted):  # one of each part, so that they are spread
            start, stop = (i * len(members) // wanted for i in (part, part + 1))
            found.append(rng.choice(members[start:stop]))
    return sorted(found)


def scatter(ax, n, values, size: float = 14) -> None:
    """Points (n, value) coloured by `class_of(n)`, with a legend, as on the lecture's slide."""
    colours = plt.get_cmap("viridis_r")
    for place, kind in enumerate(CLASSES):
        points = [(x, y) for x, y in zip(n, values, strict=True) if class_of(x) == kind]
        if points:
            label = f"{kind} or more" if kind == CLASSES[-1] else f"{kind}"
            colour = colours(0.06 + 0.94 * place / (len(CLASSES) - 1))
            ax.scatter(*zip(*points, strict=True), s=size, color=colour, label=label, zorder=3)
    ax.legend(title="largest power of two\nthat divides N", fontsize=8, title_fontsize=8,
              loc="center left", bbox_to_anchor=(1, 0.5))  # fmt: skip
