"""Layouts: which thread holds which element, against Triton's definitions and against the PTX."""

import itertools
import math
import re

import numpy as np
import pytest

from helpers import ptx
from helpers.ptx import layouts
from helpers.ptx.layouts import Tensor
from helpers.ptx.text import instructions

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from test_ptx_triton import MATMUL, matmul  # noqa: E402


@triton.jit
def gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n).to(tl.float32)
    y = x * tl.sigmoid(1.59576912 * (x + 0.044715 * x * x * x))
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n)


@triton.jit
def number(p_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr):
    """Stores every element's index in memory; ACROSS: consecutive along columns, else rows."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    index = i * COLUMNS + j if ACROSS else j * ROWS + i
    tl.store(p_ptr + index, index)


@triton.jit
def row_sums(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(y_ptr + i, tl.sum(tl.load(x_ptr + i[:, None] * COLUMNS + j[None, :]), 1))


def compiled_gelu(dtype="fp32", num_warps=4, block=1024, alignment="", n="i32:16"):
    signature = {"x_ptr": f"*{dtype}{alignment}", "y_ptr": f"*{dtype}{alignment}", "n": n}
    return ptx.triton_compiled(gelu, signature, {"BLOCK": block}, num_warps=num_warps)


def of_thread_5(one: ptx.Compiled) -> list[range]:
    load, store = (layouts.find(one.tensors, name) for name in ("tt.load", "tt.store"))
    assert layouts.runs(load, 5) == layouts.runs(store, 5) and load.layout == store.layout
    return layouts.runs(load, 5)


@pytest.fixture(scope="module", autouse=True)
def compile_all_at_once():
    """One child process for all kernels of this file; the tests then find them on disk."""
    requests = [ptx.Request(*case) for case in (*GELUS, *NUMBERS, *SUMS, *MATMULS)]
    ptx.triton_compile_many(requests)


GELU = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32:16"}
BF16 = GELU | {"x_ptr": "*bf16", "y_ptr": "*bf16"}
UNALIGNED = {"x_ptr": "*fp32:4", "y_ptr": "*fp32:4", "n": "i32:16"}
GELUS = [
    (gelu, signature, {"BLOCK": 1024}, "sm_90", num_warps)
    for signature in (GELU, BF16, UNALIGNED, GELU | {"n": "i32"})
    for num_warps in (4, 8)
] + [(gelu, GELU, {"BLOCK": 64})]
SHAPES = [(1, 1024), (1, 64), (32, 64), (64, 32), (16, 16), (2, 8), (256, 4), (128, 128)]
NUMBERS = [
    (number, {"p_ptr": "*i32"}, dict(ROWS=m, COLUMNS=n, ACROSS=across), "sm_90", num_warps)
    for num_warps, shapes in ((4, SHAPES), (1, SHAPES[2:5]), (8, SHAPES[2:5]))
    for (m, n), across in itertools.product(shapes, (True, False))
]
SUMS = [
    (row_sums, {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}, {"ROWS": m, "COLUMNS": n})
    for dtype, m, n in [("fp32", 16, 64), ("fp16", 64, 16), ("fp32", 4, 512)]
]
MATMULS = [(matmul, MATMUL, {"TILE": 64}, arch) for arch in ptx.ARCHITECTURES]


def test_a_block_of_gelu():
    # Four floats are 16 bytes, the most that one instruction loads; the rest of the block follows.
    assert of_thread_5(compiled_gelu()) == [range(20, 24), range(532, 536)]
    assert of_thread_5(compiled_gelu(num_warps=8)) == [range(20, 24)]
    assert of_thread_5(compiled_gelu("bf16")) == [range(40, 48)]
    assert of_thread_5(compiled_gelu("bf16", num_warps=8)) == [range(20, 24)]
    # Nothing is known of the addresses: neighbours in a warp take neighbours in memory.
    alone = of_thread_5(compiled_gelu(alignment=":4"))
    assert alone == [range(k, k + 1) for k in range(5, 1024, 128)]
    # A last, partial group changes what one instruction loads, not who holds what.
    unknown_n = compiled_gelu(n="i32")
    assert of_thread_5(unknown_n) == [range(20, 24), range(532, 536)]
    assert ptx.bytes_per_access(unknown_n.ptx).bytes.tolist() == [4, 4]
    assert ptx.bytes_per_access(compiled_gelu().ptx).bytes.tolist() == [16, 16]


def test_a_block_smaller_than_its_threads():
    load = layouts.find(compiled_gelu(block=64).tensors)
    found = layouts.owners(load)
    assert found.copies == 2 and found.warp.tolist() == [0] * 32 + [1] * 32
    assert found.lane.tolist() == [*range(32)] * 2 and not found.register.any()
    assert layouts.runs(load, 70) == layouts.runs(load, 6) == [range(6, 7)]


# A layout by hand: bits of the register, the lane and the warp, as in Triton's own documentation.
HAND = Tensor("x", "f32", (4, 64), "", ((0, 1), (2, 0)), tuple((0, 2 << i) for i in range(5)), ())


def test_elements_and_owners_by_hand():
    held = layouts.elements(HAND)
    assert held.shape == (1, 32, 4, 2)
    assert held[0, 3].tolist() == [[0, 6], [0, 7], [2, 6], [2, 7]]
    with pytest.raises(ValueError):  # rows 1 and 3 belong to nobody
        layouts.owners(HAND)
    whole = Tensor("x", "f32", (4, 64), "", HAND.register, HAND.lane, ((1, 0), (0, 0)))
    found = layouts.owners(whole)
    assert found.copies == 2 and found.lane.shape == (4, 64)
    assert found.warp[:, 9].tolist() == [0, 1, 0, 1] and found.lane[3].tolist() == [
        column // 2 for column in range(64)
    ]
    assert found.register[2:, 5].tolist() == [3, 3] and found.register[:2, 4].tolist() == [0, 0]


def numbers_of(layout: str, key: str) -> list[int]:
    return list(map(int, re.search(rf"{key} = \[([\d, ]+)\]", layout)[1].split(",")))


def blocked(layout: str, shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Warp and lane of each element, by the definition in TritonGPUAttrDefs.td.

    Along each dimension a thread takes sizePerThread elements, the next thread of the warp the
    next ones, after threadsPerWarp of them the next warp, and after the last warp the first again.
    """
    size, lanes, warps, order = (
        numbers_of(layout, key) for key in "sizePerThread threadsPerWarp warpsPerCTA order".split()
    )
    coordinates = np.indices(shape)
    warp = lane = 0
    for d in reversed(order):  # the slowest first
        group = coordinates[d] // size[d]
        lane = lane * lanes[d] + group % lanes[d]
        warp = warp * warps[d] + group // lanes[d] % warps[d]
    return warp, lane


