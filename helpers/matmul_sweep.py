"""Matmuls of many sizes, measured in a shuffled order: drift becomes scatter, and bends no curve.

A size may stand several times in a sweep; how far its times differ says how far to trust the rest.
"""

import dataclasses
import math
import random
import re
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from helpers import kernel_names, profiling
from helpers.bench import measure
from helpers.compute_roofs import random_matrix
from helpers.device import device, has_cuda

BUDGET_MS = 8  # each measurement warms up for 25 ms before


def shuffled(items: Iterable, seed: int = 0) -> list:
    """The items in a random order, the same for the same seed."""
    items = list(items)
    random.Random(seed).shuffle(items)
    return items


@dataclasses.dataclass(frozen=True)
class Operands:
    """Two operands and a result cut from three flat buffers: no size has to be allocated anew."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> "Operands":
        """Buffers of random numbers large enough for every (m, n, k)."""
        sizes = (max(m * k for m, _, k in shapes), max(k * n for _, n, k in shapes))
        a, b = (random_matrix(1, size, dtype).view(-1) for size in sizes)
        c = torch.empty(max(m * n for m, n, _ in shapes), dtype=dtype, device=device())
        return cls(a, b, c)

    def matrices(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(m, k), (k, n) and (m, n), contiguous; they share memory with those of other sizes."""
        return self.a[: m * k].view(m, k), self.b[: k * n].view(k, n), self.c[: m * n].view(m, n)


def sweep(
    shapes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    run: Callable[..., object] | None = None,
    budget_ms: float = BUDGET_MS,
):
    """Time c = a @ b for each (m, n, k), as a pandas frame: m, n, k, ms, p20, p80, tflop_per_s.

    run(a, b, c) writes the product; by default torch.mm. Rows are sorted; the order of measuring
    is not. The L2 is left as the call before left it, on a CPU all caches.
    """
    import pandas as pd

    run = run or (lambda a, b, c: torch.mm(a, b, out=c))
    operands, rows = Operands.of(shapes, dtype), []
    for m, n, k in shuffled(shapes):
        a, b, c = operands.matrices(m, n, k)
        found = measure(
            lambda a=a, b=b, c=c: run(a, b, c),
            flops=2 * m * n * k,
            clock="event" if has_cuda() else "host",
            cache="warm",
            budget_ms=budget_ms,
        )
        times = found.median_ms, found.p20_ms, found.p80_ms
        rows.append((m, n, k, *times, found.tflop_per_s))
    names = ["m", "n", "k", "ms", "p20", "p80", "tflop_per_s"]
    return pd.DataFrame(rows, columns=names).sort_values(["m", "n", "k"], ignore_index=True)


def squares(sizes: Iterable[int], dtype: torch.dtype, **choice):
    """`sweep` of n x n @ n x n."""
    return sweep([(n, n, n) for n in sizes], dtype, **choice)


def drift(frame) -> float:
    """How far the medians of one shape that was measured several times lie apart: 0.02 for 2%."""
    times = frame.groupby(["m", "n", "k"])["ms"]
    return float((times.max() / times.min() - 1).max())


def alignment_in(name: str) -> str:
    """The elements a kernel reads at once, as its name says: "1", or "1/4" where operands differ.

    CUTLASS writes align8, cuBLAS' xmma kernels aligna8_alignc8; "" where the name does not say.
    """
    found = re.findall(r"_align[a-z]?(\d+)", name)
    return "/".join(dict.fromkeys(found))


def matmul_kernels(runs: dict[Hashable, Callable[[], object]]):
    """Which kernel each call launches, as a pandas frame; all calls are in one capture.

    Columns: run; tile and alignment (elements) as the name says; blocks, how many are launched;
    others, how many kernels, fills and copies run beside it (a split-K sum, say); beside, their
    names; us, of all of them; name. Empty where no kernel is seen: on a CPU, or where the profiler
    may not look. ValueError for a call that launches none.
    """
    import pandas as pd

    names = ["run", "tile", "alignment", "blocks", "others", "beside", "us", "name"]
    if not has_cuda() or not runs:
        return pd.DataFrame(columns=names)
    mark = torch.zeros(1, device=device())

    def all_of_them():
        for run in runs.values():
            mark.cos_()  # a kernel that no matmul launches, in front of each of them
            run()

    groups: list[list] = []
    launched = list(profiling.kernels(profiling.capture(all_of_them)).itertuples())
    if not launched:
        return pd.DataFrame(columns=names)
    for kernel in launched:
        if kernel.full_name == launched[0].full_name:
            groups.append([])
        else:
            groups[-1].append(kernel)
    if len(groups) != len(runs) or not all(groups):
        raise ValueError(f"{len(runs)} calls, and kernels of {sum(map(bool, groups))}")
    rows = []
    for label, found in zip(runs, groups, strict=True):
        main = max(found, key=lambda kernel: kernel.duration_us)
        tile = kernel_names.decode(main.full_name).tile
        written = (
            label,
            "x".join(str(size) for size in (tile or ())[:2]) or "?",
            alignment_in(main.full_name) or "?",
            math.prod(main.grid or ()),
            len(found) - 1,
            ", ".join(dict.fromkeys(kernel.name for kernel in found if kernel is not main)),
            sum(kernel.duration_us for kernel in found),
            main.name,
        )
        rows.append(written)
    return pd.DataFrame(rows, columns=names)
