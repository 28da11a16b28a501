"""Which thread of a block holds which element of a tensor: the layouts of Triton's TTGIR.

Triton writes every layout as one rule (its "linear layout", include/triton/Tools/LinearLayout.h):
a register, lane or warp is a number in binary, each of its bits stands for a step through the
tensor, and the steps of the bits that are set are combined by XOR. The compiler's child process
asks Triton for the steps, so that this holds for all layouts, also those of tensor cores.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

Steps = tuple[tuple[int, ...], ...]  # of each bit, the lowest first: one number a dimension


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The tensor that an operation of a kernel makes, or its first operand when it makes none.

    `operation`: as TTGIR calls it ("tt.load", "tt.store"). `element`: the type of one element, of
    a tensor of addresses what they point to ("f32"). `layout`: as TTGIR spells it. `register`,
    `lane`, `warp`: the steps of their bits; a step of zero means that both hold the same element.
    """

    operation: str
    element: str
    shape: tuple[int, ...]
    layout: str
    register: Steps
    lane: Steps
    warp: Steps


@dataclasses.dataclass(frozen=True)
class Owners:
    """Who holds each element of a tensor: integer arrays of its shape.

    When several places hold an element it is the first, the lowest warp, then lane, then register;
    `copies` is how many do, the same for all elements.
    """

    warp: np.ndarray
    lane: np.ndarray
    register: np.ndarray
    copies: int


def names(ttgir: str) -> dict[str, str]:
    """The layouts that a TTGIR text defines at its head: "#blocked" -> "#ttg.blocked<{...}>"."""
    return dict(re.findall(r"(?m)^(#\w+) = (#tt\w+\..*)$", ttgir))


def find(tensors: Sequence[Tensor], operation: str = "tt.load") -> Tensor:
    """The first tensor of that operation, among a `Compiled`'s `tensors`.

    KeyError when there is none. In a pipelined loop a load is a "ttg.async_copy_global_to_local".
    """
    for tensor in tensors:
        if tensor.operation == operation:
            return tensor
    known = ", ".join(dict.fromkeys(tensor.operation for tensor in tensors))
    raise KeyError(f"no tensor of {operation} in this kernel, only of: {known or 'nothing'}")


def elements(tensor: Tensor) -> np.ndarray:
    """The element in each register: its coordinates, (warps, lanes, registers, dimensions)."""
    held = np.zeros((1, 1, 1, len(tensor.shape)), int)
    for axis, steps in enumerate((tensor.warp, tensor.lane, tensor.register)):
        for step in steps:  # a higher bit repeats what the lower ones reach, one step further
            held = np.concatenate([held, held ^ np.array(step, int)], axis)
    return held


def owners(tensor: Tensor) -> Owners:
    """Who holds each element."""
    held = elements(tensor)
    indices = np.ravel_multi_index(tuple(np.moveaxis(held, -1, 0)), tensor.shape)
    _, first, copies = np.unique(indices, return_index=True, return_counts=True)
    where = np.unravel_index(first.reshape(tensor.shape), indices.shape)
    return Owners(*where, copies=int(copies[0]))


def runs(tensor: Tensor, thread: int = 0) -> list[range]:
    """The elements of a one-dimensional tensor that one thread of a block holds, as ranges.

    In the order of its registers, consecutive ones together. ValueError for other tensors.
    """
    if len(tensor.shape) != 1:
        raise ValueError(f"runs are of one-dimensional tensors, not of shape {tensor.shape}")
    held = elements(tensor)
    held = held.reshape(-1, held.shape[2])[thread].tolist()
    breaks = [i for i in range(1, len(held)) if held[i] != held[i - 1] + 1]
    edges = itertools.pairwise([0, *breaks, len(held)])
    return [range(held[first], held[last - 1] + 1) for first, last in edges]
