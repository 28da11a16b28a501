"""The checkers of exercises 05.1 and 05.2 take what is right, and say what is wrong."""

import re

import pytest
from emulation import needs_emulator
from verdicts import verdict

from helpers import ptx
from helpers.exercises import cuda_gelu

# 05.1: the element of a thread. g, b, i, t: gridDim, blockDim, blockIdx, threadIdx


def test_the_index_as_the_notebook_solves_it(capsys):
    def solution(gridDim, blockDim, blockIdx, threadIdx):
        column = blockIdx.x * blockDim.x + threadIdx.x
        row = blockIdx.y * blockDim.y + threadIdx.y
        return row * (gridDim.x * blockDim.x) + column

    assert verdict(capsys, "05.1", solution) == "correct."


@pytest.mark.parametrize(
    "answer",
    [
        lambda g, b, i, t: (
            (i.y * g.x * b.y + t.y * g.x + i.x) * b.x + t.x  # the same, factored
        ),
        lambda g, b, i, t: (i.x * b.x + t.x) + (i.y * b.y + t.y) * b.x * g.x,
    ],
)
def test_other_ways_to_write_the_index_are_right(capsys, answer):
    assert verdict(capsys, "05.1", answer) == "correct."


WRONG_INDICES = {
    "axes exchanged": lambda g, b, i, t: (i.x * b.x + t.x) * (g.y * b.y) + i.y * b.y + t.y,
    "block after block": lambda g, b, i, t: (i.y * g.x + i.x) * b.x * b.y + t.y * b.x + t.x,
    "blockDim dropped in x": lambda g, b, i, t: (i.y * b.y + t.y) * (g.x * b.x) + i.x + t.x,
    "blockDim dropped in y": lambda g, b, i, t: (i.y + t.y) * (g.x * b.x) + i.x * b.x + t.x,
    "rows as wide as one block": lambda g, b, i, t: (i.y * b.y + t.y) * b.x + i.x * b.x + t.x,
    "rows as wide as blocks": lambda g, b, i, t: (i.y * b.y + t.y) * g.x + i.x * b.x + t.x,
    "width of the other axis": lambda g, b, i, t: (i.y * b.y + t.y) * (g.y * b.y) + i.x * b.x + t.x,
    "gridDim for blockDim": lambda g, b, i, t: (i.y * g.y + t.y) * (g.x * b.x) + i.x * g.x + t.x,
    "gridDim and blockDim exchanged": lambda g, b, i, t: (
        (t.y * g.y + i.y) * (g.x * b.x) + t.x * g.x + i.x
    ),
    "y block with x's size": lambda g, b, i, t: (i.y * b.x + t.y) * (g.x * b.x) + i.x * b.x + t.x,
    "the lecture's grid by heart": lambda g, b, i, t: (i.y * 8 + t.y) * 2 + i.x * 1 + t.x,
    "one dimension": lambda g, b, i, t: i.x * b.x + t.x,
    "counted from 1": lambda g, b, i, t: (i.y * b.y + t.y) * (g.x * b.x) + i.x * b.x + t.x + 1,
    "from the last": lambda g, b, i, t: (
        g.x * b.x * g.y * b.y - 1 - (i.y * b.y + t.y) * (g.x * b.x) - i.x * b.x - t.x
    ),
    "a pair": lambda g, b, i, t: (i.y * b.y + t.y, i.x * b.x + t.x),
    "a string": lambda g, b, i, t: str((i.y * b.y + t.y) * (g.x * b.x) + i.x * b.x + t.x),
    "a fraction": lambda g, b, i, t: (i.y * b.y + t.y) * (g.x * b.x) / 1 + i.x * b.x + t.x,
    "nothing": lambda g, b, i, t: None,
    "a constant": lambda g, b, i, t: 0,
    "not hashable": lambda g, b, i, t: [(i.y * b.y + t.y) * (g.x * b.x) + i.x * b.x + t.x],
    "equal to everything": lambda g, b, i, t: Anything(),
}


