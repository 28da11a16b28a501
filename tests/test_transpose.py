"""What the transposes of transpose.cu cost, and that their cases notice what is wrong."""

import dataclasses
import re

import pytest
import torch
from cuda_cases import CASES
from emulation import needs_emulator

from helpers.emulator import KernelFault

pytestmark = needs_emulator
TRANSPOSES = {str(case): case for case in CASES if case.file == "transpose.cu"}


def emulated(case, size, kernel=None):
    launch = case.launch(size, torch.device("cpu"))
    rows, columns = size
    x, y = (t.clone() for t in launch.arguments[:2])  # aligned, unlike a case's own
    counts = (kernel or case.load()).emulate(launch.grid, launch.block, x, y, rows, columns)
    return counts, y.equal(x.T)


@pytest.mark.parametrize(
    "name, store_sectors, extra_passes",
    [
        ("transpose_naive", 32, 0),
        ("transpose_tiled-0", 4, 31),
        ("transpose_tiled-1", 4, 0),
        ("transpose_swizzled", 4, 0),
    ],
)
def test_sectors_and_bank_conflicts(name, store_sectors, extra_passes):
    counts, right = emulated(TRANSPOSES[name], (64, 96))
    elements = 64 * 96
    assert right and (counts.loads, counts.stores) == (elements, elements)
    assert counts.sectors_per_load_request == 4
    assert counts.sectors_per_store_request == store_sectors
    shared = 0 if name == "transpose_naive" else elements
    assert (counts.shared_loads, counts.shared_stores) == (shared, shared)
    assert counts.bank_conflicts == extra_passes * elements / 32
    assert counts.barriers == (6 if shared else 0)


@pytest.mark.parametrize("name", ["transpose_tiled-1", "transpose_swizzled"])
def test_misaligned_rows_touch_at_most_five_sectors(name):
    counts, right = emulated(TRANSPOSES[name], (33, 65))
    assert right and counts.bank_conflicts == 0
    assert counts.sectors_per_load_request <= 5 and counts.sectors_per_store_request <= 5


def products(text: str) -> list[str]:
    """What is multiplied by a matrix's rows or columns, with the type that it is cast to."""
    factor = r"(?:\([^()]*\)|[\w.]+)"
    cast, size = r"(?:\([\w ]+\)\s*)?", r"(?:rows|columns)\b"
    return re.findall(rf"({cast}{factor}\s*\*\s*{size}|\b{size}\s*\*\s*{factor})", text)


@pytest.mark.parametrize("name", ["transpose_naive", "transpose_tiled-1", "transpose_swizzled"])
def test_places_are_counted_in_64_bits(name):
    """To see it in a result takes matrices of 8 GB: in 32 bits, places up to 2^32 may be right."""
    function = TRANSPOSES[name].load().function
    assert function.count(" * rows") == function.count(" * columns") == 1
    found = products(function)
    assert len(found) == 2 and all(part.startswith("(long long)") for part in found), found


@pytest.mark.parametrize(
    "text",
    ["(column + k) * rows", "(long long)((column + k) * rows)", "rows * (column + k)", "r * rows"],
)
def test_products_of_32_bits_are_found(text):
    (found,) = products(f"y[{text} + row] = 0;")
    assert not found.startswith("(long long)")


MUTANTS = {
    "transpose_naive": (
        ("row < rows && ", ""),
        (" && column < columns", ""),
        ("column * rows + row", "row * columns + column"),
        ("k < TILE", "k < STEP"),
    ),
    "transpose_tiled-1": (
        ("    __syncthreads();", "   "),
        ("row + k < rows && ", ""),
        ("column + k < columns && ", ""),
        (" && row + threadIdx.x < rows", ""),
        (" && column + threadIdx.x < columns", ""),
        ("tile[threadIdx.x][k];", "tile[k][threadIdx.x];"),
        ("blockIdx.y * TILE, column = blockIdx.x", "blockIdx.x * TILE, column = blockIdx.y"),
        ("[TILE + PAD]", "[TILE - 1]"),
    ),
    "transpose_swizzled": (
        ("    __syncthreads();", "   "),
        ("[threadIdx.x ^ k]", "[threadIdx.x]"),
        ("[k ^ threadIdx.x]", "[k]"),
        ("[k ^ threadIdx.x]", "[k | threadIdx.x]"),
    ),
}


@pytest.mark.parametrize(
    "name, before, after", [(name, *edit) for name, edits in MUTANTS.items() for edit in edits]
)
def test_mutants_are_caught(name, before, after):
    case = TRANSPOSES[name]
    kernel = case.load()
    assert before in kernel.function
    text = kernel.text.replace(kernel.function, kernel.function.replace(before, after))
    mutant = dataclasses.replace(kernel, text=text)
    for size in case.sizes:
        try:
            if not emulated(case, size, mutant)[1]:
                return
        except KernelFault as fault:
            assert fault.kernel == case.kernel
            return
    pytest.fail("the mutant's results are right for all sizes")
