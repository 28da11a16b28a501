"""Our matmuls against float64: values, layouts, gradients, and what the CUDA kernels load.

What only the Triton kernels have is in test_triton_matmul.py.
"""

import ctypes
import mmap
import re
import types

import pytest
import torch
from cuda_cases import CASES
from matmul_cases import SMALL

from helpers import cuda, ptx, traffic
from helpers.check import assert_close, relative_error
from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.emulator import KernelFault, arena
from helpers.kernels import matmul

DEVICE = device()
CPU = torch.device("cpu")
DTYPES = list(matmul.DTYPES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CUDA_WAYS = [matmul.cuda_matmul_naive, matmul.cuda_matmul_tiled]
WAYS = [*CUDA_WAYS, *([matmul.triton_matmul] if triton_version() else [])]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
each_cuda_way = pytest.mark.parametrize("way", CUDA_WAYS, ids=lambda way: way.__name__)


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.detach().cpu().double() @ b.detach().cpu().double()


# Values and layouts


@each_dtype
@each_way
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (1, 7, 1), (17, 40, 33), (129, 3, 2), (4, 4, 4), (132, 36, 140)]
)
def test_values(way, dtype, m, k, n):
    a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype, seed=1)
    before = a.clone(), b.clone()
    c = way(a, b)
    assert (c.shape, c.dtype, c.device) == ((m, n), dtype, a.device)
    # Summed in fp32 and rounded once; Triton's interpreter cuts bf16's bits off.
    units = 1 if way is matmul.triton_matmul and interpreting() else 0.5
    eps = torch.finfo(dtype).eps
    assert_close(c, reference(a, b), 1e-6 if dtype == torch.float32 else units * eps)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@pytest.mark.case("N17")
@pytest.mark.skipif(not has_cuda(), reason="takes minutes in the emulator")
@each_cuda_way
@pytest.mark.parametrize("m, k, n", [(1000, 1001, 999), (2048, 1024, 512), (257, 5000, 129)])
def test_larger_values(way, m, k, n):
    """Case N17."""
    a, b = randn(m, k), randn(k, n, seed=1)
    assert_close(way(a, b), reference(a, b), 3e-6)


