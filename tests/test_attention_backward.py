"""The backward pass of attention against float64: the kernels, and the public function's gradients.

The kernels get o and lse as they would be without an error in the forward pass; the public function
computes its own.
"""

import functools
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from helpers.check import TOLERANCE, assert_close, relative_error
from helpers.device import has_cuda, interpreting, triton_version
from helpers.kernels import (
    attention,
    attention_backward,
    attention_backward_hopper,
    attention_backward_plans,
)
from helpers.kernels.attention import attention_reference, flash_attention
from helpers.kernels.attention_backward_hopper import launch_one_pass
from helpers.kernels.attention_backward_plans import in_one_pass
from helpers.kernels.attention_tiles import Config
from helpers.kernels.matmul_plans import OutOfResources
from tests.test_attention import (
    BESIDE,
    BF16,
    CAPABILITY,
    DEVICE,
    DTYPES,
    EACH_SIZE,
    FAR_APART,
    FENCE,
    FP16,
    FP32,
    INF,
    LAYOUTS,
    NAN,
    SMALL,
    U,
    additions,
    assert_attention,
    each_causal,
    each_dtype,
    error_bound,
    exponentials,
    least,
    lies_as,
    needs_gpu,
    operands,
    randn,
    rounding,
    surrounded,
    weights,
)
from tests.test_attention import launches as forward_launches
from tests.test_attention import switch as switch  # a fixture
from tests.test_softmax import storage_bound

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
NAMES = ("dq", "dk", "dv")
LOWEST = torch.finfo(FP32).min  # a score below it is -inf in fp32
LOG2_E = 1 / math.log(2)


def all_operands(queries, keys, dim=16, dtype=FP32, batch=1, heads=1, kv_heads=None):
    """q, k, v and the gradient of the result."""
    q, k, v = operands(queries, keys, dim, dtype, batch, heads, kv_heads)
    return q, k, v, randn(*q.shape, dtype=dtype, seed=3)


# The reference, and how far rounding may lead from it