def tensors(cases) -> list[Tensor]:
    found = ptx.triton_compile_many([ptx.Request(*case) for case in cases])
    return [tensor for one in found for tensor in one.tensors]


def test_blocked_layouts_as_triton_defines_them():
    orders = set()
    for tensor in tensors((*GELUS, *NUMBERS, *SUMS, *MATMULS)):
        if not tensor.layout.startswith("#ttg.blocked"):
            continue
        warp, lane = blocked(tensor.layout, tensor.shape)
        found = layouts.owners(tensor)
        assert (found.warp == warp).all() and (found.lane == lane).all(), tensor
        threads = math.prod(numbers_of(tensor.layout, "warpsPerCTA")) * 32
        registers = layouts.elements(tensor).shape[2]
        assert found.copies == threads * registers // math.prod(tensor.shape)
        orders.add(tuple(numbers_of(tensor.layout, "order")))
    assert orders == {(0,), (1, 0), (0, 1)}


def test_a_slice_is_its_parent_without_one_dimension():
    slices = set()
    for tensor in tensors(SUMS):
        match = re.fullmatch(
            r"#ttg.slice<\{dim = (\d), parent = (#ttg.blocked<.*>)\}>", tensor.layout
        )
        if match is None:
            continue
        dim = int(match[1])
        # The parent's tensor may be of any length along the dimension that goes: take 1.
        shape = tensor.shape[:dim] + (1,) + tensor.shape[dim:]
        warp, lane = (array.squeeze(dim) for array in blocked(match[2], shape))
        found = layouts.owners(tensor)
        assert (found.warp == warp).all() and (found.lane == lane).all(), tensor
        slices.add((dim, found.copies))
    assert {dim for dim, _ in slices} == {0, 1} and max(copies for _, copies in slices) > 1