LAYOUTS = {
    "transposed": lambda x: x[:20, :17].t(),
    "rows": lambda x: x[3:20, :20],
    "columns": lambda x: x[:17, 3:23],
    "every third row": lambda x: x[:51:3, :20],
    "every second column": lambda x: x[:17, :40:2],
    "flipped": lambda x: x[:17, :20].flip(0),
    "one row, expanded": lambda x: x[:1, :20].expand(17, 20),
    "one number, expanded": lambda x: x[:1, :1].expand(17, 20),
    "overlapping": lambda x: x.flatten()[:200].unfold(0, 20, 2)[:17],
    "misaligned": lambda x: x.flatten()[1:341].view(17, 20),
    "wide rows": lambda x: x[:17, 4:24],
    "imaginary, negated": lambda x: torch.complex(x, x).conj().imag[:17, :20],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_way
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_either_operand(way, dtype, layout):
    whole = randn(60, 44)
    view = layout(whole).to(dtype) if layout is LAYOUTS["imaginary, negated"] else None
    whole = whole.to(dtype)
    view = layout(whole) if view is None else view
    assert view.shape == (17, 20)
    before, b = whole.clone(), randn(20, 24, dtype=dtype, seed=1)
    assert_close(way(view, b), reference(view, b))
    a = randn(24, 17, dtype=dtype, seed=2)
    assert_close(way(a, view), reference(a, view))
    assert torch.equal(whole, before)


@pytest.mark.parametrize(
    "x",
    [torch._neg_view(randn(8, 8)), torch.view_as_complex(randn(5, 6, 2)).conj().imag],
    ids=["dense", "strided"],
)
def test_a_view_that_stands_for_its_negative(x):
    assert x.is_neg()
    for way in WAYS:
        assert_close(way(x, x.t()), reference(x.resolve_neg(), x.t().resolve_neg()))


def test_dense_rows_are_not_copied(monkeypatch):
    """A leading dimension that is larger than the row is used as it is."""
    seen = []
    kernel = cuda.Kernel.__call__

    def spy(self, grid, block, *arguments, **options):
        seen.append((self, arguments))
        return kernel(self, grid, block, *arguments, **options)

    monkeypatch.setattr(cuda.Kernel, "__call__", spy)
    whole_a, whole_b = randn(20, 44), randn(8, 51, seed=1)
    a, b = whole_a[2:, 4:12], whole_b[:, 3:13]
    for way in CUDA_WAYS:
        assert_close(way(a, b), reference(a, b))
        arguments = seen.pop()[1]
        assert [x.data_ptr() for x in arguments[:2]] == [a.data_ptr(), b.data_ptr()]
        assert arguments[3:] == (18, 10, 8, 44, 51, 10)


def test_four_elements_at_once_where_everything_is_aligned(monkeypatch):
    used = []
    monkeypatch.setattr(
        cuda.Kernel, "__call__", lambda self, *_: used.append(dict(self.defines)["ALIGNED"])
    )
    a, b, c = randn(8, 12), randn(12, 16), randn(8, 16)
    for x, y, z in (
        (a, b, c),
        (a[:, :8], b[:8, :12], c[:, :12]),
        (a[:3, 4:8], b[4:8, 4:8], c[:3, 8:12]),
    ):
        matmul.launch_registers(x, y, z)
    assert used == ["1"] * 3
    used.clear()
    for x, y, z in (
        (a[:, :11], b[:11], c),
        (a, b[:, :15], c[:, :15]),
        (a[:, 1:9], b[:8], c),
        (randn(8, 13)[:, :12], b, c),
        (a, randn(12, 17)[:, :16], c),
        (a, b, randn(8, 18)[:, :16]),
        (a, b, randn(8 * 16 + 1)[1:].view(8, 16)),
    ):
        matmul.launch_registers(x, y, z)
    assert used == ["0"] * 7


@pytest.mark.case("N14")
@each_way
@pytest.mark.parametrize("m, k, n", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 0, 5)])
def test_empty_sizes(way, m, k, n):
    """Case N14: a grid of no blocks cannot be launched; sums of nothing are 0."""
    a, b = randn(m, k).requires_grad_(), randn(k, n).requires_grad_()
    c = way(a, b)
    assert c.shape == (m, n) and not c.any()
    c.sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape
    assert not a.grad.any() and not b.grad.any()


@each_way
@each_dtype
def test_infinities_and_nan_as_in_a_product(way, dtype):
    inf, nan = torch.inf, torch.nan
    special = torch.tensor([[0, inf, 1], [inf, -inf, 0], [nan, 0, 0], [1, 0, 2]], dtype=dtype)
    b = torch.tensor([[1, 0, 0], [0, 1, 0], [inf, 2, -1]], dtype=dtype)
    a, b = special.to(DEVICE), b.to(DEVICE)
    expected = reference(a, b)
    assert expected.isnan().any() and expected.isinf().any()
    assert_close(way(a, b), expected)


@each_way
def test_what_is_not_there_does_not_count(way):
    """Infinite rows and columns next to a view, and in its own last rows, stay where they are."""
    whole = torch.full((40, 40), torch.inf, device=DEVICE)
    a, b = whole.clone(), whole.clone()
    a[:5, :3], b[:3, :6] = 1.0, 2.0
    assert torch.equal(way(a[:5, :3], b[:3, :6]), torch.full((5, 6), 6.0, device=DEVICE))
    a[4] = torch.inf
    assert torch.equal(way(a[:5, :3], b[:3, :6])[:4], torch.full((4, 6), 6.0, device=DEVICE))


