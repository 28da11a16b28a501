"""The fastest arithmetic: a chain of multiply-adds in registers, and the matmuls of every dtype."""

import functools
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from helpers import traffic
from helpers.bench import Measurement, measure
from helpers.device import device, has_cuda, triton_version
from helpers.memory import OUT_OF_MEMORY, attempt, free_bytes, largest_power_of_2
from helpers.roofline import Roof
from helpers.toolchain import python_headers
from helpers.traffic import Work

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
SMALLEST_SIDE = 256
HOMEBREW_OPENMP = ("/opt/homebrew/opt/libomp", "/usr/local/opt/libomp")


@functools.cache
def compiler_missing() -> str:
    """Why torch.compile cannot make kernels here, in one line; "" when it can."""
    if has_cuda() and not triton_version():
        return "torch.compile needs Triton for a GPU, and it is not installed"
    compilers = {"Windows": ("cl",), "Darwin": ("clang++",)}.get(platform.system(), ("g++",))
    if not any(map(shutil.which, (*compilers, os.environ.get("CXX", "")))):
        return f"torch.compile needs a C++ compiler ({compilers[0]}), and there is none on the PATH"
    if platform.system() == "Darwin" and not _has_openmp():
        return "torch.compile needs OpenMP, which Apple's compiler lacks (brew install libomp)"
    if not python_headers():
        return "torch.compile needs Python's headers (the package python3-dev or similar)"
    return ""


def _has_openmp() -> bool:
    # Where Inductor looks for it on macOS, unless the compiler is another than Apple's.
    named = [os.environ[name] for name in ("OMP_PREFIX", "CONDA_PREFIX") if name in os.environ]
    found = any((Path(p) / "include" / "omp.h").exists() for p in (*named, *HOMEBREW_OPENMP))
    return found or "CXX" in os.environ


def can_compile() -> bool:
    """True when torch.compile can make kernels here."""
    return not compiler_missing()


def multiply_adds(x: torch.Tensor, starts: torch.Tensor, depth: int) -> torch.Tensor:
    """For each element of x and from each start, `depth` times y = y x + x; the ends' sum."""
    x, y = x[:, None], starts
    for _ in range(depth):
        y = torch.addcmul(x, y, x)  # one operation of PyTorch, so one kernel where not compiled
    return y[:, 0] if len(starts) == 1 else y.sum(1)


def compiled(function: Callable, dynamic: bool = False) -> Callable:
    """torch.compile, with multiply-adds in one instruction on a CPU as well.

    dynamic: False compiles for each shape anew, True once for all.
    """
    options = {
        # Inductor's C++ flags forbid it by default.
        "cpp.enable_floating_point_contract_flag": "fast",
        # Compiling all headers once takes ten seconds: that pays from the fourth kernel on.
        "cpp_cache_precompile_headers": False,
    }
    if not has_cuda() and _knows_all_vectors():
        import torch._inductor.config as inductor

        inductor.cpp.vec_isa_ok = True  # or it first compiles a test program, for five seconds
    # After eight shapes it would run all others eagerly, and say so only in a log.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=dynamic, options=options)


@functools.cache
def _knows_all_vectors() -> bool:
    """True for a g++ that has the vector instructions of every processor Inductor asks for."""
    if not shutil.which("g++"):
        return False
    done = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True)
    major = done.stdout.strip().split(".")[0]
    return done.returncode == 0 and major.isdigit() and int(major) >= 12


