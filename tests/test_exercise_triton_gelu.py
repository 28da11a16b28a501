"""The checkers of exercises 07.1 to 07.3 take what is right, and say what is wrong."""

import re
from types import SimpleNamespace

from helpers.device import device, has_cuda, interpreting, synchronize, triton_version

# isort: split
import pytest
import torch
from torch import profiler
from verdicts import verdict

from helpers import ptx
from helpers.exercises import triton_watch
from helpers.triton_mode import tl, triton

needs_triton = pytest.mark.skipif(not triton_version(), reason="Triton is not installed")
interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


REQUESTS = []  # what the tests have not compiled yet: one child process is enough for all


@pytest.fixture
def compile_later(monkeypatch):
    def later(requests):
        REQUESTS.extend(requests)
        return [SimpleNamespace(ptx="") for _ in requests]

    monkeypatch.setattr(ptx, "triton_compile_many", later)


def stub(*_):
    raise NotImplementedError


# 07.1: which kernels one call launches


def launched(run):
    run()
    synchronize()
    with profiler.profile() as profile:
        run()
        synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    if has_cuda():
        return [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in events if e.name.startswith("aten::") and e.cpu_parent is None]


def test_the_names_as_the_notebook_finds_them(capsys):
    assert verdict(capsys, "07.1", launched) == "correct."


def twice(run):
    return launched(lambda: (run(), run()))


def without_a_warm_up(run):
    with profiler.profile() as profile:
        run()
        synchronize()
    return [e.name for e in profile.events() if _wanted(e)]


def _wanted(event) -> bool:
    if has_cuda():
        return event.device_type == torch.autograd.DeviceType.CUDA
    return event.cpu_parent is None


def everything(run):
    run()
    with profiler.profile() as profile:
        run()
        synchronize()
    return [e.name for e in profile.events()]


def by_time(run):
    run()
    with profiler.profile() as profile:
        run()
        synchronize()
    events = [e for e in profile.events() if _wanted(e)]
    return [e.name for e in sorted(events, key=lambda e: -e.time_range.elapsed_us())]


def averages(run):
    run()
    with profiler.profile() as profile:
        run()
        synchronize()
    return [average.key for average in profile.key_averages()]


WRONG_NAMES = {
    "one distinct name each": (
        lambda run: list(dict.fromkeys(launched(run))),
        r"for x.sin\(\).cos\(\).sin\(\).*each time it is launched",
    ),
    "two calls": (twice, "more than one call"),
    "the warm-up counted": (without_a_warm_up, "something else at its first call"),
    "by time": (by_time, "in the order in which they began"),
    "by name": (lambda run: sorted(launched(run)), "in the order in which they began"),
    "host and all": (everything, "which events are the GPU's|was called by another"),
    "averages": (averages, "launches"),
    "by heart": (lambda run: ["aten::sin", "aten::cos", "aten::sin"], "launches"),
    "nothing": (lambda run: [], "it gives nothing"),
    "one name": (lambda run: launched(run)[0], "needs a list of names"),
    "a count": (lambda run: len(launched(run)), "needs a list of names"),
    "events": (lambda run: [object()], "needs a list of names"),
    "None": (lambda run: None, "needs a list of names"),
}


@pytest.mark.parametrize("answer, hint", WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_wrong_names_are_rejected(capsys, answer, hint):
    said = verdict(capsys, "07.1", answer)
    assert re.search(hint, said), said
    assert len(said) < 500


# 07.2: GeLU. A kernel's source must be in a file, so that every kernel stands here.


def launching(kernel, block: int = 1024, blocks=lambda n, block: triton.cdiv(n, block), **more):
    """A wrapper as the notebook has it, around a kernel of the same parameters."""

    def my_gelu(x, y):
        n = x.numel()
        if n:
            kernel[(blocks(n, block),)](x, y, n, BLOCK=block, **more)

    return my_gelu


@triton.jit
def gelu_of(x):
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2 * a)


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    y = 0.5 * x * (1 + (2 * tl.sigmoid(2 * a) - 1))
    tl.store(y_ptr + i, y, mask=i < n)


