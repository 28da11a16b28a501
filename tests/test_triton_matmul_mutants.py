"""The Triton matmul, changed wrongly on purpose: comparing with float64 must notice each change.

Beside A and B lies NaN, since what is read there for nothing is multiplied by 0; beside C a number.
On a GPU each mutant is compiled for one to six launches, about 150 compilations in all; those of
`matmul_pingpong` are left out everywhere: one that misses a barrier waits forever.
"""

import functools
import itertools
import re
from unittest import mock

import pytest
import torch

from helpers import ptx
from helpers.block_order import tiles_in_order
from helpers.check import assert_close
from helpers.device import device, interpreting, triton_version
from helpers.kernels import matmul, matmul_persistent, matmul_plans, matmul_tiles
from helpers.kernels.matmul_tiles import Config
from helpers.triton_mode import on_device_of
from tests import test_block_order, test_softmax_mutants
from tests.test_softmax import surrounded
from tests.test_softmax_mutants import deadline, each_of
from tests.test_triton_matmul import (
    BF16,
    CAPABILITY,
    DESCRIBED,
    FENCE,
    FP16,
    FP32,
    aligned,
    assert_product,
    exact,
    exact_leaves,
    leaves,
    operands,
    randn,
)

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
MODULES = (matmul_tiles, matmul_persistent, matmul_plans, matmul)  # each after what it imports


changed = functools.partial(test_softmax_mutants.changed, all_modules=MODULES)


def check_launch(launch, a, b, config: Config, activation: str | None, gap: int) -> None:
    """gap: elements between the rows of C."""
    (m, _), n = a.shape, b.shape[1]
    whole, c = surrounded(m, n, n + gap, FENCE, a.dtype)
    c.fill_(-7)
    launch(a, b, c, config, activation)
    assert_product(c, a, b, activation)
    c.fill_(FENCE)
    assert whole.eq(FENCE).all(), "written outside"


def check_tiles(modules) -> None:
    """The last group of rows, the last row and column of tiles and the last step are not whole."""
    launch = modules["matmul_tiles"].launch_tiles
    for m, k, n, dtype, tile_n, columns, activation in (
        (35, 40, 70, FP32, 32, (False, False), "gelu"),
        (33, 17, 20, BF16, 16, (True, True), None),
        (17, 33, 19, FP16, 16, (False, True), "gelu"),
        (19, 1, 17, FP32, 16, (False, False), "gelu"),  # one product: GeLU's own error shows
    ):
        a, b = operands(m, k, n, dtype)
        a, b = aligned(a, columns[0]), aligned(b, columns[1])
        check_launch(launch, a, b, Config(16, tile_n, 16, group=2), activation, 3)


def check_order(modules) -> None:
    with mock.patch.object(matmul_tiles, "tile_of", modules["matmul_tiles"].tile_of):
        for rows, columns, group in ((7, 5, 3), (3, 4, 1), (2, 3, 8), (5, 2, 3)):
            found = torch.full((2, rows * columns), -1, dtype=torch.int32, device=device())
            with on_device_of(found):
                test_block_order.write_order[(rows * columns,)](*found, rows, columns, GROUP=group)
            assert found.t().tolist() == tiles_in_order(rows, columns, group).tolist()


def check_persistent(modules) -> None:
    """More tiles than programs, in every layout."""
    persistent = modules["matmul_persistent"]
    side, times = (16, 1) if interpreting() else (64, 4)
    with mock.patch.object(persistent, "sms", lambda device: 2):
        for a_columns, b_columns in itertools.product((False, True), repeat=2):
            dtype, activation = (BF16, None) if b_columns else (FP16, "gelu")
            a, b = operands(24 * times, 24 * times, 40 * times, dtype)
            a, b = aligned(a, a_columns), aligned(b, b_columns)
            check_launch(
                persistent.launch_persistent, a, b, Config(side, side, side, 2), activation, 8
            )


def check_described(modules) -> None:
    for name, (x, expected) in DESCRIBED.items():
        assert modules["matmul_persistent"].has_descriptor(x) == expected, name


