"""The Triton matmul against float64: each of its kernels, what chooses among them, autograd.

What it shares with the CUDA matmuls is in test_matmul.py. Compiled, on a GPU, these tests take
about 150 variants of the three kernels, a second or two each: pytest -n 8 spreads them.
"""

import functools
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.check import assert_close
from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.kernels import matmul, matmul_persistent, matmul_pingpong, matmul_plans
from helpers.kernels.matmul import triton_matmul
from helpers.kernels.matmul_persistent import can_be_written, descriptor, has_descriptor
from helpers.kernels.matmul_plans import LAUNCHES
from helpers.kernels.matmul_tiles import Config, launch_tiles
from tests.test_softmax import storage_bound, surrounded

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
DEVICE = device()
CAPABILITY = torch.cuda.get_device_capability() if has_cuda() else (0, 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP32, FP16, BF16]
INF, NAN = torch.inf, torch.nan
U = 2.0**-24  # the unit roundoff of fp32
FENCE = 3
TIMES = 1 if interpreting() else 4  # so much wider are the tiles that a tensor core wants
SMALL = {
    "tiles": Config(16, 16, 16, group=2),
    "persistent": Config(16, 32, 16, 2) if interpreting() else Config(64, 64, 64, 2),
    "pingpong": Config(64, 64, 64, group=2),
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_activation = pytest.mark.parametrize("activation", [None, "gelu"])
each_launch = pytest.mark.parametrize(
    "launch",
    [
        "tiles",
        pytest.param(
            "persistent",
            marks=pytest.mark.skipif(
                not interpreting() and CAPABILITY < (9, 0), reason="needs the copy engine"
            ),
        ),
        pytest.param(
            "pingpong", marks=pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
        ),
    ],
)


def randn(*shape, dtype=FP32, seed=0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def operands(m: int, k: int, n: int, dtype=FP32) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(m, k, dtype=dtype), randn(k, n, dtype=dtype, seed=1)


def aligned(values: torch.Tensor, columns: bool = False) -> torch.Tensor:
    """The values in a buffer of NaN, their rows or columns where the copy engine can take them."""
    if columns:
        return aligned(values.t()).t()
    rows, n = values.shape
    unit = 16 // values.itemsize
    _, inside = surrounded(rows, n, (n + unit) // unit * unit, NAN, values.dtype)
    return inside.copy_(values)


def launched(launch: str, a, b, activation=None, config: Config | None = None, gap: int = 0):
    """What a launch writes to the middle of a buffer, of which it must leave the rest alone.

    TMA writes whole units of 16 bytes: see `matmul_persistent.can_be_written`.
    """
    (m, _), n = a.shape, b.shape[1]
    stride = n + gap if gap else (n + 8) // 8 * 8
    whole, c = surrounded(m, n, stride, FENCE, a.dtype)
    c.fill_(-7)
    LAUNCHES[launch](a, b, c, config or SMALL[launch], activation)
    found = c.clone()
    unit = 1 if launch == "tiles" else 16 // c.itemsize
    c.as_strided((m, -(-n // unit) * unit), c.stride()).fill_(FENCE)
    assert whole.eq(FENCE).all(), "written outside"
    return found


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Its tanh form in float64; x sigmoid(2 a) keeps the tail, where 1 + tanh a cancels."""
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


def gelu_error(x: torch.Tensor) -> torch.Tensor:
    """What computing x / (1 + e), with e = 2^-t, in fp32 adds at most.

    t is rounded in 4 operations and 2 constants: 6 t u in e at most, and 4 u for exp2 (a GPU's
    ex2.approx keeps 2^-22; NumPy's is closer). Of that the share e / (1 + e) is seen in the
    quotient, which adds 1 u for the sum and 4 for the division. A GPU may write 0 below 2^-126;
    there x, at most 2^7 while e is finite, makes it 2^-119.
    """
    t = (x.abs() * (2.3022082 + 0.10294324 * x * x)).clamp(max=200)
    share = torch.sigmoid(-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return gelu(x).abs() * U * ((6 * t + 4) * share + 6) + 2.0**-119


def assert_product(c, a, b, activation=None) -> None:
    """AssertionError unless c is activation(a @ b), each element within what rounding explains.

    A sum of K products in fp32, in any order, is within K u Σ|a||b| of the exact one, rigorously
    (Higham, Accuracy and Stability, 3.1; one unit more where products are rounded too); and within
    8 sqrt(K) u Σ|a||b|, but for one element in 10^13, if errors are independent (Higham and Mary,
    2019). Tensor cores cut bits off instead of rounding: 2 u. Then it is rounded to c's dtype.
    GeLU's slope is at most 1.13. Where the product, rounded, is NaN or infinite, c must be too.
    """
    a, b, c = (x.detach().cpu() for x in (a, b, c))
    a, b, k = a.double(), b.double(), a.shape[1]
    exact = a @ b
    steps = min(k + 1, 8 * k**0.5) * (1 if c.dtype == FP32 else 2)
    error = steps * U * (a.abs() @ b.abs())
    if activation:
        error, exact = 1.13 * error + gelu_error(exact), gelu(exact)
    rounded = exact.to(c.dtype)
    assert (c.shape, torch.equal(c.isnan(), rounded.isnan())) == (exact.shape, True)
    infinite, finite = rounded.isinf(), rounded.isfinite()
    assert torch.equal(c[infinite], rounded[infinite])
    allowed = error + storage_bound(c.dtype, exact.abs() + error)
    times = torch.where(finite, (c.double() - exact).abs() / allowed, 0).nan_to_num(nan=0.0)
    place = torch.unravel_index(times.argmax(), times.shape)
    assert times.max() <= 1, (
        f"{c[place]} at {[int(i) for i in place]}, expected {exact[place]}: "
        f"{times.max():.3g} times the bound"
    )


# The kernels, one by one


@pytest.mark.case("N17", "N20")
@each_dtype
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (17, 40, 33), (33, 17, 1), (16, 32, 48), (5, 50, 70)]
)
def test_tiles(m, k, n, dtype):
    """Case N17; case N20, as no tile is below 16."""
    a, b = operands(m, k, n, dtype)
    for x, y, gap in ((a, b, 0), (aligned(a), aligned(b), 3), (aligned(a, True), b, 1)):
        assert_product(launched("tiles", x, y, gap=gap), x, y)


@pytest.mark.parametrize(
    "config", [Config(64, 16, 32, 3), Config(16, 64, 16, 1), Config(32, 32, 64, 8)], ids=str
)
@each_activation
def test_tiles_of_other_shapes(config, activation):
    a, b = operands(150, 70, 90)
    assert_product(launched("tiles", a, b, activation, config), a, b, activation)


@each_launch
@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (17, 33, 40), (50, 5, 70), (35, 48, 64)])
@pytest.mark.parametrize("b_columns", [False, True])
@pytest.mark.parametrize("a_columns", [False, True])
def test_every_kernel_takes_rows_and_columns(launch, m, k, n, a_columns, b_columns):
    """Tiles that do not divide, and several for each program; beside the matrices there is NaN."""
    m, k, n = (size * TIMES if size > 1 else 1 for size in (m, k, n))
    a, b = operands(m, k, n, BF16 if m == 17 * TIMES else FP16)
    a, b = aligned(a, a_columns), aligned(b, b_columns)
    assert has_descriptor(a) and has_descriptor(b)
    activation = "gelu" if m == 50 * TIMES else None
    assert_product(launched(launch, a, b, activation), a, b, activation)


@each_launch
@pytest.mark.parametrize("programs", [1, 3, 132])
def test_any_number_of_programs(monkeypatch, launch, programs):
    for module in (matmul_persistent, matmul_pingpong):
        monkeypatch.setattr(module, "sms", lambda device: programs)
    a, b = (aligned(x) for x in operands(40 * TIMES, 24 * TIMES, 70 * TIMES, FP16))
    assert_product(launched(launch, a, b), a, b)


@each_launch
@each_activation
def test_nan_and_infinities_stay_in_their_rows_and_columns(launch, activation):
    a, b = operands(20, 33, 40, FP16)
    a[3, 5] = b[0, 39] = NAN
    a[7, 32] = a[8, 0] = INF
    b[32, 9] = -INF
    b[32, 4] = 0
    product = a.cpu().double() @ b.cpu().double()
    assert 59 < product.isnan().sum() < 70 and product.isinf().sum() > 90
    a, b = aligned(a), aligned(b)
    assert_product(launched(launch, a, b, activation), a, b, activation)


@each_launch
@each_activation
def test_what_fp16_cannot_hold_is_infinite(launch, activation):
    a, b = operands(20, 33, 40, FP16)
    a, b = aligned(300 * a.sign()), aligned(300 * b.sign().abs())
    c = launched(launch, a, b, activation)
    assert (c == INF).any() and ((c == 0) if activation else (c == -INF)).any()
    assert_product(c, a, b, activation)


@pytest.mark.case("N21")
@each_launch
def test_integers_in_bf16_are_exact(launch):
    """Case N21: interpreted, tl.dot would multiply their bits."""
    a, b = (randn(16, 16, seed=seed).mul(2).round().clamp(-2, 2).to(BF16) for seed in (0, 1))
    assert torch.equal(launched(launch, aligned(a), aligned(b)).double(), a.double() @ b.double())


@each_launch
@each_dtype
def test_gelu_where_it_goes_wrong(launch, dtype):
    """Where exp overflows, in the tail, at zeros, and beyond what fp32 can square."""
    if launch != "tiles" and dtype == FP32:
        pytest.skip("for 16 bits")
    large = [1e20, 3e38] if dtype != FP16 else [3e4, 65504]
    values = [0.0, 1e-4, 0.5, 1, 3, 5, 8, 10, 13, 14.5, 20, 300, INF, *large]
    x = torch.tensor([values, [-value for value in values]], device=DEVICE).t().to(dtype)
    one = aligned(torch.ones(1, 1, dtype=dtype, device=DEVICE))
    column = aligned(x.reshape(-1, 1))
    y = launched(launch, column, one, "gelu")
    assert y[2 * values.index(INF) + 1].isnan()  # of -inf, as in helpers.kernels.gelu
    assert_product(y, column, one, "gelu")


FAR_APART = {
    "rows": ((3, 20), (2**30, 1)),
    "columns": ((20, 3), (1, 2**30)),
    # A step of 16 is 2^31.
    "k": ((20, 17), (1, 2**27)),
}


@pytest.mark.case("N15")
@pytest.mark.parametrize("shape, strides", FAR_APART.values(), ids=FAR_APART)
def test_offsets_are_64_bits_wide(memory, shape, strides):
    """Case N15."""
    x = memory.as_strided(shape, strides, 2**17).copy_(randn(*shape))
    y = randn(max(shape), max(shape), dtype=FP16, seed=1)
    for a, b in ((x, y[: shape[1]]), (y[:, : shape[0]], x), (x.t(), y[: shape[0]])):
        assert_product(launched("tiles", a, b), a, b)


def test_offsets_of_the_result_are_64_bits_wide(memory):
    a, b = operands(3, 20, 20, FP16)
    c = memory.as_strided((3, 20), (2**30, 1), 2**18).fill_(-7)
    launch_tiles(a, b, c, SMALL["tiles"])
    assert_product(c, a, b)


# What the copy engine can take

M = torch.zeros(64, 64, dtype=FP16)
DESCRIBED = {
    "a matrix": (M, True),
    "transposed": (M.t(), True),
    "some columns": (M[:, :7], True),
    "from the eighth on": (M[3:, 8:], True),
    "from the seventh on": (M[:, 7:], False),
    "its columns from the seventh on": (M.t()[7:], False),
    "rows of 60": (torch.zeros(8, 60, dtype=FP16), False),
    "rows of 60 in fp32": (torch.zeros(8, 60), True),
    "rows of 62 in fp32": (torch.zeros(8, 62), False),
    "every second column": (M[:, ::2], False),
    "every second row": (M[::2], True),
    "every second row of the transposed": (M.t()[::2], False),
    "a row": (M[:1], True),
    "every second of a row": (M[:1, ::2], False),
    "a column": (M[:, :1], True),
    "a column, dense": (torch.zeros(64, 1, dtype=FP16), False),
    "a column of the transposed": (M.t()[:, :1], True),
    "one number": (M[:1, :1], True),
    "a row, expanded": (M[:1].expand(9, 64), False),
    "a column, expanded": (M[:, :1].expand(64, 9), False),
    "a number, expanded": (M[:1, :1].expand(64, 64), False),
    "overlapping": (M.as_strided((5, 20), (8, 1)), False),
    "overlapping columns": (M.as_strided((20, 5), (1, 8)), False),
    "rows too far apart": (torch.ones(64, dtype=FP16).as_strided((1, 64), (2**40, 1)), False),
}


@pytest.mark.parametrize("x, expected", DESCRIBED.values(), ids=DESCRIBED)
def test_what_has_a_descriptor(x, expected):
    assert has_descriptor(x) == expected
    if expected:  # and what Triton itself asks of it
        from triton.tools.tensor_descriptor import TensorDescriptor

        made, by_columns = descriptor(x, 16, 32, TensorDescriptor)
        lies = x.t() if by_columns else x
        assert (made.shape, made.strides) == (list(lies.shape), list(lies.stride()))
        assert made.block_shape == ([32, 16] if by_columns else [16, 32])


def test_what_can_be_written():
    """Rows of dense columns, of a multiple of 16 bytes: TMA writes whole units."""
    assert can_be_written(M) and can_be_written(M[:, :8]) and can_be_written(M[::2])
    assert not can_be_written(M[:, :7]) and not can_be_written(M[:, 1:9])
    assert not can_be_written(M.t())
    assert can_be_written(M.float()[:, :4]) and not can_be_written(M.float()[:, :6])


# The public function


@pytest.mark.parametrize("m", [1, 17, 33, 511])
def test_sizes(m):
    for k, n in itertools.product((1, 17, 33, 511), repeat=2):
        a, b = operands(m, k, n)
        c = triton_matmul(a, b)
        assert (c.dtype, c.device, c.is_contiguous()) == (a.dtype, a.device, True)
        assert_product(c, a, b)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@each_activation
def test_sizes_in_16_bits(dtype, activation):
    for m, k, n in ((511, 17, 33), (17, 511, 1), (33, 1, 511), (64, 128, 96), (1, 1, 1)):
        a, b = operands(m, k, n, dtype)
        assert_product(triton_matmul(a, b, activation), a, b, activation)


@pytest.mark.case("N17", "N18")
@pytest.mark.parametrize(
    "m, k, n, dtype",
    [(1000, 999, 1001, FP32), (511, 511, 511, FP16), (128, 8192, 128, FP16), (512, 512, 512, BF16)],
)
def test_larger_sizes(m, k, n, dtype):
    """Cases N17 and N18."""
    a, b = operands(m, k, n, dtype)
    assert_product(triton_matmul(a, b), a, b)


LAYOUTS = {
    "transposed": lambda x: x.t()[:30, :40],
    "every second column": lambda x: x[:30, :80:2],
    "every third row": lambda x: x[:90:3, :40],
    "one row, expanded": lambda x: x[:1, :40].expand(30, 40),
    "one column, expanded": lambda x: x[:30, :1].expand(30, 40),
    "one number, expanded": lambda x: x[:1, :1].expand(30, 40),
    "negated": lambda x: torch._neg_view(x[:30, :40]),
    "misaligned": lambda x: x.flatten()[1:1201].view(30, 40),
    "rows of 42": lambda x: x.flatten()[:1260].view(30, 42)[:, :40],
    "overlapping rows": lambda x: x.as_strided((30, 40), (8, 1)),
    "overlapping columns": lambda x: x.as_strided((30, 40), (1, 16)),
}


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_read_where_they_lie(monkeypatch, layout, dtype):
    seen = []
    for name, launch in LAUNCHES.items():

        def spy(a, b, *more, launch=launch, **options):
            seen.append([(x.data_ptr(), x.stride()) for x in (a, b)])
            return launch(a, b, *more, **options)

        monkeypatch.setitem(LAUNCHES, name, spy)
    whole = randn(96, 96, dtype=dtype)
    before, x = whole.clone(), layout(whole)
    assert x.shape == (30, 40)
    for a, b in ((x, randn(40, 24, dtype=dtype)), (randn(24, 30, dtype=dtype), x), (x.t(), x)):
        assert_product(triton_matmul(a, b), a.resolve_neg(), b.resolve_neg())
        lies = [(y.data_ptr(), y.stride()) for y in (a, b)]
        assert layout is LAYOUTS["negated"] or seen[-1] == lies
    assert torch.equal(whole, before)


@pytest.mark.case("N14")
@each_activation
@pytest.mark.parametrize("m, k, n", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 0, 5)])
def test_nothing_is_launched_for_empty_sizes(monkeypatch, activation, m, k, n):
    """Case N14, backward included."""
    monkeypatch.setattr(matmul, "launch_triton_matmul", lambda *_, **__: pytest.fail("launched"))
    a, b = (x.requires_grad_() for x in operands(m, k, n))
    c = triton_matmul(a, b, activation)
    assert c.shape == (m, n) and not c.any()
    c.sum().backward()
    for x in (a, b):
        assert x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.case("N20")
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_one_product_is_exact(dtype):
    """Case N20: what tl.dot sums beside it are zeros."""
    a, b = operands(40, 1, 33, dtype)
    assert torch.equal(triton_matmul(a, b), (a.float() * b.float()).to(dtype))


@pytest.fixture
def switch():
    """PyTorch's own switch of TF32, which is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.case("N19")
def test_fp32_is_exact_unless_tf32_is_allowed(switch):
    """Case N19: TF32 keeps 11 bits."""
    numbers = torch.arange(46.0 * 46, device=DEVICE).view(46, 46) + 2049
    one = torch.eye(46, device=DEVICE)
    assert torch.equal(triton_matmul(one, numbers), numbers)
    assert torch.equal(triton_matmul(numbers, one), numbers)
    switch("high")
    found = triton_matmul(one, numbers)
    if CAPABILITY < (8, 0):
        assert torch.equal(found, numbers)
    else:
        assert 1 <= (found - numbers).abs().max() <= 4
        a, b = operands(200, 300, 100)
        # Cut to 11 bits, each of two factors is off by 2^-10 at most.
        assert_close(triton_matmul(a, b), a.double() @ b.double(), 2**-9)


@pytest.mark.parametrize("activation", ["relu", "", True, torch.nn.functional.gelu], ids=str)
def test_other_activations_are_refused(monkeypatch, activation):
    monkeypatch.setattr(matmul, "apply", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match="activation is None or gelu, not"):
        triton_matmul(*operands(2, 3, 4), activation)


def test_tensors_elsewhere_are_refused():
    other = "meta" if interpreting() else "cpu"
    a, b = (x.to(other) for x in operands(2, 3, 4))
    with pytest.raises(ValueError, match=f"tensors, not {other}"):
        triton_matmul(a, b)


def test_what_pytorch_traces_is_refused():
    """A graph without the launch would be silently wrong."""
    a, b = operands(4, 8, 5)
    with FakeTensorMode() as mode, pytest.raises((TypeError, RuntimeError)):
        triton_matmul(mode.from_tensor(a), mode.from_tensor(b))
    with pytest.raises((TypeError, RuntimeError)):
        make_fx(triton_matmul)(a, b)
    assert_product(triton_matmul(a, b), a, b)


# Gradients


def exact(a, b, activation):
    return gelu(a @ b) if activation else a @ b


def leaves(a, b) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in (a, b)]


def exact_leaves(a, b) -> list[torch.Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in (a, b)]


GRADIENTS = {  # of c, (9, 13), from a (13, 9)
    "transposed": lambda x: x.t(),
    "contiguous": lambda x: x.t().contiguous(),
    "a row, expanded": lambda x: x.t()[:1].expand(9, 13),
    "a number, expanded": lambda x: x[:1, :1].expand(9, 13),
    "negated": lambda x: torch._neg_view(x.t()),
}


@pytest.mark.case("N29")
@each_activation
@each_dtype
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_against_float64(layout, dtype, activation):
    a, b = operands(9, 20, 13, dtype)
    a, b = a * 0.3, b  # so that GeLU's slopes differ
    grad = layout(randn(13, 9, dtype=dtype, seed=2))
    found, expected = leaves(a, b), exact_leaves(a, b)
    triton_matmul(*found, activation).backward(grad)
    exact(*expected, activation).backward(grad.cpu().double())
    for x, y in zip(found, expected, strict=True):
        assert x.grad.dtype == dtype
        assert_close(x.grad, y.grad)


@each_activation
@pytest.mark.parametrize("needs_a, needs_b", [(True, False), (False, True)])
def test_gradients_of_one_operand(activation, needs_a, needs_b):
    a, b = operands(9, 20, 13)
    (a, b), (x, y) = leaves(a, b), exact_leaves(a, b)
    a.requires_grad_(needs_a), b.requires_grad_(needs_b)
    triton_matmul(a, b, activation).sum().backward()
    exact(x, y, activation).sum().backward()
    for of, wanted, reference in ((a, needs_a, x), (b, needs_b, y)):
        assert (of.grad is not None) == wanted
        if wanted:
            assert_close(of.grad, reference.grad)


def test_only_what_the_gradient_needs_is_kept():
    a, b = operands(9, 20, 13)
    x = a.clone().requires_grad_()
    c = triton_matmul(x, b)
    with torch.no_grad():
        x.zero_()  # dA needs b alone, as with torch.mm
    c.sum().backward()
    assert_close(x.grad, b.double().sum(1).expand(9, 20))
    c = triton_matmul(x, b)
    b.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.sum().backward()


@pytest.mark.parametrize("sign, slope", [(-1, 0.0), (1, 2.0)])
def test_the_slope_beyond_the_end_of_fp16(sign, slope):
    """a @ b is infinite in fp16, which GeLU's own value at -inf is not."""
    a = torch.tensor([[sign * 6e4]], device=DEVICE, dtype=FP16, requires_grad=True)
    b = torch.full((1, 1), 2.0, device=DEVICE, dtype=FP16)
    triton_matmul(a, b, "gelu").backward()
    assert a.grad.item() == slope


@each_activation
def test_second_derivatives(activation):
    def second(product, a, b):
        (first,) = torch.autograd.grad(product(a, b).pow(2).sum(), a, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (a, b))

    a, b = operands(3, 5, 4)
    found = second(functools.partial(triton_matmul, activation=activation), *leaves(a, b))
    expected = second(functools.partial(exact, activation=activation), *exact_leaves(a, b))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_no_graph_is_kept_where_none_is_wanted():
    a, b = operands(3, 5, 4)
    assert not triton_matmul(a, b).requires_grad
    a.requires_grad_()
    with torch.no_grad():
        assert not triton_matmul(a, b).requires_grad
    assert triton_matmul(a, b).requires_grad


@pytest.mark.case("E21")
def test_inside_a_compiled_function():
    """Case E21: torch.compile goes around a kernel that is interpreted."""
    a, b = operands(9, 20, 13)
    found, expected = leaves(a, b), exact_leaves(a, b)
    y = torch.compile(lambda a, b: triton_matmul(a, b, "gelu") + a[:, :13], backend="aot_eager")(
        *found
    )
    y.sum().backward()
    z = exact(*expected, "gelu") + expected[0][:, :13]
    z.sum().backward()
    assert_close(y, z)
    for x, exactly in zip(found, expected, strict=True):
        assert_close(x.grad, exactly.grad)


# On a GPU only


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_nothing_is_tuned_while_a_graph_is_captured(monkeypatch):
    a, b = operands(2048, 2048, 2048, FP16)
    triton_matmul(a, b)  # in the profile smoke: compiled, and not tuned
    monkeypatch.setattr(matmul_plans.machine, "profile", lambda: "full")
    monkeypatch.setattr(matmul_plans, "in_turn", lambda *_: pytest.fail("tuned"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = triton_matmul(a, b)
    c.fill_(-7)
    graph.replay()
    assert_close(c, a.double() @ b.double())


@pytest.mark.case("E14")
@pytest.mark.skipif(torch.cuda.device_count() < 2 or not has_cuda(), reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_on_another_gpu_than_the_current_one(dtype):
    """Case E14, backward included: autograd runs it on threads of its own."""
    a, b = (x.to("cuda:1") for x in operands(200, 304, 104, dtype))
    found, expected = leaves(a, b), exact_leaves(a, b)
    c = triton_matmul(*found, "gelu")
    c.sum().backward()
    exact(*expected, "gelu").sum().backward()
    assert_product(c, a, b, "gelu")
    for x, y in zip(found, expected, strict=True):
        assert x.grad.device == x.device
        assert_close(x.grad, y.grad)
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("columns", [False, True])
def test_more_elements_than_an_int_counts(columns):
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB of GPU memory")
    rows, k = 2**21 + 8, 1024
    a = torch.zeros((k, rows) if columns else (rows, k), dtype=FP16, device=DEVICE)
    a = a.t() if columns else a
    a[-5:] = randn(5, k, dtype=FP16)
    b = randn(k, 16, dtype=FP16, seed=1)
    c = triton_matmul(a, b)
    assert_product(c[-9:], a[-9:], b)
    assert not c[:-5].any()
