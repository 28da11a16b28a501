"""cpu_memory.cpp, compiled for this CPU by g++ and called without Python in the way.

Every function returns the nanoseconds that its own loop took, by the steady clock. Python's lock is
free meanwhile; keep a call below half a second, because Ctrl-C waits for its end.
"""

import ctypes
import functools
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from helpers import cache, toolchain
from helpers.ptx import ToolMissing

SOURCE = Path(__file__).with_name("cpu_memory.cpp")
FLAGS = "-std=c++20 -O3 -march=native -ffp-contract=fast -fPIC -shared -pthread".split()
MAX_CHAINS = 16
INT, LONG, FLOAT, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS = {
    "cpu_chase": (POINTER, POINTER, INT, LONG),
    "cpu_add_chain": (LONG, POINTER),
    "cpu_fma_chain": (LONG, FLOAT, FLOAT, POINTER),
    "cpu_fma_width": (),
    "cpu_fma_all": (INT, LONG, FLOAT, FLOAT, POINTER),
    "cpu_read": (POINTER, LONG, LONG, INT, POINTER),
    "cpu_copy": (POINTER, POINTER, LONG, INT),
    "cpu_triad": (POINTER, POINTER, POINTER, FLOAT, LONG, INT),
}


def load() -> ctypes.CDLL:
    """The library, compiled the first time (about a second) and kept.

    ToolMissing where there is no g++, or it cannot compile or load the library.
    """
    path = shutil.which("g++")
    if platform.system() != "Linux" or path is None:
        raise ToolMissing(
            "what a CPU's memory costs is measured by C++ that g++ compiles on Linux, and there "
            "is none here"
        )
    return _library(path)


@functools.cache
def _library(compiler: str) -> ctypes.CDLL:
    source = SOURCE.read_text(encoding="utf-8")
    about = toolchain.compiler_version(compiler), toolchain.machine(), " ".join(FLAGS)
    if not about[0]:
        raise ToolMissing(f"what a CPU's memory costs needs g++, and {compiler} does not run")

    def compile_source(path: Path) -> None:
        done = toolchain.run([compiler, *FLAGS, SOURCE, "-o", path])
        if done.returncode:
            raise ToolMissing(f"g++ cannot compile {SOURCE.name}: {done.stderr.strip()[:300]}")

    library = _loaded(cache.key(*about, source), compile_source)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, LONG
    library.cpu_fma_width.restype = INT
    return library


def _loaded(key: str, compile_source: Callable[[Path], None]) -> ctypes.CDLL:
    """The library, compiled again once if the one that was kept cannot be loaded."""
    for last in (False, True):
        try:
            path = cache.file("native", f"{key}.so", compile_source)
        except OSError as error:
            raise ToolMissing(f"{SOURCE.name} cannot be compiled: {error.strerror}") from None
        try:
            if not cache.is_whole(path):
                raise OSError("it was cut off")
            return ctypes.CDLL(str(path))
        except OSError as error:  # half a file, or a file system that forbids execution
            path.unlink(missing_ok=True)
            if last:
                raise ToolMissing(f"the compiled {SOURCE.name} cannot be loaded: {error}") from None


def chase(ring: torch.Tensor, at: torch.Tensor, steps: int) -> int:
    """Follow chains through `ring` for `steps` steps each; ns. One chain for each element of `at`.

    ring: int32; an element holds the index of the next. at: int32, 1 to 16 of them, where each
    chain stands, and afterwards where it got to.
    """
    _check("ring", ring, torch.int32)
    _check("at", at, torch.int32)
    if not 1 <= at.numel() <= MAX_CHAINS:
        raise ValueError(f"there can be 1 to {MAX_CHAINS} chains, not {at.numel()}")
    return load().cpu_chase(ring.data_ptr(), at.data_ptr(), at.numel(), steps)


def add_ns(steps: int = 1 << 20) -> float:
    """Time of one integer addition that waits for the one before, in ns: a cycle of the clock."""
    value = torch.zeros(1, dtype=torch.int64)
    steps = -(-steps // 32) * 32
    ns = load().cpu_add_chain(steps, value.data_ptr())
    assert value.item() == steps
    return ns / steps


def fma_chain(value: torch.Tensor, a: float, b: float, steps: int) -> int:
    """value = a * value + b, `steps` times one after the other, in fp32; ns."""
    _check("value", value, torch.float32)
    return load().cpu_fma_chain(steps, a, b, value.data_ptr())


def fma_width() -> int:
    """Multiply-adds that a thread of `fma_all` computes in one step: vectors x chains."""
    return load().cpu_fma_width()


def fma_all(values: torch.Tensor, a: float, b: float, steps: int) -> int:
    """The same for all fp32 `values`, (threads, fma_width()), each row by a thread; ns."""
    _check("values", values, torch.float32)
    if values.dim() != 2 or values.shape[1] != fma_width() or not len(values):
        raise ValueError(f"values must be (threads, {fma_width()}), not {tuple(values.shape)}")
    return load().cpu_fma_all(len(values), steps, a, b, values.data_ptr())


def read(x: torch.Tensor, threads: int, stride: int = 1) -> tuple[int, float]:
    """Sum every `stride`-th of the fp32 `x`: (ns, the sum)."""
    _check("x", x, torch.float32)
    if stride < 1:
        raise ValueError(f"stride must be at least 1, not {stride}")
    sums = torch.zeros(_threads(threads))
    n = -(-x.numel() // stride)
    return load().cpu_read(x.data_ptr(), n, stride, threads, sums.data_ptr()), sums.sum().item()


def copy(x: torch.Tensor, y: torch.Tensor, threads: int) -> int:
    """y = x, both fp32; ns."""
    _check("x", x, torch.float32)
    _check("y", y, torch.float32, x.numel())
    return load().cpu_copy(x.data_ptr(), y.data_ptr(), x.numel(), _threads(threads))


def triad(x: torch.Tensor, z: torch.Tensor, y: torch.Tensor, scale: float, threads: int) -> int:
    """y = x + scale * z, all fp32, as STREAM has it; ns."""
    for name, tensor in (("x", x), ("z", z), ("y", y)):
        _check(name, tensor, torch.float32, x.numel())
    pointers = (tensor.data_ptr() for tensor in (x, z, y))
    return load().cpu_triad(*pointers, scale, x.numel(), _threads(threads))


def _threads(threads: int) -> int:
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return threads


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, n: int | None = None) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be {dtype} on the CPU, not {tensor.dtype} {tensor.device}")
    if not tensor.is_contiguous() or tensor.numel() != (n or tensor.numel()):
        raise ValueError(f"{name} must be contiguous and of {n or 'any'} elements")
