"""The Triton GeLU, changed wrongly on purpose: comparing with float64 must notice each change."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from helpers import ptx
from helpers.check import assert_close
from helpers.device import device, triton_version
from helpers.kernels import gelu
from tests.test_gelu import randn, reference, reference_with_gradient

SOURCE = Path(gelu.__file__).read_text(encoding="utf-8")
SIZES = (1, 511, 512, 513, 2048, 5000)
BESIDE = 8192  # elements before and behind each tensor: a wrong kernel may write there
FENCE = 3
LARGE = [5, 10.1, 20, 45, 300, -5, -10.1, -45, -300, 1e20, -1e20]

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")


def fenced(values: torch.Tensor) -> torch.Tensor:
    # A number, not NaN: the GeLU of a NaN from beside x would not show beside y.
    whole = torch.full((len(values) + 2 * BESIDE,), FENCE, device=device(), dtype=values.dtype)
    whole[BESIDE:-BESIDE] = values
    return whole


def inside(whole: torch.Tensor) -> torch.Tensor:
    return whole[BESIDE:-BESIDE]


def numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    x = randn(n, dtype=dtype)
    large = torch.tensor(LARGE).clamp(-60000, 60000) if dtype == torch.float16 else LARGE
    if n > 500:
        x[-len(LARGE) :] = torch.as_tensor(large).to(dtype)
    return x


def check(module) -> None:
    """AssertionError unless the kernels of a gelu module are right, and write nothing beside."""
    for dtype in gelu.DTYPES:
        for n in SIZES:
            x = fenced(numbers(n, dtype))
            y = fenced(torch.full_like(inside(x), -7))
            module.launch_triton_gelu(inside(x), inside(y))
            expected = reference(inside(x))
            ordinary = expected.abs() < 100  # in a norm, errors would vanish beside the large
            assert_close(inside(y)[ordinary], expected[ordinary])
            assert_close(inside(y), expected)
            assert (y[:BESIDE] == FENCE).all() and (y[-BESIDE:] == FENCE).all(), "written outside"
            exact = inside(x).cpu().double().requires_grad_()
            grad, dx = fenced(randn(n, dtype=dtype, seed=1)), fenced(torch.full_like(inside(x), -7))
            module.launch_triton_gelu_backward(inside(grad), inside(x), inside(dx))
            reference_with_gradient(exact).backward(inside(grad).cpu().double())
            assert_close(inside(dx), exact.grad)
            assert (dx[:BESIDE] == FENCE).all() and (dx[-BESIDE:] == FENCE).all(), "written outside"


def changed(folder: Path, old: str, new: str):
    """The gelu module with every `old` of its text replaced."""
    assert old in SOURCE, f"the kernels have no {old!r}: change this test with them"
    file = folder / "mutant.py"
    file.write_text(SOURCE.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unchanged_kernels_are_right(tmp_path):
    check(changed(tmp_path, "0.044715", "0.044715"))


MUTANTS = {
    "no mask": ("offsets, offsets < n)", "offsets, None)"),
    "mask one too far": ("offsets < n", "offsets <= n"),
    "mask one too short": ("offsets < n", "offsets < n - 1"),
    "bound that forgets the block": ("if start + BLOCK <= n", "if start <= n"),
    "bound one too far": ("if start + BLOCK <= n", "if start + BLOCK <= n + 1"),
    "grid rounded down": ("triton.cdiv(n, block)", "n // block"),
    "one block too few": ("triton.cdiv(n, block)", "triton.cdiv(n, block) - 1"),
    "blocks that overlap": (".to(tl.int64) * BLOCK", ".to(tl.int64) * (BLOCK - 1)"),
    "blocks one further": ("start + tl.arange(0, BLOCK)", "start + 1 + tl.arange(0, BLOCK)"),
    "cubic constant": ("0.044715", "0.04715"),
    "linear constant": ("0.79788456", "0.7978"),
    "sigmoid of a": ("tl.sigmoid(2 * a)", "tl.sigmoid(a)"),
    "tanh from exp(2a)": (
        "x * tl.sigmoid(2 * a)",
        "0.5 * x * (1 + (tl.exp(2 * a) - 1) / (tl.exp(2 * a) + 1))",
    ),
    "erf": ("x * tl.sigmoid(2 * a)", "0.5 * x * (1 + tl.erf(0.70710678 * x))"),
    "x instead of y": ("y.to(y_ptr", "x.to(y_ptr"),
    "gradient not passed on": ("(grad * slope)", "slope"),
    "half of the product rule": ("slope = s + x", "slope = x"),
    "slope of the sigmoid": ("s * (1 - s)", "(1 - s)"),
    "slope of the cube": ("3 * 0.044715 * square", "0.044715 * square"),
    "square that overflows": ("tl.minimum(x * x, 1e9)", "x * x"),
}


@pytest.mark.parametrize("old, new", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(tmp_path, old, new):
    module = changed(tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(module)


@pytest.mark.case("N02")
def test_computing_in_half_precision_is_refused(tmp_path):
    """Case N02: by Triton itself, which has no exp of 16 bits."""
    with pytest.raises(Exception) as refused:
        check(changed(tmp_path, ".to(tl.float32)", ""))
    reasons, error = [], refused.value  # the compiler's innermost error is the reason
    while error:
        reasons.append(str(error))
        error = error.__cause__
    assert "but got fp16" in "\n".join(reasons)


KERNELS = {  # the pointers of each, and where its text ends
    "forward": (("x_ptr", "y_ptr"), "@triton.jit\ndef gelu_backward_block"),
    "backward": (("grad_ptr", "x_ptr", "dx_ptr"), "def launch_triton_gelu"),
}


@pytest.mark.case("N15")
@pytest.mark.parametrize("pointers, end", KERNELS.values(), ids=KERNELS)
def test_offsets_are_64_bits_wide(pointers, end):
    """Case N15: beyond 2^31 elements a product in 32 bits wraps around."""

    def products(text: str) -> list[str]:
        """The widths of the kernel's integer products, before any layout."""
        signature = dict.fromkeys(pointers, "*fp32") | {"n": "i64"}
        kernels = text[text.index("@triton.jit") : text.index(end)]
        ttir = ptx.triton_compiled(kernels, signature, {"BLOCK": 512}).ttir
        return re.findall(r"arith\.muli .* : (\w+)", ttir)

    assert products(SOURCE) == ["i64"]
    assert products(SOURCE.replace(".to(tl.int64)", "")) == ["i32"]
