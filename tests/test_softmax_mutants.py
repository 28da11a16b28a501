"""The softmax kernels, changed wrongly on purpose: comparing with float64 must notice each change.

On a GPU each mutant of a kernel is compiled for one to four launches, some 150 compilations in
all; those of `softmax_shared_kernel` are left out there: programs that miss each other's pairs wait
forever.
"""

import contextlib
import importlib.util
import inspect
import re
import signal
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers import ptx
from helpers.check import assert_close
from helpers.device import device, interpreting, triton_version
from helpers.kernels import softmax, softmax_backward, softmax_plans, softmax_tiles
from helpers.triton_mode import on_device_of
from tests.test_softmax import assert_softmax, randn, rescalings, slope

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
MODULES = (softmax_tiles, softmax_backward, softmax_plans, softmax)  # each after what it imports
BESIDE = 1 << 15  # elements before and behind each tensor: a wrong kernel may write there
FENCE = 3  # a number, not NaN: one that is read from beside x need not show as NaN in y
SECONDS = 20  # far more than any check takes


def each_of(mutants: dict[str, dict[str, tuple[str, str]]]) -> list:
    """Parameters for a test of each: the kernel, a text in its source, and what replaces it."""
    return [
        pytest.param(kernel, old, new, id=f"{kernel}: {name}")
        for kernel, changes in mutants.items()
        for name, (old, new) in changes.items()
    ]


def changed(
    folder: Path, owner: types.ModuleType, old: str, new: str, all_modules: tuple = MODULES
) -> dict:
    """`all_modules` by name, with every `old` in the text of one of them replaced.

    They stand each after what it imports.
    """
    text = Path(owner.__file__).read_text(encoding="utf-8")
    assert old in text, f"{owner.__name__} has no {old!r}: change this test with it"
    loaded = {}
    for module in all_modules:
        text = Path(module.__file__).read_text(encoding="utf-8")
        file = folder / Path(module.__file__).name
        file.write_text(text.replace(old, new) if module is owner else text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module.__name__, file)
        loaded[module.__name__] = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, loaded):
            spec.loader.exec_module(loaded[module.__name__])
    return {name.rpartition(".")[2]: module for name, module in loaded.items()}