def check_public(modules) -> None:
    """Autograd, with square matrices, so that no shape betrays an exchange; and empty sizes."""
    module = modules["matmul"]
    for activation, needs in itertools.product((None, "gelu"), ((True, True), (True, False))):
        a, b = operands(20, 20, 20)
        a, b = torch._neg_view(a * 0.3), b.t()
        (x, y), references = leaves(a, b), exact_leaves(a.resolve_neg(), b)
        x.requires_grad_(needs[0]), y.requires_grad_(needs[1])
        grad = randn(20, 20, seed=2)
        module.triton_matmul(x, y, activation).backward(grad)
        exact(*references, activation).backward(grad.cpu().double())
        for left, right in ((a, b), (b, a)):
            c = module.triton_matmul(left, right, activation)
            assert_product(c, left.resolve_neg(), right.resolve_neg(), activation)
        for of, wanted, reference in zip((x, y), needs, references, strict=True):
            assert (of.grad is not None) == wanted
            if wanted:
                assert_close(of.grad, reference.grad)
    x, y = leaves(*(torch.tensor(v, device=device()) for v in ([[-6e4, 6e4]], [[2.0], [0.0]])))
    module.triton_matmul(x.half(), y.half(), "gelu").backward()
    assert x.grad.eq(0).all()  # a @ b is -inf in fp16
    with mock.patch.object(module, "launch_triton_matmul", side_effect=AssertionError("launched")):
        for m, k, n in ((3, 0, 4), (0, 3, 4), (3, 4, 0)):
            assert not module.triton_matmul(*operands(m, k, n)).any()


CHECKS = {
    "tiles": (check_tiles, matmul_tiles),
    "order": (check_order, matmul_tiles),
    "interpreted": (check_tiles, matmul_tiles),
    "persistent": (check_persistent, matmul_persistent),
    "persistent, interpreted": (check_persistent, matmul_persistent),
    "described": (check_described, matmul_persistent),
    "public": (check_public, matmul),
}


def skip_if_it_cannot_run(kernel: str) -> None:
    if kernel == "order" or "interpreted" in kernel:
        if not interpreting():  # a compiled kernel keeps the function that it was compiled with
            pytest.skip("in the interpreter only")
    elif kernel == "persistent" and not interpreting() and CAPABILITY < (9, 0):
        pytest.skip("needs the copy engine")


@pytest.mark.parametrize("kernel", CHECKS)
def test_unchanged_kernels_are_right(tmp_path, kernel):
    skip_if_it_cannot_run(kernel)
    check, owner = CHECKS[kernel]
    check(changed(tmp_path, owner, "import", "import"))