class Exact:
    """The gradients of attention in float64, what they are computed from, and their bounds.

    q, k, v, do: of any dtype and strides. o: the result. lse: log2 of the sums of exponentials,
    +inf where a query sees nothing. gradients: of q, k and v.
    """

    def __init__(self, q, k, v, do, causal=False, scale=None):
        self.dtype, self.group = q.dtype, q.shape[1] // k.shape[1]
        q, k, v, do = (x.detach().cpu().double() for x in (q, k, v, do))
        k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        x, w = weights(q, k, causal, self.scale)
        if x[x > -INF].lt(LOWEST).any():
            x = x.masked_fill(x < LOWEST, -INF)
            w = torch.softmax(x, -1).masked_fill(x.eq(-INF).all(-1, keepdim=True), 0)
        self.operands, self.x, self.w = (q, k, v, do), x, w
        self.o, self.dp = w @ v, do @ v.mT
        self.d = (w * self.dp).sum(-1, keepdim=True)
        self.ds = w * (self.dp - self.d)
        lse = torch.logsumexp(x, -1) * LOG2_E
        self.lse = lse.masked_fill(lse == -INF, INF).masked_fill(w.isnan().any(-1), NAN)
        self.gradients = (
            self.scale * self.ds @ k,
            self.of_group(self.scale * self.ds.mT @ q),
            self.of_group(w.mT @ do),
        )

    def of_group(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the heads that share their keys."""
        return x.unflatten(1, (-1, self.group)).sum(2)

    def sizes(self) -> torch.Tensor:
        """Scores times scale, of the sizes of what is added up in them."""
        q, k, *_ = self.operands
        return abs(self.scale) * (q.abs() @ k.abs().mT)

    def lse_error(self) -> torch.Tensor:
        """How far lse may be off, times ln 2: a bound for the relative error that it means.

        That of the row's sum; u |lse| for adding the maximum to a logarithm; 8 u for this itself.
        """
        dim = self.operands[0].shape[3]
        of_sum = exponentials(self.x, self.w, self.sizes(), dim, self.dtype)[1].squeeze(-1)
        return of_sum / (1 - of_sum) + U * (self.lse.abs() / LOG2_E + 8)

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """How far each gradient may be from the exact one, element by element.

        u = 2^-24; `additions(n)` u and `storage_bound` as in test_attention, and from there the
        relative errors of an exponential and of a row's sum, and the error of o.
        - p = exp2(s scale - lse): as an exponential there; `lse_error`; u |x - lse| for the
          difference.
        - dp: `additions(dim)` u Σ |do| |v|. D = Σ do o: the error of o, which is stored in 16 bits,
          times |do|, and `additions(dim)` u Σ |do| |o|.
        - ds = p (dp - D): p (errors of dp and D, 3 u for the operations) + p's error |dp - D|.
        - p and ds are rounded to 16 bits for the products with do, k and q: half a unit, `least`.
        - dv = Σ p do, dq = scale Σ ds k, dk = scale Σ ds q: the sum of the terms' errors,
          `additions(n)` u of the terms' sizes, 3 u for the scale, and the storage in 16 bits. n is
          the number of keys, or of the queries of all heads of a group.
        """
        dtype, x, w = self.dtype, self.x, self.w
        q, k, v, do = (y.abs() for y in self.operands)
        (queries, keys), dim, factor = x.shape[2:], q.shape[3], abs(self.scale)
        size = self.sizes()
        each, _ = exponentials(x, w, size, dim, dtype)
        of_o = error_bound(x, w, size, v, self.o, dim, dtype)
        of_o = of_o + storage_bound(dtype, self.o.abs() + of_o)
        t = (x - self.lse[..., None] / LOG2_E).abs()
        of_p = (1 + each) * (1 + self.lse_error()[..., None] + U * t) - 1
        of_p = torch.where(w > 0, of_p, 0)
        of_dp = additions(dim, dtype) * U * (do @ v.mT)
        of_d = (do * (of_o + additions(dim, dtype) * U * self.o.abs())).sum(-1, keepdim=True)
        gap = (self.dp - self.d).abs()
        of_ds = w * (1 + of_p) * (of_dp + of_d + 3 * U * (self.dp.abs() + self.d.abs()))
        of_ds = of_ds + w * of_p * gap
        of_ds = of_ds + rounding(dtype) * (self.ds.abs() + of_ds) + least(dtype)
        of_p = w * (of_p + rounding(dtype) * (1 + of_p)) + least(dtype)
        of_ds, of_p = (torch.where(x > -INF, y, 0) for y in (of_ds, of_p))
        by_keys = U * additions(keys, dtype)
        by_queries = U * additions(self.group * queries, dtype)
        ds = self.ds.abs() + of_ds
        found = (
            factor * ((of_ds + by_keys * ds) @ k),
            factor * self.of_group((of_ds + by_queries * ds).mT @ q),
            self.of_group((of_p + by_queries * (w + of_p)).mT @ do),
        )
        found = [b + 3 * U * (y.abs() + b) for b, y in zip(found, self.gradients, strict=True)]
        return tuple(
            b + storage_bound(dtype, y.abs() + b) + least(FP32)
            for b, y in zip(found, self.gradients, strict=True)
        )


def uses(found, exact: Exact) -> dict[str, float]:
    """The largest errors of dq, dk and dv, as parts of what is allowed, of those that are no None.

    AssertionError where their shapes or dtypes differ from the exact ones', or what is finite does.
    """
    largest = {}
    for name, x, y, bound in zip(NAMES, found, exact.gradients, exact.bounds(), strict=True):
        if x is None:
            continue
        assert (x.dtype, x.shape) == (exact.dtype, y.shape), name
        x = x.detach().cpu().double()
        assert torch.equal(x.isfinite(), y.isfinite()), f"{name}: not finite, or finite"
        if x.numel():
            used = torch.where(y.isfinite(), (x - y).abs() / bound, 0)
            largest[name] = used.nan_to_num(nan=INF).max().item()
    return largest


def assert_gradients(found, *tensors_and_options) -> None:
    """AssertionError unless dq, dk and dv are exact but for what rounding explains.

    Of an `Exact`, or its arguments. The largest errors in these tests, interpreted, were 0.1 of
    what is allowed in fp32 and 0.88 in 16 bits (dv; 0.43 of dq and dk).
    """
    exact = tensors_and_options[0] if len(tensors_and_options) == 1 else Exact(*tensors_and_options)
    for name, used in uses(found, exact).items():
        assert used <= 1, f"{name} is off by {used:.3g} times the bound"


def autograd(function, q, k, v, do, *options) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv by autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(function(*leaves, *options), leaves, do)


@each_causal
@pytest.mark.parametrize("queries, keys", [(1, 20), (20, 1), (9, 17)])
def test_the_reference_of_these_tests_is_autograds(queries, keys, causal):
    """And the bound of fp32 notices 0.002."""
    x = [y.cpu().double() for y in all_operands(queries, keys, heads=6, kv_heads=2)]
    exact = Exact(*x, causal, 0.3)
    for found, expected in zip(
        exact.gradients, autograd(attention_reference, *x, causal, 0.3), strict=True
    ):
        torch.testing.assert_close(found, expected)
    exact = Exact(*(y.float() for y in x), causal, 0.3)
    found = [y.float() for y in exact.gradients]
    assert_gradients(found, exact)
    for place in range(3):
        wrong = list(found)
        wrong[place] = wrong[place].clone()
        wrong[place][..., 0] += 2e-3
        with pytest.raises(AssertionError, match=f"{NAMES[place]} is off by .* times the bound"):
            assert_gradients(wrong, exact)


# The kernels, in each of their configurations


def launches(q, k, causal: bool) -> list[tuple[Callable, tuple[int, ...]]]:
    """All that `launch_attention_backward` may choose here for such heads, and Hopper's kernel.

    Each with the places, among dq, dk and dv, of what it computes.
    """
    found = [(SMALL[q.dtype],)] * 2
    if not interpreting():
        found = attention_backward_plans.configs(CAPABILITY, q.dtype, q.shape[3], "ieee")
    all_launches = [
        (functools.partial(launch, config=config), places)
        for (launch, places), configs in zip(PARTS, found, strict=True)
        for config in configs
    ]
    if in_one_pass(q, k, causal=True):  # without a mask not where it would wait, but as it comes
        for in_turn in {False, in_one_pass(q, k, causal)}:
            all_launches.append((functools.partial(in_one, in_turn=in_turn), (0, 1, 2)))
    return all_launches


def in_one(q, k, v, o, lse, do, dq, dk, dv, causal, scale, in_turn) -> None:
    """Twice: what is added up in turn is the same bits, in a memory of any numbers."""
    found = []
    for begin in (-7, 5) if in_turn else (0,):
        whole, dq_sum = alone(torch.full(q.shape, begin, dtype=FP32, device=q.device), FENCE)
        launch_one_pass(q, k, v, o, lse, do, dq_sum, dk, dv, causal, scale, in_turn)
        found.append([x.clone() for x in (dq_sum, dk, dv)])
        dq_sum.fill_(FENCE)
        assert whole.eq(FENCE).all(), "written outside"
    torch.testing.assert_close(found[0], found[-1], rtol=0, atol=0, equal_nan=True)
    torch.mul(found[0][0], scale, out=dq)


def deltas(o, lse, do, module=attention_backward) -> torch.Tensor:
    """What `launch_delta` writes, which is checked, into a buffer of which nothing else changes."""
    whole, delta = alone(torch.full_like(lse, -7), FENCE)
    module.launch_delta(o, do, delta)
    found = delta.clone()
    delta.fill_(FENCE)
    assert whole.eq(FENCE).all(), "written outside"
    o, do = o.detach().cpu().double(), do.detach().cpu().double()
    bound = U * (2 + additions(o.shape[3], FP32)) * (o * do).abs().sum(-1)
    gap = (found.cpu().double() - (o * do).sum(-1)).abs()
    assert ((gap <= bound) | gap.isnan()).all(), "delta"
    return alone(found, NAN)[1]


def launch_keys(q, k, v, o, lse, do, dq, dk, dv, causal, scale, config, module=attention_backward):
    given = q, k, v, do, lse, deltas(o, lse, do, module)
    module.launch_keys_gradient(*given, dk, dv, config, causal, scale)


def launch_queries(
    q, k, v, o, lse, do, dq, dk, dv, causal, scale, config, module=attention_backward
):
    given = q, k, v, do, lse, deltas(o, lse, do, module)
    module.launch_queries_gradient(*given, dq, config, causal, scale)


PARTS = (launch_keys, (1, 2)), (launch_queries, (0,))


def alone(values: torch.Tensor, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of one number, and the values within it, contiguous."""
    whole = values.new_full((values.numel() + 2 * BESIDE,), fill)
    return whole, whole[BESIDE:-BESIDE].view(values.shape).copy_(values)


def launched(exact: Exact, q, k, v, do, causal=False) -> list[list]:
    """dq, dk and dv, or None, of every launch, in buffers of which it must leave the rest alone.

    Beside all that is read lies NaN. At least one launch of each has room.
    """
    o, lse = exact.o.to(q), exact.lse.to(q.device, FP32)
    q, k, v, o, do = (surrounded(x, NAN)[1] for x in (q, k, v, o, do))
    lse, found = alone(lse, NAN)[1], []
    for launch, places in launches(q, k, causal):
        buffers = [alone(torch.full_like(x, -7), FENCE) for x in (q, k, v)]
        try:
            launch(q, k, v, o, lse, do, *(x for _, x in buffers), causal, exact.scale)
        except OutOfResources:
            continue
        found.append([x.clone() if i in places else None for i, (_, x) in enumerate(buffers)])
        for i, (whole, x) in enumerate(buffers):
            x.fill_(FENCE) if i in places else None
            assert whole.eq(FENCE).logical_or_(whole.eq(-7)).all(), "written outside"
    for place in range(3):
        assert any(x[place] is not None for x in found)
    return found


def assert_launched(q, k, v, do, causal=False, scale=None) -> None:
    exact = Exact(q, k, v, do, causal, scale)
    for found in launched(exact, q, k, v, do, causal):
        assert_gradients(found, exact)


@pytest.mark.case("N22", "N27")
@each_causal
@pytest.mark.parametrize("dtype, queries, keys", EACH_SIZE, ids=str)
def test_sizes(dtype, queries, keys, causal):
    """Cases N22 and N27."""
    assert_launched(*all_operands(queries, keys, 32, dtype), causal)


@pytest.mark.skipif(interpreting(), reason="takes long in the interpreter")
@each_causal
@pytest.mark.parametrize("dim, dtype", [(64, BF16), (128, FP16), (256, BF16), (64, FP32)], ids=str)
@pytest.mark.parametrize("queries, keys", [(300, 300), (1000, 129), (129, 1000), (193, 191)])
def test_larger_sizes(queries, keys, dim, dtype, causal):
    assert_launched(*all_operands(queries, keys, dim, dtype, heads=2, kv_heads=1), causal)


@needs_gpu
@each_causal
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("queries, keys, dim", [(700, 600, 64), (1000, 1000, 128), (300, 900, 80)])
def test_several_rounds(monkeypatch, queries, keys, dim, programs, causal):
    """Of few programs, on Hopper; the queries' heads are more than the keys'."""
    for module in (attention_backward_hopper, attention_backward_plans):
        monkeypatch.setattr(module, "sms", lambda device: programs)
    assert_launched(*all_operands(queries, keys, dim, BF16, 2, 4, 2), causal)


@pytest.mark.parametrize(
    "dim, dtype",
    [(1, FP32), (5, BF16), (16, FP16), (17, FP32), (64, BF16), (80, FP16), (128, FP32), (256, FP16)]
    if interpreting()
    else [(dim, dtype) for dim in (1, 5, 16, 17, 64, 80, 128, 200, 256) for dtype in DTYPES],
    ids=str,
)
def test_head_dims(dim, dtype):
    """With a scale from the true one."""
    x, causal = all_operands(18, 33, dim, dtype), dim % 16 == 0
    exact = Exact(*x, causal)
    for found in launched(exact, *x, causal):
        assert_gradients(found, exact)
        for y, expected in zip(found, exact.gradients, strict=True):
            if y is not None:  # in norm, bounds for the worst case are far away
                assert_close(y, expected, None if dtype == FP32 else 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "heads, kv_heads, dtype, causal",
    [(4, 2, FP16, True), (4, 1, BF16, False), (6, 2, FP32, True), (3, 3, FP32, False)],
    ids=str,
)
def test_gradients_of_shared_keys_are_summed_over_their_heads(heads, kv_heads, dtype, causal):
    """All batches and heads differ."""
    x = all_operands(5, 7, 16, dtype, batch=2, heads=heads, kv_heads=kv_heads)
    assert_launched(*x, causal)


def test_the_bound_is_close_in_16_bits():
    """An error of a few units in the last place is noticed."""
    for dtype in (FP16, BF16):
        x = all_operands(40, 33, 32, dtype)
        exact = Exact(*x)
        used = {}
        for found in launched(exact, *x):
            used |= uses(found, exact)
        assert min(used.values()) > 0.05 and max(used.values()) < 0.8, used


# Numbers that go wrong


@each_causal
@each_dtype
def test_large_scores(dtype, causal):
    """Up to 800 of both signs, times the scale: exponentials of themselves would overflow."""
    q, k, v, do = all_operands(20, 40, 16, dtype)
    q = q * (800 / (q.double() @ k.double().mT).abs().max().item())
    exact = Exact(q, k, v, do, causal, 1)
    assert causal or exact.x.abs().max() > 770
    assert_launched(q, k, v, do, causal, scale=1)


def far_apart_scores(size: float) -> tuple[torch.Tensor, ...]:
    """Operands whose scores are so large that rounding them changes weights by large factors."""
    q, k, v, do = all_operands(40, 33)
    return size * q, k, v, do


def assert_weights_below_1(found, exact: Exact) -> None:
    """AssertionError where a gradient is larger than weights of at most 1 can make it."""
    q, k, _, do = (y.abs() for y in exact.operands)
    dp = exact.dp.abs()
    ds = exact.scale * (dp + dp.amax(-1, keepdim=True))  # whatever the weights are that D is of
    largest = (
        ds @ k,
        exact.of_group(ds.mT @ q),
        exact.of_group(torch.ones_like(ds).mT @ do),
    )
    for name, x, bound in zip(NAMES, found, largest, strict=True):
        assert x is None or (x.cpu().double().abs() <= 1.01 * bound).all(), name


@each_causal
@pytest.mark.parametrize("size", [1e7, 1e9])
def test_rounded_scores_make_no_weight_above_1(size, causal):
    """They are off by more than 1, and exp2 of that, above lse, would be any number."""
    x = far_apart_scores(size)
    exact = Exact(*x, causal)
    assert all(y.isfinite().all() for y in exact.gradients)
    for found in (*launched(exact, *x, causal), autograd(flash_attention, *x, causal)):
        assert_weights_below_1(found, exact)


def with_a_key_of_no_weight() -> tuple[torch.Tensor, ...]:
    """All scores of key 5 are -inf; that of a query of zeros, as past the end, would be NaN."""
    q, k, v, do = all_operands(63, 20, 8)
    k[..., 5, :] = -INF
    return q.abs(), k, v, do


@pytest.mark.case("N23")
def test_queries_past_the_end_weigh_nothing():
    """Case N23."""
    x = with_a_key_of_no_weight()
    exact = Exact(*x)
    for found in (*launched(exact, *x), autograd(flash_attention, *x)):
        for y in found[1:]:
            assert y is None or (y.isfinite().all() and not y[..., 5, :].any())


@each_dtype
def test_scores_that_rise_and_fall_along_the_keys(dtype):
    """Every tile has another maximum, and few of the weights are not 0."""
    q, k, v, do = all_operands(20, 40, 16, dtype, heads=2)
    k[..., 0] = torch.linspace(-20, 20, 40)
    q[..., 0], q[:, 1, :, 0] = 2, -2
    assert_launched(q, k, v, do, scale=1)


@each_dtype
def test_equal_values_have_no_gradient_of_the_scores(dtype):
    """dp is the same for all keys, and so is D: what is left of ds is rounding."""
    q, k, v, do = all_operands(17, 20, 16, dtype)
    assert_launched(q, k, v[:, :, :1].expand_as(v), do)


EACH_PLACE = [(place, dtype) for place, dtype in zip(range(4), [*DTYPES, FP32], strict=True)]


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("place, dtype", EACH_PLACE, ids=["q", "k", "v", "do"])
def test_nan_and_infinities_spread_as_in_the_formula(place, dtype, value):
    """No further; `assert_gradients` compares what is finite."""
    x = all_operands(33, 33, 16, dtype, heads=2)
    x[place][0, 1, 18, 5] = value
    assert_launched(*x)


@pytest.mark.parametrize("place, dtype", EACH_PLACE, ids=["q", "k", "v", "do"])
def test_nan_reaches_who_sees_it(place, dtype):
    """Causal, all of these, and no more than in the formula, where hidden weights are 0 or NaN."""
    x = all_operands(33, 33, 16, dtype, heads=2)
    x[place][0, 1, 18, 5] = NAN
    found = autograd(flash_attention, *x, True)
    dq, dk, dv = (y[0, 1].isnan() for y in found)
    assert dq[18:].all() if place in (1, 2) else dq[18].all()
    assert dk[:19].all() and (dk.all() or place in (0, 3))
    assert {0: dv[:19].all(), 1: dv.all(), 2: not dv.any(), 3: dv[:19, 5].all()}[place]
    formula = Exact(*x, True).gradients
    exact = Exact(*(y.nan_to_num() for y in x), True)
    clean = []
    for a, b, c in zip(found, formula, exact.gradients, strict=True):
        a = a.cpu()
        assert b[a.isnan()].isnan().all()
        clean.append(torch.where(a.isnan(), c.to(dtype), a))
    assert_gradients(clean, exact)


@pytest.mark.case("N23")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_query_that_sees_nothing_has_no_gradient(dtype):
    """Case N23: all of its scores are -inf; nor does it add to those of keys and values."""
    q, k, v, do = all_operands(20, 40, 16, dtype, heads=2)
    q[..., 0], k[..., 0] = 0, 1e30
    q[0, 1, [3, 17], 0] = -1e30
    exact = Exact(q, k, v, do)
    assert exact.lse.isinf().sum() == 2
    all_found = [*launched(exact, q, k, v, do), autograd(flash_attention, q, k, v, do)]
    for found in all_found:
        assert_gradients(found, exact)
        assert found[0] is None or not found[0][0, 1, [3, 17]].any()
    for x in (q, do):  # these two rows might as well not be there
        x[0, 1, [3, 17]] = 0
    do[0, 1, [3, 17]] = 0
    dk, dv = autograd(flash_attention, q, k, v, do)[1:]
    assert torch.equal(dk, all_found[-1][1]) and torch.equal(dv, all_found[-1][2])


# What the forward pass leaves


@each_causal
@pytest.mark.parametrize(
    "dtype, queries, keys, dim",
    [(FP32, 17, 40, 5), (FP16, 40, 17, 16), (BF16, 33, 33, 32)],
    ids=str,
)
def test_lse(dtype, queries, keys, dim, causal):
    """To the base of 2; the result is the same with it as without."""
    q, k, v, do = all_operands(queries, keys, dim, dtype, batch=2, heads=2, kv_heads=1)
    exact = Exact(q, k, v, do, causal)
    for launch in forward_launches(dtype, dim):
        whole, lse = alone(torch.full(q.shape[:3], -7.0, device=DEVICE), FENCE)
        o, other = torch.empty_like(q), torch.empty_like(q)
        try:
            launch(q, k, v, o, causal=causal, scale=exact.scale, lse=lse)
            launch(q, k, v, other, causal=causal, scale=exact.scale)
        except OutOfResources:
            continue
        assert torch.equal(o, other)
        assert ((lse.cpu() - exact.lse).abs() <= exact.lse_error() * LOG2_E).all()
        lse.fill_(FENCE)
        assert whole.eq(FENCE).all()


def test_lse_of_a_query_that_sees_nothing_is_infinite():
    q, k, v = operands(20, 40, 16)
    q[..., 0], k[..., 0] = 0, 1e30
    q[0, 1, [3, 17], 0] = -1e30
    lse = torch.empty(q.shape[:3], device=DEVICE)
    attention.launch_flash_attention(q, k, v, torch.empty_like(q), lse=lse)
    expected = torch.zeros(q.shape[:3], dtype=torch.bool, device=DEVICE)
    expected[0, 1, [3, 17]] = True
    assert torch.equal(lse == INF, expected) and lse[~expected].isfinite().all()


# The public function


def assert_differentiated(q, k, v, do, *options) -> None:
    """`flash_attention`'s gradients are right, and lie as inputs; what it reads is not changed."""
    before = [x.clone() for x in (q, k, v, do)]
    found = autograd(flash_attention, q, k, v, do, *options)
    assert all(
        dx.device == x.device and lies_as(dx, x) for dx, x in zip(found, (q, k, v), strict=True)
    )
    assert_gradients(found, q, k, v, do, *options)
    assert all(map(torch.equal, (q, k, v, do), before))


@pytest.mark.case("N29")
@each_causal
@pytest.mark.parametrize(
    "dtype, queries, keys",
    [(FP32, 1, 1), (FP16, 70, 150), (BF16, 150, 40)],
    ids=str,
)
def test_gradients(dtype, queries, keys, causal):
    """Case N29: they are there, and are those of the formula."""
    x = all_operands(queries, keys, 24, dtype, heads=2, kv_heads=1)
    assert flash_attention(x[0].requires_grad_(), *x[1:3], causal).requires_grad
    assert_differentiated(*x, causal)


@pytest.mark.parametrize("scale", [None, 0, 0.0, -0.5, 2, 1e-30, 1e-60, -1e-60, 2.0**100], ids=str)
def test_scales(scale):
    """A small or large one with scores of a usual size, where fp32 holds what gives them."""
    q, k, v, do = all_operands(20, 19, 9)
    if scale and not 1e-50 < abs(scale) < 1e-10 and abs(scale) < 1e10:
        assert_differentiated(q, k, v, do, True, scale)
    if scale and abs(scale) > 1e-40:
        q, k = (x / abs(scale) ** 0.5 for x in (q, k))
    assert_differentiated(q, k, v, do, True, scale)
    assert_differentiated(q, k, v, do, False, scale)


@pytest.mark.parametrize(
    "layout, dtype",
    [*zip(LAYOUTS.values(), DTYPES * len(LAYOUTS), strict=False)],
    ids=LAYOUTS,
)
def test_layouts(layout, dtype):
    """Of q, k, v and of the gradient."""
    whole = [randn(2, 2, 40, 32, dtype=dtype, seed=seed) for seed in range(4)]
    before = [x.clone() for x in whole]
    q, k, v, do = map(layout, whole)
    found = autograd(flash_attention, q, k, v, do, True)
    assert_gradients(found, *(x.resolve_neg() for x in (q, k, v, do)), True)
    assert all(map(torch.equal, whole, before))


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "do"])
def test_layouts_of_one_operand(place):
    """Strides of which no two are alike; and a view that stands for its negative."""
    x, other = list(all_operands(20, 20, 16, FP16, batch=2, heads=2)), (place + 1) % 4
    x[place] = randn(2, 20, 16, 2, dtype=FP16, seed=4).permute(0, 3, 1, 2)
    x[other] = torch._neg_view(x[other])
    found = autograd(flash_attention, *x, True)
    assert_gradients(found, *(y.resolve_neg() for y in x), True)