def fenced(values: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of FENCE, and the values within it, `gap` elements between their rows."""
    rows, n = values.shape
    stride = n + gap
    whole = torch.full((rows * stride + 2 * BESIDE,), FENCE, dtype=values.dtype, device=device())
    inside = whole.as_strided((rows, n), (stride, 1), BESIDE)
    inside.copy_(values)
    return whole, inside


def assert_fence(whole: torch.Tensor, inside: torch.Tensor) -> None:
    inside.fill_(FENCE)
    assert whole.eq(FENCE).all(), "written outside"


def inputs(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows: falling, rising, nothing but -inf, half of it, the largest at the ends, far apart."""
    x = randn(7, n)
    x[0] += torch.linspace(-180, -220, n, device=x.device)
    x[1] += torch.linspace(-20, 20, n, device=x.device)
    x[2] = -torch.inf
    x[3, : n // 2] = -torch.inf
    x[4, [0, -1]] = 200
    x[5] *= 60
    x[6, n // 2 + 1 :] = -torch.inf
    return x.to(dtype)


def check_forward(launch, n, dtype, gaps: tuple[int, int], steps: int, rows: int = 7) -> None:
    _, x = fenced(inputs(n, dtype)[:rows], gaps[0])
    whole, y = fenced(torch.full_like(x, -7), gaps[1])
    with on_device_of(x):
        launch(x, y)
    assert_softmax(y, x, steps)
    assert_fence(whole, y)


def check_rows(modules) -> None:
    for dtype, n, gaps in (
        (torch.float32, 5, (1, 2)),
        (torch.float16, 96, (8, 12)),
        (torch.float32, 1025, (0, 3)),
        (torch.float32, 1, (0, 0)),
    ):
        check_forward(modules["softmax"].launch_rows, n, dtype, gaps, 0)


def check_online(modules) -> None:
    def launch(x, y):
        modules["softmax"].launch_online(x, y, 128)

    for dtype, n, gaps in ((torch.float32, 5, (1, 2)), (torch.bfloat16, 1000, (24, 0))):
        check_forward(launch, n, dtype, gaps, rescalings("online", 32 * n))


def check_tiles(modules) -> None:
    for dtype, n, gaps, split in (
        (torch.float32, 1025, (0, 0), True),
        (torch.float16, 1029, (2, 10), True),
        (torch.float32, 1284, (4, 8), False),
    ):

        def launch(x, y, split=split):
            assert modules["softmax_plans"].launch_wide(x, y, split)

        check_forward(launch, n, dtype, gaps, 0)


def check_shared(modules) -> None:
    plans = modules["softmax_plans"]
    for n, gaps, parts, split in ((697, (0, 4), 3, True), (640, (4, 8), 2, False)):

        def launch(x, y, parts=parts, split=split):
            # Two or three tiles for each program, and several rows for each group of them.
            with mock.patch.object(plans, "SHARED_BLOCK", 128):
                plans.launch_shared(x, y, split, parts, 2 * parts + 1)

        check_forward(launch, n, torch.float32, gaps, 1, rows=5)


def check_backward(modules, sizes) -> None:
    for dtype, n, gap in sizes:
        _, y = fenced(torch.softmax(randn(5, n), -1).to(dtype), gap)
        _, grad = fenced(randn(5, n, dtype=dtype, seed=1), 2 * gap)
        whole, dx = fenced(torch.full_like(y, -7), 3 * gap)
        with mock.patch.object(modules["softmax"], "BACKWARD_ELEMENTS", 4096):
            modules["softmax"].launch_triton_softmax_backward(y, grad, dx)
        assert_close(dx, slope(y, grad))
        assert_fence(whole, dx)


def check_rows_backward(modules) -> None:
    sizes = ((torch.float32, 5, 1), (torch.float16, 96, 8), (torch.float32, 1025, 0))
    check_backward(modules, sizes)


def check_tiles_backward(modules) -> None:
    check_backward(modules, ((torch.float32, 5001, 1), (torch.bfloat16, 9200, 8)))


def check_chosen(modules) -> None:
    """What the public function does, its choice of the kernel and autograd included."""
    triton_softmax = modules["softmax"].triton_softmax
    plans = modules["softmax_plans"]
    with (  # so that rows of few elements are wide
        mock.patch.object(modules["softmax"], "REGISTER_COLUMNS", 1100),
        mock.patch.multiple(plans, TILES_COLUMNS=1500, SHARED_BYTES=2048, SHARED_BLOCK=256),
    ):
        whole, odd = randn(3, 1816), randn(3, 1817)
        layouts = [whole[:, :n] for n in (5, 1000, 1029, 1104, 1504, 1816)]
        layouts += [odd[:, :1000], odd[:, :1103], odd[:, ::2], odd.t(), odd[:, 1:1702]]
        layouts += [torch._neg_view(whole[:, :9]), whole[1, :1301], whole[:, :1]]
        for x in layouts:
            leaf = x.detach().requires_grad_()
            y = triton_softmax(leaf)
            assert_softmax(y, x)
            grad = randn(*x.shape[:-1], x.shape[-1] + 3, seed=1)[..., :-3]
            y.backward(grad)
            assert_close(leaf.grad, slope(torch.softmax(x.cpu().double(), -1), grad))


@contextlib.contextmanager
def deadline():
    """AssertionError where an interpreted kernel waits for what never comes."""

    def stop(*_):
        raise AssertionError("it waits forever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


CHECKS = {
    "rows": (check_rows, softmax),
    "online": (check_online, softmax),
    "tiles": (check_tiles, softmax_tiles),
    "shared": (check_shared, softmax_tiles),
    "rows backward": (check_rows_backward, softmax_backward),
    "tiles backward": (check_tiles_backward, softmax_backward),
    "chosen": (check_chosen, softmax),
    "plans": (check_chosen, softmax_plans),
}
ON_A_GPU = set(CHECKS) - {"shared"}


@pytest.mark.parametrize("kernel", CHECKS)
def test_unchanged_kernels_are_right(tmp_path, kernel):
    check, owner = CHECKS[kernel]
    check(changed(tmp_path, owner, "import", "import"))


MUTANTS = {
    "rows": {
        "no maximum": ("x - tl.max(x, axis=1, keep_dims=True)", "x"),
        "maximum of all rows": ("tl.max(x, axis=1, keep_dims=True)", "tl.max(x)"),
        "maximum of the columns": ("tl.max(x, axis=1,", "tl.max(x, axis=0,"),
        "sum of the columns": ("tl.sum(e, axis=1,", "tl.sum(e, axis=0,"),
        "minimum": ("tl.max(x, axis=1", "tl.min(x, axis=1"),
        "padded with 0": (
            'x_ptr + row * x_stride + column, mask=mask, other=-float("inf")',
            "x_ptr + row * x_stride + column, mask=mask, other=0.0",
        ),
        "mask one too far": ("(column < columns)", "(column <= columns)"),
        "mask one too short": ("(column < columns)", "(column < columns - 1)"),
        "rows without a mask": ("(row < rows) & ", ""),
        "one row too few": ("(row < rows)", "(row < rows - 1)"),
        "x's stride for y": ("y_ptr + row * y_stride", "y_ptr + row * x_stride"),
        "y's stride for x": ("x_ptr + row * x_stride", "x_ptr + row * y_stride"),
        "rows without gaps": ("x_ptr + row * x_stride", "x_ptr + row * columns"),
        "columns cut to 4": ("columns // UNIT * UNIT", "columns // 4 * 4"),
        "stride cut to 4": ("y_stride // UNIT * UNIT", "y_stride // 4 * 4"),
        "programs that overlap": (".to(tl.int64) * ROWS +", ".to(tl.int64) * (ROWS // 2) +"),
        "grid rounded down": ("(triton.cdiv(rows, at_once),)", "(rows // at_once,)"),
        "unit of y forgotten": ("(at_once, block, unit(x, y))", "(at_once, block, unit(x))"),
        "not divided": ("e * (1.0 / tl.sum(e, axis=1, keep_dims=True))", "e"),
        "base 2": ("tl.exp(x - tl.max", "tl.exp2(x - tl.max"),
        "rounded to 16 bits within": (
            "x - tl.max(x, axis=1, keep_dims=True)",
            "(x - tl.max(x, axis=1, keep_dims=True)).to(tl.float16).to(tl.float32)",
        ),
        "x instead of y": ("y.to(y_ptr", "x.to(y_ptr"),
    },
    "online": {
        "no rescaling": ("d * tl.exp(m - shift) +", "d +"),
        "rescaled the wrong way": ("tl.exp(m - shift)", "tl.exp(shift - m)"),
        "m renewed before d": (
            "m_new = tl.maximum(m, tl.max(x, axis=0))",
            "m_new = tl.maximum(m, tl.max(x, axis=0))\n        m = m_new",
        ),
        "the new terms rescaled too": (
            "d * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), axis=0)",
            "(d + tl.sum(tl.exp(x - shift), axis=0)) * tl.exp(m - shift)",
        ),
        "maximum of the last tile": ("tl.maximum(m, tl.max(x, axis=0))", "tl.max(x, axis=0)"),
        "NaN after a tile of -inf": ('tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
        "second look with other tiles": (
            "range(0, columns, BLOCK):  # the second",
            "range(0, columns, 2 * BLOCK):  # the second",
        ),
        "first look without the rest": (
            "range(0, columns, BLOCK):  # the first",
            "range(0, columns // BLOCK * BLOCK, BLOCK):  # the first",
        ),
        "padded with 0": (
            'column < columns, other=-float("inf")',
            "column < columns, other=0.0",
        ),
        "mask one too far": ("mask=column < columns)", "mask=column <= columns)"),
        "not masked": (
            "tl.store(y_row + column, y.to(y_ptr.dtype.element_ty), mask=column < columns)",
            "tl.store(y_row + column, y.to(y_ptr.dtype.element_ty))",
        ),
        "x's stride for y": ("y_ptr + row * y_stride", "y_ptr + row * x_stride"),
        "state of the first tile": ("d = d * tl.exp(m - shift) +", "d = d +"),
    },
    "tiles": {
        "no maximum": ("return tl.max(top, axis=0)", "return tl.max(top, axis=0) * 0"),
        "maximum of the last tile": (
            "top = tl.maximum(top, x.to(tl.float32))",
            "top = x.to(tl.float32)",
        ),
        "maximum padded with 0": (
            'other=-float("inf"), eviction_policy="evict_last"',
            'other=0.0, eviction_policy="evict_last"',
        ),
        "sum padded with 0": (
            'mask=at < count, other=-float("inf"))\n        d +=',
            "mask=at < count, other=0.0)\n        d +=",
        ),
        "one element twice": ("at = i * BLOCK + tile", "at = i * (BLOCK - 1) + tile"),
        "sum of the last tile": (
            "d += power(x.to(tl.float32) - shift)",
            "d = power(x.to(tl.float32) - shift)",
        ),
        "base 2": ("tl.exp2(x * LOG2E)", "tl.exp2(x)"),
        "a coarse log2 e": ("1.4426950408889634", "1.4427"),
        "a tile less": ("tl.static_range(TILES)", "tl.static_range(TILES - 1)"),
        "mask one too far": ("at < count", "at <= count"),
        "mask one too short": ("at < count", "at < count - 1"),
        "first unit rounded down": ("(start + UNIT - 1) // UNIT * UNIT", "start // UNIT * UNIT"),
        "not in whole units": ("(columns - head) // UNIT * UNIT", "columns // UNIT * UNIT"),
        "no head": ("(at >= -head) &", "(k >= UNIT) &"),
        "no tail": ("(at < columns - head)", "(at < whole)"),
        "tail one too far": ("(at < columns - head)", "(at <= columns - head)"),
        "head from before the row": ("(at >= -head)", "(at >= -head - 1)"),
        "tail that forgets the head": ("(at < columns - head)", "(at < columns)"),
        "edges in the tiles too": (
            "return first, head, (columns - head) // UNIT * UNIT",
            "return first, head, columns - head",
        ),
        "edges not in the maximum": ("m = tl.maximum(m, tl.max(edge, axis=0))\n    d", "d"),
        "edges not in the sum": ("d += tl.sum(power(edge - m), axis=0)\n    write", "write"),
        "edges twice in the sum": (
            "d += tl.sum(power(edge - m), axis=0)",
            "d += 2 * tl.sum(power(edge - m), axis=0)",
        ),
        "edges not written": (
            "tl.store(y + at, (power(edge - m) / d)",
            "tl.store(y + at, edge * 0 - 7 + (power(edge - m) / d)",
        ),
        "edges not divided": ("(power(edge - m) / d)", "(power(edge - m))"),
        "x's stride for y": (
            "inner(row, y_stride, columns, UNIT)[0]",
            "inner(row, x_stride, columns, UNIT)[0]",
        ),
    },
    "shared": {
        "-inf in a part": ('tl.where(m == -float("inf"), 0.0, m)\n    d', "m\n    d"),
        "-inf in a part with edges": (
            'power(edge - tl.where(m == -float("inf"), 0.0, m))',
            "power(edge - m)",
        ),
        "halves swapped": ("high | low", "(low << 32) | ((high >> 32) & 0xFFFFFFFF)"),
        "sign of m spreads": (".to(tl.int64) & 0xFFFFFFFF", ".to(tl.int64)"),
        "no common maximum": ("power(m - whole)", "1.0"),
        "sum of the first part": (
            "tl.where(each < parts, d * power(m - whole), 0.0)",
            "tl.where(each < 1, d * power(m - whole), 0.0)",
        ),
        "pairs of the first row": ("m, d = gather(pairs, parts", "m, d = gather(pairs_ptr, parts"),
        "one pair less": ("m, d = gather(pairs, parts,", "m, d = gather(pairs, parts - 1,"),
        "padding has a maximum": ('m = tl.where(each < parts, m, -float("inf"))', "m = m"),
        "parts that overlap": (
            "begin = part.to(tl.int64) * (chunk // UNIT * UNIT)",
            "begin = part.to(tl.int64) * (chunk // UNIT * UNIT - UNIT)",
        ),
        "part without an end": ("tl.minimum(whole - begin, chunk // UNIT * UNIT)", "whole - begin"),
        "last part without an end": (
            "tl.minimum(whole - begin, chunk // UNIT * UNIT)",
            "chunk // UNIT * UNIT + 0 * begin",
        ),
        "edges in every part": ("mask = mask & (part == 0)", "mask = mask & (part >= 0)"),
        "edges in no part": ("mask = mask & (part == 0)", "mask = mask & (part < 0)"),
        "groups that skip a row": (", rows, groups):", ", rows, groups + 1):"),
        "only the first rows": (", rows, groups):", ", groups, groups):"),
        "x's stride for y": (
            "inner(row, y_stride, columns, UNIT)[0] + begin",
            "inner(row, x_stride, columns, UNIT)[0] + begin",
        ),
        "publishes before its edges": (
            "d += tl.sum(power(edge - tl.where",
            "_ = tl.sum(power(edge - tl.where",
        ),
    },
    "rows backward": {
        "no sum": ("grad - tl.sum(y * grad, axis=1, keep_dims=True)", "grad"),
        "sum of the gradients": ("tl.sum(y * grad, axis=1", "tl.sum(grad, axis=1"),
        "sum of the columns": ("tl.sum(y * grad, axis=1", "tl.sum(y * grad, axis=0"),
        "not times y": ("dx = y * (grad", "dx = (grad"),
        "sum times y only": (
            "y * (grad - tl.sum(y * grad, axis=1, keep_dims=True))",
            "grad - y * tl.sum(y * grad, axis=1, keep_dims=True)",
        ),
        "mask one too far": ("(column < columns)", "(column <= columns)"),
        "mask one too short": ("(column < columns)", "(column < columns - 1)"),
        "y's stride for grad": ("grad_ptr + row * grad_stride", "grad_ptr + row * y_stride"),
        "y's stride for dx": ("dx_ptr + row * dx_stride", "dx_ptr + row * y_stride"),
        "padded with 1": ("other=0.0", "other=1.0"),
    },
    "tiles backward": {
        "no sum": ("(y * (grad - total))", "(y * grad)"),
        "sum of the gradients": ("y.to(tl.float32) * grad.to(tl.float32)", "grad.to(tl.float32)"),
        "sum of the last tile": ("products += y", "products = y"),
        "a tile less": ("tl.static_range(TILES):  #", "tl.static_range(TILES - 1):  #"),
        "tiles looked at twice": (
            "range(0, columns, BLOCK * TILES):\n        for i in tl.static_range(TILES):  #",
            "range(0, columns, BLOCK):\n        for i in tl.static_range(TILES):  #",
        ),
        "first tiles only": (
            "range(0, columns, BLOCK * TILES)",
            "range(0, BLOCK * TILES, BLOCK * TILES)",
        ),
        "mask one too far": ("mask = at < columns", "mask = at <= columns"),
        "mask one too short": ("mask = at < columns", "mask = at < columns - 1"),
        "y's stride for grad": ("(grad_stride // UNIT * UNIT)\n    dx", "(y_stride)\n    dx"),
        "y's stride for dx": ("row * (dx_stride // UNIT * UNIT)", "row * y_stride"),
    },
    "chosen": {
        "any stride taken for 1": ("x if x.stride(-1) == 1 else x.contiguous()", "x"),
        "a view's sign forgotten": ("x = x.resolve_neg()", "x = x"),
        "output laid out as the input": (", memory_format=torch.contiguous_format", ""),
        "rows that begin anywhere": ("split=not wide", "split=False"),
        "always with wide accesses": ("unit(x, y) * x.itemsize == VECTOR_BYTES", "True"),
        "x saved for y": ("ctx.save_for_backward(y)", "ctx.save_for_backward(x)"),
        "gradient with x and y exchanged": (
            "_rows(y), _rows(grad), _rows(dx)",
            "_rows(grad), _rows(y), _rows(dx)",
        ),
        "no strides of the gradient": (
            "[tensor.stride(0) for tensor in tensors]",
            "3 * [y.stride(0)]",
        ),
    },
    "plans": {
        "a tile less": ("triton.cdiv(columns, block)", "columns // block"),
        "chunks rounded down": (
            "triton.cdiv(triton.cdiv(columns, size), parts) * size",
            "columns // size // parts * size",
        ),
        "chunks of any size": (
            "triton.cdiv(triton.cdiv(columns, size), parts) * size",
            "triton.cdiv(columns, parts)",
        ),
        "remainders not compared": ("(strides[0] - strides[1]) % size", "False"),
        "a tile less of a part": ("triton.cdiv(chunk, SHARED_BLOCK)", "chunk // SHARED_BLOCK"),
        "strides not in the unit": (
            "math.gcd(most, tensors[0].shape[1], *strides)",
            "math.gcd(most, tensors[0].shape[1])",
        ),
        "columns not in the unit": (
            "math.gcd(most, tensors[0].shape[1], *strides)",
            "math.gcd(most, *strides)",
        ),
    },
}


@pytest.mark.parametrize("kernel, old, new", each_of(MUTANTS))
def test_a_mutant_is_noticed(tmp_path, kernel, old, new):
    if not interpreting() and kernel not in ON_A_GPU:
        pytest.skip("its programs could wait for each other forever")
    check, owner = CHECKS[kernel]
    modules = changed(tmp_path, owner, old, new)
    with deadline(), pytest.raises(AssertionError):
        check(modules)


OFFSETS = {  # the kernel, its constants, and what makes its offsets wide
    "rows": (softmax, dict(ROWS=2, BLOCK=128, UNIT=4), ".to(tl.int64)"),
    "online": (softmax, dict(BLOCK=128), ".to(tl.int64)"),
    "tiles": (softmax_tiles, dict(BLOCK=128, TILES=2, UNIT=4, EDGES=True), "(0).to(tl.int64)"),
    "shared": (
        softmax_tiles,
        dict(BLOCK=128, TILES=2, UNIT=4, EDGES=True, PARTS=4, STEP=0),
        "tl.cast(i, tl.int64)",
    ),
    "rows_backward": (softmax_backward, dict(ROWS=2, BLOCK=128, UNIT=4), ".to(tl.int64)"),
    "tiles_backward": (softmax_backward, dict(BLOCK=128, TILES=2, UNIT=4), ".to(tl.int64)"),
}


def test_offsets_are_64_bits_wide(tmp_path):
    """Case N15: beyond 2^31 elements a product of row and stride in 32 bits wraps around."""
    requests = []
    for name, (owner, constants, wide) in OFFSETS.items():
        narrow = {"(0).to(tl.int64)": "(0)", "tl.cast(i, tl.int64)": "i"}.get(wide, "")
        for new in (wide, narrow):
            (folder := tmp_path / f"{len(requests)}").mkdir()
            module = changed(folder, owner, wide, new)[owner.__name__.rpartition(".")[2]]
            kernel = getattr(module, f"softmax_{name}_kernel")
            arguments = inspect.signature(kernel.fn).parameters.keys() - constants.keys()
            types = {k: "*fp32" if k.endswith("_ptr") else "i32" for k in sorted(arguments)}
            if "pairs_ptr" in types:
                types["pairs_ptr"] = "*i64"
            requests.append(ptx.Request(kernel, types, constants))
    found = []
    for compiled in ptx.triton_compile_many(requests):
        # Not those with a constant, which round to whole units.
        product = r"arith\.muli %\w+, %(?!c\d)\w+ : (?:tensor<\w+x)?(i\d+)"
        widths = re.findall(product, compiled.ttir)
        assert len(widths) >= 2
        found.append("i32" in widths)
    assert found == [False, True] * len(OFFSETS)
