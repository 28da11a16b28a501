"""TF32 against exact arithmetic, and the expected errors against errors."""

import math
from fractions import Fraction

import pytest
import torch

from helpers import precision
from helpers.check import relative_error
from helpers.precision import BITS, emulated_matmul, expected_error, rounding_error, to_tf32

INF = math.inf


def rounded_exactly(x: float, bits: int) -> float:
    """x to `bits` bits, to the nearest, ties away from zero, in rational arithmetic."""
    if x == 0 or not math.isfinite(x):
        return x
    step = Fraction(2) ** (max(math.frexp(x)[1], -125) - bits)  # fp32's smallest normal: 2^-126
    size = abs(Fraction(x)) / step + Fraction(1, 2)
    return math.copysign(float(math.floor(size) * step), x)


def check_tf32(to_tf32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, generator=generator) * 10.0 ** torch.randint(-44, 38, (2000,))
    ties = torch.tensor([2049.0, 2051.0, -2049.0, 2049.0 + 2**-10, 2049.0 - 2**-10, 1 + 2.0**-11])
    edges = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-126, 65504.0, 2.0**127, INF, -INF])
    x = torch.cat([x, ties, edges])
    expected = torch.tensor([rounded_exactly(v, 11) for v in x.tolist()])
    found = to_tf32(x)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), x.signbit())
    assert torch.equal(to_tf32(found), found)
    assert to_tf32(torch.tensor([math.nan])).isnan().all()
    largest = torch.finfo(torch.float32).max
    assert to_tf32(torch.tensor([largest, -largest])).tolist() == [INF, -INF]
    x = torch.randn(3, 4, generator=generator).t()
    assert torch.equal(to_tf32(x), to_tf32(x.contiguous()))


def test_tf32_in_exact_arithmetic():
    check_tf32(to_tf32)


def cut_off(x):
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def ties_to_even(x):
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def through_fp16(x):
    return x.half().float()


def one_bit_more(x):
    return ((x.view(torch.int32) + 0x800) & ~0xFFF).view(torch.float32)


@pytest.mark.parametrize("mutant", [cut_off, ties_to_even, through_fp16, one_bit_more])
def test_other_roundings_are_found(mutant):
    with pytest.raises(AssertionError):
        check_tf32(mutant)


def test_2049_needs_12_bits():
    x = torch.arange(46.0 * 46).reshape(46, 46)
    eye = torch.eye(46)
    assert torch.equal(emulated_matmul(eye, x, "fp32"), x)
    assert torch.equal(emulated_matmul(eye, x, "tf32x3"), x)
    wrong = emulated_matmul(eye, x, "tf32") != x
    assert torch.equal(wrong, (x > 2048) & (x % 2 == 1))


@pytest.mark.parametrize("name", [*BITS, "tf32x3"])
@pytest.mark.parametrize("k", [1, 17, 300])
def test_emulated_by_formula(name, k):
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(5, k, generator=generator), torch.randn(k, 7, generator=generator)
    found = emulated_matmul(a, b, name)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
    assert found.dtype == dtype and found.shape == (5, 7)
    if name == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    a, b = a.to(dtype).double(), b.to(dtype).double()
    exact = (a @ b).to(dtype)
    assert relative_error(found, exact) < 1e-3 * (dtype != torch.float32) + 1e-6


@pytest.mark.parametrize("bits", [8, 11, 24])
def test_the_rounding_of_normal_numbers(bits):
    x = torch.randn(2**16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    assert relative_error(rounded, x) == pytest.approx(rounding_error(bits), rel=0.02)


@pytest.mark.parametrize("k", [16, 256, 2048])
@pytest.mark.parametrize("name", [*BITS, "tf32x3"])
def test_the_expected_error_is_the_emulated_one(name, k):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(48, k, generator=generator), torch.randn(k, 48, generator=generator)
    found = relative_error(emulated_matmul(a, b, name), a.double() @ b.double())
    assert found == pytest.approx(expected_error(k, name), rel=0.35)
    if name in ("tf32", "fp16", "bf16"):
        assert found == pytest.approx(expected_error(k, name), rel=0.1)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: expected_error(0, "fp32"), "k must be"),
        (lambda: expected_error(4, "fp8"), "precision must be"),
        (lambda: emulated_matmul(torch.ones(2, 2), torch.ones(2, 2), "fp8"), "precision must be"),
        (lambda: precision.rounding_error(0), "bits must be"),
        (
            lambda: emulated_matmul(torch.ones(2, 4), torch.ones(5, 3), "fp32"),
            "not .2, 4. and .5, 3",
        ),
        (lambda: emulated_matmul(torch.ones(2, 4), torch.ones(4), "fp32"), "and .4,."),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_other_dtypes_and_views_are_rounded_as_fp32():
    x = torch.randn(4, 3)
    assert torch.equal(precision.to_tf32(x.bfloat16()), x.bfloat16().float())
    assert torch.equal(precision.to_tf32(x.double()), precision.to_tf32(x))
    assert torch.equal(precision.to_tf32(torch._neg_view(x)), precision.to_tf32(-x))
    assert torch.equal(precision.to_tf32(x.t()), precision.to_tf32(x).t())