@each_dtype
def test_expanded_gradients_and_keys(dtype):
    """The sum's gradient has strides of 0; of expanded keys autograd adds the gradients up."""
    q, k, v, _ = all_operands(17, 20, 16, dtype, batch=2, heads=2, kv_heads=1)
    q, k, v = q.requires_grad_(), k[:1].clone().requires_grad_(), v[:1].clone().requires_grad_()
    flash_attention(q, k.expand(2, 2, -1, -1), v.expand(2, 2, -1, -1)).sum().backward()
    x = [y.detach().double().requires_grad_() for y in (q, k, v)]
    attention_reference(x[0], *(y.expand(2, 2, -1, -1) for y in x[1:])).sum().backward()
    for found, exact in zip((q, k, v), x, strict=True):
        assert found.grad.dtype == dtype
        gap, size = (found.grad.double() - exact.grad).abs().max(), exact.grad.abs().max()
        assert gap <= 8 * torch.finfo(dtype).eps * max(size, v.abs().max() * k.abs().max())


def test_one_tensor_for_all_three():
    x = randn(1, 2, 20, 16).requires_grad_()
    flash_attention(x, x, x, causal=True).sum().backward()
    exact = x.detach().double().requires_grad_()
    attention_reference(exact, exact, exact, causal=True).sum().backward()
    assert_close(x.grad, exact.grad)


