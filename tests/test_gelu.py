"""GeLU in every way against float64, at the values and layouts that go wrong; on a GPU if any."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import compute_roofs, cuda
from helpers.check import TOLERANCE, assert_close
from helpers.device import device, has_cuda, interpreting
from helpers.kernels import gelu

DEVICE = device()
DTYPES = list(gelu.DTYPES)
OWN = [gelu.cuda_gelu, gelu.triton_gelu]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_own = pytest.mark.parametrize("way", OWN, ids=lambda way: way.__name__)


def ways() -> list:
    found = [gelu.manual_gelu, gelu.pytorch_gelu, *OWN]
    # On a CPU torch.compile takes seconds, and is no kernel of ours.
    if has_cuda() and compute_roofs.can_compile():
        found.append(gelu.compiled_gelu)
    return found


each_way = pytest.mark.parametrize("way", ways(), ids=lambda way: way.__name__)


def reference(x: torch.Tensor) -> torch.Tensor:
    """By its definition, in float64 on the CPU."""
    x = x.detach().cpu().double()
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    values = 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


@each_dtype
@each_way
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1023, 1024, 1025, 4099])
def test_values(way, dtype, n):
    if way is gelu.compiled_gelu and n not in (8, 1025):
        pytest.skip("it would be compiled again")
    x = randn(n, dtype=dtype)
    before = x.clone()
    y = way(x)
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    # manual_gelu rounds after each of its operations.
    assert_close(y, reference(x), TOLERANCE[dtype] * (5 if way is gelu.manual_gelu else 1))
    assert torch.equal(x, before)


@each_own
@each_dtype
def test_ours_are_rounded_once(way, dtype):
    """Computed in fp32, within one unit in the last place of the true value's rounding."""
    x = randn(4096, dtype=dtype)
    y, expected = way(x).cpu().double(), reference(x)
    unit = torch.finfo(dtype).eps * expected.abs() + 1e-7  # the tail of fp32 cancels nothing here
    units = 4 if dtype == torch.float32 else 0.51
    if dtype == torch.bfloat16 and way is gelu.triton_gelu and interpreting():
        units = 1.01  # Triton's interpreter cuts the bits off
    assert ((y - expected).abs() <= units * unit).all()


@pytest.mark.case("N01")
@each_way
def test_large_values_are_finite(way):
    """Case N01: tanh from exp(2a) is inf / inf from x = 10.06 on."""
    x = torch.tensor([5, 9, 10, 10.05, 10.06, 10.1, 11, 20, 44.2, 100, 1e4, 3e12], device=DEVICE)
    y = way(torch.cat((x, -x)))
    assert y.isfinite().all()
    assert_close(y[: len(x)], x)
    assert y[len(x) :].abs().max() < 1e-5
    assert y[len(x) + 3 :].abs().max() < 1e-37  # -10.05 and beyond


@each_own
@each_dtype
def test_the_largest_numbers_of_a_dtype(way, dtype):
    large = torch.finfo(dtype).max
    x = torch.tensor([large, -large, torch.finfo(dtype).tiny], dtype=dtype, device=DEVICE)
    y = way(x)
    assert y[0] == large and y[1] == 0
    assert 0 <= y[2] <= x[2]