@pytest.mark.parametrize("dtype, k", [(torch.float16, 2080), (torch.bfloat16, 512)], ids=str)
@each_way
def test_sums_are_in_fp32_and_rounded_once(way, dtype, k):
    """A sum of ones would stop at 2,048 in fp16, 256 in bf16; 300 squared is infinite in fp16."""
    ones = torch.ones(1, k, dtype=dtype, device=DEVICE)
    assert way(ones, ones.t()).item() == k
    large = torch.tensor([[300.0, 300.0, 1.0]], dtype=dtype, device=DEVICE)
    back = torch.tensor([[300.0], [-300.0], [1.0]], dtype=dtype, device=DEVICE)
    assert way(large, back).item() == 1


# What is refused


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(matmul, "apply", lambda *_: pytest.fail("launched"))


@each_way
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes_are_refused_before_any_launch(way, no_launch, dtype):
    for shape in ((3, 3), (0, 0)):
        x, fp32 = torch.zeros(shape, device=DEVICE).to(dtype), torch.zeros(shape, device=DEVICE)
        for a, b in ((x, x), (x, fp32), (fp32, x)):
            with pytest.raises(
                TypeError, match=f"matmul takes float32, float16, bfloat16, not {dtype}"
            ):
                way(a, b)


@each_way
def test_what_is_no_dense_tensor_is_refused(way, no_launch):
    x = torch.eye(3, device=DEVICE)
    nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    for wrong, name in (
        ([[1.0]], "list"),
        (x.to_sparse(), "torch.sparse_coo"),
        (nested, "nested"),
    ):
        for a, b in ((x, wrong), (wrong, x)):
            with pytest.raises(TypeError, match=f"matmul takes a dense tensor, not {name}"):
                way(a, b)


@each_way
def test_operands_that_do_not_fit_are_refused(way, no_launch):
    a = torch.ones(2, 3, device=DEVICE)
    for x, y in ((a, a), (a, a[0]), (a[0], a.t()), (a[None], a.t()[None]), (a[0, 0], a)):
        with pytest.raises(ValueError, match=r"takes \(m, k\) and \(k, n\), not \("):
            way(x, y)
    with pytest.raises(TypeError, match="a is torch.float32 and b is torch.float16"):
        way(a, a.t().half())
    with pytest.raises(ValueError, match="a is on .* and b on meta"):
        way(a, a.t().to("meta"))


def test_sizes_that_an_int_cannot_count_are_refused(no_launch):
    large = torch.empty(1, device=DEVICE, dtype=torch.bfloat16).expand(1, matmul.LARGEST + 1)
    one = large[:, :1]
    for a, b in ((large, large.t()), (large.t(), one), (one, large)):
        for way in WAYS:
            with pytest.raises(ValueError, match="at most 2,147,482,624"):
                way(a, b)


def test_more_rows_than_a_grid_has_in_y(monkeypatch):
    monkeypatch.setattr(matmul, "MOST_BLOCKS_Y", 2)
    a, b = randn(37, 5), randn(5, 3, seed=1)
    assert_close(matmul.cuda_matmul_naive(a, b), reference(a, b), 1e-6)


@pytest.fixture
def far_apart(monkeypatch):
    """A function of (columns, place): 9 rows in one memory, the last over 2^31 elements away.

    No more than the rows is touched. The emulator, which copies what a tensor spans, copies the
    beginning of each row too.
    """
    step = 307_000_000  # seven of them are more than 2^31
    try:
        whole = torch.empty(8 * step + 64, dtype=torch.bfloat16, device=DEVICE)
        mmap.mmap(-1, whole.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"needs 5 GB of address space twice: {error}")

    def memmove(to, source, nbytes):
        for at in range(0, nbytes, 2 * step):
            ctypes.memmove(to + at, source + at, min(256, nbytes - at))

    copies = types.SimpleNamespace(**vars(ctypes) | {"memmove": memmove})
    monkeypatch.setattr(arena, "ctypes", copies)
    return lambda columns, place: whole.as_strided((9, columns), (step, 1), place)