STORE = "mask=(i < m) & (j < n))"
GRID = "(waves.tiles(m, n, config.tile_m, config.tile_n),)"
MUTANTS = {
    "tiles": {
        "last group as high as the others": ("tl.minimum(rows - first, GROUP)", "GROUP"),
        "row and column exchanged": (
            "return first + within % height, within // height",
            "return within // height, first + within % height",
        ),
        "group's first row": ("(GROUP * columns) * GROUP", "(GROUP * columns)"),
        "groups of rows by rows": ("// (GROUP * columns)", "// (GROUP * rows)"),
        "activation forgotten": ('if ACTIVATION == "gelu"', 'if ACTIVATION == "relu"'),
        "linear constant": ("2.302208198", "2.3025"),
        "cubic constant": ("0.1029432396", "0.10297"),
        "base e": ("tl.exp2(", "tl.exp("),
        "sign of the exponent": ("(-2.302208198 -", "(2.302208198 +"),
        "square for the cube": ("* c * c))", "* c))"),
        "activation at every step": (
            "        a_at +=",
            "        c = activate(c, ACTIVATION)\n        a_at +=",
        ),
        "activation not called": ("    c = activate(c, ACTIVATION)\n", ""),
        "activation of a rounded product": (
            "c = activate(c, ACTIVATION)",
            "c = activate(c.to(c_ptr.dtype.element_ty).to(tl.float32), ACTIVATION)",
        ),
        "only the last step": ("tl.dot(a, b, c, ", "tl.dot(a, b, c * 0, "),
        "summed in 16 bits": (
            "c = tl.dot(a, b, c, input_precision=PRECISION)",
            "c = tl.dot(a, b, c, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
        ),
        "A in 16 bits": (
            "c = tl.dot(a, b, c, input_precision=PRECISION)",
            "c = tl.dot(a.to(tl.float16).to(b.dtype), b, c, input_precision=PRECISION)",
        ),
        "rest of k as long as k": ("left = k - start", "left = k"),
        "k not masked in A": ("(i < m) & (l[None, :] < left)", "(i < m)"),
        "k not masked in B": ("(l[:, None] < left) & (j < n)", "(j < n)"),
        "k one too far in A": ("(l[None, :] < left)", "(l[None, :] <= left)"),
        "k one too far in B": ("(l[:, None] < left)", "(l[:, None] <= left)"),
        "k one too short in A": ("(l[None, :] < left)", "(l[None, :] < left - 1)"),
        "k one too short in B": ("(l[:, None] < left)", "(l[:, None] < left - 1)"),
        "a row of A too few": ("(i < m) & (l[", "(i < m - 1) & (l["),
        "a column of B too few": ("(j < n), other", "(j < n - 1), other"),
        "padded with 1": ("other=0.0", "other=1.0"),
        "whole steps only": ("range(0, k, TILE_K)", "range(0, k // TILE_K * TILE_K, TILE_K)"),
        "A not advanced": ("a_at += TILE_K *", "a_at += 0 *"),
        "B not advanced": ("b_at += TILE_K *", "b_at += 0 *"),
        "A advanced by B's stride": ("tl.cast(a_stride_k,", "tl.cast(b_stride_k,"),
        "B advanced by A's stride": ("tl.cast(b_stride_k,", "tl.cast(a_stride_k,"),
        "steps that overlap": ("a_at += TILE_K *", "a_at += (TILE_K - 1) *"),
        "A's strides exchanged": (
            "i * a_stride_m + l[None, :] * a_stride_k",
            "i * a_stride_k + l[None, :] * a_stride_m",
        ),
        "B's strides exchanged": (
            "l[:, None] * b_stride_k + j * b_stride_n",
            "l[:, None] * b_stride_n + j * b_stride_k",
        ),
        "A's stride for C": ("c_ptr + i * c_stride_m", "c_ptr + i * a_stride_m"),
        "rows of C without gaps": ("c_ptr + i * c_stride_m", "c_ptr + i * n"),
        "rows written beyond C": (STORE, "mask=(j < n))"),
        "columns written beyond C": (STORE, "mask=(i < m))"),
        "one row beyond C": (STORE, "mask=(i <= m) & (j < n))"),
        "one column beyond C": (STORE, "mask=(i < m) & (j <= n))"),
        "one row too few": (STORE, "mask=(i < m - 1) & (j < n))"),
        "one column too few": (STORE, "mask=(i < m) & (j < n - 1))"),
        "rows and columns exchanged": (STORE, "mask=(i < n) & (j < m))"),
        "width for height": ("i = row * TILE_M", "i = row * TILE_N"),
        "height for width": ("j = column * TILE_N", "j = column * TILE_M"),
        "rows by column": ("i = row * TILE_M", "i = column * TILE_M"),
        "columns by row": ("j = column * TILE_N", "j = row * TILE_N"),
        "grid rounded down": (GRID, "((m // config.tile_m) * (n // config.tile_n),)"),
        "a program too few": (GRID, GRID.replace(",)", " - 1,)")),
        "launched with the strides exchanged": (
            "*a.stride(), *b.stride()",
            "*b.stride(), *a.stride()",
        ),
        "launched with A transposed": ("*a.stride(),", "*a.stride()[::-1],"),
        "launched as if C were dense": ("c.stride(0))", "n)"),
        "launched with tiles exchanged": (
            "config.tile_m, config.tile_n, config.tile_k",
            "config.tile_n, config.tile_m, config.tile_k",
        ),
        "launched without the activation": ("*(activation, precision", "*(None, precision"),
    },
    "order": {
        "place in the last group": ("% (GROUP * columns)", "% (height * columns)"),
        "row by row": (
            "first + within % height, within // height",
            "first + within // columns, within % columns",
        ),
        "group of one": ("tl.minimum(rows - first, GROUP)", "1"),
        "not grouped": (
            "return first + within % height, within // height",
            "return program // columns, program % columns",
        ),
        "down the columns": (
            "return first + within % height, within // height",
            "return program % rows, program // rows",
        ),
        "upwards": ("first + within % height", "first + height - 1 - within % height"),
    },
    "interpreted": {"bits of bf16 multiplied": ("if UPCAST:", "if False:")},
    "persistent": {
        "last tile forgotten": ("rows * columns, tl.", "rows * columns - 1, tl."),
        "tiles left out": ("tl.num_programs(0), fl", "tl.num_programs(0) + 1, fl"),
        "the first tile only": ("tile_of(tile, rows", "tile_of(tl.program_id(0), rows"),
        "rows and columns exchanged": (
            "i, j = row * TILE_M, column * TILE_N",
            "i, j = column * TILE_M, row * TILE_N",
        ),
        "always the first step": ("at = step * TILE_K", "at = step * 0"),
        "steps that overlap": ("at = step * TILE_K", "at = step * (TILE_K - 8)"),
        "whole steps only": ("tl.cdiv(k, TILE_K)", "(k // TILE_K)"),
        "only the last step": ("tl.dot(a, b, c)", "tl.dot(a, b)"),
        "columns of A not turned": ("a_matrix.load([at, i]).T", "a_matrix.load([at, i])"),
        "columns of B not turned": ("b_matrix.load([j, at]).T", "b_matrix.load([j, at])"),
        "place in A's columns": ("a_matrix.load([at, i]).T", "a_matrix.load([i, at]).T"),
        "place in B's columns": ("b_matrix.load([j, at]).T", "b_matrix.load([at, j]).T"),
        "place in A's rows": ("a_matrix.load([i, at])", "a_matrix.load([at, i])"),
        "place in B's rows": ("b_matrix.load([at, j])", "b_matrix.load([j, at])"),
        "B's layout for A": (".T if A_COLUMNS", ".T if B_COLUMNS"),
        "A's layout for B": (".T if B_COLUMNS", ".T if A_COLUMNS"),
        "halves exchanged": ("left, right =", "right, left ="),
        "columns in turn": (
            "c.reshape(TILE_M, 2, TILE_N // 2).permute(0, 2, 1)",
            "c.reshape(TILE_M, TILE_N // 2, 2)",
        ),
        "second half over the first": ("[i, j + TILE_N // 2]", "[i, j]"),
        "second half too far": ("[i, j + TILE_N // 2]", "[i, j + TILE_N]"),
        "left half without activation": ("activate(left, ACTIVATION)", "left"),
        "right half without activation": ("activate(right, ACTIVATION)", "right"),
        "launched without the activation": ("activation, interpreting", "None, interpreting"),
        "launched for the other layouts": (
            "*(*columns, activation",
            "*(*columns[::-1], activation",
        ),
    },
    "persistent, interpreted": {"bits of bf16 multiplied": ("if UPCAST:", "if False:")},
    "described": {
        "rows that overlap": ("size <= leading <", "leading <"),
        "rows off a boundary": (" and leading % unit == 0", ""),
        "memory off a boundary": (" and x.data_ptr() % UNIT_BYTES == 0", ""),
        "gaps in a row": ("dense == 1 and ", ""),
        "rows too far apart": (" < MOST_BYTES // x.itemsize", ""),
        "units of 16 bits": ("UNIT_BYTES // x.itemsize", "8"),
        "units of fp32": ("UNIT_BYTES // x.itemsize", "4"),
        "size of the other side": ("0 if columns else 1", "1 if columns else 0"),
        "rows only": ("columns = x.stride(1) != 1\n    dense", "columns = False\n    dense"),
    },
    "public": {
        "gradients exchanged": ("return grad_a, grad_b,", "return grad_b, grad_a,"),
        "operands exchanged": (
            "ctx.save_for_backward(*saved)",
            "ctx.save_for_backward(*saved[::-1])",
        ),
        "B not transposed": ("_matmul(grad, b.t(), ", "_matmul(grad, b, "),
        "A not transposed": ("_matmul(a.t(), grad, ", "_matmul(a, grad, "),
        "factors of dA exchanged": ("_matmul(grad, b.t(), ", "_matmul(b.t(), grad, "),
        "factors of dB exchanged": ("_matmul(a.t(), grad, ", "_matmul(grad, a.t(), "),
        "GeLU's slope at its result": (
            "product = _matmul(a, b, ctx.launch)",
            "product = _matmul(a, b, ctx.launch, ctx.activation)",
        ),
        "GeLU's slope beyond fp16": (".clamp(-most, most)", ""),
        "GeLU's slope forgotten": ("if ctx.activation:", "if False:"),
        "activation not passed on": ('{"activation": activation} if activation else {}', "{}"),
        "other gradient wanted": ("if needs_a else None", "if needs_b else None"),
        "launched without k": ("if a.shape[1] == 0:", "if False:"),
        "launched without a result": ("if c.numel():", "if True:"),
        "A's sign forgotten": ("launch(a.resolve_neg()", "launch(a"),
        "B's sign forgotten": ("b.resolve_neg(), c", "b, c"),
    },
}


