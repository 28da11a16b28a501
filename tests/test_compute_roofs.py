"""The chain of multiply-adds, matmuls of every dtype, and the search for the best one."""

import functools
import inspect
import math
import shutil
import subprocess
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from helpers import compute_roofs
from helpers.check import assert_close, relative_error
from helpers.compute_roofs import multiply_adds, supports, tf32_allowed
from helpers.device import device, has_cuda
from helpers.traffic import Work

DTYPES = compute_roofs.TORCH_DTYPES


def closed_form(x, starts, depth):
    """The sum over starts s of s x^d + x + x^2 + … + x^d, in float64."""
    x, starts = x.double(), starts.double()
    power = x**depth
    series = torch.where(x == 1, depth, x * (1 - power) / (1 - x))
    return starts.sum() * power + len(starts) * series


def closure(run) -> dict:
    return inspect.getclosurevars(run).nonlocals


@pytest.mark.parametrize("n", [1, 7, 1001])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 8, 13])
def test_multiply_adds_in_closed_form(n, count, depth):
    x = torch.rand(n, device=device())  # positive: nothing cancels, so rounding stays small
    starts = torch.rand(count, device=device())
    ends = multiply_adds(x, starts, depth)
    assert ends.shape == (n,)
    assert_close(ends, closed_form(x, starts, depth), 1e-6)


def test_multiply_adds_of_special_numbers():
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5], device=device())
    starts = torch.tensor([3.0], device=device())
    # Three times y = y x + x.
    assert multiply_adds(x, starts, 3).tolist() == [0, 6, -4, 38, 1.25]
    two = torch.tensor([3.0, -1.0], device=device())
    assert multiply_adds(x, two, 3).tolist() == [0, 8, -4, 44, 2]


@pytest.mark.parametrize("length", [1, 16])
def test_a_runs_work_and_result(length):
    run, work = compute_roofs.multiply_add_run(length, eager=True)
    held = closure(run)
    x, starts, depth = held["x"], held["starts"], held["depth"]
    assert x.device.type == device().type
    assert depth * len(starts) == length  # all chains together
    assert work == Work(x.nbytes, x.nbytes, 2 * length * x.numel())
    assert_close(run()[::97], closed_form(x[::97], starts, depth), 1e-6)


@pytest.mark.parametrize("length", [0, -1, -4, 3, 12, 1023])
def test_only_powers_of_two(length):
    with pytest.raises(ValueError, match=f"power of two is asked for, not {length}"):
        compute_roofs.multiply_add_run(length)


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU: compiling takes long on a CPU")
def test_the_compiled_chain():
    if not compute_roofs.can_compile():
        pytest.skip("needs Triton")
    run, work = compute_roofs.multiply_add_run(32)
    held = closure(run)
    assert work.flops == 64 * held["x"].numel()
    assert_close(run(), closed_form(held["x"], held["starts"], held["depth"]), 1e-6)


def test_the_chains_roof_is_its_rate(monkeypatch):
    asked = []

    def run_of(length):
        asked.append(length)
        return None, Work(8, 8, 1e9)

    monkeypatch.setattr(compute_roofs, "multiply_add_run", run_of)
    monkeypatch.setattr(
        compute_roofs, "measure", lambda run, flops: SimpleNamespace(tflop_per_s=flops / 1e9)
    )
    roof = compute_roofs.multiply_add_roof()
    assert roof.value == 1 and f"{asked[0]} an element" in roof.how
    assert asked[0] >= 256  # beyond the ridge of any machine


@pytest.fixture
def toolchain(monkeypatch):
    """Pretend to have these programs, this Triton, a GPU or none, Python's headers or none."""

    def pretend(*programs, gpu=False, triton="3.6.0", system="Linux", include=None):
        monkeypatch.setattr(compute_roofs, "has_cuda", lambda: gpu)
        monkeypatch.setattr(compute_roofs, "triton_version", lambda: triton)
        monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
        monkeypatch.setattr(compute_roofs.platform, "system", lambda: system)
        if include:
            monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": include})
        compute_roofs.compiler_missing.cache_clear()
        return compute_roofs.compiler_missing()

    yield pretend
    monkeypatch.undo()
    compute_roofs.compiler_missing.cache_clear()


@pytest.mark.case("E21")
def test_what_torch_compile_lacks_is_named(toolchain, tmp_path):
    (tmp_path / "Python.h").touch()
    headers = {"include": str(tmp_path)}
    assert toolchain("g++", **headers) == "" and compute_roofs.can_compile()
    assert toolchain("g++", gpu=True, **headers) == ""
    assert toolchain("cl", system="Windows", **headers) == ""
    assert "g++" in toolchain(**headers) and not compute_roofs.can_compile()
    assert "g++" in toolchain("clang++", **headers)  # Inductor does not look for it on Linux
    assert "g++" in toolchain("cl", **headers)
    assert "Triton" in toolchain("g++", gpu=True, triton="", **headers)
    assert "headers" in toolchain("g++", include=str(tmp_path / "none"))


