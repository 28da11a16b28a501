"""What people reported of numbers, N01 to N31 of cases.jsonl, with the numbers that they gave.

Where a module's own tests have that very input they carry the mark instead, and no test is here.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from helpers import cuda, emulator, ptx
from helpers.check import assert_close
from helpers.device import device, has_cuda, triton_version
from helpers.kernels import attention_tiles, gelu, matmul_tiles, softmax
from helpers.kernels.attention import attention_reference, flash_attention
from helpers.kernels.matmul import triton_matmul
from helpers.triton_mode import on_device_of, tl, triton
from tests.test_attention import assert_attention, operands
from tests.test_attention_backward import all_operands, assert_differentiated
from tests.test_gelu import OWN
from tests.test_gelu import ways as gelus
from tests.test_softmax import ways as softmaxes
from tests.test_triton_matmul import assert_product, launched
from tests.triton_cases import recorded

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
DEVICE = device()
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
case = pytest.mark.case


def randn(*shape, dtype=FP32, seed=0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


# GeLU


def after_a_matmul(x: torch.Tensor) -> torch.Tensor:
    """The GeLU that is fused into our matmul."""
    return triton_matmul(x[:, None], x.new_ones(1, 1), "gelu")[:, 0]


each_gelu = pytest.mark.parametrize("way", [*gelus(), after_a_matmul], ids=lambda way: way.__name__)


@case("N01")
@each_gelu
def test_gelu_of_moderately_large_numbers(way):
    numbers = [5, 9, 10, 10.1, 11, 20, 100, -100]
    x = torch.tensor(numbers, device=DEVICE, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    y, expected = way(x), F.gelu(exact, approximate="tanh")
    for each in (y, expected):
        each.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert_close(y, expected)
    assert_close(x.grad, exact.grad)
    assert torch.equal(y[4:7], x[4:7]) and y[7].abs() < 1e-37


@case("N03")
@each_gelu
@pytest.mark.parametrize("n", [3, 64])
def test_gelu_of_infinities_and_nan(way, n):
    x = torch.tensor([INF, -INF, NAN], device=DEVICE).repeat(22)[:n]
    y = way(x)
    assert (y[0::3] == INF).all()
    assert (y[1::3].isnan() | y[1::3].eq(0)).all()  # PyTorch's differs between devices
    if way in (*OWN, gelu.manual_gelu):
        assert y[1::3].isnan().all() and "For -inf the limit is 0" in gelu.__doc__
    assert y[2::3].isnan().all()


@case("N05")
@each_gelu
def test_zeros_of_either_sign_are_equal(way):
    zeros = torch.tensor([-0.0, 0.0], device=DEVICE)
    y = way(zeros)
    assert torch.equal(y, zeros) and torch.allclose(y, -zeros)


# Softmax

each_softmax = pytest.mark.parametrize("way", softmaxes(), ids=lambda way: way.__name__)


@case("N06")
@each_softmax
def test_a_row_of_nothing_but_minus_infinity(way):
    x = randn(3, 4)
    others = way(x)[[0, 2]]
    x[1] = -INF
    y = way(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], others)
    assert_close(y, torch.softmax(x.double(), -1))
    assert "rows of nothing but -inf, become NaN" in softmax.__doc__


@case("N09")
@each_softmax
@pytest.mark.parametrize("shape", [(3, 1), (3, 5), (3, 96), (3, 127), (3, 0), (0, 3)])
def test_softmax_of_any_width(way, shape):
    x = randn(*shape)
    y = way(x)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert_close(y, torch.softmax(x.double(), -1))


@case("N10")
@pytest.mark.parametrize("n", [65_537, 131_072, 1_048_577])
def test_softmax_of_long_rows(n):
    x = randn(1, n)
    assert_close(softmax.triton_softmax(x), torch.softmax(x.double(), -1))


@case("N11")
@each_softmax
def test_softmax_of_columns(way):
    for x in (torch.arange(12.0, device=DEVICE).reshape(3, 4).t(), randn(4, 8)[:, ::2]):
        assert_close(way(x), torch.softmax(x.double(), -1))


# Offsets


@triton.jit
def offset_kernel(out_ptr, WIDE: tl.constexpr):
    row = tl.program_id(0) + 40000
    if WIDE:
        row = row.to(tl.int64)
    tl.store(out_ptr, row * 60000)


@case("N15")
def test_offsets_beyond_32_bits():
    found = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with on_device_of(found):
        for wide in (False, True):
            offset_kernel[(1,)](found, wide)
            assert (found.item() == 2_400_000_000) == wide


OFFSET = """extern "C" __global__ void offset(long long* out, int rows) {
    out[0] = (blockIdx.x + 40000) * 60000LL;
}"""


@case("N15")
def test_offsets_beyond_32_bits_in_cuda():
    found, kernel = torch.zeros(1, dtype=torch.int64, device=DEVICE), cuda.Kernel(OFFSET, "offset")
    with pytest.raises(OverflowError, match="rows = 2,147,483,648 does not fit the kernel's int"):
        kernel(1, 1, found, 2**31)
    try:
        kernel(1, 1, found, 1)
    except (emulator.Unsupported, ptx.ToolMissing) as reason:
        pytest.skip(str(reason))
    assert found.item() == 2_400_000_000


# Matmul


@case("N17")
@pytest.mark.parametrize("m, n, k", [(17, 33, 40), (1000, 999, 1001)])
def test_matmul_of_sizes_that_are_no_multiples_of_a_tile(m, n, k):
    a, b = randn(m, k), randn(k, n, seed=1)
    found = [triton_matmul(a, b)] + ([launched("tiles", a, b)] if m == 17 else [])
    limit = max(1e-4, k * 2**-21)  # a GPU adds up k products in turn, and rounds k times
    for c in found:
        assert (c.double() - a.double() @ b.double()).abs().max() < limit


def compiled_fp32(precision: str, arch: str = "sm_80") -> list[str]:
    """The PTX of our matmul and attention in fp32."""
    x = torch.zeros(64, 64, device=DEVICE)
    q = x[None, None]
    with recorded() as launches:
        matmul_tiles.launch_tiles(x, x, x, matmul_tiles.Config(32, 32, 32), None, precision)
        config = attention_tiles.Config(32, 32)
        attention_tiles.launch_tiles(q, q, q, q, config, False, 1.0, precision)
    requests = [ptx.Request(c.kernel, c.signature, c.constexprs, arch) for c in launches]
    return [one.ptx for one in ptx.triton_compile_many(requests)]


@case("N19")
def test_fp32_products_take_no_tf32_unless_asked_to():
    """The CPU cannot show it, what is compiled for a GPU can."""
    for precision in ("ieee", "tf32"):
        for text in compiled_fp32(precision):
            assert (".tf32" in text) == (precision == "tf32")


@case("N19")
def test_attention_in_fp32_is_not_off_by_tf32():
    x = all_operands(128, 128, 32, FP32, heads=1)
    assert x[0].shape == (1, 1, 128, 32)
    assert_attention(flash_attention(*x[:3], causal=True), *x[:3], causal=True)
    assert_differentiated(*x, True)


@case("N20")
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_the_smallest_matmul_is_exact(dtype):
    a, b = (torch.tensor([[value]], dtype=dtype, device=DEVICE) for value in (3.0, -1.25))
    assert triton_matmul(a, b).tolist() == [[-3.75]]


@case("N21")
def test_bf16_integers_in_a_tile():
    a, b = (randn(16, 16, seed=seed).mul(4).round().bfloat16() for seed in (0, 1))
    exact = (a.double() @ b.double()).bfloat16()
    assert torch.equal(launched("tiles", a, b), exact)
    assert torch.equal(triton_matmul(a, b), exact)
    q = k = torch.eye(16, dtype=BF16, device=DEVICE)[None, None]
    assert torch.equal(flash_attention(200 * q, k, b[None, None], scale=1.0), b[None, None])


@case("N18")
@pytest.mark.parametrize("m, k", [(511, 511), (128, 8192)])
def test_a_tolerance_that_grows_with_k_still_sees_a_missing_step(m, k):
    a, b = randn(m, k, dtype=FP16), randn(k, m, dtype=FP16, seed=1)
    assert_product((a.double() @ b.double()).half(), a, b)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_product((a[:, 16:].double() @ b[16:].double()).half(), a, b)


# Attention


@case("N22", "N27")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("queries, keys", [(64, 64), (65, 65), (1, 20)])
def test_attention_and_its_gradients(queries, keys, causal):
    x = all_operands(queries, keys, 32, FP32, heads=2)
    assert x[0].shape == (1, 2, queries, 32)
    assert_attention(flash_attention(*x[:3], causal), *x[:3], causal)
    assert_differentiated(*x, causal)


@case("N23")
@pytest.mark.parametrize("way", [flash_attention, attention_reference])
@pytest.mark.parametrize("value", [-INF, -1e30])
def test_a_query_that_sees_no_key(way, value):
    """Ours takes no mask: one more number of each query and key hides all keys of the second.

    A score of -1e30 is no hidden key: there the weights are equal, and the row is the mean of v.
    """
    if value != -INF and way is flash_attention and has_cuda():
        pytest.skip("compiled, scores beyond some 10^8 overflow, as its docstring says")
    q, k, v = operands(4, 6, 8, heads=1)
    mask = torch.ones(4, 6, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    expected = [x.double().requires_grad_() for x in (q, k, v)]
    exact = scaled_dot_product_attention(*expected, mask, scale=1.0)
    (exact * exact.detach()).sum().backward()
    more_q = q.new_zeros(1, 1, 4, 1)
    more_q[0, 0, 1] = -1e20
    more_k = k.new_full((1, 1, 6, 1), 1e20 if value == -INF else 1e10)  # -1e40 is -inf in fp32
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wider = (
        torch.cat((leaves[0], more_q), -1),
        torch.cat((leaves[1], more_k), -1),
        torch.cat((leaves[2], torch.zeros_like(more_k)), -1),
    )
    o = way(*wider, scale=1.0)[..., :8]
    assert_close(o[:, :, [0, 2, 3]], exact[:, :, [0, 2, 3]])
    if value != -INF:
        assert_close(o[:, :, 1], v.mean(2), 1e-5)
        return
    (o * exact.detach().float()).sum().backward()
    assert not o[:, :, 1].any() and not leaves[0].grad[:, :, 1].any()
    for leaf, double in zip(leaves, expected, strict=True):
        assert leaf.grad.isfinite().all()
        assert_close(leaf.grad, double.grad)