def test_tensor_cores():
    # PTX manual, "Matrix fragments for mma.m16n8k16": c0 and c1 in row lane / 4, columns
    # 2 (lane % 4) and the next; c2 and c3 eight rows below.
    total = layouts.find(tensors([MATMULS[1]]), "tt.dot")
    assert "#ttg.nvidia_mma<{versionMajor = 2" in total.layout and total.element == "f32"
    found = layouts.owners(total)
    rows, columns = np.indices((16, 8))
    assert (found.lane[:16, :8] == rows % 8 * 4 + columns // 2).all()
    assert (found.register[:16, :8] == rows // 8 * 2 + columns % 2).all()
    assert len(np.unique(found.warp[:16, :8])) == 1 and found.copies == 1
    # Hopper's, "Register Fragments for wgmma.mma_async.m64nNk16": the same, 16 rows to a warp.
    hopper = layouts.owners(layouts.find(tensors([MATMULS[4]]), "ttng.warp_group_dot"))
    assert (hopper.lane[:16, :8] == found.lane[:16, :8]).all()
    assert (hopper.warp == np.arange(64)[:, None] // 16).all()


def test_every_tensor_of_a_matmul_has_an_owner():
    for tensor in tensors(MATMULS):
        found = layouts.owners(tensor)
        assert found.warp.shape == tensor.shape and found.lane.max() < 32
        assert found.warp.max() < 4 and found.copies >= 1


def stored(text: str, num_threads: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Runs the PTX of `number` for all threads: of each element stored, who, where and what.

    "who" is True for the threads whose predicate lets them store; addresses are from p_ptr on.
    """
    values = {"%tid.x": np.arange(num_threads)}
    found = []

    def value(name: str) -> np.ndarray:
        known = values.get(name)
        return np.full(num_threads, int(name, 0)) if known is None else known

    compute = {
        "mov": lambda a: a,
        "cvt": lambda a: a,
        "shl": np.left_shift,
        "shr": np.right_shift,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "add": np.add,
        "mul": np.multiply,
        "mad": lambda a, b, c: a * b + c,
        "not": np.logical_not,
    }
    compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "gt": np.greater}
    for step in instructions(text):
        stem, *parts = step.opcode.split(".")
        names = re.findall(r"[%\w.]+", step.operands)
        if stem == "ld":
            values[names[0]] = np.zeros(num_threads, int)  # the one parameter, p_ptr
        elif stem == "setp":
            values[names[0]] = compare[parts[0]](*map(value, names[1:]))
        elif stem == "st":
            allowed = np.ones(num_threads, bool)
            if step.predicate:
                allowed = values[step.predicate.lstrip("@!")].astype(bool)
                allowed = ~allowed if "!" in step.predicate else allowed
            base = value(names[0]) + int(names[1])
            found += [(allowed, base + 4 * k, value(name)) for k, name in enumerate(names[2:])]
        elif stem != "ret":
            values[names[0]] = compute[stem](*map(value, names[1:]))
    return found


@pytest.mark.parametrize("case", NUMBERS, ids=lambda c: "-".join(map(str, (*c[2].values(), c[4]))))
def test_the_threads_of_the_ptx_store_what_the_layout_says(case):
    one = ptx.triton_compiled(*case[:4], num_warps=case[4])
    tensor = layouts.find(one.tensors, "tt.store")
    held = layouts.elements(tensor)
    i, j = np.moveaxis(held.reshape(-1, *held.shape[2:]), -1, 0)  # (threads, registers)
    rows, columns, across = case[2].values()
    index = i * columns + j if across else j * rows + i
    found = stored(one.ptx, 32 * case[4])
    assert len(found) <= index.shape[1]
    first = layouts.owners(tensor)
    owner = np.full(rows * columns, -1)
    for allowed, address, value in found:
        assert (address == 4 * value)[allowed].all()
        # Some register of the thread holds that element, by the layout.
        assert (index == value[:, None]).any(1).all()
        assert (owner[value[allowed]] == -1).all(), "two threads store one element"
        owner[value[allowed]] = np.flatnonzero(allowed)
    # Of several threads that hold an element, the first stores it.
    expected = first.warp * 32 + first.lane
    assert (
        owner.reshape((rows, columns) if across else (columns, rows))
        == (expected if across else expected.T)
    ).all()


def test_names_and_what_is_not_there():
    one = ptx.triton_compiled(*SUMS[0])
    found = layouts.names(one.ttgir)
    assert set(found) >= {"#blocked"} and all(name in one.ttgir for name in found)
    assert {t.layout for t in one.tensors if "slice" not in t.layout} <= set(found.values())
    with pytest.raises(KeyError, match="no tensor of tt.dot in this kernel, only of: .*tt.load"):
        layouts.find(one.tensors, "tt.dot")
    with pytest.raises(ValueError, match="one-dimensional tensors, not of shape"):
        layouts.runs(layouts.find(one.tensors))


def test_steps_are_combined_by_xor():
    """As in swizzled layouts, where a step may go back: of lanes 1, of registers 3."""
    tensor = layouts.Tensor("tt.load", "f32", (4,), "#linear", ((3,),), ((1,),), ())
    assert layouts.elements(tensor)[0, :, :, 0].tolist() == [[0, 3], [1, 2]]
