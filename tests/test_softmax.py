"""Softmax in every way against float64, at the values and layouts that go wrong; on a GPU if any.

Compiled, on a GPU, these tests take about 200 variants of the six kernels, a second each:
pytest -n 8 spreads them.
"""

import functools
import math
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import compute_roofs, online
from helpers.check import TOLERANCE, assert_close
from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.kernels import softmax, softmax_plans
from helpers.kernels.softmax_tiles import gather, publish
from helpers.triton_mode import on_device_of, tl, triton

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
DEVICE = device()
DTYPES = list(softmax.DTYPES)
INF, NAN = torch.inf, torch.nan
U = 2.0**-24  # the unit roundoff of fp32
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ways() -> list:
    found = [softmax.manual_softmax, softmax.pytorch_softmax, softmax.triton_softmax]
    # On a CPU torch.compile takes seconds, and is no kernel of ours.
    if has_cuda() and compute_roofs.can_compile():
        found.append(softmax.compiled_softmax)
    return found


each_way = pytest.mark.parametrize("way", ways(), ids=lambda way: way.__name__)
each_eager_way = pytest.mark.parametrize("way", ways()[:3], ids=lambda way: way.__name__)


def launch_tiles(x: torch.Tensor, y: torch.Tensor) -> None:
    assert softmax_plans.launch_wide(x, y, split=_split(x, y))


def launch_shared(x: torch.Tensor, y: torch.Tensor, parts: int = 2) -> None:
    with on_device_of(x):
        softmax_plans.launch_shared(x, y, _split(x, y), parts, programs=2 * parts)


def _split(x: torch.Tensor, y: torch.Tensor) -> bool:
    return softmax_plans.unit(x, y) * x.itemsize < 16


def within(launch):
    """The launch of one kernel, as launch_triton_softmax makes it."""

    @functools.wraps(launch)
    def launched(x, y):
        with on_device_of(x):
            launch(x, y)

    return launched


LAUNCHES = {
    "rows": within(softmax.launch_rows),
    "tiles": within(launch_tiles),
    "shared": launch_shared,
    "online": within(softmax.launch_online),
    "chosen": softmax.launch_triton_softmax,
}
WIDTHS = {
    "rows": (1, 5, 96, 127, 128, 1000, 1023, 1024, 1025, 4095, 4096),
    "tiles": (1025, 2048, 4095, 4097, 5000, 10007, 16384, 65537),
    "shared": (4099, 10007, 16384, 65537),
    "online": (1, 5, 4095, 4096, 4097, 10007, 65537),
    "chosen": (1, 127, 1025, 4097),
}
WIDTHS_16_BITS = {
    "rows": (5, 127, 128, 1000, 1025, 4096),
    "tiles": (1025, 2048, 4097, 10007),
    "shared": (4099, 16384),
    "online": (5, 4097),
}
FEW_WIDTHS = {  # for what does not depend on them
    "rows": (5, 1000),
    "tiles": (1029, 2048),
    "shared": (4099, 8192),
    "online": (5, 4099),
}


def launches(widths: dict):
    found = [(launch, n) for launch in widths for n in widths[launch]]
    return pytest.mark.parametrize("launch, n", found, ids=lambda value: str(value))