@pytest.mark.case("E21")
@pytest.mark.parametrize("name", ["OMP_PREFIX", "CONDA_PREFIX"])
def test_apples_compiler_lacks_openmp(toolchain, monkeypatch, tmp_path, name):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compute_roofs, "HOMEBREW_OPENMP", ())
    for other in ("CXX", "OMP_PREFIX", "CONDA_PREFIX"):
        monkeypatch.delenv(other, raising=False)
    mac = functools.partial(toolchain, "clang++", system="Darwin", include=str(tmp_path))
    assert "OpenMP" in mac()
    monkeypatch.setenv(name, str(tmp_path))
    assert "OpenMP" in mac()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "omp.h").touch()
    assert mac() == ""


def test_another_compiler_may_be_named(toolchain, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", "clang++")
    assert toolchain("clang++", include=str(tmp_path)) == ""


@pytest.mark.parametrize(
    "code, text, expected",
    [(0, "11", False), (0, "12", True), (0, "13.2.0", True), (0, "", False), (1, "12", False)],
)
def test_which_compilers_know_all_vectors(monkeypatch, code, text, expected):
    done = SimpleNamespace(returncode=code, stdout=f"{text}\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert compute_roofs._knows_all_vectors.__wrapped__() is expected
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compute_roofs._knows_all_vectors.__wrapped__() is False


SHAPES = [(1, 1, 1), (17, 5, 9), (3, 1, 33), (64, 48, 96)]
MULTIPLES_OF_16 = [(32, 48, 64), (64, 16, 128)]
TOLERANCE = {"float32": 2e-6, "tfloat32": 2e-3, "float8": 1.6e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmuls_of_every_dtype(dtype):
    if reason := supports(dtype):
        pytest.skip(reason)
    for m, n, k in MULTIPLES_OF_16 if dtype in ("int8", "float8") else SHAPES:
        run = compute_roofs.matmul_run(dtype, m, n, k)
        a, b = closure(run)["a"], closure(run)["b"]
        assert a.dtype == b.dtype == DTYPES[dtype] and a.device.type == device().type
        assert (a.shape, b.shape) == ((m, k), (k, n))
        if dtype in ("int8", "float8"):
            assert a.stride() == (k, 1) and b.stride() == (1, k)  # cuBLAS takes no other
        with tf32_allowed(dtype == "tfloat32"):
            result = run()
        if dtype == "int8":
            assert result.dtype == torch.int32
            assert torch.equal(result.cpu().long(), a.cpu().long() @ b.cpu().long())
            continue
        assert result.dtype == (torch.bfloat16 if dtype == "float8" else DTYPES[dtype])
        expected = a.float().double() if dtype == "float8" else a.double()
        expected = expected @ (b.float().double() if dtype == "float8" else b.double())
        assert_close(result, expected, TOLERANCE.get(dtype))


@pytest.mark.parametrize("dtype", set(DTYPES.values()))
def test_random_matrices_are_random(dtype):
    x = compute_roofs.random_matrix(100, 200, dtype)
    assert x.shape == (100, 200) and x.dtype == dtype
    x = x.float().double() / (74 if dtype == torch.int8 else 1)  # the deviation of -128 … 127
    assert abs(x.mean()) < 0.05 and x.std().item() == pytest.approx(1, abs=0.05)
    assert (x == 0).double().mean() < 0.05


@pytest.mark.skipif(bool(supports("tfloat32")), reason="needs TF32 tensor cores")
def test_tf32_rounds_and_fp32_does_not():
    a, b = (torch.randn(512, 512, device=device()) for _ in range(2))
    with tf32_allowed(False):
        exact = relative_error(a @ b, a.double() @ b.double())
    with tf32_allowed(True):
        rounded = relative_error(a @ b, a.double() @ b.double())
    assert exact < 2e-6 < 1e-5 < rounded < 2e-3


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("allowed, inside", [(True, "high"), (False, "highest")])
def test_tf32_allowed_puts_the_setting_back(precision, allowed, inside):
    with tf32_allowed(allowed):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == precision
    with pytest.raises(ZeroDivisionError):
        with tf32_allowed(allowed):
            raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_tfloat32_is_measured_with_tf32(dtype, precision, monkeypatch):
    def measure(run, flops, budget_ms):
        return run, torch.get_float32_matmul_precision(), flops, budget_ms

    monkeypatch.setattr(compute_roofs, "measure", measure)
    monkeypatch.setattr(compute_roofs, "matmul_run", lambda *made: made)
    run, seen, flops, budget_ms = compute_roofs.measure_matmul(dtype, 3, 5, 7, budget_ms=11)
    assert run == (dtype, 3, 5, 7) and (flops, budget_ms) == (2 * 3 * 5 * 7, 11)
    assert seen == ("high" if dtype == "tfloat32" else "highest")


@pytest.mark.parametrize("dtype", DTYPES)
def test_supports_answers_for_every_dtype(dtype):
    reason = supports(dtype)
    assert isinstance(reason, str) and "\n" not in reason
    if dtype in ("float64", "float32"):
        assert reason == ""
    if not has_cuda():
        assert (reason == "") <= (dtype != "tfloat32")


@pytest.mark.parametrize(
    "error, text",
    [
        (RuntimeError("\n  no such kernel\nC++ stack trace"), "no such kernel"),
        (NotImplementedError(), "NotImplementedError"),
        (RuntimeError(" \n "), "RuntimeError"),
        (ValueError("float8 needs compute capability 8.9"), "float8 needs compute capability 8.9"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
        (RuntimeError("x" * 1000), "x" * 120),
    ],
)
@pytest.mark.parametrize("when", ["made", "run"])
def test_supports_never_raises(monkeypatch, error, text, when):
    def fail():
        raise error

    monkeypatch.setattr(compute_roofs, "matmul_run", lambda *_: fail() if when == "made" else fail)
    assert supports("float8") == text


def test_tf32_needs_ampere(monkeypatch):
    monkeypatch.setattr(compute_roofs, "has_cuda", lambda: True)
    monkeypatch.setattr(compute_roofs, "matmul_run", lambda *_: lambda: None)
    for capability, supported in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert (supports("tfloat32") == "") is supported
        assert supports("float16") == ""


class Device:
    """Matmuls whose rates, in TFLOP/s, are known; what does not fit is out of memory.

    sustained: the median's share of the fast samples' rate.
    """

    def __init__(self, rate, fits=lambda m, n, k: True, sustained=1.0):
        self.rate, self.fits, self.sustained = rate, fits, sustained
        self.asked, self.budgets = [], []

    def measure_matmul(self, dtype, m, n, k, budget_ms):
        self.asked.append((m, n, k))
        self.budgets.append(budget_ms)
        assert len(self.asked) < 100, "the search does not end"
        if not self.fits(m, n, k):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return SimpleNamespace(
            flops=2 * m * n * k,
            p20_ms=self.ms((m, n, k)),
            tflop_per_s=self.sustained * self.rate(m, n, k),
        )

    def ms(self, shape) -> float:
        return 2 * math.prod(shape) / self.rate(*shape) / 1e9


@pytest.fixture
def search(monkeypatch):
    monkeypatch.setattr("helpers.memory.has_cuda", lambda: False)  # nothing is to be released

    def run(device, **limits):
        monkeypatch.setattr(compute_roofs, "measure_matmul", device.measure_matmul)
        return compute_roofs.matmul_roof("bfloat16", **limits)

    return run


def peak_at(*best, top=700):
    """A rate that falls with the distance from the best shape, in doublings."""
    return lambda *shape: (
        top / (1 + sum(abs(math.log2(side / b)) for side, b in zip(shape, best, strict=True)))
    )


@pytest.mark.parametrize(
    "best",
    [
        (4096, 4096, 4096),
        (6144, 4096, 4096),
        (4096, 8192, 4096),
        (4096, 4096, 2048),
        (3072, 4096, 4096),
        (4096, 2048, 8192),
        (512, 512, 512),
        (8192, 8192, 12288),
    ],
)
def test_the_search_finds_the_best_shape(best, search):
    device = Device(peak_at(*best))
    roof = search(device)
    assert device.asked[-1] == best
    assert roof.value == pytest.approx(700) and roof.name == "bfloat16"
    m, n, k = best
    assert roof.how.startswith(f"{m} x {k} @ {k} x {n}, of {len(set(device.asked))} shapes")
    assert len(device.asked) == len(set(device.asked)) + 1  # none twice, but the best
    assert device.budgets[-1] == 4 * device.budgets[0] == 120


@pytest.mark.parametrize("gpu, value", [(True, 630), (False, 700)])
def test_a_gpus_roof_is_what_it_sustains(gpu, value, search, monkeypatch):
    """A CPU's is its best moment: other programs slow it down."""
    monkeypatch.setattr(compute_roofs, "has_cuda", lambda: gpu)
    roof = search(Device(peak_at(4096, 4096, 4096), sustained=0.9))
    assert roof.value == pytest.approx(value)
    assert "best moment 700" in roof.how


def with_overhead(top, ms=0.005):
    """A launch before every matmul."""
    return lambda *shape: 1 / (1 / top + ms * 1e9 / (2 * math.prod(shape)))


@pytest.mark.parametrize("longest_ms", [1, 4, 25])
@pytest.mark.parametrize(
    "rate",
    [
        lambda *_: 1.0,
        lambda *_: 1e-3,  # emulated
        with_overhead(0.05),
        with_overhead(50),
        with_overhead(1000),
        with_overhead(50, ms=1),
        peak_at(2048, 4096, 1024, top=300),
    ],
)
def test_no_shape_takes_far_longer_than_asked(rate, longest_ms, search):
    device = Device(rate)
    search(device, longest_ms=longest_ms)
    for shape in device.asked:
        assert device.ms(shape) <= 1.1 * longest_ms or max(shape) <= compute_roofs.SMALLEST_SIDE
    # The budget is used, too: the next square would be too long.
    squares = [shape for shape in device.asked if len(set(shape)) == 1]
    assert max(squares)[0] >= compute_roofs.SMALLEST_SIDE  # smaller ones do not tell
    best = max(rate(*shape) for shape in squares)
    assert 2 * (2 * max(squares)[0]) ** 3 / best / 1e9 > longest_ms


def test_a_dtype_that_is_emulated_is_not_stretched(search):
    """The larger the slower: the best is a small square, and its sides tell nothing."""
    device = Device(lambda m, n, k: 1 / m)
    roof = search(device)
    assert device.asked[-1] == (64, 64, 64) and roof.value == pytest.approx(1 / 64)
    assert all(m == n == k for m, n, k in device.asked)


@pytest.mark.parametrize("largest", [64, 128, 256, 512, 1024, 4096])
def test_the_search_survives_running_out_of_memory(largest, search):
    device = Device(with_overhead(1000), fits=lambda m, n, k: max(m, n, k) <= largest)
    roof = search(device)
    fitting = [shape for shape in device.asked if max(shape) <= largest]
    assert roof.value == pytest.approx(max(device.rate(*shape) for shape in fitting))
    assert max(device.asked[-1]) <= largest


def test_the_search_survives_at_any_shape(search):
    whole = Device(peak_at(4096, 2048, 8192))
    search(whole)
    for missing in dict.fromkeys(whole.asked):
        device = Device(whole.rate, fits=lambda *shape, missing=missing: shape != missing)
        roof = search(device)
        if missing == (64, 64, 64):
            assert math.isnan(roof.value)
        else:
            fitting = [shape for shape in device.asked if shape != missing]
            assert roof.value == pytest.approx(max(device.rate(*shape) for shape in fitting))


def test_no_memory_at_all_gives_no_rate(search):
    device = Device(lambda *_: 1.0, fits=lambda *_: False)
    roof = search(device)
    assert math.isnan(roof.value) and len(device.asked) <= 2


def test_a_last_measurement_that_does_not_fit_leaves_the_searchs_own(search):
    calls = []

    def fits(*shape):
        calls.append(shape)
        return calls.count(shape) < 2

    roof = search(Device(peak_at(4096, 4096, 4096), fits))
    assert roof.value == pytest.approx(700)


def test_other_errors_are_the_callers(search):
    def rate(*_):
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        search(Device(rate))


def test_a_real_search_ends(monkeypatch):
    monkeypatch.setattr(compute_roofs, "SMALLEST_SIDE", 64)
    roof = compute_roofs.matmul_roof("float32", longest_ms=0.1, budget_ms=1)
    assert roof.value > 0 and roof.name == "float32"


def test_matmul_settings_are_put_back_after_an_exception_too():
    backend = torch.backends.cuda.matmul
    before = backend.allow_fp16_accumulation, backend.allow_fp16_reduced_precision_reduction
    with pytest.raises(ZeroDivisionError):
        with compute_roofs.matmul_settings(
            allow_fp16_accumulation=True, allow_fp16_reduced_precision_reduction=False
        ):
            assert backend.allow_fp16_accumulation is True
            assert backend.allow_fp16_reduced_precision_reduction is False
            _ = 1 / 0
    assert before == (
        backend.allow_fp16_accumulation,
        backend.allow_fp16_reduced_precision_reduction,
    )


def test_a_switch_that_does_not_exist_is_refused_before_any_is_set():
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    with pytest.raises(AttributeError):
        with compute_roofs.matmul_settings(allow_fp16_accumulation=not before, no_such_switch=True):
            pass
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is before