def test_a_gradient_that_comes_in_another_dtype():
    x = all_operands(9, 12, 16, BF16)
    leaves = [y.detach().requires_grad_() for y in x[:3]]
    (flash_attention(*leaves).float() * x[3].float()).sum().backward()
    assert_gradients([y.grad for y in leaves], *x)


@pytest.mark.case("N14", "N23")
@pytest.mark.parametrize(
    "q_shape, k_shape",
    [
        ((0, 2, 3, 4), (0, 2, 5, 4)),
        ((2, 0, 3, 4), (2, 2, 5, 4)),
        ((2, 2, 0, 4), (2, 1, 5, 4)),
        ((2, 2, 3, 4), (2, 1, 0, 4)),
        ((2, 2, 3, 0), (2, 1, 5, 0)),
    ],
)
def test_nothing_is_launched_for_empty_sizes(monkeypatch, q_shape, k_shape):
    """Case N14; without keys or queries, case N23. Gradients are of their inputs' shapes, and 0."""
    for name in ("launch_attention", "launch_attention_backward"):
        monkeypatch.setattr(attention, name, lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    leaves = [torch.ones(x, device=DEVICE, requires_grad=True) for x in (q_shape, k_shape, k_shape)]
    flash_attention(*leaves).sum().backward()
    for x in leaves:
        assert (x.grad.shape, x.grad.dtype) == (x.shape, FP32) and not x.grad.any()


WANTED = [(0,), (1,), (2,), (1, 2), (0, 2)]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: " ".join(NAMES[i] for i in wanted))
def test_only_what_is_wanted_is_computed(monkeypatch, wanted):
    *x, do = all_operands(9, 20)
    for name, places in (("launch_keys_gradient", (1, 2)), ("launch_queries_gradient", (0,))):
        if interpreting() and not {*places} & {*wanted}:
            monkeypatch.setattr(attention_backward_plans, name, lambda *_: pytest.fail("launched"))
    exact = Exact(*x, do)
    for i in wanted:
        x[i].requires_grad_()
    flash_attention(*x).backward(do)
    assert [y.grad is not None for y in x] == [i in wanted for i in range(3)]
    assert_gradients([y.grad for y in x], exact)