@pytest.mark.parametrize("kernel, old, new", each_of(MUTANTS))
def test_a_mutant_is_noticed(tmp_path, kernel, old, new):
    skip_if_it_cannot_run(kernel)
    check, owner = CHECKS[kernel]
    modules = changed(tmp_path, owner, old, new)  # which asserts too, that there is an `old`
    with deadline(), pytest.raises(AssertionError):
        try:
            check(modules)
        except RuntimeError as error:  # a loop that the compiler's pipeliner gives up on
            assert "PassManager::run failed" not in str(error)
            raise


OFFSETS = {  # what makes them wide in matmul_tiles_kernel, and what would leave them narrow
    "rows of tiles": ("tl.arange(0, TILE_M).to(tl.int64)", "tl.arange(0, TILE_M)"),
    "columns of tiles": ("tl.arange(0, TILE_N).to(tl.int64)", "tl.arange(0, TILE_N)"),
    "along k": ("tl.arange(0, TILE_K).to(tl.int64)", "tl.arange(0, TILE_K)"),
    "steps in A": ("tl.cast(a_stride_k, tl.int64)", "a_stride_k"),
    "steps in B": ("tl.cast(b_stride_k, tl.int64)", "b_stride_k"),
}


def test_offsets_are_64_bits_wide(tmp_path):
    """Case N15: beyond 2^31 elements a product of an index and a stride in 32 bits wraps around."""
    strides = ("a_stride_m", "a_stride_k", "b_stride_k", "b_stride_n", "c_stride_m")
    types = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*fp16")
    types |= dict.fromkeys(("m", "n", "k", *strides), "i32")
    constants = dict(TILE_M=32, TILE_N=64, TILE_K=16, GROUP=8)
    constants |= dict(ACTIVATION=None, PRECISION="ieee", UPCAST=False)
    requests = []
    for old, new in (("import", "import"), *OFFSETS.values()):
        (folder := tmp_path / f"{len(requests)}").mkdir()
        kernel = changed(folder, matmul_tiles, old, new)["matmul_tiles"].matmul_tiles_kernel
        requests.append(ptx.Request(kernel, types, constants))
    narrow = []
    for compiled in ptx.triton_compile_many(requests):
        # Of tiles, and of a stride itself. Numbers of tiles and of rows fit into 32 bits.
        products = re.findall(r"arith\.muli .*: tensor<\w+x(i\d+)>", compiled.ttir)
        assert len(products) == 5
        steps = re.findall(r"arith\.muli %[ab]_stride_k, .*: (i\d+)", compiled.ttir)
        narrow.append("i32" in products + steps)
    assert narrow == [False] + [True] * len(OFFSETS)