@pytest.mark.parametrize("name", ["rows", "columns", "shared", "registers"])
@pytest.mark.parametrize("place", [0, 1], ids=["aligned", "misaligned"])
def test_rows_that_are_far_apart(far_apart, name, place):
    a, b, c = (far_apart(columns, at + place) for columns, at in ((9, 0), (8, 16), (8, 32)))
    a.copy_(randn(9, 9)), b.copy_(randn(9, 8, seed=1)), c.fill_(torch.nan)
    getattr(matmul, f"launch_{name}")(a, b, c)
    assert_close(c, reference(a, b))
    for way in CUDA_WAYS if name == "rows" else ():
        assert_close(way(a, b), reference(a, b))


# Gradients


@each_dtype
@each_way
def test_gradients_against_float64(way, dtype):
    a = randn(9, 20, dtype=dtype).requires_grad_()
    b = randn(20, 13, dtype=dtype, seed=1).requires_grad_()
    weights = randn(9, 13, dtype=dtype, seed=2)
    (way(a, b) * weights).sum().backward()
    x, y = (t.detach().cpu().double().requires_grad_() for t in (a, b))
    (x @ y * weights.cpu().double()).sum().backward()
    assert a.grad.dtype == b.grad.dtype == dtype
    assert_close(a.grad, x.grad)
    assert_close(b.grad, y.grad)


@each_way
def test_second_derivatives(way):
    a, b = randn(3, 5).requires_grad_(), randn(5, 4, seed=1).requires_grad_()
    x, y = (t.detach().cpu().double().requires_grad_() for t in (a, b))

    def second(product, a, b):
        (first,) = torch.autograd.grad(product(a, b).pow(2).sum(), a, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (a, b))

    for found, expected in zip(second(way, a, b), second(torch.matmul, x, y), strict=True):
        assert_close(found, expected)


@each_way
def test_only_the_gradients_that_are_wanted_are_computed(way):
    a, b = randn(3, 5).requires_grad_(), randn(5, 4, seed=1)
    c = way(a, b)
    launches = []
    launch = c.grad_fn.launch
    c.grad_fn.launch = lambda *args: launches.append(args) or launch(*args)
    c.sum().backward()
    assert len(launches) == 1 and b.grad is None
    assert not way(b.t(), b).requires_grad


# What the kernels load: the lesson's counts, in the emulator


def counts(name: str, side: int, block, grid, **macros):
    kernel = matmul.matmul_kernel(name, torch.float32, **macros)
    a, b, c = (torch.randn(side, side) for _ in range(3))
    found = kernel.emulate(grid, block, *matmul._arguments(a, b, c))
    assert_close(c, reference(a, b))
    return found