def multiply_add_run(length: int, eager: bool = False) -> tuple[Callable, Work]:
    """`length` (a power of two) multiply-adds on each element of a large fp32 vector, and its work.

    Compiled, they are one kernel and stay in registers. On a CPU a long chain is split into several
    beside each other: a core, which has no other threads to turn to, would wait for the end of each
    multiply-add, and hundreds of steps would take long to compile.
    """
    if length < 1 or length & (length - 1):
        raise ValueError(f"a power of two is asked for, not {length}")
    depth = length if has_cuda() else min(length, 8)
    n = min(2**26, largest_power_of_2(free_bytes() / 64)) if has_cuda() else 2**22
    x = torch.rand(n, device=device())
    starts = torch.rand(length // depth, device=device())
    function = multiply_adds
    if not eager:
        torch.compiler.reset()  # or the compiler takes every new length for one more exception
        function = compiled(multiply_adds)
    return lambda: function(x, starts, depth), traffic.multiply_adds(n, length, x.dtype)


def multiply_add_roof() -> Roof:
    """The rate of a long chain, in TFLOP/s: what arithmetic other than matmuls can reach."""
    length = 256 if has_cuda() else 512
    run, work = multiply_add_run(length)
    found = measure(run, flops=work.flops)
    return Roof("multiply-adds, float32", found.tflop_per_s, f"{length} an element, compiled")


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Let fp32 matmuls use TF32 tensor cores, or not, and put the setting back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def matmul_settings(**settings: bool) -> Iterator[None]:
    """Set switches of `torch.backends.cuda.matmul` by name, and put them back."""
    backend = torch.backends.cuda.matmul
    before = {name: getattr(backend, name) for name in settings}  # AttributeError: no such switch
    try:
        for name, value in settings.items():
            setattr(backend, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(backend, name, value)


def random_matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers (uniform ones for int8): zeros would draw less power and run faster."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=dtype, device=device())
    return torch.randn(rows, columns, device=device()).to(dtype)


def matmul_run(dtype: str, m: int, n: int, k: int) -> Callable:
    """(m, k) @ (k, n) of random matrices for a name of `TORCH_DTYPES`, to be timed.

    Sums are in fp32 (int32 for int8, fp64 for fp64); float8 gives bfloat16 and asks for the fast
    accumulator, as training libraries do.
    """
    kind = TORCH_DTYPES[dtype]
    a = random_matrix(m, k, kind)
    if dtype == "int8":
        b = random_matrix(n, k, kind).t()  # both have k contiguous: the layout that cuBLAS takes
        return lambda: torch._int_mm(a, b)
    if dtype == "float8":
        b = random_matrix(n, k, kind).t()
        one = torch.ones((), device=device())
        return lambda: torch._scaled_mm(
            a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    b = random_matrix(k, n, kind)
    return lambda: a @ b


def measure_matmul(dtype: str, m: int, n: int, k: int, budget_ms: float = 30) -> Measurement:
    """Time of one matmul; RuntimeError where this device or build has none for the dtype."""
    run = matmul_run(dtype, m, n, k)
    with tf32_allowed(dtype == "tfloat32"):
        return measure(run, flops=2 * m * n * k, budget_ms=budget_ms)


def supports(dtype: str) -> str:
    """Empty when a matmul of this dtype runs here, else the reason in one line."""
    if dtype == "tfloat32" and not (has_cuda() and torch.cuda.get_device_capability() >= (8, 0)):
        return "needs tensor cores of compute capability 8.0"
    try:
        matmul_run(dtype, 64, 64, 64)()
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    return ""


def matmul_roof(dtype: str, longest_ms: float = 25, budget_ms: float = 30) -> Roof:
    """The sustained rate of the best shape of a small search, in TFLOP/s.

    Squares are doubled until a call takes `longest_ms`; from the best one, each side in turn is
    shrunk and stretched where it helps. The winner is measured again for four times as long: a
    GPU's clock falls while it works, so that shapes were faster for a moment (`how` says how
    fast). After stas00's mamf-finder, which searches more.
    """
    rates: dict[tuple[int, int, int], float] = {}

    def rate(shape: tuple[int, int, int]) -> float:
        best = max(rates.values(), default=0)
        # Even the best rate seen would be too slow; small shapes, mostly overhead, do not tell.
        if best and max(shape) > SMALLEST_SIDE and 2 * math.prod(shape) / best / 1e9 > longest_ms:
            return 0
        if shape not in rates:
            found = attempt(lambda: measure_matmul(dtype, *shape, budget_ms=budget_ms))
            # The fast end of the samples: a slow moment of the machine must not end the search.
            rates[shape] = 0 if found == OUT_OF_MEMORY else found.flops / found.p20_ms / 1e9
        return rates[shape]

    side = SMALLEST_SIDE // 4
    while rate((side, side, side)):
        side *= 2
    best = max(rates, key=rates.get)
    for axis in range(3 if best[0] >= SMALLEST_SIDE else 0):  # smaller: it is all emulated
        for side in [int(factor * best[axis]) for factor in (0.25, 0.5, 0.75, 1.5, 2)]:
            shape = (*best[:axis], side, *best[axis + 1 :])
            if rate(shape) > rate(best):
                best = shape
    found = attempt(lambda: measure_matmul(dtype, *best, budget_ms=4 * budget_ms))
    if found == OUT_OF_MEMORY or not has_cuda():  # a CPU is slowed down by others, not by heat
        value = rates[best] or math.nan
    else:
        value = found.tflop_per_s
    m, n, k = best
    how = f"{m} x {k} @ {k} x {n}, of {len(rates)} shapes; best moment {max(rates.values()):.4g}"
    return Roof(dtype, value, how)