def test_what_is_not_differentiated_keeps_nothing(monkeypatch):
    x, lse = list(operands(3, 4)), []
    launch = attention.launch_attention
    monkeypatch.setattr(
        attention, "launch_attention", lambda *given: (lse.append(given[6]), launch(*given))
    )
    assert flash_attention(*x).grad_fn is None
    x[1].requires_grad_()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            o = flash_attention(*x)
        assert not o.requires_grad and o.grad_fn is None
        assert_attention(o, *x)
    assert lse == [None] * 3
    o = flash_attention(*x)
    assert_attention(o, *x)
    kept = weakref.ref(o.grad_fn)
    del o
    assert kept() is None


@each_dtype
def test_gradients_are_the_same_bits_each_time(dtype):
    """In two calls, and in two backward passes of one, which add up."""
    size = (40, 33, 16) if interpreting() else (1500, 1500, 64)
    *x, do = all_operands(*size, dtype, heads=2, kv_heads=1)
    first, second = (autograd(flash_attention, *x, do, True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    leaves = [y.requires_grad_() for y in x]
    o = flash_attention(*leaves, causal=True)
    o.backward(do, retain_graph=True)
    assert all(torch.equal(y.grad, other) for y, other in zip(leaves, first, strict=True))
    o.backward(do)
    assert all(torch.equal(y.grad, 2 * other) for y, other in zip(leaves, first, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        o.backward(do)


@pytest.mark.case("N29")
@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "o"])
def test_what_was_changed_in_place_is_refused(place):
    """Case N29: not a gradient of other numbers than were multiplied."""
    x = [y.requires_grad_() for y in operands(3, 4)]
    o = flash_attention(*x)
    with torch.no_grad():
        (*x, o)[place].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("function", [torch.sum, lambda o: o.sin().sum()], ids=["sum", "sin"])
def test_a_second_derivative_is_refused(function):
    """Also where the gradient of the result is constant, and where other terms have one."""
    x = [y.requires_grad_() for y in operands(3, 4)]
    o = flash_attention(*x)
    first = torch.autograd.grad(function(o), x, create_graph=True)
    assert_gradients(first, *x, torch.autograd.grad(function(o), o)[0])
    for penalty in (first[0].sum(), first[2].square().sum() + x[0].sum()):
        with pytest.raises(RuntimeError, match="(?i)once|twice|second"):
            penalty.backward()


def test_tangents_are_refused():
    inputs = operands(3, 4)
    for place in range(3):
        for allowed in (torch.enable_grad, torch.no_grad):
            with forward_ad.dual_level(), allowed():
                x = list(inputs)
                x[place] = forward_ad.make_dual(x[place], torch.ones_like(x[place]))
                with pytest.raises(RuntimeError, match="jvp|forward"):
                    flash_attention(*x)


def test_function_transforms_are_refused():
    """They would look into the kernels."""
    q, k, v = operands(3, 4)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: flash_attention(q, k, v).sum())(q)
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda q: flash_attention(q[None], k, v))(q)