def test_neighbours_in_a_row_are_coalesced_and_down_a_column_are_not():
    """Slide 35. A warp's loads of A and B: 32 + 1 sectors a step, against 1 + 4."""
    side, block, steps = 32, (32, 8), 32 * 32  # a warp for 32 elements of C, 32 steps each
    rows = counts("matmul_rows", side, block, (1, 4))
    columns = counts("matmul_columns", side, block, (1, 4))
    for found in (rows, columns):
        assert found.loads == 2 * side**3  # each element of A and of B is loaded `side` times
        assert found.load_requests == 2 * steps
    assert rows.load_sectors == 33 * steps and columns.load_sectors == 5 * steps
    assert rows.store_sectors == 32 * 32 and columns.store_sectors == 4 * 32


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_shared_tiles_divide_the_loads_by_their_side(tile):
    side = 64
    found = counts("matmul_shared", side, (tile, tile), (side // tile,) * 2, TILE=tile)
    assert found.loads == 2 * side**2 * (side // tile)
    assert (
        found.bytes_read
        == traffic.tiled_matmul(side, side, side, tile, tile, torch.float32).bytes_read
    )
    blocks, phases = (side // tile) ** 2, side // tile
    assert found.barriers == 2 * phases * blocks
    assert found.shared_loads == 2 * side**3
    assert found.bank_conflicts == 0


@pytest.mark.parametrize("aligned", [1, 0])
def test_register_tiles_divide_the_loads_of_shared_memory_too(aligned):
    side, tile, per_thread = 128, 64, 4
    macros = {key: int(value) for key, value in SMALL} | {"ALIGNED": aligned}
    found = counts("matmul_registers", side, 256, 4, **macros)
    elements = 2 * side**2 * (side // tile)  # each element of A N / BN times, of B N / BM times
    assert found.bytes_read == 4 * elements
    assert found.loads == elements // (4 if aligned else 1)
    assert found.bytes_written == 4 * side**2
    # A float4 each, and where the block's tile begins.
    assert found.shared_loads == 2 * side**3 / per_thread / 4 + 2 * 4 * 256
    assert found.bank_conflicts == 0
    if aligned:  # whole sectors, of which nothing is read twice by a warp
        assert found.load_sectors == found.bytes_read / 32


def test_the_default_tiles_are_free_of_bank_conflicts():
    tm, tn = matmul.TILES["TM"], matmul.TILES["TN"]
    threads = 128 * 128 // (tm * tn)
    found = counts("matmul_registers", 128, threads, 1, **matmul.TILES)
    assert found.loads == 2 * 128**2 / 4  # one block: every element once
    assert found.bank_conflicts == 0
    assert found.shared_loads == 128**3 * (1 / tm + 1 / tn) / 4 + 2 * threads


# Other tiles, and what the compilers make of the defaults


def test_the_defaults_of_the_text_are_those_of_the_launch():
    text = (cuda.KERNELS / "matmul.cu").read_text()
    found = dict(re.findall(r"#ifndef (\w+)[^\n]*\n#define \1 (\d+)\n", text))
    assert {name: int(found[name]) for name in matmul.TILES} == matmul.TILES


@pytest.mark.parametrize(
    "macros",
    [
        {"BM": 64, "BN": 128, "BK": 16, "TM": 8, "TN": 4, "LANES_M": 8, "GROUP": 1},
        {"BM": 256, "BN": 128, "TM": 8, "TN": 16, "LANES_M": 8, "BLOCKS_PER_SM": 1, "GROUP": 2},
        {"BK": 16, "TM": 16, "GROUP": 3},
    ],
    ids=str,
)
def test_other_tiles(macros):
    m, k, n = 300, 20, 516
    a, b = randn(m, k), randn(k, n, seed=1)
    c = torch.full((m, n), torch.nan, device=DEVICE)
    matmul.launch_registers(a, b, c, **macros)
    assert_close(c, reference(a, b), 1e-6)


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_the_other_launches(tile):
    a, b = randn(17, 40), randn(40, 33, seed=1)
    launches = (
        matmul.launch_rows,
        lambda *abc: matmul.launch_rows(*abc, block=(16, 16)),
        lambda *abc: matmul.launch_columns(*abc, block=(tile, tile)),
        lambda *abc: matmul.launch_shared(*abc, tile=tile),
    )
    for launch in launches:
        c = torch.full((17, 33), torch.nan, device=DEVICE)
        launch(a, b, c)
        assert_close(c, reference(a, b), 1e-6)


@pytest.mark.parametrize("aligned", [1, 0])
def test_machine_code_of_the_default_tiles(aligned):
    """Two blocks fit an SM's registers; four elements are one load, from either memory."""
    pytest.importorskip("cuda.bindings.nvrtc")
    macros = matmul.TILES | {"ALIGNED": aligned}
    kernel = matmul.matmul_kernel("matmul_registers", torch.float32, **macros)
    try:
        code = kernel.sass("sm_90")
    except ptx.ToolMissing as missing:
        pytest.skip(str(missing))
    assert not re.search(r"\b(LDL|STL)\b", code)
    shared = re.findall(r"\bLDS\S*", code)
    assert sum(".128" in load for load in shared) >= 4 * matmul.TILES["BK"]
    assert sum(".128" not in load for load in shared) <= 2  # where the block's tile begins
    loads = re.findall(r"\bLDG\S*", code)
    assert loads and all((".128" in load) == bool(aligned) for load in loads)


def test_the_next_tile_is_loaded_during_the_arithmetic():
    """A compiler is free to move loads down to where their values are stored."""
    pytest.importorskip("cuda.bindings.nvrtc")
    kernel = matmul.matmul_kernel("matmul_registers", torch.float32, **matmul.TILES, ALIGNED=1)
    try:
        code = kernel.sass("sm_90")
    except ptx.ToolMissing as missing:
        pytest.skip(str(missing))
    order = "".join(re.findall(r"\b([LFSB])(?:DG|FMA|TS|AR\.)", code))  # global loads, FFMA, ...
    inner = order[order.index("B") + 1 : order.rindex("B")]
    between = inner[inner.rindex("L") : inner.index("S")]
    assert inner.count("F") == matmul.TILES["BK"] * matmul.TILES["TM"] * matmul.TILES["TN"]
    assert between.count("F") > inner.count("F") / 3


# Mutants: kernel -> edits of the text, each of which makes it wrong

MUTANTS = {
    "matmul_rows": (
        ("row >= m || ", ""),
        ("int row = x, column = y;", "int row = y, column = x;"),
    ),
    "matmul_columns": (
        (" || column >= n", ""),
        ("row * ldc + column", "row * n + column"),
        ("row * lda", "row * k"),
        ("k, ldb)", "k, n)"),
        ("k, ldb)", "k - 1, ldb)"),
    ),
    "matmul_shared": (
        ("__syncthreads();  // all has been written before anyone reads", ""),
        ("__syncthreads();  // all has been read before anyone writes the next tiles", ""),
        (" && k0 + x < k", ""),
        ("k0 + y < k && ", ""),
        ("row < m && k0", "k0"),
        (" && column < n ? float(b", " ? float(b"),
        ("if (row < m && column < n) c", "if (row < m) c"),
        ("p < TILE", "p < TILE - 1"),
        ("tile_a[y][p]", "tile_a[p][y]"),
        ("k0 += TILE", "k0 += TILE + 1"),
    ),
    "matmul_registers": (
        ("        __syncthreads();\n    }", "    }"),
        ("    store(0);\n    __syncthreads();", "    store(0);"),
        ("buffer ^= 1;", ""),
        ("min(row0 + a_row(g), m - 1)", "(row0 + a_row(g))"),
        ("load_four(from_a[i], k_left - a_p(g))", "load_four(from_a[i], 4)"),
        ("b_p(g) < k_left ? n - column0 - b_column(g) : 0", "n - column0 - b_column(g)"),
        ("n - column0 - b_column(g) : 0", "4 : 0"),
        ("if (row < m) store_four", "store_four"),
        ("ldc + column, n - column,", "ldc + column, 4,"),
        ("from_b[i] += BK * ldb", "from_b[i] += BK * n"),
        ("i / 4 * 4 * LANES_M + i % 4", "i"),
        ("thread_column + j * lanes_n]", "thread_column + j]"),
        ("high = min(GROUP, tiles_m - first)", "high = GROUP"),
        ("in_group / high * BN", "in_group / GROUP * BN"),
        ("k_left > -BK", "k_left > 0"),
    ),
}


@pytest.mark.parametrize(
    "kernel, before, after",
    [(kernel, *edit) for kernel, edits in MUTANTS.items() for edit in edits],
)
def test_mutants_are_caught(kernel, before, after):
    cases = [
        case for case in CASES if case.kernel == kernel and ("scalar", "float") in case.defines
    ]
    for case in cases[::-1]:  # those with small tiles first
        right = case.load()
        assert before in right.function
        wrong = right.text.replace(right.function, right.function.replace(before, after))
        mutant = cuda.Kernel(wrong, kernel, case.file, case.defines)
        for size in case.sizes[::-1]:
            for order in ("forward", "reverse", 1):
                launch = case.launch(size, CPU)
                try:
                    mutant.emulate(launch.grid, launch.block, *launch.arguments, order=order)
                except KernelFault:
                    return
                if not relative_error(launch.arguments[2], launch.expected[2]) <= case.tolerance:
                    return
    pytest.fail("the mutant's results are right for all sizes")