@triton.jit
def helped(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def two_parts(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for part in tl.static_range(2):
        i = (2 * tl.program_id(0) + part) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
        tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def from_exp_of_minus(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    a = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    e = tl.exp(-2 * tl.abs(a))
    tanh = tl.where(a < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    tl.store(y_ptr + i, 0.5 * x * (1 + tanh), mask=i < n)


def by_meta(x, y):
    if x.numel():
        gelu_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), 512)


def views(x, y):
    assert x.is_contiguous() and x.shape == y.shape
    launching(gelu_kernel)(x.view(-1), y.reshape(-1))


RIGHT = {
    "the notebook's": launching(gelu_kernel),
    "another block": launching(gelu_kernel, 256),
    "a large block, more warps": launching(gelu_kernel, 4096, num_warps=8),
    "a block too many": launching(gelu_kernel, blocks=lambda n, block: n // block + 1),
    "a helper": launching(helped),
    "a block in two parts": launching(two_parts),
    "exp of what is negative": launching(from_exp_of_minus),
    "a grid from the meta-parameters": by_meta,
    "views": views,
}


@needs_triton
@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_written_kernels_are_right(capsys, compile_later, answer):
    assert verdict(capsys, "07.2", answer) == "correct."


@triton.jit
def store_not_masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x))


@triton.jit
def load_not_masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def mask_one_too_far(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i <= n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i <= n)


@triton.jit
def mask_one_too_short(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n - 1)


@triton.jit
def mask_of_the_block(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    i = tl.program_id(0) * BLOCK + k
    x = tl.load(x_ptr + i, mask=k < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=k < n)


@triton.jit
def from_block_1(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = (tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def blocks_overlap(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def no_block_offset(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def shifted_load(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i - 1, mask=(i > 0) & (i < n), other=0.0).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def lectures_tanh(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    e = tl.exp(2 * 0.79788456 * (x + 0.044715 * x * x * x))
    tl.store(y_ptr + i, 0.5 * x * (1 + (e - 1) / (e + 1)), mask=i < n)


@triton.jit
def erf_form(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, 0.5 * x * (1 + tl.erf(x * 0.70710678)), mask=i < n)


@triton.jit
def cubic_0_04715(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoid(2 * 0.79788456 * (x + 0.04715 * x * x * x)), mask=i < n)


@triton.jit
def linear_0_79(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoid(2 * 0.797 * (x + 0.044715 * x * x * x)), mask=i < n)


@triton.jit
def square_for_cube(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoid(2 * 0.79788456 * (x + 0.044715 * x * x)), mask=i < n)


@triton.jit
def logistic_1_702(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoid(1.702 * x), mask=i < n)


@triton.jit
def half_arithmetic(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + i, x * tl.sigmoid((2 * a).to(tl.float32)).to(x.dtype), mask=i < n)


@triton.jit
def exp_of_half(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + i, x / (1 + tl.exp(-2 * a)), mask=i < n)


@triton.jit
def writes_x_too(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(x_ptr + i, gelu_of(x), mask=i < n)
    tl.store(y_ptr + i, gelu_of(x), mask=i < n)


@triton.jit
def reads_twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    again = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, gelu_of(tl.minimum(x, again)), mask=i < n)


@triton.jit
def takes_atomics(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.atomic_xchg(y_ptr + i, x * tl.sigmoid(x), mask=i < n)


@triton.jit
def everything_in_fp64(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float64)
    a = 0.79788456 * (x + 0.044715 * x * x * x)
    tl.store(y_ptr + i, x / (1 + tl.exp(-2 * a)), mask=i < n)


CUBIC = 0.044715


@triton.jit
def plain_global(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoid(2 * 0.79788456 * (x + CUBIC * x * x * x)), mask=i < n)


@triton.jit
def misspelt(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x * tl.sigmoyd(x), mask=i < n)


@triton.jit
def copies(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def pytorch_alone(x, y):
    y.copy_(torch.nn.functional.gelu(x, approximate="tanh"))


def pytorch_beside(x, y):
    launching(copies)(torch.nn.functional.gelu(x, approximate="tanh"), y)


def pytorch_afterwards(x, y):
    launching(gelu_kernel)(x, y)
    y.mul_(1)


def numpy_alone(x, y):
    y.numpy()[:] = torch.nn.functional.gelu(x, approximate="tanh").numpy()


def through_a_temporary(x, y):
    temporary = torch.empty_like(y)
    launching(gelu_kernel)(x, temporary)
    launching(copies)(temporary, y)


def two_launches(x, y):
    launching(gelu_kernel)(x, y)
    launching(gelu_kernel)(x, y)


def empty_grid(x, y):
    gelu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024)


def exchanged(x, y):
    launching(gelu_kernel)(y, x)


def returned(x, y):
    return x


def asserts(x, y):
    if x.dtype != torch.int32:
        raise AssertionError  # pytest gives the others a text


HERE = r"^not yet\. for n = "
FIRST = HERE + "1024, "
# Name -> answer, and what the hint must say; on a GPU too unless it stands in SEEN_IN_INTERPRETER.
WRONG = {
    "unmasked store": (launching(store_not_masked), HERE + r"1, .*writes y\[1\].*store masked"),
    "unmasked load": (launching(load_not_masked), HERE + r"1, block 0 reads x\[1\].*load masked"),
    "i <= n": (
        launching(mask_one_too_far),
        HERE + r"1, .*(reads x|writes y)\[1\], and it has 1 el",
    ),
    "i < n - 1": (launching(mask_one_too_short), FIRST + r"nothing is written to y\[1023\]"),
    "mask within the block": (
        launching(mask_of_the_block),
        HERE + r"1025, .*(reads x|writes y)\[1025\]",
    ),
    "floor": (
        launching(gelu_kernel, blocks=lambda n, block: max(n // block, 1)),
        HERE + r"1025, nothing is written to y\[1024\]",
    ),
    "floor, to no block": (
        launching(gelu_kernel, blocks=lambda n, block: n // block),
        HERE + r"1, nothing is written to y\[0\]",
    ),
    "a block too few": (
        launching(gelu_kernel, blocks=lambda n, block: max(triton.cdiv(n, block) - 1, 1)),
        HERE + r"1025, nothing is written to y\[1024\]",
    ),
    "from block 1 on": (launching(from_block_1), FIRST + r"nothing is written to y\[0\]"),
    "no offset": (launching(no_block_offset), HERE + r"1025, nothing is written to y\[1024\]"),
    "grid for another block": (
        launching(gelu_kernel, 512, blocks=lambda n, block: triton.cdiv(n, 1024)),
        FIRST + r"nothing is written to y\[512\]",
    ),
    "overlapping blocks": (
        launching(blocks_overlap, blocks=lambda n, block: triton.cdiv(2 * n, block)),
        FIRST + r"the values are right, but it reads x\[512\] 2 times",
    ),
    "shifted": (launching(shifted_load), FIRST + r"y\[1\] is -?0 for x = 100"),
    "the lecture's tanh": (launching(lectures_tanh), FIRST + r"y\[3\] is nan for x = 10.2.*overfl"),
    "erf": (launching(erf_form), FIRST + r"y\[\d+\] is .*should be"),
    "0.04715": (launching(cubic_0_04715), FIRST + r"y\[\d+\] is .*should be"),
    "0.797": (launching(linear_0_79), FIRST + r"y\[\d+\] is .*should be"),
    "x squared": (launching(square_for_cube), FIRST + r"y\[\d+\] is .*should be"),
    "1.702": (launching(logistic_1_702), FIRST + r"y\[\d+\] is .*should be"),
    "copied": (launching(copies), FIRST + r"y\[0\] is -100 for x = -100"),
    "half arithmetic": (launching(half_arithmetic), HERE + r"1025 in fp16, y\[\d+\] is"),
    "exp of half": (
        launching(exp_of_half),
        HERE + r"1025 in fp16, (y\[\d+\] is|Triton's exp and sigmoid take fp32: convert)",
    ),
    "x changed": (launching(writes_x_too), r"writes to x, which is an input|changes x"),
    "y and x exchanged": (exchanged, "writes to x|changes x"),
    "reads twice": (launching(reads_twice), r"the values are right, but it reads x\[0\] 2 times"),
    "atomics": (launching(takes_atomics), "atomics"),
    "fp64": (launching(everything_in_fp64), "its PTX has .* fp64 instructions"),
    "a plain global": (
        launching(plain_global),
        "(Triton's compiler says|CompilationError).*global",
    ),
    "a block of 1000": (
        launching(gelu_kernel, 1000),
        "the size of a block must be a power of two",
    ),
    "misspelt": (launching(misspelt), "It raises .*sigmoyd"),
    "PyTorch": (pytorch_alone, FIRST + "it calls PyTorch's gelu"),
    "PyTorch beside": (pytorch_beside, FIRST + "it calls PyTorch's gelu"),
    "PyTorch afterwards": (pytorch_afterwards, FIRST + "it calls PyTorch's mul_"),
    "NumPy": (numpy_alone, "calls PyTorch's gelu"),
    "a temporary": (through_a_temporary, "neither|launches 2 kernels"),
    "two launches": (two_launches, "launches 2 kernels"),
    "an empty grid": (empty_grid, HERE + r"0, a grid of \(0,\) is launched"),
    "one block": (
        lambda x, y: launching(gelu_kernel, triton.next_power_of_2(x.numel() or 1))(x, y),
        "one block does it all",
    ),
    "nothing": (returned, FIRST + "no Triton kernel is launched"),
    "its own assert": (asserts, FIRST + "an assert of its own fails"),
    "one parameter": (lambda x: x, "It raises TypeError"),
}
SEEN_IN_INTERPRETER = {"unmasked load", "overlapping blocks", "reads twice", "atomics", "fp64"}


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected_with_a_hint(capsys, name):
    if name in SEEN_IN_INTERPRETER and not interpreting():
        pytest.skip("only the interpreter shows what a kernel reads")
    answer, hint = WRONG[name]
    said = verdict(capsys, "07.2", answer)
    assert re.search(hint, said, re.DOTALL), said
    assert len(said) < 900 and "Traceback" not in said


# 07.3: three sigmoids, one kernel each way


@triton.jit
def three_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, tl.sigmoid(tl.sigmoid(tl.sigmoid(x))), mask=i < n)


@triton.jit
def three_backward(x_ptr, grad_ptr, dx_ptr, n, BLOCK: tl.constexpr, WRONG: tl.constexpr = ""):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    grad = tl.load(grad_ptr + i, mask=i < n)
    s1 = tl.sigmoid(x)
    s2 = tl.sigmoid(s1)
    s3 = tl.sigmoid(s2)
    dx = grad * s1 * (1 - s1) * s2 * (1 - s2) * s3 * (1 - s3)
    if WRONG == "no grad":
        dx = s1 * (1 - s1) * s2 * (1 - s2) * s3 * (1 - s3)
    if WRONG == "grad added":
        dx = grad + s1 * (1 - s1) * s2 * (1 - s2) * s3 * (1 - s3)
    if WRONG == "two factors":
        dx = grad * s2 * (1 - s2) * s3 * (1 - s3)
    if WRONG == "the last factor three times":
        dx = grad * s3 * (1 - s3) * s3 * (1 - s3) * s3 * (1 - s3)
    if WRONG == "1 + s":
        dx = grad * s1 * (1 - s1) * s2 * (1 - s2) * s3 * (1 + s3)
    if WRONG == "no 1 - s":
        dx = grad * s1 * s2 * s3
    if WRONG == "x is s1":
        dx = grad * x * (1 - x) * s1 * (1 - s1) * s2 * (1 - s2)
    if WRONG == "slopes added":
        dx = grad * (s1 * (1 - s1) + s2 * (1 - s2) + s3 * (1 - s3))
    if WRONG == "grad changed":
        tl.store(grad_ptr + i, dx, mask=i < n)
    if WRONG == "fp64":
        dx = (dx.to(tl.float64) * 1.5 / 1.5).to(tl.float32)
    if WRONG == "stored without a mask":
        tl.store(dx_ptr + i, dx)
    else:
        tl.store(dx_ptr + i, dx, mask=i < n)


@triton.jit
def one_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.sigmoid(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


@triton.jit
def two_forward(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, tl.sigmoid(tl.sigmoid(x)), mask=i < n)


@triton.jit
def forward_with_saved(x_ptr, y_ptr, saved_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s1 = tl.sigmoid(tl.load(x_ptr + i, mask=i < n))
    tl.store(saved_ptr + i, s1, mask=i < n)
    tl.store(y_ptr + i, tl.sigmoid(tl.sigmoid(s1)), mask=i < n)


@triton.jit
def backward_from_saved(saved_ptr, grad_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s1 = tl.load(saved_ptr + i, mask=i < n)
    s2 = tl.sigmoid(s1)
    s3 = tl.sigmoid(s2)
    dx = tl.load(grad_ptr + i, mask=i < n) * s1 * (1 - s1) * s2 * (1 - s2) * s3 * (1 - s3)
    tl.store(dx_ptr + i, dx, mask=i < n)


def forward(x, y):
    if n := x.numel():
        three_forward[(triton.cdiv(n, 1024),)](x, y, n, 1024)


def backward(x, grad, dx, block=1024, **choice):
    if n := x.numel():
        three_backward[(triton.cdiv(n, block),)](x, grad, dx, n, block, **choice)


def in_three_steps(x, y):
    for source in (x, y, y):
        one_forward[(triton.cdiv(x.numel(), 1024),)](source, y, x.numel(), 1024)


SAVED = {}


def saves(x, y):
    if n := x.numel():
        SAVED[n] = torch.empty_like(x)
        forward_with_saved[(triton.cdiv(n, 1024),)](x, y, SAVED[n], n, 1024)


def keeps_x(x, y):
    SAVED[x.numel()] = x
    forward(x, y)


def uses_the_kept(x, grad, dx):
    backward(SAVED[x.numel()], grad, dx)


def uses_the_saved(x, grad, dx):
    if n := x.numel():
        backward_from_saved[(triton.cdiv(n, 1024),)](SAVED[n], grad, dx, n, 1024)


def by_autograd(x, grad, dx):
    with torch.enable_grad():
        there = x.clone().requires_grad_()
        dx.copy_(torch.autograd.grad(there.sigmoid().sigmoid().sigmoid(), there, grad)[0])


def wrong_backward(wrong: str):
    return lambda x, grad, dx: backward(x, grad, dx, WRONG=wrong)


def test_three_sigmoids_as_the_notebook_solves_them(capsys):
    if not triton_version():
        pytest.skip("Triton is not installed")
    assert verdict(capsys, "07.3", forward, backward) == "correct."


@needs_triton
def test_blocks_of_another_size_are_right(capsys, compile_later):
    def in_blocks_of_512(x, grad, dx):
        backward(x, grad, dx, 512, num_warps=8)

    assert verdict(capsys, "07.3", forward, in_blocks_of_512) == "correct."


@needs_triton
def test_a_right_forward_alone_is_not_attempted(capsys):
    assert verdict(capsys, "07.3", forward, stub) == "not attempted yet."


DX = HERE + r"1024, backward: dx\[\d+\] is .* should be"
WRONG_SIGMOIDS = {
    "two sigmoids": (
        lambda x, y: two_forward[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024),
        backward,
        HERE + r"1024, forward: y\[0\] is",
    ),
    "one by one": (in_three_steps, backward, "forward: the values are right.*launches 3 kernels"),
    "PyTorch forward": (
        lambda x, y: torch.sigmoid(x, out=y),
        backward,
        "forward: it calls PyTorch's sigmoid",
    ),
    "autograd": (forward, by_autograd, "backward: it calls PyTorch's clone"),
    "saved activations": (saves, uses_the_saved, "is neither x's nor y's|backward: dx.*should be"),
    "x kept from forward": (keeps_x, uses_the_kept, "is neither x's nor|backward: dx.*should be"),
    "forward in place of backward": (
        forward,
        lambda x, grad, dx: forward(x, dx),
        DX,
    ),
    "x and grad exchanged": (forward, lambda x, grad, dx: backward(grad, x, dx), DX),
    "grad changed": (forward, wrong_backward("grad changed"), "writes to grad|changes grad"),
    "stored without a mask": (
        forward,
        wrong_backward("stored without a mask"),
        HERE + r"1, backward: .*writes dx\[1\], and it has 1 element: is the store masked",
    ),
    "a floor": (
        forward,
        lambda x, grad, dx: three_backward[(x.numel() // 1024 or 1,)](x, grad, dx, x.numel(), 1024),
        HERE + r"1025, backward: nothing is written to dx\[1024\]",
    ),
    "an empty grid": (
        forward,
        lambda x, grad, dx: three_backward[(triton.cdiv(x.numel(), 1024),)](
            x, grad, dx, x.numel(), 1024
        ),
        HERE + r"0, backward: a grid of \(0,\) is launched",
    ),
    "no grad": (forward, wrong_backward("no grad"), "backward: dx lacks grad as a factor"),
    "one block": (
        forward,
        lambda x, grad, dx: backward(x, grad, dx, 1 << 14),
        "backward: one block does it all",
    ),
    **{
        wrong: (forward, wrong_backward(wrong), DX)
        for wrong in (
            *("grad added", "two factors", "the last factor three times", "1 + s"),
            *("no 1 - s", "x is s1", "slopes added"),
        )
    },
}


@needs_triton
@pytest.mark.parametrize("name", WRONG_SIGMOIDS)
def test_wrong_sigmoids_are_rejected_with_a_hint(capsys, name):
    *answers, hint = WRONG_SIGMOIDS[name]
    said = verdict(capsys, "07.3", *answers)
    assert re.search(hint, said, re.DOTALL), said
    assert len(said) < 500


@needs_triton
@interpreted
def test_fp64_is_found_in_the_compiled_kernel(capsys):
    said = verdict(capsys, "07.3", forward, wrong_backward("fp64"))
    assert "fp64 instructions: compute in fp32" in said


# Both


@needs_triton
@interpreted
def test_what_was_right_compiles():
    ptx.triton_compile_many(REQUESTS)


@needs_triton
@interpreted
def test_without_the_compiler_right_values_are_enough(capsys, monkeypatch):
    def missing(*_):
        raise ptx.ToolMissing("Triton is missing")

    monkeypatch.setattr(ptx, "triton_compile_many", missing)
    assert verdict(capsys, "07.2", launching(plain_global)) == "correct."
    assert "not yet" in verdict(capsys, "07.2", launching(erf_form))


def test_without_triton_it_says_so_in_a_sentence(capsys, monkeypatch):
    def launches(*_):
        raise ptx.ToolMissing("Triton is not installed here")  # as the stand-in for Triton does

    monkeypatch.setattr(triton_watch, "triton_version", lambda: "")
    for answers in (("07.2", launches), ("07.3", launches, launches)):
        said = verdict(capsys, *answers)
        assert said == "it cannot be checked on this machine: Triton is not installed here"


@needs_triton
def test_nothing_stays_patched(capsys):
    verdict(capsys, "07.2", launching(store_not_masked))
    x = torch.ones(3, device=device())
    assert torch.equal(x + x, 2 * x)
    forward(x, torch.empty_like(x))
    assert not any("triton_watch" in f"{vars(owner)}" for owner in _patched())


def _patched():
    from triton.runtime import interpreter, jit

    return interpreter.InterpretedFunction, interpreter.InterpreterBuilder, jit.JITFunction
