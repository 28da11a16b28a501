"""What rounding does to C = A B: TF32 on any machine, and how large an error to expect.

Floating-point formats differ in the bits of their significand, the leading one included: BITS. To
round to p bits makes an error of at most 2^-p of a number, its unit roundoff.
"""

import math

import torch

BITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to fp32 and then to TF32: 11 bits, to the nearest, ties away from zero.

    As the PTX instruction cvt.rna.tf32.f32 does (PTX ISA, "cvt"). Infinities and NaN stay.
    """
    x = x.detach().float().resolve_neg()
    bits = x.view(torch.int32)
    # Half a step is added to the magnitude, then the 13 bits below are cut off.
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def matmul_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 for (m, k) and (k, n): a sum after the other, in the order of k.

    A library splits long sums into parts, which rounds less; a GPU's thread adds in this order.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"(m, k) and (k, n) please, not {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = a.float(), b.float()
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for p in range(a.shape[1]):
        c.addr_(a[:, p], b[p])
    return c


def emulated_matmul(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    """a @ b of fp32 matrices in the given precision: a name of `BITS`, or tf32x3.

    Operands are rounded first; sums are in fp32, and 16-bit results are rounded once more. tf32x3
    takes each operand apart into two TF32 numbers, leaves out the product of the small parts, and
    adds up what they make with the large ones on its own; what is infinite in TF32 becomes NaN.
    """
    _known(precision)
    if precision == "tf32x3":
        (a, rest_a), (b, rest_b) = _in_two(a), _in_two(b)
        small = matmul_in_order(rest_a, b) + matmul_in_order(a, rest_b)
        return matmul_in_order(a, b) + small
    if precision == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    return matmul_in_order(a.to(dtype), b.to(dtype)).to(dtype)


def _known(precision: str) -> None:
    if precision != "tf32x3" and precision not in BITS:
        raise ValueError(f"precision must be tf32x3 or one of {', '.join(BITS)}, not {precision!r}")


def _in_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    large = to_tf32(x)
    return large, to_tf32(x - large)


def rounding_error(bits: int) -> float:
    """The relative error (root mean square) of normally distributed numbers rounded to `bits`.

    Between 2^e and 2^(e+1) it is evenly spread up to 2^(e-bits), so its square is a third of that
    one's on average; e is as likely as normal numbers of that size are.
    """
    if bits < 1:
        raise ValueError(f"bits must be at least 1, not {bits}")

    def below(size: float) -> float:  # the share of numbers that are smaller
        return math.erf(size / math.sqrt(2))

    square = sum(4.0**e * (below(2.0 ** (e + 1)) - below(2.0**e)) for e in range(-40, 6))
    return 2.0**-bits * math.sqrt(square / 3)


def expected_error(k: int, precision: str) -> float:
    """‖C - AB‖ / ‖AB‖ that rounding alone explains, for normal A (m, k) and B (k, n) in fp32.

    Three sources, independent of each other: the operands' rounding, whatever k is; that of the
    k sums, each of them relative to what is there so far; and a 16-bit result's.
    """
    _known(precision)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    in_fp32 = rounding_error(BITS["fp32"])
    sums = in_fp32 * math.sqrt((k + 1) / 2)  # the p-th sum is √(p / k) of the last one
    if precision == "tf32x3":
        small = rounding_error(BITS["tf32"]) ** 2  # a small part's own rounding, and their product
        return math.hypot(math.sqrt(3) * small, sums)
    own = rounding_error(BITS[precision])
    operands = 0.0 if precision == "fp32" else math.sqrt(2) * own
    result = own if precision in ("fp16", "bf16") else 0.0
    return math.hypot(operands, sums, result)