def test_autocast_changes_nothing():
    for dtype in (FP32, FP16):
        x = all_operands(9, 20, 16, dtype)
        expected = autograd(flash_attention, *x)
        with torch.autocast(DEVICE.type if hasattr(DEVICE, "type") else DEVICE, torch.bfloat16):
            found = autograd(flash_attention, *x)
        assert all(map(torch.equal, found, expected))


@pytest.mark.case("N19")
def test_fp32_is_exact_unless_tf32_is_allowed(switch):  # noqa: F811
    """Case N19: TF32 keeps 11 bits. Each query finds its key, and gives it its gradient."""
    one = torch.eye(46, device=DEVICE)[None, None]
    v = torch.zeros_like(one).requires_grad_()
    numbers = torch.arange(46.0 * 46, device=DEVICE).view(1, 1, 46, 46) + 2049
    flash_attention(200 * one, one, v, scale=1.0).backward(numbers)
    assert torch.equal(v.grad, numbers)
    x = all_operands(40, 33, 64)
    exact = Exact(*x)
    for allowed in ("highest", "high"):
        switch(allowed)
        found = autograd(flash_attention, *x)
        for near, y in zip(found, exact.gradients, strict=True):
            error = relative_error(near, y)
            if allowed == "highest" or CAPABILITY < (8, 0):
                assert error < 1e-5
            else:
                assert 1e-5 < error < 5e-3