class Anything(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = int.__hash__


@pytest.mark.parametrize("answer", WRONG_INDICES.values(), ids=WRONG_INDICES)
def test_wrong_indices_are_rejected_with_the_thread(capsys, answer):
    said = verdict(capsys, "05.1", answer)
    assert re.search(r"thread \(\d+, \d+\) of block \(\d+, \d+\) in a grid of \(\d+, \d+\)", said)
    assert re.search(r"(has element|gets element|needs a whole number)", said)


def test_an_answer_that_raises_is_named(capsys):
    said = verdict(capsys, "05.1", lambda g, b, i, t: g.z)
    assert said.startswith("not yet. It raises AttributeError")
    assert "TypeError" in verdict(capsys, "05.1", lambda g, b: 0)


# 05.2: the GeLU with four faults

BROKEN = """
extern "C" __global__ void gelu(const float* x, float* y, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i <= n) {
        float e = exp(2 * 0.79788456 * (x[i] + 0.044715 * x[i] * x[i] * x[i]));
        float t = (e - 1) / (e + 1);
        y[i] = 0.5 * x[i] * (1 + t);
    }
}
"""
SOLUTION = """
extern "C" __global__ void gelu(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float a = 0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
        y[i] = x[i] / (1.0f + expf(-2.0f * a));
    }
}
"""
LAST = "y[i] = x[i] / (1.0f + expf(-2.0f * a));"
HELPER = "__device__ float t(float a) { return tanhf(a); }\n"

RIGHT = {
    "the notebook's": SOLUTION,
    "tanhf": SOLUTION.replace(LAST, "y[i] = 0.5f * x[i] * (1.0f + tanhf(a));"),
    "fast": SOLUTION.replace(LAST, "y[i] = __fdividef(x[i], 1.0f + __expf(-2.0f * a));"),
    "exp of a float": SOLUTION.replace("expf", "exp"),
    # Halves are exact: the compiler itself does without the double.
    "0.5 cast at once": SOLUTION.replace(LAST, "y[i] = float(0.5 * x[i]) * (1.0f + tanhf(a));"),
    "a helper function": HELPER
    + SOLUTION.replace(LAST, "y[i] = 0.5f * x[i] * (1.0f + t(a));").lstrip(),
    "restrict, comments, another order": SOLUTION.replace(
        "(const float* x", "/* in */ (float const* __restrict__ x"
    ),
    "early return": SOLUTION.replace("if (i < n) {", "if (i >= n) return; {"),
    "grid stride": SOLUTION.replace("if (i < n) {", "for (; i < n; i += gridDim.x * blockDim.x) {"),
    "a second kernel beside": SOLUTION + "__global__ void other(int n) {}\n",
}


@needs_emulator
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_repaired_kernels_are_right(capsys, text):
    assert verdict(capsys, "05.2", lambda: text) == "correct."


def edited(*edits: tuple[str, str], text: str = SOLUTION) -> str:
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return text


FROM_EXP = (
    "float e = expf(2.0f * a); float t = (e - 1.0f) / (e + 1.0f); y[i] = 0.5f * x[i] * (1.0f + t);"
)
# Name -> text, and what the hint must say.
WRONG = {
    "as it was": (BROKEN, "gelu, block|for n ="),
    "i <= n": (edited(("i < n", "i <= n")), "element 1 of x, which has 1"),
    "no bounds": (edited(("if (i < n) ", "")), "element .* of x, which has"),
    "bounds of the block": (edited(("i < n", "threadIdx.x < n")), "element .* of x, which has"),
    "every thread does all": (
        edited(("if (i < n) ", "for (i = 0; i < n; ++i) ")),
        "stores .* times: once for each",
    ),
    "last element left out": (edited(("i < n", "i < n - 1")), "nothing was written"),
    "256": (edited(("blockDim.x", "256")), "for n = 2(55|000).*nothing was written"),
    "gridDim": (edited(("blockDim.x", "gridDim.x")), "nothing was written|error"),
    "exp that overflows": (edited((LAST, FROM_EXP)), "is -?nan for x = 10.*overflow"),
    "clamped too early": (
        edited((LAST, FROM_EXP), ("2.0f * a", "fminf(2.0f * a, 4.0f)")),
        "the error is",
    ),
    "__tanhf": (
        edited((LAST, "y[i] = 0.5f * x[i] * (1.0f + __tanhf(a));")),
        "of __tanhf only 11 bits",
    ),
    "as inexact as __tanhf": (
        edited((LAST, "y[i] = 0.5f * x[i] * (1.0f + 1.00005f * tanhf(a));")),
        "the error is",
    ),
    "erf form": (
        edited((LAST, "y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));")),
        "the error is",
    ),
    "relu": (edited((LAST, "y[i] = fmaxf(x[i], 0.0f);")), "the error is"),
    "sign of a": (edited(("-2.0f * a", "2.0f * a")), "the error is"),
    "half left in": (edited(("x[i] / (", "0.5f * x[i] / (")), "the error is"),
    "doubles out of sight": (
        "__noinline__ __device__ float half(float v, float w) { return 0.5 * v * w; }\n"
        + edited((LAST, "y[i] = half(x[i], 1.0f + tanhf(a));")).lstrip(),
        "its PTX still has .* fp64",
    ),
    "one double literal": (edited(("0.79788456f", "0.79788456")), "PTX still has .* fp64"),
    "double exp": (edited(("expf(-2.0f * a)", "exp(-2.0 * a)")), "PTX still has .* fp64"),
    "another name": (edited((" gelu(", " my_gelu(")), "no __global__ function 'gelu'.*my_gelu"),
    "another parameter": (
        edited(("int n)", "long long n)")),
        "keep the parameters: const float\\* x, float\\* y, int n",
    ),
    "renamed parameters": (
        edited(("float* x, float* y", "float* y, float* x")),
        "keep the parameters",
    ),
    "more parameters": (edited(("int n)", "int n, int m)")), "keep the parameters"),
    "half precision": (edited(("float* y", "__half* y")), "keep the parameters"),
    "a template": (
        edited(('extern "C"', "template <typename T>"), ("float* x", "T* x")),
        "a type that is not known",
    ),
    "does not compile": (edited(("float a = ", "float b = ")), r"yours.cu:6.*\ba\b"),
    "unbalanced": (SOLUTION.rstrip()[:-1], "yours.cu"),
    "empty": ("", "no __global__ function 'gelu'"),
    "only a prototype": (
        "__global__ void gelu(const float* x, float* y, int n);",
        "yours.cu|gelu",
    ),
    "commented out": ("/*" + SOLUTION + "*/", "no __global__ function 'gelu'"),
    "endless": (edited(("if (i < n) {", "while (n < 1 << 30) {} if (i < n) {")), "still runs"),
    "inputs changed": (edited((LAST, LAST + " const_cast<float*>(x)[i] = 0;")), "changes x"),
    "zeros everywhere": (
        edited(("const float* x", "float* x"), (LAST, "x[i] = y[i] = 0.0f;")),
        "changes x",
    ),
}


@needs_emulator
@pytest.mark.parametrize("text, hint", WRONG.values(), ids=WRONG)
def test_wrong_kernels_are_rejected_with_a_hint(capsys, monkeypatch, text, hint):
    monkeypatch.setattr(cuda_gelu, "TIMEOUT_S", 1)
    said = verdict(capsys, "05.2", lambda: text)
    assert re.search(hint, said), said
    assert len(said) < 700 and "Traceback" not in said


@pytest.mark.parametrize("answer", [None, b"text", 3, ["text"], SOLUTION.encode()])
def test_what_is_no_text_is_rejected(capsys, answer):
    assert "return the kernel's text, not " in verdict(capsys, "05.2", lambda: answer)


@needs_emulator
def test_without_nvrtc_right_values_are_enough(capsys, monkeypatch):
    def missing(*_, **__):
        raise ptx.ToolMissing("NVRTC is missing")

    monkeypatch.setattr(ptx, "cuda_ptx", missing)
    assert verdict(capsys, "05.2", lambda: SOLUTION) == "correct."
    assert "not yet" in verdict(capsys, "05.2", lambda: BROKEN)
