"""Attention against float64: our kernels in each of their configurations, and the public function.

Compiled, on an H200, these tests take about 300 variants of the two kernels, 3 to 10 s each:
pytest -n 14 spreads them. (A size or stride that is 1, or a multiple of 16, makes a variant.)
"""

import functools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from helpers.check import assert_close
from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.kernels import attention, attention_hopper, attention_plans, attention_tiles
from helpers.kernels.attention import attention_reference, flash_attention
from helpers.kernels.attention_plans import hopper_config
from helpers.kernels.attention_tiles import Config, launch_tiles
from helpers.kernels.matmul_plans import OutOfResources
from tests.test_softmax import storage_bound

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
DEVICE = device()
CAPABILITY = torch.cuda.get_device_capability() if has_cuda() else (0, 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP32, FP16, BF16]
INF, NAN = torch.inf, torch.nan
U = 2.0**-24  # the unit roundoff of fp32
FENCE, BESIDE = 3, 2**16  # a number, and how often: a wrong kernel may write there
# In the interpreter, where each step takes milliseconds.
SMALL = {FP32: Config(32, 32), FP16: Config(32, 16), BF16: Config(16, 32)}
MANY = 70 if interpreting() else 600  # keys, several tiles of them
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
needs_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")


def randn(*shape, dtype=FP32, seed=0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def operands(queries, keys, dim=16, dtype=FP32, batch=1, heads=2, kv_heads=None):
    q = randn(batch, heads, queries, dim, dtype=dtype)
    kv = (batch, kv_heads or heads, keys, dim)
    return q, randn(*kv, dtype=dtype, seed=1), randn(*kv, dtype=dtype, seed=2)


# The reference, and how far rounding may lead from it


def weights(q, k, causal=False, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores times scale, -inf where a key is hidden, and their softmax; of float64 on the CPU.

    A query all of whose scores are -inf has weights of 0.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]
        x = x.masked_fill(hidden, -INF)
    nothing = x.eq(-INF).all(-1, keepdim=True)
    return x, torch.softmax(x, -1).masked_fill(nothing, 0)


def additions(n: int, dtype: torch.dtype) -> float:
    """The units u that a sum of n products in fp32 may be off by, relative to that of their sizes.

    n + 1 in any order (Higham, Accuracy and Stability, 3.1); 8 √n, but for one sum in 10^13, if
    errors are independent (Higham and Mary, 2019). Tensor cores cut bits off instead of rounding.
    """
    return min(n + 1, 8 * n**0.5) * (1 if dtype == FP32 else 2)


def least(dtype: torch.dtype) -> float:
    """Half of the smallest number above 0 in 16 bits; in fp32, and in as many bits' range, the
    smallest that is not denormal."""
    return 2.0**-25 if dtype == FP16 else 2.0**-126


def rounding(dtype: torch.dtype) -> float:
    """How far a weight may be off in 16 bits, relative to it; the interpreter cuts bf16 off."""
    half = {FP32: 0, FP16: 0.501, BF16: 1.01 if interpreting() else 0.501}[dtype]
    return half * torch.finfo(dtype).eps


def exponentials(x, w, size, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The relative errors of exp(x - max) and, of each row, of their sum, as in `error_bound`."""
    n, t = x.shape[-1], x.amax(-1, keepdim=True) - x
    each = torch.expm1(U * (additions(dim, dtype) * size + 2 * x.abs() + t + 4))
    each = torch.where(w > 0, each, 0)
    return each, (w * each).sum(-1, keepdim=True) + sums(n, dtype)


def sums(n: int, dtype: torch.dtype) -> float:
    return U * (additions(n, dtype) + 6 * math.ceil(n / 16) + 6)


def error_bound(x, w, size, v, y, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """How far attention in fp32 may be from the exact y = Σ w v, element by element.

    x: scores times scale; size: the same of |q| and |k|; w: their softmax. u = 2^-24. What an error
    does to all terms alike cancels, so that maxima need not be exact.
    - A score's own error, `additions(dim)` u size, is one of the exponent and so a relative one of
      its exponential; so are 2 u |x| of the scale, rounded with log2 e, and of its product; and
      u |x - max|, the difference (those of the maxima are parts of it); and 4 u for exp2 itself (a
      GPU's ex2.approx keeps 2^-22; NumPy's is closer).
    - Weights are rounded to 16 bits for the product with v, but not for their sum: half a unit, a
      whole one in the interpreter, which cuts bf16 off. Below 2^-14 fp16's unit is 2^-24, where the
      largest score's weight is 1; below 2^-126 fp32 may be 0.
    - Both sums, of n terms: `additions(n)` u; 6 u for each tile, of 16 keys at least, where another
      maximum may mean exp2, a product and a sum; division, 6 u.
    With N the numerator's error and D the sum's relative one, (N + |y| D) / (1 - D).
    """
    v = v.abs()
    each, of_sum = exponentials(x, w, size, dim, dtype)
    of_products = (w * (each + sums(x.shape[-1], dtype) + rounding(dtype))) @ v
    return (of_products + least(dtype) * v.sum(-2, keepdim=True) + y.abs() * of_sum) / (1 - of_sum)


def assert_attention(o, q, k, v, causal=False, scale=None) -> None:
    """AssertionError unless o is softmax(q kᵀ scale) v, each element within what rounding explains.

    Where the exact result is NaN or infinite, o must be too. The largest error in these tests,
    interpreted, was 0.06 of what is allowed in fp32 and 0.7 in 16 bits.
    """
    dtype, (o, q, k, v) = o.dtype, (x.detach().cpu().double() for x in (o, q, k, v))
    x, w = weights(q, k, causal, scale)
    group, dim = q.shape[1] // k.shape[1], q.shape[3]
    v = v.repeat_interleave(group, 1)
    size = abs(dim**-0.5 if scale is None else scale) * (
        q.abs() @ k.abs().repeat_interleave(group, 1).mT
    )
    y = w @ v
    assert (o.shape, torch.equal(o.isnan(), y.isnan())) == (y.shape, True)
    infinite = y.isinf()
    assert torch.equal(o[infinite], y[infinite])
    if not o.numel():
        return
    error = error_bound(x, w, size, v, y, dim, dtype)
    allowed = error + storage_bound(dtype, y.abs() + error)
    times = torch.where(y.isfinite(), (o - y).abs() / allowed, 0).nan_to_num(nan=0.0)
    place = torch.unravel_index(times.argmax(), times.shape)
    assert times.max() <= 1, (
        f"{o[place]} at {[int(i) for i in place]}, expected {y[place]}: "
        f"{times.max():.3g} times the bound"
    )


@each_causal
@pytest.mark.parametrize("queries, keys", [(1, 20), (20, 1), (9, 17), (17, 9)])
def test_the_reference_of_these_tests_is_pytorchs(queries, keys, causal):
    """Causal is aligned top-left; neighbouring heads share keys."""
    q, k, v = (x.cpu().double() for x in operands(queries, keys, heads=6, kv_heads=2))
    y = weights(q, k, causal)[1] @ v.repeat_interleave(3, 1)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert_close(y, expected)
    assert_close(attention_reference(q, k, v, causal), expected)
    first = y.clone()
    first[..., 0] += 1e-5  # the bound of fp32 notices
    assert_attention(y.float(), q, k, v, causal)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_attention(first.float(), q, k, v, causal)


# The kernels, in each of their configurations


def launches(dtype: torch.dtype, dim: int) -> list:
    """All that `launch_attention` may choose here for such heads, whatever the lengths."""
    if interpreting():
        return [functools.partial(launch_tiles, config=SMALL[dtype])]
    found = attention_plans.configs(CAPABILITY, dtype, dim, "ieee")
    all_launches = [functools.partial(launch_tiles, config=config) for config in found]
    if CAPABILITY == (9, 0) and dtype != FP32 and dim % 8 == 0:
        lengths = (1, 64, 512, 1024, 2048, 2049, 4096, 10**5)
        for config in {hopper_config(dim, n, c) for n in lengths for c in (False, True)}:
            all_launches.append(functools.partial(attention_hopper.launch_hopper, config=config))
    return all_launches


def surrounded(values: torch.Tensor, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of one number, and the values within it where the copy engine can take them."""
    batch, heads, n, dim = values.shape
    shape = batch + 1, heads + 1, n + 5, dim + 16
    whole = values.new_full((math.prod(shape) + 2 * BESIDE,), fill)
    inside = whole[BESIDE:-BESIDE].view(shape)[:batch, 1:, 2:-3, 8:-8]
    return whole, inside.copy_(values)


def launched(q, k, v, causal=False, scale=None) -> list[torch.Tensor]:
    """What every launch writes into the middle of a buffer, of which it must leave the rest alone.

    Beside q, k and v lies NaN. At least one launch has room.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = []
    q, k, v = (surrounded(x, NAN)[1] for x in (q, k, v))
    for launch in launches(q.dtype, q.shape[3]):
        whole, o = surrounded(torch.full_like(q, -7), FENCE)
        try:
            launch(q, k, v, o, causal=causal, scale=scale)
        except OutOfResources:
            continue
        found.append(o.clone())
        o.fill_(FENCE)
        assert whole.eq(FENCE).all(), "written outside"
    assert found
    return found


def assert_launched(q, k, v, causal=False, scale=None) -> None:
    for o in launched(q, k, v, causal, scale):
        assert_attention(o, q, k, v, causal, scale)


SIZES = [(n, n) for n in (1, 15, 16, 17, 65, 127)] + [(1, 20), (20, 1), (40, 17), (17, 40)]
EACH_SIZE = [(FP32, *size) for size in SIZES]
EACH_SIZE += [(FP16, 17, 40), (FP16, 65, 33), (FP16, 15, 1)]
EACH_SIZE += [(BF16, 17, 40), (BF16, 40, 17), (BF16, 1, 15)]


@pytest.mark.case("N22")
@each_causal
@pytest.mark.parametrize("dtype, queries, keys", EACH_SIZE, ids=str)
def test_sizes(dtype, queries, keys, causal):
    """Case N22."""
    assert_launched(*operands(queries, keys, 32, dtype), causal)


@pytest.mark.skipif(interpreting(), reason="takes long in the interpreter")
@each_causal
@pytest.mark.parametrize("dim, dtype", [(64, BF16), (128, FP16), (256, BF16), (64, FP32)], ids=str)
@pytest.mark.parametrize("queries, keys", [(300, 300), (1000, 129), (129, 1000), (193, 191)])
def test_larger_sizes(queries, keys, dim, dtype, causal):
    assert_launched(*operands(queries, keys, dim, dtype, kv_heads=1), causal)


@each_dtype
@pytest.mark.parametrize("dim", [1, 16, 31, 64, 80, 128, 200, 256])
def test_head_dims(dim, dtype):
    """With a scale from the true one."""
    assert_launched(*operands(18, 33, dim, dtype), causal=dim % 16 == 0)


@each_causal
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (8, 1), (6, 2), (3, 3)])
def test_neighbouring_heads_share_keys(heads, kv_heads, causal):
    """All batches and heads differ."""
    dtype = FP32 if heads == 6 else FP16
    q, k, v = operands(5, 7, 16, dtype, batch=2, heads=heads, kv_heads=kv_heads)
    assert_launched(q, k, v, causal)


@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs TF32")
@each_causal
@pytest.mark.parametrize("dim", [31, 64, 128, 256])
def test_tf32(dim, causal):
    """Cut to 11 bits, each factor is off by 2^-10 at most, weights by twice that of a score."""
    q, k, v = operands(150, 200, dim)
    for config in attention_plans.configs(CAPABILITY, FP32, dim, "tf32"):
        o = torch.full_like(q, -7)
        try:
            launch_tiles(q, k, v, o, config, causal, dim**-0.5, "tf32")
        except OutOfResources:
            continue
        assert_close(o, attention_reference(*(x.double() for x in (q, k, v)), causal), 2**-8)


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
@each_causal
@pytest.mark.parametrize("section", [1, 2, 3, 12])
@pytest.mark.parametrize("programs", [1, 3, 132])
def test_any_number_of_programs(monkeypatch, programs, section, causal):
    """Several blocks for each, in any order, of which every one is computed."""
    monkeypatch.setattr(attention_hopper, "sms", lambda device: programs)
    q, k, v = operands(500, 300, 64, BF16, batch=2, heads=6, kv_heads=2)
    for config in {hopper_config(64, n, causal) for n in (1, 10**5)}:
        o = torch.full_like(q, NAN)
        attention_hopper.launch_hopper(q, k, v, o, config, causal, 0.125, section)
        assert_attention(o, q, k, v, causal)


def test_any_strides_of_the_result():
    q, k, v = operands(20, 18, 16)
    whole = torch.full((1, 20, 16, 2, 2), FENCE, dtype=FP32, device=DEVICE)
    o = whole[..., 0].permute(0, 3, 1, 2)
    assert o.shape == q.shape
    launch_tiles(q, k, v, o, SMALL[FP32], True, 0.25)
    assert_attention(o, q, k, v, True)
    assert whole[..., 1].eq(FENCE).all()


# Numbers that go wrong


@each_causal
@each_dtype
def test_large_scores(dtype, causal):
    """Up to 1e4 of both signs: without the maximum all exponentials would overflow."""
    q, k, v = operands(20, 40, 16, dtype)
    q = q * (1e4 / (q.double() @ k.double().mT).abs().max().item())
    assert weights(*(x.cpu().double() for x in (q, k)), scale=1)[0].abs().max() > 9900
    assert_launched(q, k, v, causal, scale=1)


@each_causal
@each_dtype
def test_scores_that_rise_and_fall_along_the_keys(dtype, causal):
    """Every tile has another maximum, or none after the first."""
    q, k, v = operands(20, MANY, 16, dtype)
    k[..., 0] = torch.linspace(-20, 20, MANY)
    q[..., 0], q[:, 1, :, 0] = 2, -2
    assert_launched(q, k, v, causal, scale=1)


@each_dtype
def test_equal_scores_give_the_mean(dtype):
    """Exactly: there are 32 keys, and few bits in v."""
    q, k, v = operands(5, 32, 16, dtype)
    v = (4 * v).round().clamp(-8, 8)
    for o in launched(torch.zeros_like(q), k, v):
        expected = v.double().mean(2, keepdim=True).expand(q.shape).to(dtype)
        gap = (o.double() - expected.double()).abs()
        assert (gap <= storage_bound(dtype, expected.double().abs())).all()
        assert dtype == BF16 or torch.equal(o, expected)


@each_causal
@each_dtype
def test_nan_in_a_query_stays_in_its_row(dtype, causal):
    q, k, v = operands(20, 40, 16, dtype)
    q[0, 1, 3, 5] = NAN
    for o in launched(q, k, v, causal):
        assert_attention(o, q, k, v, causal)
        assert o.isnan().sum() == 16


@each_causal
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@each_dtype
def test_nan_in_a_key_reaches_who_sees_it(dtype, value, causal):
    """Just these: hidden scores are gone before they are used. inf gives NaN, or the weight 0."""
    q, k, v = operands(33, 33, 16, dtype)
    k[0, 1, 18, 5] = value
    for o in launched(q, k, v, causal):
        assert_attention(o, q, k, v, causal)
        rows = o[0, 1].isnan().any(-1).nonzero().flatten().tolist()
        assert value == INF or rows == list(range(18 if causal else 0, 33))
        assert rows and rows[0] >= (18 if causal else 0) and not o[0, 0].isnan().any()


@each_causal
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@each_dtype
def test_nan_and_infinities_in_a_value_reach_who_sees_it(dtype, value, causal):
    """And, causal, some before it, as in the formula: those in whose tile it is."""
    q, k, v = operands(33, 33, 16, dtype)
    v[0, 1, 18, 5] = value
    for o in launched(q, k, v, causal):
        before, seen = o[0, 1, :, 5].split([18, 15] if causal else [0, 33])
        assert seen.isnan().all() if math.isnan(value) else seen.eq(value).all()
        others = torch.where(v.isfinite(), v, 0)
        exact = attention_reference(q, k, others, causal)[0, 1, :, 5]
        assert (before.isnan() | ((before - exact[: len(before)]).abs() < 0.05)).all()
        o[0, 1, :, 5] = exact
        assert_attention(o, q, k, others, causal)


@pytest.mark.case("N23")
@each_dtype
def test_a_query_that_sees_nothing_gets_0(dtype):
    """Case N23: all of its scores are -inf; those of others are so in the first tiles, or last."""
    q, k, v = operands(20, MANY, 16, dtype)
    q = -q.abs()
    q[0, 0, 3] = -INF
    k = k.abs()
    k[0, 1, :-30] = INF
    k[0, 0, 30:] = INF
    for o in launched(q, k, v):
        assert_attention(o, q, k, v)
        assert o[0, 0, 3].eq(0).all() and o.isfinite().all() and o.ne(0).sum() == o.numel() - 16


@pytest.mark.case("N21")
@each_dtype
def test_integers_are_exact(dtype):
    """Case N21: interpreted, tl.dot would multiply bf16's bits. Each query finds its key."""
    one = torch.eye(32, device=DEVICE, dtype=dtype)[None, None]
    v = randn(1, 1, 32, 32, dtype=dtype, seed=2).mul(20).round()
    for o in launched(200 * one, one, v, scale=1):
        assert torch.equal(o, v)
    for o in launched(200 * one, one[:, :, 3:4], v[:, :, :1], scale=1):
        assert torch.equal(o, v[:, :, :1].expand(o.shape))


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
    one = torch.eye(46, device=DEVICE)[None, None]
    numbers = torch.arange(46.0 * 46, device=DEVICE).view(1, 1, 46, 46) + 2049
    assert torch.equal(flash_attention(200 * one, one, numbers, scale=1.0), numbers)
    switch("high")
    found = flash_attention(200 * one, one, numbers, scale=1.0)
    if CAPABILITY < (8, 0):
        assert torch.equal(found, numbers)
    else:
        assert 1 <= (found - numbers).abs().max() <= 4


@each_dtype
def test_two_runs_are_the_same(dtype):
    q, k, v = operands(20, 40, 16, dtype)
    assert all(map(torch.equal, launched(q, k, v, True), launched(q, k, v, True)))
    assert torch.equal(flash_attention(q, k, v), flash_attention(q, k, v))


# The public function


@each_causal
@each_dtype
@pytest.mark.parametrize("queries, keys", [(1, 1), (70, 150), (150, 40)])
def test_values(queries, keys, dtype, causal):
    q, k, v = operands(queries, keys, 24, dtype, kv_heads=1)
    before = [x.clone() for x in (q, k, v)]
    o = flash_attention(q, k, v, causal)
    assert (o.dtype, o.device) == (dtype, q.device) and lies_as(o, q)
    assert_attention(o, q, k, v, causal)
    assert all(map(torch.equal, (q, k, v), before))
    assert_close(attention_reference(q, k, v, causal), o.double())


@pytest.mark.parametrize("function", [flash_attention, attention_reference])
@pytest.mark.parametrize("scale", [None, 0, 0.0, -0.5, 2, 1e-30, 1e-60], ids=str)
def test_scales(function, scale):
    q, k, v = operands(20, 19, 9)
    assert_attention(function(q, k, v, True, scale), q, k, v, True, scale)
    assert_attention(function(q, k, v, scale=scale), q, k, v, scale=scale)


@pytest.mark.parametrize("function", [flash_attention, attention_reference])
@pytest.mark.parametrize("scale", [INF, -INF, NAN, 1e60], ids=str)
def test_scales_that_are_no_numbers_are_refused(function, scale):
    with pytest.raises(ValueError, match="scale is None or a number of at most"):
        function(*operands(2, 3), scale=scale)


@pytest.mark.parametrize("function", [flash_attention, attention_reference])
def test_masks_and_tensors_are_no_options(function):
    inputs = operands(2, 3)
    for causal in (torch.ones(2, 3, dtype=torch.bool), 1, "no", None):
        with pytest.raises(TypeError, match="causal is True or False, and no mask"):
            function(*inputs, causal)
    for scale in (torch.tensor(0.3, requires_grad=True), "1", [1.0]):
        with pytest.raises(TypeError, match="scale is None or a number, not"):
            function(*inputs, scale=scale)


def by_token(x: torch.Tensor) -> torch.Tensor:
    """x in memory (batch, sequence, heads, head dim), as a model's projection gives it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def lies_as(y: torch.Tensor, x: torch.Tensor) -> bool:
    """y is dense, and in memory token by token where x's heads are nearer than its tokens."""
    return (y.transpose(1, 2) if x.stride(1) < x.stride(2) else y).is_contiguous()


LAYOUTS = {  # of q, k or v, from (2, 2, 40, 32)
    "heads within tokens": lambda x: x.reshape(2, 40, 2, 32).transpose(1, 2),
    "every second token": lambda x: x[:, :, ::2],
    "every second number": lambda x: x[..., ::2],
    "one batch, expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "one head, expanded": lambda x: x[:, :1].expand(-1, 2, -1, -1),
    "one token, expanded": lambda x: x[:, :, :1].expand(-1, -1, 20, -1),
    "tokens last": lambda x: x.reshape(2, 2, 32, 40).mT,
    "negated": torch._neg_view,
    "misaligned": lambda x: x.flatten()[1 : 1 + 2 * 2 * 20 * 30].view(2, 2, 20, 30),
    "heads of 31": lambda x: x[:, :, :20, :31],
    "from the eighth number on": lambda x: x[..., 8:24],
    "overlapping tokens": lambda x: x.as_strided((2, 2, 30, 16), (640, 320, 8, 1)),
}


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_are_read_where_they_lie(monkeypatch, layout, dtype):
    seen = []

    def spy(*tensors):
        seen.extend((x.data_ptr(), x.stride()) for x in tensors[:3])
        return attention_plans.launch_attention(*tensors)

    monkeypatch.setattr(attention, "launch_attention", spy)
    whole = [randn(2, 2, 40, 32, dtype=dtype, seed=seed) for seed in range(3)]
    before = [x.clone() for x in whole]
    q, k, v = map(layout, whole)
    o = flash_attention(q, k, v, causal=True)
    assert_attention(o, *(x.resolve_neg() for x in (q, k, v)), causal=True)
    lies = [(x.data_ptr(), x.stride()) for x in (q, k, v)]
    assert layout is LAYOUTS["negated"] or seen == lies
    assert lies_as(o, q)
    assert all(map(torch.equal, whole, before))


def test_layouts_of_one_operand():
    """Strides of q, k and v that differ, beside one another in one projection."""
    packed = randn(2, 20, 3 * 4 * 16, dtype=FP16)
    q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in packed.split(4 * 16, -1))
    assert_attention(flash_attention(q, k, v), q, k, v)
    for changed in range(3):
        x = [y.contiguous() for y in (q, k, v)]
        x[changed] = randn(2, 20, 16, 4, dtype=FP16, seed=4).permute(0, 3, 1, 2)
        assert_attention(flash_attention(*x, causal=True), *x, causal=True)


@pytest.mark.case("N14", "N23")
@each_causal
@each_dtype
@pytest.mark.parametrize(
    "q_shape, k_shape",
    [
        ((0, 2, 3, 4), (0, 2, 5, 4)),
        ((2, 0, 3, 4), (2, 0, 5, 4)),
        ((2, 0, 3, 4), (2, 2, 5, 4)),
        ((2, 2, 0, 4), (2, 1, 5, 4)),
        ((2, 2, 3, 4), (2, 1, 0, 4)),
        ((0, 0, 0, 4), (0, 0, 0, 4)),
        ((2, 2, 3, 0), (2, 1, 5, 0)),
    ],
)
def test_nothing_is_launched_for_empty_sizes(monkeypatch, q_shape, k_shape, dtype, causal):
    """Case N14; without keys, case N23."""
    monkeypatch.setattr(attention, "launch_attention", lambda *_: pytest.fail("launched"))
    q, k = (torch.ones(shape, dtype=dtype, device=DEVICE) for shape in (q_shape, k_shape))
    for function in (flash_attention, attention_reference):
        o = function(q, k, k, causal)
        assert (o.shape, o.dtype, o.device) == (q.shape, dtype, q.device) and not o.any()


REFUSED = {  # the error, a part of its text, and how right operands are made wrong
    "3-d": (ValueError, "are .batch, heads, sequence", lambda q, k, v: (q[0], k[0], v[0])),
    "3-d keys": (ValueError, "are .batch, heads, sequence", lambda q, k, v: (q, k[0], v)),
    "dims": (ValueError, "k and v are alike", lambda q, k, v: (q, k[..., :8], v[..., :8])),
    "dim of v": (ValueError, "k and v are alike", lambda q, k, v: (q, k, v[..., :8])),
    "keys": (ValueError, "k and v are alike", lambda q, k, v: (q, k, v[:, :, 1:])),
    "batches": (ValueError, "k and v are alike", lambda q, k, v: (q, k[:1], v[:1])),
    "heads": (ValueError, "q's heads are a multiple", lambda q, k, v: (q, k[:, :3], v[:, :3])),
    "more kv heads": (ValueError, "q's heads are a multiple", lambda q, k, v: (q[:, :2], k, v)),
    "no kv heads": (
        ValueError,
        "q's heads are a multiple",
        lambda q, k, v: (q, k[:, :0], v[:, :0]),
    ),
    "dim 257": (
        ValueError,
        "head dims are at most 256",
        lambda *x: [y[..., :1].expand(-1, -1, -1, 257) for y in x],
    ),
    "length": (
        ValueError,
        "sequences are at most",
        lambda q, k, v: (q, *(y[:, :, :1].expand(-1, -1, 2**31 - 1, -1) for y in (k, v))),
    ),
    "dtypes": (TypeError, "of one dtype, not q torch.float32, k", lambda q, k, v: (q, k.half(), v)),
    "devices": (ValueError, "of one device, not q", lambda q, k, v: (q, k, v.to("meta"))),
    "int": (TypeError, "takes float32, .*not torch.int", lambda *x: [y.int() for y in x]),
    "complex": (TypeError, "takes float32, .*complex", lambda *x: [y.to(torch.cfloat) for y in x]),
    "a list": (TypeError, "takes a dense tensor, not list", lambda q, k, v: (q, k, [1.0])),
    "sparse": (TypeError, "dense tensor, not torch.sp", lambda q, k, v: (q, k.to_sparse(), v)),
    "nested": (
        TypeError,
        "takes a dense tensor, not nested",
        lambda q, k, v: (q, torch.nested.nested_tensor([*k]), v),
    ),
}


@pytest.mark.parametrize("error, message, wrong", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_any_launch(monkeypatch, error, message, wrong):
    monkeypatch.setattr(attention, "launch_attention", lambda *_: pytest.fail("launched"))
    for function in (flash_attention, attention_reference):
        with pytest.raises(error, match=message) as raised:
            function(*wrong(*operands(3, 5, batch=2, heads=4)))
        assert "\n" not in str(raised.value)


def test_float64_is_for_the_reference_alone():
    x = [y.double() for y in operands(3, 5)]
    with pytest.raises(TypeError, match="takes float32, float16, bfloat16, not torch.float64"):
        flash_attention(*x)
    assert attention_reference(*x).dtype == torch.float64


def test_tensors_elsewhere_are_refused():
    other = "meta" if interpreting() else "cpu"
    with pytest.raises(ValueError, match=f"tensors, not {other}"):
        flash_attention(*(x.to(other) for x in operands(2, 3)))


def test_what_pytorch_traces_is_refused():
    """A graph without the launch would be silently wrong."""
    x = operands(4, 8)
    with FakeTensorMode() as mode, pytest.raises((TypeError, RuntimeError)):
        flash_attention(*map(mode.from_tensor, x))
    with pytest.raises((TypeError, RuntimeError)):
        make_fx(flash_attention)(*x)
    assert_attention(flash_attention(*x), *x)


@pytest.mark.case("E21")
def test_inside_a_compiled_function():
    """Case E21: torch.compile goes around a kernel that is interpreted; gradients come through."""
    q, k, v = (x.requires_grad_() for x in operands(9, 20))
    compiled = torch.compile(lambda *x: 2 * flash_attention(*x, causal=True), backend="aot_eager")
    o = compiled(q, k, v)
    assert_attention(o / 2, q, k, v, causal=True)
    exact = 2 * attention_reference(q.double(), k.double(), v.double(), causal=True)
    for found, expected in zip(
        *(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (o, exact)), strict=True
    ):
        assert_close(found, expected)


@each_causal
@pytest.mark.parametrize("queries, keys", [(9, 20), (20, 9)])
def test_the_reference_is_differentiable(queries, keys, causal):
    grads = []
    for function in (
        lambda q, k, v: attention_reference(q, k, v, causal, 0.3),
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=0.3, enable_gqa=True
        ),
    ):
        x = [y.cpu().double().requires_grad_() for y in operands(queries, keys, kv_heads=1)]
        (function(*x) * randn(queries, 16, seed=5).cpu()).sum().backward()
        grads.append([y.grad for y in x])
    for found, expected in zip(*grads, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_the_reference_computes_in_fp32(dtype):
    x = operands(9, 20, dtype=dtype)
    expected = attention_reference(*(y.double() for y in x))
    found = attention_reference(*x)
    assert found.dtype == dtype
    gap = (found.double() - expected).abs().cpu()
    assert (gap <= (torch.finfo(dtype).eps * 0.51) * expected.abs().cpu() + 1e-5).all()


# What is far apart, and what is many


FAR_APART = {
    "batches": ((3, 1, 5, 16), (2**30, 2**12, 16, 1)),
    "heads": ((1, 3, 5, 16), (2**12, 2**30, 16, 1)),
    "tokens": ((1, 1, 3, 16), (2**12, 2**12, 2**30, 1)),
    "numbers": ((1, 1, 5, 17), (2**12, 2**12, 20, 2**27)),
}


@pytest.mark.case("N15")
@pytest.mark.parametrize("shape, strides", FAR_APART.values(), ids=FAR_APART)
def test_offsets_are_64_bits_wide(memory, shape, strides):
    """Case N15."""
    dense = [randn(*shape, dtype=FP16, seed=seed) for seed in range(4)]
    for place in range(4):
        x = list(dense)
        x[place] = memory.as_strided(shape, strides, 2**17).copy_(dense[place])
        launch_tiles(*x, SMALL[FP16], False, shape[3] ** -0.5)
        assert_attention(x[3], *dense[:3])


def test_a_grid_has_one_axis(monkeypatch):
    """Of 2^31 - 1 programs at most, where the others end at 65,535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(attention_tiles, "attention_tiles_kernel", Kernel())
    x = torch.zeros(1, device=DEVICE).expand(70_000, 30, 33, 16)
    launch_tiles(x, x, x, x, Config(16, 16))
    assert grids == [(70_000 * 30 * 3,)]
    x = torch.zeros(1, device=DEVICE).expand(2**20, 2**10, 33, 16)
    with pytest.raises(ValueError, match=r"has 3,221,225,472 blocks: too many"):
        launch_tiles(x, x, x, x, Config(16, 16))


@needs_gpu
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("batch, heads", [(1, 70_000), (70_000, 1)])
def test_more_heads_than_an_axis_counts(batch, heads, dtype):
    q, k, v = operands(1, 16, 16, dtype, batch=batch, heads=heads)
    assert_attention(flash_attention(q, k, v), q, k, v)


@needs_gpu
@each_causal
@pytest.mark.parametrize("dim", [64, 63])
def test_more_elements_than_an_int_counts(dim, causal):
    """63 is for the plain kernel. Only the last head is not 0."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of GPU memory")
    heads = 2**17 + 1
    q = torch.zeros(1, heads, 265, dim, dtype=FP16, device=DEVICE)
    k = torch.zeros_like(q)
    for seed, x in enumerate((q, k)):
        x[0, -1] = randn(265, dim, dtype=FP16, seed=seed)
    assert q.numel() > 2**31
    o = flash_attention(q, k, k, causal)
    assert_attention(o[:, -1:], q[:, -1:], k[:, -1:], k[:, -1:], causal)
    assert not o[:, :-1].any()


# On a GPU only


@pytest.mark.case("E14")
@pytest.mark.skipif(torch.cuda.device_count() < 2 or not has_cuda(), reason="needs two GPUs")
@each_dtype
def test_on_another_gpu_than_the_current_one(dtype):
    """Case E14."""
    q, k, v = (x.to("cuda:1") for x in operands(200, 300, 64, dtype))
    o = flash_attention(q, k, v, causal=True)
    assert o.device == q.device and torch.cuda.current_device() == 0
    assert_attention(o, q, k, v, causal=True)


@pytest.mark.case("E14")
@needs_gpu
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_the_current_stream(dtype):
    """Case E14: what comes before it there is waited for."""
    q, k, v = operands(500, 500, 64, dtype)
    flash_attention(q, k, v)  # compiled
    stream, late = torch.cuda.Stream(), torch.zeros_like(v)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(v)
        o = flash_attention(q, k, late)
    stream.synchronize()
    assert_attention(o, q, k, v)


@needs_gpu
@pytest.mark.parametrize("dtype, dim", [(FP32, 64), (FP16, 128), (BF16, 80), (FP16, 63)], ids=str)
def test_inside_a_cuda_graph(dtype, dim):
    q, k, v = operands(300, 200, dim, dtype, kv_heads=1)
    flash_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attention(q, k, v, causal=True)
    q.copy_(randn(*q.shape, seed=9))
    o.fill_(-7)
    graph.replay()
    assert_attention(o, q, k, v, causal=True)