# What is far apart, and what is many


@pytest.mark.case("N15")
@pytest.mark.parametrize("shape, strides", FAR_APART.values(), ids=FAR_APART)
def test_offsets_are_64_bits_wide(memory, shape, strides):
    """Case N15."""
    dense = [randn(*shape, dtype=FP16, seed=seed) for seed in range(4)]
    exact = Exact(*dense)
    o, lse, config = exact.o.to(dense[0]), exact.lse.to(DEVICE, FP32), SMALL[FP16]
    for place in range(8):  # q, k, v, o, do, dq, dk, dv
        x = [*dense[:3], o, dense[3], *(torch.full_like(o, -7) for _ in range(3))]
        x[place] = memory.as_strided(shape, strides, 2**17).copy_(x[place])
        q, k, v, o_there, do, *gradients = x
        given = q, k, v, o_there, lse, do, *gradients, False, exact.scale, config
        if place != 5:
            launch_keys(*given)
        if place not in (6, 7):
            launch_queries(*given)
        found = [None if y.eq(-7).all() else y for y in gradients]
        assert found[0] is not None or found[1] is not None
        assert_gradients(found, exact)
        if not interpreting():  # Hopper's kernel
            attention.launch_flash_attention_backward(q, k, v, o_there, lse, do, *gradients)
            assert_gradients(gradients, exact)