@pytest.mark.case("N02")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_fp32(dtype):
    """Case N02: in fp16 the cube overflows from 41 on, and so do its gradients."""
    values = [1, 5, 39, 45, 60, 300, -1, -5, -45, -60, -300]
    for way in (*OWN, gelu.pytorch_gelu, gelu.manual_gelu):
        x = torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=True)
        y = way(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert_close(y, reference(x))
        assert x.grad[1:6].eq(1).all() and x.grad[8:].eq(0).all()


@pytest.mark.case("N03")
@each_own
@each_dtype
@pytest.mark.parametrize("repeats", [1, 64])
def test_infinities_and_nan(way, dtype, repeats):
    """Case N03: -inf has no agreed result (the limit is 0, the formula gives NaN)."""
    inf = torch.inf
    x = torch.tensor([inf, torch.nan, -inf, 2.0], dtype=dtype, device=DEVICE).repeat(repeats)
    y = way(x).view(repeats, 4)
    assert (y[:, 0] == inf).all()
    assert y[:, 1].isnan().all()
    assert (y[:, 2].isnan() | (y[:, 2] == 0)).all()
    assert_close(y[:, 3], reference(x.view(repeats, 4)[:, 3]))


@pytest.mark.case("N04")
@each_way
def test_it_is_the_tanh_form(way):
    """Case N04. PyTorch's default is the erf form; small values are compared absolutely."""
    x = torch.linspace(-8, 6, 14_001, device=DEVICE)
    y = way(x).cpu().double()
    assert (y - reference(x)).abs().max() < 2e-6
    apart = (y - F.gelu(x.cpu().double())).abs()
    assert 4.6e-4 < apart.max() < 4.8e-4
    assert x[apart.argmax()].abs().item() == pytest.approx(2.7, abs=0.1)


@pytest.mark.case("N05")
@each_own
@each_dtype
def test_zeros_give_zero_of_either_sign(way, dtype):
    """Case N05."""
    y = way(torch.tensor([-0.0, 0.0], dtype=dtype, device=DEVICE))
    assert (y == 0).all()


@pytest.mark.case("N14")
@each_own
@each_dtype
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty_tensors(way, dtype, shape):
    """Case N14: a grid of no blocks is an error, which some later call would be blamed for."""
    x = torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    y = way(x)
    y.sum().backward()
    assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
    assert x.grad.shape == x.shape
    assert_close(way(torch.ones(3, device=DEVICE)), reference(torch.ones(3)))


@each_way
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes_are_refused_before_any_launch(way, monkeypatch, dtype):
    monkeypatch.setattr(cuda.Kernel, "__call__", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(gelu, "_launch", lambda *_: pytest.fail("launched"))
    for shape in ((3,), (0,)):
        x = torch.zeros(shape, device=DEVICE).to(dtype)
        with pytest.raises(TypeError, match=f"GeLU takes float32, float16, bfloat16, not {dtype}"):
            way(x)


@each_way
def test_what_is_no_dense_tensor_is_refused(way):
    for wrong in ([1.0], torch.eye(3, device=DEVICE).to_sparse()):
        with pytest.raises(
            TypeError, match="GeLU takes a dense tensor, not (list|torch.sparse_coo)"
        ):
            way(wrong)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(4, 15, 35).permute(2, 0, 1),
    "rows": lambda x: x[3:17],
    "columns": lambda x: x[:, 5:22],
    "every third": lambda x: x[::3, ::3],
    "flipped": lambda x: x.flip(0),
    "expanded": lambda x: x[:1].expand(9, 35),
    "one element, expanded": lambda x: x[0, 0].expand(33),
    "overlapping": lambda x: x.flatten().unfold(0, 5, 2),
    "0-d": lambda x: x[2, 3],
    "misaligned": lambda x: x.flatten()[1:],
    "misaligned by one row": lambda x: x[1:],
    "channels last": lambda x: x.view(2, 5, 6, 35).contiguous(memory_format=torch.channels_last),
}


@each_own
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(way, dtype, layout):
    whole = randn(60, 35, dtype=dtype)
    before = whole.clone()
    x = layout(whole)
    y = way(x)
    assert y.shape == x.shape
    assert_close(y, reference(x))
    assert torch.equal(whole, before)  # nothing beside the view was written either
    assert y.stride() == gelu.pytorch_gelu(x).stride()
    leaf = whole.detach().requires_grad_()
    way(layout(leaf)).sum().backward()
    exact = whole.detach().cpu().double().requires_grad_()
    F.gelu(layout(exact), approximate="tanh").sum().backward()
    # Sums over elements that a view repeats round in their own dtype.
    assert_close(leaf.grad, exact.grad, 4 * TOLERANCE[dtype])


def test_vectors_are_read_where_x_and_y_are_aligned(monkeypatch):
    used = []
    kernel = gelu.gelu_kernel
    monkeypatch.setattr(gelu, "gelu_kernel", lambda *key: used.append(key) or kernel(*key))
    x = randn(64)
    gelu.cuda_gelu(x)
    gelu.cuda_gelu(x[4:])
    gelu.cuda_gelu(x[1:])
    gelu.launch_cuda_gelu(x[4:12], torch.empty_like(x)[2:10])
    assert [vector_bytes for _, vector_bytes in used] == [16, 16, 4, 4]


@pytest.mark.case("N31")
@pytest.mark.parametrize("launch", [gelu.launch_cuda_gelu, gelu.launch_triton_gelu])
def test_writing_in_place_is_right(launch):
    x = randn(1025)
    expected = reference(x)
    launch(x, x)
    assert_close(x, expected)


@pytest.mark.parametrize("launch", [gelu.launch_cuda_gelu, gelu.launch_triton_gelu])
@pytest.mark.parametrize("n", [1, 15, 512, 513, 2048, 4097])
def test_nothing_is_written_beside_the_output(launch, n):
    x, y = randn(n), torch.full((n + 4096,), torch.nan, device=DEVICE)
    launch(x, y[1000 : 1000 + n])
    assert_close(y[1000 : 1000 + n], reference(x))
    assert y[:1000].isnan().all() and y[1000 + n :].isnan().all()


def test_slopes_of_large_values():
    """The slope is 0 or 1 there; x² overflows in fp32, and PyTorch's is NaN from 1.8e19 on."""
    x = torch.tensor([14, 50, 1e4, 3e12, 1e19, 3e38], device=DEVICE)
    x = torch.cat((x, -x)).requires_grad_()
    gelu.triton_gelu(x).sum().backward()
    assert x.grad.tolist() == [1] * 6 + [0] * 6


@pytest.mark.case("N29")
@each_own
@each_dtype
@pytest.mark.parametrize("n", [1, 257, 1024, 5000])
def test_gradients_against_float64(way, dtype, n):
    x = randn(n, dtype=dtype).requires_grad_()
    weights = randn(n, dtype=dtype, seed=1)
    (way(x) * weights).sum().backward()
    exact = x.detach().cpu().double().requires_grad_()
    (reference_with_gradient(exact) * weights.cpu().double()).sum().backward()
    assert x.grad.dtype == dtype
    assert_close(x.grad, exact.grad)


def reference_with_gradient(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


GRADIENTS = {  # x, and the gradient that comes from above, of one shape
    "x transposed": lambda a, b: (a.t(), b.t().contiguous()),
    "gradient transposed": lambda a, b: (a, b.t().contiguous().t()),
    "x negated": lambda a, b: (torch._neg_view(a), b),
    "gradient negated": lambda a, b: (a, torch._neg_view(b)),
}


@each_own
@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_another_layout_than_x(way, layout):
    x, grad = layout(randn(7, 6), randn(7, 6, seed=1))
    leaf = x.detach().requires_grad_()
    y = way(leaf)
    assert_close(y, reference(x))
    (found,) = torch.autograd.grad(y, leaf, grad)
    exact = x.detach().cpu().double().requires_grad_()
    reference_with_gradient(exact).backward(grad.cpu().double())
    assert_close(found, exact.grad)


@each_own
def test_what_pytorch_traces_is_refused(way):
    """A graph without the launch would be silently wrong."""
    with FakeTensorMode() as mode, pytest.raises((TypeError, RuntimeError)):
        way(mode.from_tensor(torch.ones(8)))
    with pytest.raises((TypeError, RuntimeError)):
        make_fx(way)(randn(8))
    assert_close(way(randn(8)), reference(randn(8)))


def test_nothing_is_launched_for_no_elements(monkeypatch):
    monkeypatch.setattr(gelu, "triton_gelu_kernel", None)
    monkeypatch.setattr(gelu, "triton_gelu_backward_kernel", None)
    x = torch.empty(0, device=DEVICE)
    gelu.launch_triton_gelu(x, x)
    gelu.launch_triton_gelu_backward(x, x, x)


def test_manual_gelu_in_half_precision_is_rounded_once():
    x = randn(4096, dtype=torch.float16)
    y, expected = gelu.manual_gelu(x).cpu().double(), reference(x)
    assert ((y - expected).abs() <= 0.51 * (2**-10 * expected.abs()) + 1e-6).all()


@each_own
def test_second_derivative(way):
    x = randn(33).requires_grad_()
    (first,) = torch.autograd.grad(way(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    exact = x.detach().cpu().double().requires_grad_()
    (first,) = torch.autograd.grad(reference_with_gradient(exact).sum(), exact, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), exact)
    assert_close(second, expected)


@each_own
def test_no_graph_is_kept_where_none_is_wanted(way):
    x = randn(8)
    assert not way(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not way(x).requires_grad
    assert way(x).requires_grad
    assert torch.equal(way(x).detach(), way(x.detach()))


@each_dtype
def test_all_ways_agree(dtype):
    x = randn(1000, dtype=dtype)
    first, *others = (way(x) for way in ways())
    for other in others:
        assert_close(other, first.double(), 5 * TOLERANCE[dtype])


@pytest.mark.case("E14")
@each_own
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one(way):
    """Case E14, backward included: autograd runs it on threads of its own."""
    x = randn(1000).to("cuda:1").requires_grad_()
    y = way(x)
    y.sum().backward()
    assert y.device == x.grad.device == x.device
    assert_close(y, reference(x))
    assert torch.cuda.current_device() == 0


@each_own
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_more_elements_than_an_int_counts(way):
    n = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 5 * n:
        pytest.skip("needs 11 GB of GPU memory")
    x = torch.zeros(n, dtype=torch.float16, device=DEVICE)
    x[-7:] = torch.arange(1, 8)
    assert_close(way(x)[-9:], reference(x[-9:]))


@pytest.mark.case("E21")
@each_own
@pytest.mark.skipif(not compute_roofs.can_compile(), reason=compute_roofs.compiler_missing())
def test_inside_a_compiled_function(way):
    """Case E21: torch.compile goes around a kernel that is interpreted or emulated."""
    x = randn(1025).requires_grad_()
    y = torch.compile(lambda x: way(x) + x, backend="aot_eager")(x)
    y.sum().backward()
    exact = x.detach().cpu().double().requires_grad_()
    (reference_with_gradient(exact) + exact).sum().backward()
    assert_close(y, reference(x) + exact.cpu().detach())
    assert_close(x.grad, exact.grad)