def reference(x: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU."""
    return torch.softmax(x.detach().cpu().double(), dim=-1)


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    values = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def error_bound(x: torch.Tensor, y: torch.Tensor, rescalings: int) -> torch.Tensor:
    """How far softmax in fp32 may be from the exact y = exp(x - m) / d, element by element.

    Relative to y, with u = 2^-24 and t = |x - m|, to first order:
    - exp: 3 t u, as t is rounded three times (the difference; log2 e; their product), and 6 u for
      exp itself (a GPU's ex2.approx keeps 2^-22 = 4 u, NumPy's exp 2.52 units in the last place);
    - d: the terms' errors, weighted with y: 3 u Σ y t, at most 3 u ln n (see
      `online.sum_error_bound`), and 6 u; u for each addition that a term goes through, 48 at most:
      up to 16 tiles, then 16 elements of a thread, 5 levels in a warp and 5 between warps;
      NumPy's sum in pairs, 19 + log2(n / 128);
    - each time that a term is rescaled to another maximum: exp, a product and a sum, 8 u (the
      differences of the maxima are parts of t);
    - 1 / d or a division, 2 units in the last place on a GPU: 4 u; a product, u.
    Below 2^-126 a GPU may write 0. What that takes from d >= 1 vanishes, as the second order does.
    """
    x = x.detach().cpu().double()
    t = x.amax(dim=-1, keepdim=True) - x
    units = 3 * t + 3 * math.log(x.shape[-1]) + 6 + 6 + 48 + 8 * rescalings + 4 + 1
    return torch.where(y > 0, U * units * y, 0) + 2.0**-126


def storage_bound(dtype: torch.dtype, y: torch.Tensor) -> torch.Tensor:
    """What rounding to 16 bits adds: half a unit in the last place."""
    if dtype == torch.float32:
        return torch.zeros_like(y)
    about = torch.finfo(dtype)
    units = torch.clamp(about.eps * y, min=about.smallest_normal * about.eps)
    # Triton's interpreter cuts bf16's bits off.
    return units * (1.01 if dtype == torch.bfloat16 and interpreting() else 0.501)


def assert_softmax(y: torch.Tensor, x: torch.Tensor, rescalings: int = 1) -> None:
    x = torch.atleast_1d(x)
    expected, found = reference(x), torch.atleast_1d(y).detach().cpu().double()
    assert torch.equal(found.isnan(), expected.isnan())
    allowed = error_bound(x, expected, rescalings) + storage_bound(y.dtype, expected)
    times = ((found - expected).abs() / allowed).nan_to_num(nan=0.0)
    place = torch.unravel_index(times.argmax(), times.shape)
    assert times.max() <= 1, (
        f"{found[place]} at {[int(i) for i in place]}, expected {expected[place]}: "
        f"{times.max():.3g} times the bound"
    )


def rescalings(launch: str, n: int) -> int:
    return {"rows": 0, "tiles": 0, "online": math.ceil(n / 4096)}.get(launch, 1)


def launched(launch: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, -7)
    LAUNCHES[launch](x, y)
    return y


def awkward(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows: ordinary, far apart, far from 0, as large as can be, equal, rising and falling."""
    largest = torch.finfo(dtype).max
    x = randn(7, n, dtype=torch.float32)
    x[1] *= 50
    x[2] += 1e4
    x[3] *= largest / 8
    x[4] = 5
    x[5:] = torch.linspace(-40, 40, n)
    x[6] = x[6].flip(0)
    x[3, : n // 2 : 5] = -largest
    x[3, n // 2 :: 5] = largest
    return x.clamp(-largest, largest).to(dtype)


@launches(WIDTHS)
def test_fp32_keeps_the_bound(launch, n):
    x = awkward(n, torch.float32)
    before = x.clone()
    assert_softmax(launched(launch, x), x, rescalings(launch, n))
    assert torch.equal(x, before)


@launches(WIDTHS_16_BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once(launch, n, dtype):
    """Computed in fp32, also where fp16 has subnormal results."""
    x = awkward(n, dtype)[:4]
    assert_softmax(launched(launch, x), x, rescalings(launch, n))


@pytest.mark.case("N10")
@pytest.mark.parametrize(
    "rows, n, dtype",
    [(1, 2**18 + 1, torch.float32), (2, 2**17, torch.float32)]
    + [(2, 2**16 + 1, dtype) for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_wide_rows(rows, n, dtype):
    """Case N10."""
    x = randn(rows, n, dtype=dtype)
    assert_softmax(softmax.triton_softmax(x), x)


@pytest.mark.parametrize("rows, parts, n", [(1, 2, 4096), (5, 2, 1027), (2, 7, 1027), (2, 16, 40)])
def test_any_number_of_programs_can_share_a_row(rows, parts, n):
    """Also more than there are elements for: the last ones have none."""
    x = randn(rows, n)
    y = torch.empty_like(x)
    launch_shared(x, y, parts)
    assert_softmax(y, x)


def special(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN and infinities, the last three with finite results, and ordinary ones between.

    Of the programs that share a row, some have nothing but -inf.
    """
    x = randn(13, n, dtype=dtype)
    x[0] = -INF
    x[1] = INF
    x[3, n // 3] = INF
    x[4, n // 3] = NAN
    x[6] = NAN
    x[7] = -INF
    x[7, n - 1] = INF
    x[9, : n // 2] = -INF
    x[10, n // 2 :] = -INF
    x[12, : n - 1] = -INF
    return x


@pytest.mark.case("N06")
@pytest.mark.parametrize(
    "launch, n, dtype",
    [(launch, n, torch.float32) for launch, both in FEW_WIDTHS.items() for n in both]
    + [(launch, n, torch.float16) for launch, (n, _) in FEW_WIDTHS.items()],
    ids=str,
)
def test_rows_with_nan_and_infinities(launch, n, dtype):
    """Case N06: NaN where PyTorch's is, and nowhere else."""
    x = special(n, dtype)
    y = launched(launch, x)
    assert_softmax(y, x, rescalings(launch, n))
    nan = [row for row in range(len(y)) if y[row].isnan().any()]
    assert nan == [0, 1, 3, 4, 6, 7] and y[nan].isnan().all()


@each_eager_way
@each_dtype
def test_all_ways_treat_nan_and_infinities_alike(way, dtype):
    x = special(33, dtype)
    assert_close(way(x), reference(x), 5 * TOLERANCE[dtype])


def test_the_rows_of_the_lecture():
    x = torch.tensor([[5.0, 5, 5], [0, 0, 100]], device=DEVICE)
    y = softmax.triton_softmax(x)
    assert_softmax(y, x)
    assert y[0, 0] == y[0, 1] == y[0, 2] and y[1, 2] == 1
    assert y[1, :2].tolist() == pytest.approx([3.783506e-44] * 2, abs=1.5e-45)  # a subnormal unit


@each_eager_way
@each_dtype
def test_one_column_gives_one(way, dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([0, -0.0, 3, largest, -largest], dtype=dtype, device=DEVICE)
    assert way(x[:, None]).eq(1).all()
    assert way(x[3]) == 1


@launches(FEW_WIDTHS)
def test_a_shift_changes_nothing_and_neither_does_another_run(launch, n):
    """To the bit, as x - m is the same where adding the shift rounds nothing."""
    x = (8 * randn(2, n)).round() / 8
    y = launched(launch, x)
    assert torch.equal(launched(launch, x), y)
    assert torch.equal(launched(launch, x - 4096), y)


@pytest.mark.case("N09")
@each_way
@each_dtype
@pytest.mark.parametrize("n", [1, 5, 96, 127, 1025, 4099])
def test_values(way, dtype, n):
    """Case N09."""
    if way is softmax.compiled_softmax and n not in (96, 1025):
        pytest.skip("it would be compiled again")
    x = randn(3, n, dtype=dtype)
    before = x.clone()
    y = way(x)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert_close(y, reference(x), TOLERANCE[dtype])
    assert torch.equal(x, before)


@each_dtype
def test_all_ways_agree(dtype):
    x = randn(7, 1000, dtype=dtype)
    first, *others = (way(x) for way in ways())
    for other in others:
        assert_close(other, first.double(), 2 * TOLERANCE[dtype])


@pytest.mark.case("N14")
@each_eager_way
@each_dtype
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty_tensors(way, dtype, shape):
    """Case N14."""
    x = torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    y = way(x)
    y.sum().backward()
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert x.grad.shape == x.shape
    assert_close(way(torch.ones(3, device=DEVICE)), reference(torch.ones(3)))


def test_nothing_is_launched_for_no_elements(monkeypatch):
    for name in ("launch_rows", "launch_wide", "launch_online"):
        monkeypatch.setattr(softmax, name, None)
    for name in ("softmax_rows_backward_kernel", "softmax_tiles_backward_kernel"):
        monkeypatch.setattr(softmax, name, None)
    for shape in ((0, 5), (5, 0), (0, 9000)):
        x = torch.empty(shape, device=DEVICE)
        softmax.launch_triton_softmax(x, x)
        softmax.launch_triton_softmax_backward(x, x, x)
        assert softmax.triton_softmax(x).shape == shape


@each_way
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes_are_refused_before_any_launch(way, monkeypatch, dtype):
    monkeypatch.setattr(softmax, "launch_triton_softmax", lambda *_: pytest.fail("launched"))
    for shape in ((3,), (0,)):
        x = torch.zeros(shape, device=DEVICE).to(dtype)
        message = f"softmax takes float32, float16, bfloat16, not {dtype}"
        with pytest.raises(TypeError, match=message):
            way(x)


@each_way
def test_what_is_no_dense_tensor_is_refused(way):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for wrong, name in (([1.0], "list"), (torch.eye(3).to_sparse(), "torch"), (nested, "nested")):
        with pytest.raises(TypeError, match=f"softmax takes a dense tensor, not {name}"):
            way(wrong)


LAYOUTS = {  # of a matrix with rows in multiples of 12
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(4, -1, x.shape[1]).permute(2, 0, 1),
    "4-d": lambda x: x.view(2, 3, -1, x.shape[1]),
    "rows": lambda x: x[3:9],
    "columns": lambda x: x[:, 5:-3],
    "every third": lambda x: x[::3, ::3],
    "every other row": lambda x: x[::2],
    "flipped": lambda x: x.flip(1),
    "a row, expanded": lambda x: x[:1].expand(9, -1),
    "a column, expanded": lambda x: x[:, :1].expand(-1, 17),
    "overlapping": lambda x: x.flatten().unfold(0, x.shape[1], x.shape[1] // 2 + 1),
    "1-d": lambda x: x[2],
    "0-d": lambda x: x[2, 3],
    "misaligned": lambda x: x.flatten()[1 : 1 - x.shape[1]].view(-1, x.shape[1]),
    "channels last": lambda x: x.view(2, 2, -1, x.shape[1]).contiguous(
        memory_format=torch.channels_last
    ),
    "negated": torch._neg_view,
}


@pytest.mark.case("N11")
@pytest.mark.parametrize(
    "shape, dtype",
    [((24, 35), torch.float32), ((24, 35), torch.float16)]
    + [((24, 40), torch.bfloat16), ((12, 1307), torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(shape, dtype, layout):
    """Case N11: the values, not the rows' sums, which a wrong stride leaves at 1."""
    whole = randn(*shape, dtype=dtype)
    before = whole.clone()
    x = layout(whole)
    y = softmax.triton_softmax(x)
    assert y.shape == x.shape
    assert_softmax(y, x)
    assert torch.equal(whole, before)  # nothing beside the view was written either
    assert y.is_contiguous() and y.stride() == torch.empty(x.shape).stride()
    if layout is LAYOUTS["a column, expanded"]:
        return  # its gradient is 0, up to rounding
    weights = randn(*y.shape, dtype=dtype, seed=1)  # a gradient of ones would give 0, too
    leaf = whole.detach().requires_grad_()
    (softmax.triton_softmax(layout(leaf)) * weights).sum().backward()
    exact = whole.detach().cpu().double().requires_grad_()
    (torch.softmax(layout(exact), -1) * weights.cpu().double()).sum().backward()
    # Sums over elements that a view repeats round in their own dtype.
    assert_close(leaf.grad, exact.grad, 4 * TOLERANCE[dtype])


def surrounded(rows: int, n: int, stride: int, fill: float, dtype, start: int = 64):
    """A buffer full of one number, and rows within it, `stride` elements apart."""
    whole = torch.full((rows * stride + 2 * start + 8192,), fill, dtype=dtype, device=DEVICE)
    return whole, whole.as_strided((rows, n), (stride, 1), start)


@launches(FEW_WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nothing_beside_the_rows_is_read_or_written(launch, n, dtype):
    for x_gap, y_gap, start in ((3, 11, 64), (16, 8, 64), (5, 8, 65)):
        # Tiles are for rows that begin at the same place of 16 bytes as those of y.
        if start == 65 and launch in ("tiles", "shared"):
            continue
        _, x = surrounded(3, n, n + x_gap, NAN, dtype, start)
        whole, y = surrounded(3, n, n + y_gap, 3, dtype)
        x.copy_(randn(3, n))
        LAUNCHES[launch](x, y)
        assert_softmax(y, x, rescalings(launch, n))
        y.fill_(3)
        assert whole.eq(3).all()


@each_dtype
@pytest.mark.parametrize("n", [5, 1000, 4097, 5000])
def test_nothing_beside_the_rows_is_read_or_written_backward(n, dtype):
    for gap in (0, 3, 8):
        y, grad = (surrounded(5, n, n + 2 * gap, NAN, dtype)[1] for _ in range(2))
        whole, dx = surrounded(5, n, n + gap, 3, dtype)
        y.copy_(reference(randn(5, n)))
        grad.copy_(randn(5, n, seed=1))
        softmax.launch_triton_softmax_backward(y, grad, dx)
        assert_close(dx, slope(y, grad))
        dx.fill_(3)
        assert whole.eq(3).all()


def slope(y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """dx in float64."""
    y, grad = y.cpu().double(), grad.cpu().double()
    return y * (grad - (y * grad).sum(-1, keepdim=True))


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS, TILES, SHARED, ONLINE = (f"softmax_{n}_kernel" for n in ("rows", "tiles", "shared", "online"))
BORDERS = [
    # dtype, columns, elements after a 16-byte boundary, the kernel
    *((FP32, 1023, 0, ROWS), (FP32, 1024, 0, ROWS), (FP32, 1025, 0, TILES), (FP32, 1028, 0, ROWS)),
    *((FP32, 4095, 0, TILES), (FP32, 4096, 0, ROWS), (FP32, 4097, 0, TILES)),
    *((FP32, 4100, 0, TILES), (BF16, 4100, 0, TILES), (BF16, 1028, 0, TILES)),
    *((BF16, 4096, 0, ROWS), (BF16, 4104, 0, TILES)),
    *((FP32, 65536, 0, TILES), (FP32, 65537, 0, TILES), (FP32, 65540, 0, SHARED)),
    *((FP16, 65536, 0, TILES), (FP16, 65543, 0, TILES), (FP16, 65544, 0, SHARED)),
    *((FP32, 2**21, 0, SHARED), (FP32, 2**21 + 1, 0, ONLINE)),
    *((FP16, 2**22, 0, SHARED), (FP16, 2**22 + 8, 0, ONLINE)),
    *((FP32, 1000, 1, ROWS), (FP32, 1001, 1, ROWS), (FP32, 1025, 1, ONLINE)),
    *((FP32, 4096, 1, ROWS), (FP32, 4100, 1, ONLINE), (FP32, 131072, 1, ONLINE)),
]


def used(launch, *tensors, programs: int = 1024):
    """The names of the kernels that a launch would run."""
    from triton_cases import name, recorded

    with (
        mock.patch.object(softmax_plans, "programs_at_once", lambda device: programs),
        recorded() as cases,
    ):
        launch(*tensors)
    return {name(case.kernel) for case in cases}


@pytest.mark.parametrize("dtype, n, start, kernel", BORDERS, ids=str)
@pytest.mark.parametrize("of", ["x", "y"])
def test_the_width_chooses_the_kernel(dtype, n, start, kernel, of):
    """As the module's docstring has it."""
    aligned = torch.empty(2 * n, dtype=dtype, device=DEVICE).view(2, n)
    moved = torch.empty(2 * n + 8, dtype=dtype, device=DEVICE)[start : start + 2 * n].view(2, n)
    tensors = (moved, aligned) if of == "x" else (aligned, moved)
    assert used(softmax.launch_triton_softmax, *tensors) == {kernel}


def test_what_else_chooses_the_kernel():
    def launched(x, y, **more):
        return used(softmax.launch_triton_softmax, x, y, **more)

    whole = torch.empty(3, 4096, device=DEVICE)
    y = torch.empty(3, 2000, device=DEVICE)
    assert launched(whole[:, :2000], y) == {ROWS}
    assert launched(whole[:, 1:2001], y) == {ROWS}  # where it begins only costs wide accesses
    odd = torch.empty(3, 2001, device=DEVICE)
    assert launched(odd[:, :2000], y) == {ONLINE}  # rows of x and y are apart by another remainder
    assert launched(odd[:, :2000], torch.empty(3, 2005, device=DEVICE)[:, :2000]) == {TILES}
    assert launched(odd[:1, :2000], y[:1]) == {ROWS}  # a single row has no stride
    assert launched(odd[:1, :1999], y[:1, :1999]) == {TILES}
    wide = torch.empty(2, 2**18, device=DEVICE)  # 32 parts
    assert launched(wide, wide, programs=32) == {SHARED}
    assert launched(wide, wide, programs=31) == {ONLINE}  # they could not run at the same time


def test_the_width_chooses_the_backward_kernel():
    def launched(n):
        return used(softmax.launch_triton_softmax_backward, *3 * [torch.empty(2, n, device=DEVICE)])

    assert launched(1) == launched(4095) == launched(4096) == {"softmax_rows_backward_kernel"}
    assert launched(4097) == launched(10**6) == {"softmax_tiles_backward_kernel"}


def test_how_many_elements_are_read_at_once():
    x = torch.empty(4, 48, device=DEVICE)
    half = x.to(torch.float16)
    assert (softmax_plans.unit(x), softmax_plans.unit(half)) == (4, 8)
    assert softmax_plans.unit(x[:, :47]) == 1 and softmax_plans.unit(half[:, :44]) == 4
    assert softmax_plans.unit(x, x[:, :46]) == 4  # the shape is the first one's
    assert softmax_plans.unit(x, torch.empty(4, 50, device=DEVICE)[:, :48]) == 2
    assert softmax_plans.unit(x[:1], torch.empty(1, 50, device=DEVICE)[:, :48]) == 4
    assert softmax_plans.unit(x[:1].expand(3, -1)) == 4


def test_rows_that_are_too_wide_are_refused():
    """Before anything is read."""
    for columns in (softmax.WIDEST + 1, 2**31, 2**33):
        x = torch.zeros(1, 1, dtype=FP16, device=DEVICE).expand(1, columns)
        with pytest.raises(ValueError, match=r"softmax takes rows of up to 2,\d+,\d+,\d+ elements"):
            softmax.launch_triton_softmax(x, x)


@each_dtype
def test_offsets_in_the_widest_rows_fit_into_32_bits(dtype):
    """The last tile begins within the row and may end behind it; so may a look at several."""
    from triton_cases import recorded

    x = torch.zeros(1, 1, dtype=dtype, device=DEVICE).expand(1, softmax.WIDEST)
    with recorded() as cases:
        softmax.launch_triton_softmax(x, x)
        softmax.launch_triton_softmax_backward(x, x, x)
    assert len(cases) == 2
    for case in cases:
        tile = case.constexprs["BLOCK"] * case.constexprs.get("TILES", 1)
        assert softmax.WIDEST - 1 + tile < 2**31


@pytest.fixture(scope="module")
def far_apart():
    """Rows 2^30 elements apart: the third begins where 32 bits end. On a CPU most of that memory
    is never touched, so that it is only reserved."""
    if has_cuda() and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB of GPU memory")
    try:
        whole = torch.empty(2**31 + 2**20, dtype=FP16, device=DEVICE)
    except RuntimeError:
        pytest.skip("needs 4 GB of address space")
    return lambda n, i: whole.as_strided((3, n), (2**30, 1), i * 2**17)


@pytest.mark.case("N15")
@launches(FEW_WIDTHS)
def test_offsets_between_rows_are_64_bits_wide(launch, n, far_apart):
    """Case N15."""
    x, y = far_apart(n, 0), far_apart(n, 1)
    x.copy_(randn(3, n))
    y.fill_(-7)
    LAUNCHES[launch](x, y)
    assert_softmax(y, x, rescalings(launch, n))


@pytest.mark.parametrize("n", [1000, 5000])
def test_offsets_between_rows_are_64_bits_wide_backward(n, far_apart):
    y, grad, dx = (far_apart(n, i) for i in range(3))
    y.copy_(reference(randn(3, n)))
    grad.copy_(randn(3, n, seed=1))
    softmax.launch_triton_softmax_backward(y, grad, dx)
    assert_close(dx, slope(y, grad))


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2**21 + 1, 1024), (4, 2**29)], ids=str)
def test_more_elements_than_an_int_counts(shape):
    if torch.cuda.mem_get_info()[0] < 5 * math.prod(shape):
        pytest.skip("needs 11 GB of GPU memory")
    x = torch.zeros(shape, dtype=FP16, device=DEVICE)
    x[-1, -1] = 30  # beside it nothing is left of the others in 16 bits
    y = softmax.triton_softmax(x)
    assert y[-1, -1] == 1 and y[-1].count_nonzero() == 1
    assert y[:2, -3:].eq(torch.tensor(1 / shape[1], dtype=FP16)).all()


@triton.jit
def hand_over_kernel(m_ptr, d_ptr, pairs_ptr, found_ptr, parts, PARTS: tl.constexpr):
    for part in range(parts):
        publish(pairs_ptr + part, tl.load(m_ptr + part), tl.load(d_ptr + part))
    tl.debug_barrier()
    m, d = gather(pairs_ptr, parts, PARTS)
    tl.store(found_ptr, m)
    tl.store(found_ptr + 1, d)


NOTHING = (-INF, 0.0)
PAIRS = {
    "one": [(3, 2.5)],
    "two": [(3, 2.5), (-1, 7)],
    "zero, of either sign": [(0.0, 1.0), (-0.0, 1.0)],
    "a part of nothing": [NOTHING, (-3, 1.25), NOTHING],
    "far apart": [(-1e38, 3), (3e38, 1), (88, 1e9)],
    "NaN": [(1, NAN), (2, 1)],
    "nothing but NaN in a part": [(-INF, NAN), (2, 1)],
    "an infinity": [(INF, NAN), (2, 1), NOTHING],
    "256": [(i % 13 - 20.5, 1 + i) for i in range(256)],
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_pairs_are_handed_over_whole_and_merged(pairs):
    m, d = torch.tensor(pairs, device=DEVICE, dtype=torch.float32).t().contiguous()
    memory = torch.zeros(len(pairs), dtype=torch.int64, device=DEVICE)
    found = torch.empty(2, device=DEVICE)
    with on_device_of(m):
        hand_over_kernel[(1,)](m, d, memory, found, len(pairs), triton.next_power_of_2(len(pairs)))
    assert memory.ne(0).all()  # 0 stands for a pair that is not there yet
    m, d = (values.cpu().double() for values in (m, d))
    expected = functools.reduce(online.merge, zip(m, d, strict=True))
    assert found[0].item() == expected[0].item()
    assert found[1].item() == pytest.approx(expected[1].item(), rel=1e-5, nan_ok=True)


GRADIENTS = {  # x, and the gradient that comes from above, of one shape
    "x transposed": lambda a, b: (a.t(), b.t().contiguous()),
    "gradient transposed": lambda a, b: (a, b.t().contiguous().t()),
    "gradient expanded": lambda a, b: (a, b[:1].expand_as(a)),
    "gradient the same in a row": lambda a, b: (a, b[:, :1].expand_as(a)),
    "x negated": lambda a, b: (torch._neg_view(a), b),
    "gradient negated": lambda a, b: (a, torch._neg_view(b)),
    "gradient misaligned": lambda a, b: (
        a,
        torch.cat((b.flatten(), b[0]))[1:][: b.numel()].view_as(b),
    ),
}


@pytest.mark.parametrize("shape", [(7, 6), (3, 5000)], ids=str)
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_another_layout_than_x(layout, shape):
    x, grad = layout(randn(*shape), randn(*shape, seed=1))
    leaf = x.detach().requires_grad_()
    y = softmax.triton_softmax(leaf)
    assert_softmax(y, x)
    (found,) = torch.autograd.grad(y, leaf, grad)
    exact = x.detach().cpu().double().requires_grad_()
    torch.softmax(exact, -1).backward(grad.cpu().double())
    # Where one gradient is for all, its terms cancel: what is left is rounding.
    gap = (found.cpu().double() - exact.grad).abs()
    assert (gap <= 50 * U * (reference(x) * grad.cpu().double().abs().amax(-1, True))).all()


@each_dtype
@pytest.mark.parametrize("n", [1, 5, 127, 1000, 1025, 4096, 4097, 5000, 10007, 65537])
def test_gradients_against_float64(dtype, n):
    x = randn(3, n, dtype=dtype).requires_grad_()
    weights = randn(3, n, dtype=dtype, seed=1)
    (softmax.triton_softmax(x) * weights).sum().backward()
    exact = x.detach().cpu().double().requires_grad_()
    (torch.softmax(exact, -1) * weights.cpu().double()).sum().backward()
    assert x.grad.dtype == dtype
    assert_close(x.grad, exact.grad)


@pytest.mark.case("N29")
@each_way
@each_dtype
def test_all_ways_are_differentiable(way, dtype):
    """Case N29."""
    x = randn(3, 96, dtype=dtype).requires_grad_()
    weights = randn(3, 96, dtype=dtype, seed=1)
    (way(x) * weights).sum().backward()
    assert_close(x.grad, slope(reference(x), weights))


@pytest.mark.parametrize(
    "way", [softmax.manual_softmax, softmax.pytorch_softmax, softmax.triton_softmax]
)
def test_second_derivative(way):
    def twice(way, x, weights):
        (first,) = torch.autograd.grad((way(x) * weights).sum(), x, create_graph=True)
        return torch.autograd.grad((first * weights).sum(), x)[0]

    x, weights = randn(3, 33).requires_grad_(), randn(3, 33, seed=1)
    exact = x.detach().cpu().double().requires_grad_()
    expected = twice(lambda x: torch.softmax(x, -1), exact, weights.cpu().double())
    assert_close(twice(way, x, weights), expected)


def test_no_graph_is_kept_where_none_is_wanted():
    x = randn(2, 8)
    assert not softmax.triton_softmax(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not softmax.triton_softmax(x).requires_grad
    assert softmax.triton_softmax(x).requires_grad
    assert torch.equal(softmax.triton_softmax(x).detach(), softmax.triton_softmax(x.detach()))


def test_what_pytorch_traces_is_refused():
    """A graph without the launch would be silently wrong."""
    way = softmax.triton_softmax
    with FakeTensorMode() as mode, pytest.raises((TypeError, RuntimeError, ValueError)):
        way(mode.from_tensor(torch.ones(2, 8)))
    with pytest.raises((TypeError, RuntimeError)):
        make_fx(way)(randn(2, 8))
    assert_close(way(randn(2, 8)), reference(randn(2, 8)))


@pytest.mark.case("E14")
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [96, 5000, 131072])
def test_on_another_gpu_than_the_current_one(n):
    """Case E14, backward included: autograd runs it on threads of its own."""
    x = randn(3, n).to("cuda:1").requires_grad_()
    y = softmax.triton_softmax(x)
    (y * randn(3, n, seed=1).to("cuda:1")).sum().backward()
    assert y.device == x.grad.device == x.device
    assert_softmax(y, x)
    assert_close(x.grad, slope(reference(x), randn(3, n, seed=1)))
    assert torch.cuda.current_device() == 0


@pytest.mark.case("E21")
def test_inside_a_compiled_function():
    """Case E21: torch.compile goes around a kernel that is interpreted."""
    x, weights = randn(2, 1025).requires_grad_(), randn(2, 1025, seed=1)
    y = torch.compile(lambda x: softmax.triton_softmax(x) * weights, backend="aot_eager")(x)
    y.sum().backward()
    assert_close(y, reference(x) * weights.cpu())
    assert_close(x.grad, slope(reference(x), weights))