def test_a_grid_has_one_axis(monkeypatch):
    """Of 2^31 - 1 programs at most, where the others end at 65,535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    for name in ("delta_kernel", "keys_gradient_kernel", "queries_gradient_kernel"):
        monkeypatch.setattr(attention_backward, name, Kernel())

    def launch(q, k):
        attention_backward.launch_delta(q, q, q)
        attention_backward.launch_keys_gradient(q, k, k, q, q, q, k, k, Config(16, 32))
        attention_backward.launch_queries_gradient(q, k, k, q, q, q, q, Config(16, 32))

    x = torch.zeros(1, device=DEVICE)
    launch(x.expand(70_000, 30, 66, 16), x.expand(70_000, 10, 33, 16))
    assert grids == [(70_000 * 30 * 3,), (70_000 * 10 * 2,), (70_000 * 30 * 5,)]
    few, many = x.expand(2**20, 2, 33, 16), x.expand(2**20, 2, 2**21, 16)
    for q, k in ((few, many), (many, few)):
        with pytest.raises(ValueError, match=r"has [\d,]+ blocks: too many"):
            launch(q, k)


@needs_gpu
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("batch, heads", [(1, 70_000), (70_000, 1)])
def test_more_heads_than_an_axis_counts(batch, heads, dtype):
    x = all_operands(1, 16, 16, dtype, batch=batch, heads=heads)
    assert_gradients(autograd(flash_attention, *x), *x)


@needs_gpu
@each_causal
@pytest.mark.parametrize("dim", [64, 63])
def test_more_elements_than_an_int_counts(dim, causal):
    """63 is for the plain kernels. Only the last head is not 0."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of GPU memory")
    heads = 2**17 + 1
    x = [torch.zeros(1, heads, 265, dim, dtype=FP16, device=DEVICE) for _ in range(4)]
    for seed, y in enumerate(x):
        y[0, -1] = randn(265, dim, dtype=FP16, seed=seed)
    assert x[0].numel() > 2**31
    found = autograd(flash_attention, *x, causal)
    assert_gradients([y[:, -1:] for y in found], *(y[:, -1:] for y in x), causal)
    assert not any(y[:, :-1].any() for y in found)


# On a GPU only


@pytest.mark.case("E14")
@pytest.mark.skipif(torch.cuda.device_count() < 2 or not has_cuda(), reason="needs two GPUs")
@each_dtype
def test_on_another_gpu_than_the_current_one(dtype):
    """Case E14."""
    x = [y.to("cuda:1") for y in all_operands(200, 300, 64, dtype)]
    assert_differentiated(*x, True)
    assert torch.cuda.current_device() == 0


@pytest.mark.case("E14")
@needs_gpu
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_on_the_current_stream(dtype):
    """Case E14: what comes before it there is waited for."""
    *x, do = all_operands(500, 500, 64, dtype)
    autograd(flash_attention, *x, do)  # compiled
    stream, late = torch.cuda.Stream(), torch.zeros_like(do)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(do)
        found = autograd(flash_attention, *x, late)
    stream.synchronize()
    assert_gradients(found, *x, do)


@needs_gpu
@pytest.mark.parametrize("dtype, dim", [(FP32, 64), (FP16, 128), (BF16, 80), (FP16, 63)], ids=str)
def test_inside_a_cuda_graph(dtype, dim):
    *x, do = all_operands(300, 200, dim, dtype, heads=2, kv_heads=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        autograd(flash_attention, *x, do, True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = autograd(flash_attention, *x, do, True)
    do.copy_(randn(*do.shape, seed=9))
    for y in found:
        y.fill_(-7)
    graph.replay()
    assert_gradients(found, *x, do, True)
