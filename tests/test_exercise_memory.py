"""The checkers of exercises 06.1 and 06.2 take what is right, and say what is wrong."""

import re

import pytest
import torch
from emulation import needs_emulator
from verdicts import verdict

from helpers import cuda, emulator
from helpers.device import has_cuda
from helpers.exercises import memory, written_kernels

# 06.1: s, o, b: stride, offset, element_bytes


def by_set(stride, offset, element_bytes):
    return len({(stride * lane + offset) * element_bytes // 32 for lane in range(32)})


def by_formula(stride, offset, element_bytes):
    step, first = stride * element_bytes, offset * element_bytes
    if step >= 32:
        return 32
    return (first + 31 * step) // 32 - first // 32 + 1


def by_ends(stride, offset, element_bytes):
    first, last = (lane * stride + offset for lane in (0, 31))
    return min(32, last * element_bytes // 32 - first * element_bytes // 32 + 1)


@pytest.mark.parametrize("answer", [by_set, by_formula, by_ends])
def test_right_counts(capsys, answer):
    assert verdict(capsys, "06.1", answer) == "correct."


WRONG_COUNTS = {
    "lines": lambda s, o, b: len({(s * i + o) * b // 128 for i in range(32)}),
    "sectors of 64 bytes": lambda s, o, b: len({(s * i + o) * b // 64 for i in range(32)}),
    "bytes, rounded up": lambda s, o, b: -(-s * 32 * b // 32),
    "bytes, rounded up, at most 32": lambda s, o, b: min(32, max(1, -(-s * 32 * b // 32))),
    "no offset": lambda s, o, b: by_set(s, 0, b),
    "offset in bytes": lambda s, o, b: len({(s * i * b + o) // 32 for i in range(32)}),
    "always 32": lambda s, o, b: 32,
    "always 4": lambda s, o, b: 4,
    "stride 0 is none": lambda s, o, b: by_set(s, o, b) if s else 0,
    "stride 0 is 32": lambda s, o, b: by_set(s, o, b) if s else 32,
    "4 a stride": lambda s, o, b: min(32, s * 4),
    "4 a stride and one more": lambda s, o, b: min(32, s * 4 + (o % 8 > 0)),
    "elements of 4 bytes": lambda s, o, b: by_set(s, o, 4),
    "from the first to the last": lambda s, o, b: (31 * s + o) * b // 32 - o * b // 32 + 1,
    "without the last element": lambda s, o, b: min(32, -(-(31 * s * b) // 32) or 1),
    "33 for misaligned": lambda s, o, b: by_set(s, o, b) + (s >= 8 and o % 8 > 0),
    "misaligned is always one more": lambda s, o, b: by_set(s, 0, b) + (o * b % 32 > 0),
    "lanes from 1": lambda s, o, b: len({(s * i + o) * b // 32 for i in range(1, 33)}),
    "31 lanes": lambda s, o, b: len({(s * i + o) * b // 32 for i in range(31)}),
    "a fraction": lambda s, o, b: by_set(s, o, b) / 1,
    "nothing": lambda s, o, b: None,
    "a set": lambda s, o, b: {0},
}


@pytest.mark.parametrize("answer", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_wrong_counts_are_rejected_with_the_case(capsys, answer):
    said = verdict(capsys, "06.1", answer)
    assert re.search(r"for stride \d+, offset \d+ and elements of \d+ bytes it ", said), said
    assert re.search(
        r"needs a whole number|is \d+, not -?\d+: (all lanes want|lane 0 begins)", said
    )


def test_an_answer_that_raises_is_named(capsys):
    assert "ZeroDivisionError" in verdict(capsys, "06.1", lambda s, o, b: o // (s - s))


@pytest.mark.parametrize(
    "answer, hint",
    [
        (lambda s, o, b: by_set(s, o, b) if s else 0, "all lanes want address 0, in sector 0"),
        (lambda s, o, b: 32, r"is 4, not 32: lane 0 begins at byte 0, in sector 0, and lane 31"),
        (lambda s, o, b: (31 * s + o) * b // 32 - o * b // 32 + 1, "a step of 128 bytes leaves"),
    ],
)
def test_hints_say_why(capsys, answer, hint):
    assert re.search(hint, verdict(capsys, "06.1", answer))


# 06.2

PADDED = """
constexpr int TILE = 32;
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[TILE][TILE + 1];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    for (int k = threadIdx.y; k < TILE; k += blockDim.y) {
        if (row + k < rows && column + threadIdx.x < columns)
            tile[k][threadIdx.x] = x[(row + k) * columns + column + threadIdx.x];
    }
    __syncthreads();
    for (int k = threadIdx.y; k < TILE; k += blockDim.y) {
        if (column + k < columns && row + threadIdx.x < rows)
            y[(column + k) * rows + row + threadIdx.x] = tile[threadIdx.x][k];
    }
}
"""
NAIVE = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    int column = blockIdx.x * 32 + threadIdx.x;
    for (int row = blockIdx.y * 32 + threadIdx.y; row < min(rows, blockIdx.y * 32 + 32); row += 8)
        if (column < columns) y[column * rows + row] = x[row * columns + column];
}
"""
# Four elements a thread, loaded before the first is stored; the tile is one-dimensional, and it is
# turned on the way in.
OTHER = """
extern "C" __global__ void transpose(const float* __restrict__ x, float* __restrict__ y,
                                     int rows, int columns) {
    __shared__ float tile[33 * 32];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int i = blockIdx.x * 32 + tx, j = blockIdx.y * 32 + ty;
    float mine[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k)
        mine[k] = i < columns && j + 8 * k < rows ? x[(j + 8 * k) * columns + i] : 0.0f;
    #pragma unroll
    for (int k = 0; k < 4; ++k) tile[33 * tx + ty + 8 * k] = mine[k];
    __syncthreads();
    const int to = blockIdx.y * 32 + tx;
    for (int k = 3; k >= 0; --k) {
        int from = blockIdx.x * 32 + ty + 8 * k;
        if (from >= columns || to >= rows) continue;
        y[from * rows + to] = tile[33 * (ty + 8 * k) + tx];
    }
}
"""
# A tile of 8 rows at a time, so two barriers a step.
NARROW = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[32][33];
    int place = threadIdx.y * 32 + threadIdx.x;
    for (int half = 0; half < 2; ++half) {
        for (int e = place; e < 16 * 32; e += 256) {
            int r = blockIdx.y * 32 + half * 16 + e / 32, c = blockIdx.x * 32 + e % 32;
            if (r < rows && c < columns) tile[half * 16 + e / 32][e % 32] = x[r * columns + c];
        }
        __syncthreads();
    }
    for (int e = place; e < 32 * 32; e += 256) {
        int r = blockIdx.y * 32 + e % 32, c = blockIdx.x * 32 + e / 32;
        if (r < rows && c < columns) y[c * rows + r] = tile[e % 32][e / 32];
    }
}
"""


def edited(*edits: tuple[str, str], text: str = PADDED) -> str:
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return text


SWIZZLED = edited(
    ("TILE + 1", "TILE"),
    ("tile[k][threadIdx.x]", "tile[k][threadIdx.x ^ k]"),
    ("tile[threadIdx.x][k]", "tile[threadIdx.x][k ^ threadIdx.x]"),
)
RIGHT = {
    "padded": PADDED,
    "swizzled": SWIZZLED,
    "rotated": edited(
        ("TILE + 1", "TILE"),
        ("tile[k][threadIdx.x]", "tile[k][(threadIdx.x + k) % 32]"),
        ("tile[threadIdx.x][k]", "tile[threadIdx.x][(k + threadIdx.x) % 32]"),
    ),
    "padded by 3": edited(("TILE + 1", "TILE + 3")),
    "other loops": OTHER,
    "narrow": NARROW,
    "the repository's": cuda.load("transpose.cu", "transpose_tiled").text.replace(
        "transpose_tiled(const", "transpose(const"
    ),
}


@needs_emulator
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_good_transposes_are_right(capsys, text):
    assert verdict(capsys, "06.2", lambda: text) == "correct."


WITH_SHUFFLES = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    int lane = threadIdx.x, row = blockIdx.y * 32, column = blockIdx.x * 32;
    if (threadIdx.y) return;
    float v[32];
    for (int k = 0; k < 32; ++k)
        v[k] = row + k < rows && column + lane < columns ? x[(row + k) * columns + column + lane]
                                                         : 0;
    for (int c = 0; c < 32; ++c) {
        float mine = 0;
        for (int k = 0; k < 32; ++k) {
            float other = __shfl_sync(0xffffffff, v[k], c);
            if (lane == k) mine = other;
        }
        if (column + c < columns && row + lane < rows) y[(column + c) * rows + row + lane] = mine;
    }
}
"""
# Warps read patches of 4 x 8: four sectors where rows begin at one, and else up to eight. The tile
# has no bank conflicts.
PATCHES = """
__device__ int place(int row, int column) { return 32 * row + (column ^ (row % 4 * 8 + row / 4)); }
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[32 * 32];
    int row = blockIdx.y * 32, column = blockIdx.x * 32, lane = threadIdx.x;
    for (int patch = threadIdx.y; patch < 32; patch += 8) {
        int i = patch / 4 * 4 + lane / 8, j = patch % 4 * 8 + lane % 8;
        if (row + i < rows && column + j < columns)
            tile[place(i, j)] = x[(row + i) * columns + column + j];
    }
    __syncthreads();
    for (int k = threadIdx.y; k < 32; k += 8) {
        if (column + k < columns && row + lane < rows)
            y[(column + k) * rows + row + lane] = tile[place(lane, k)];
    }
}
"""
ONE_THREAD = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    __shared__ float t[1];
    if (threadIdx.x || threadIdx.y) return;
    t[0] = 0;
    for (int r = blockIdx.y * 32; r < min(rows, blockIdx.y * 32 + 32); ++r)
        for (int c = blockIdx.x * 32; c < min(columns, blockIdx.x * 32 + 32); ++c)
            y[c * rows + r] = x[r * columns + c];
}
"""
BARRIER = "    __syncthreads();\n"
LOAD = "tile[k][threadIdx.x] = x[(row + k) * columns + column + threadIdx.x];"
STORE = "y[(column + k) * rows + row + threadIdx.x] = tile[threadIdx.x][k];"

# Name -> text, and what the hint must say.
WRONG = {
    "naive": (NAIVE, r"for 64 x 64 the values are right, but a warp that writes y touches 32 sec"),
    "naive, the other way": (
        edited(
            (
                "column = blockIdx.x * 32 + threadIdx.x",
                "column = blockIdx.x * 32 + threadIdx.y, i = threadIdx.x",
            ),
            (
                "for (int row = blockIdx.y * 32 + threadIdx.y; row < min(rows, blockIdx.y * 32 "
                "+ 32); row += 8)",
                "for (int row = blockIdx.y * 32 + i, k = 0; row < rows && k < 32; column += 8, "
                "k += 8)",
            ),
            text=NAIVE,
        ),
        "a warp that reads x touches 32 sectors",
    ),
    "in patches": (PATCHES, r"for 33 x 65 .* a warp that reads x touches [67]\S* sectors"),
    "one thread": (ONE_THREAD, "32 lanes"),
    "no barrier": (edited((BARRIER, "")), "without a barrier between"),
    "a barrier of the warp": (edited(("__syncthreads", "__syncwarp")), "without a barrier"),
    "the barrier too late": (
        edited((BARRIER, "")).rstrip()[:-1] + BARRIER + "}",
        "without a barrier",
    ),
    "a barrier before only": (
        edited(
            (BARRIER, ""),
            (
                "    for (int k = threadIdx.y; k < TILE; k += blockDim.y) {\n        if (row",
                BARRIER + "    for (int k = threadIdx.y; k < TILE; k += blockDim.y) {\n"
                "        if (row",
            ),
        ),
        "without a barrier between",
    ),
    "32 wide": (edited(("TILE + 1", "TILE")), "256 requests .* need 3968 passes more"),
    "34 wide": (edited(("TILE + 1", "TILE + 2")), "256 requests .* need 128 passes more"),
    "one element out of place": (
        edited(
            (
                "tile[k][threadIdx.x]",
                "tile[k + (k + threadIdx.x == 0)][k + threadIdx.x ? threadIdx.x : TILE]",
            ),
            (
                "tile[threadIdx.x][k]",
                "tile[threadIdx.x + (k + threadIdx.x == 0)][k + threadIdx.x ? k : TILE]",
            ),
        ),
        "256 requests .* need 8 passes more",
    ),
    "half swizzled": (
        edited(
            ("TILE + 1", "TILE"),
            ("tile[k][threadIdx.x]", "tile[k][threadIdx.x ^ (k & 15)]"),
            ("tile[threadIdx.x][k]", "tile[threadIdx.x][k ^ (threadIdx.x & 15)]"),
        ),
        "passes more",
    ),
    "reads twice": (
        edited(
            (
                LOAD,
                "{ " + LOAD + " if (tile[k][threadIdx.x] != x[(row + k) * columns + column + "
                "threadIdx.x]) tile[k][threadIdx.x] = 0; }",
            )
        ),
        r"it reads 32,768 bytes of global memory: 16,384",
    ),
    "writes twice": (
        edited((STORE, "{ y[(column + k) * rows + row + threadIdx.x] = 0; " + STORE + " }")),
        "it writes 32,768 bytes",
    ),
    "shuffles": (WITH_SHUFFLES, "no tile in shared memory"),
    "atomics": (
        edited(
            (
                "y[column * rows + row] = x[row * columns + column];",
                "atomicExch(y + column * rows + row, x[row * columns + column]);",
            ),
            text=NAIVE,
        ),
        "atomics",
    ),
    "a tile that is only read": (
        edited(
            (
                STORE,
                "y[(column + k) * rows + row + threadIdx.x] = x[(row + threadIdx.x) * "
                "columns + column + k];",
            )
        ),
        "it reads 32,768 bytes",
    ),
    "copied": (
        edited((STORE, "y[(column + k) * rows + row + threadIdx.x] = tile[k][threadIdx.x];")),
        r"y\[0, 1\] is x\[0, 1\]; it should be x\[1, 0\]",
    ),
    "blocks not exchanged": (
        edited(("y[(column + k) * rows + row", "y[(row + k) * rows + column")),
        r"for 64 x 64 y\[0, 32\] is x\[0, 32\]|which has|it should be",
    ),
    "row length not exchanged": (
        edited(("(column + k) * rows", "(column + k) * columns")),
        r"for 33 x 65|of y, which has",
    ),
    "no mask on loads": (
        edited(("if (row + k < rows && column + threadIdx.x < columns)", "")),
        "of x, which has",
    ),
    "no mask on stores": (
        edited(("if (column + k < columns && row + threadIdx.x < rows)", "")),
        "of y, which has|should be",
    ),
    "one mask for both": (
        edited(
            (
                "column + k < columns && row + threadIdx.x < rows",
                "row + k < rows && column + threadIdx.x < columns",
            )
        ),
        "nothing was written to y|of y, which has",
    ),
    "one step only": (
        edited(("k < TILE; k += blockDim.y", "k < blockDim.y; k += blockDim.y")),
        r"nothing was written to y\[8, 0\]|nothing was written to y\[0, 8\]|does not hold",
    ),
    "changes x": (edited((LOAD, LOAD + " const_cast<float*>(x)[0] = 0;")), "changes x|should be"),
    "another name": (edited((" transpose(", " mine(")), "no __global__ function 'transpose'.*mine"),
    "other parameters": (
        edited(("int rows, int columns", "int columns, int rows")),
        "keep the par",
    ),
    "does not compile": (edited(("int row =", "int line =")), "yours.cu:"),
    "endless": (edited((BARRIER, BARRIER + "while (rows) {}\n")), "still runs"),
}


@needs_emulator
@pytest.mark.parametrize("text, hint", WRONG.values(), ids=WRONG)
def test_wrong_transposes_are_rejected_with_a_hint(capsys, monkeypatch, text, hint):
    monkeypatch.setattr(memory, "TIMEOUT_S", 1)
    said = verdict(capsys, "06.2", lambda: text)
    assert re.search(hint, said), said
    assert len(said) < 700 and "Traceback" not in said


def test_what_is_no_text_is_rejected(capsys):
    assert "return the kernel's text, not NoneType" in verdict(capsys, "06.2", lambda: None)


def without_emulator(monkeypatch):
    def missing(*_, **__):
        raise emulator.Unsupported("the emulator needs g++, which is not here")

    monkeypatch.setattr(cuda.Kernel, "emulate", missing)


def test_without_emulator_and_gpu_it_says_so(capsys, monkeypatch):
    without_emulator(monkeypatch)
    monkeypatch.setattr(written_kernels, "has_cuda", lambda: False)
    said = verdict(capsys, "06.2", lambda: PADDED)
    assert "it cannot be checked on this machine: the emulator needs g++" in said


def on_a_stand_in(monkeypatch, kernel):
    """The GPU is a CPU, and a kernel a Python function of (x, y, rows, columns)."""
    without_emulator(monkeypatch)
    monkeypatch.setattr(written_kernels, "has_cuda", lambda: True)
    monkeypatch.setattr(written_kernels, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuda.Kernel, "__call__", lambda self, grid, block, *args: kernel(*args))


def test_on_a_gpu_without_emulator_values_are_enough(capsys, monkeypatch):
    def transposed(x, y, rows, columns):
        y.copy_(x.T.flatten())

    def copied(x, y, rows, columns):
        y.copy_(x.flatten())

    def too_far(x, y, rows, columns):
        transposed(x, y, rows, columns)
        y.as_strided((1,), (1,), y.numel()).zero_()

    def changing(x, y, rows, columns):
        transposed(x, y, rows, columns)
        x.zero_()

    for kernel, expected in (
        (transposed, "correct."),
        (copied, "y[0, 1] is x[0, 1]; it should be x[1, 0]"),
        (too_far, "writes past the end of y"),
        (changing, "changes x"),
    ):
        with monkeypatch.context() as patch:
            on_a_stand_in(patch, kernel)
            assert expected in verdict(capsys, "06.2", lambda: PADDED)


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_good_transposes_on_a_gpu(capsys, monkeypatch, text):
    without_emulator(monkeypatch)
    assert verdict(capsys, "06.2", lambda: text) == "correct."
