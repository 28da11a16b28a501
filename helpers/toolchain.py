"""The tools that kernels are built with: what this machine lacks, and what a failed build means."""

import contextlib
import errno
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from helpers import cache
from helpers.device import has_cuda, triton_version


def installed(module: str) -> bool:
    """True when a module could be imported; it is not, so that nothing is loaded."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def missing() -> str:
    """What this machine lacks and what that costs, in one line; "" when it lacks nothing."""
    lacking = [unseen] if (unseen := _unseen_gpu()) else []
    if not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        lacking.append("no C++ compiler (what compiles code for the CPU is left out)")
    if not triton_version():
        lacking.append("no Triton (its kernels are left out, recorded results stay)")
    elif has_cuda() and not triton_can_build():
        lacking.append(
            "no C compiler with Python's headers (gcc, python3-dev), which Triton needs on a GPU "
            "(its kernels are left out)"
        )
    if not installed("cuda.bindings.nvrtc"):
        lacking.append("no cuda-bindings (CUDA is emulated, its PTX cannot be shown)")
    if has_cuda() and not torch.version.hip and not installed("cuda.core"):
        lacking.append("no cuda-core (our CUDA kernels cannot be launched)")
    return "; ".join(lacking)


def _unseen_gpu() -> str:
    # A course that runs on the CPU unnoticed is the commonest trouble of an installation.
    if torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return ""
    try:
        done = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "no GPU that PyTorch can use (and nvidia-smi does not answer)"
    said = next(iter((done.stdout + done.stderr).strip().splitlines()), "").rstrip(".")
    if done.returncode or not said:
        return f"no GPU that PyTorch can use (nvidia-smi fails: {said[:150] or 'it says nothing'})"
    return f"no GPU that PyTorch can use, though nvidia-smi lists {said} ({_why_unseen()})"


def _why_unseen() -> str:
    readme = 'see "Which PyTorch" in README.md'
    if torch.version.hip:
        return f"this PyTorch is a build for AMD's GPUs: {readme}"
    if torch.version.cuda is None:
        return f"this PyTorch is a build for CPUs alone: {readme}"
    try:
        torch.cuda.init()
        said = "it finds it now"
    except RuntimeError as error:
        said = str(error)
    if "too old" in said:
        return f"its driver is too old for a build for CUDA {torch.version.cuda}: {readme}"
    if (hiding := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={hiding} hides it: unset that variable"
    return f"PyTorch says: {said.splitlines()[0][:150]}"


def triton_can_build() -> bool:
    """True when Triton finds what it compiles a small C launcher with, against Python.h."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton asks
    return any(map(shutil.which, names)) and python_headers()


def python_headers() -> bool:
    """True when C code can be compiled against this Python."""
    # Debian's own Python installs below /usr/local, and has its headers elsewhere.
    local = sysconfig.get_default_scheme() == "posix_local"
    paths = sysconfig.get_paths("posix_prefix") if local else sysconfig.get_paths()
    return (Path(paths["include"]) / "Python.h").exists()


def inline_missing() -> str:
    """Why `torch.utils.cpp_extension.load_inline` cannot build CUDA here; "" when it can."""
    if torch.version.hip:
        return "this PyTorch is built for AMD's GPUs, and the kernel's binding for NVIDIA's"
    if torch.version.cuda is None:
        return "this PyTorch is built for CPUs alone: it cannot launch what nvcc would build"
    if not has_cuda():
        return "there is no GPU that PyTorch can use"
    from torch.utils import cpp_extension

    nvcc = Path(cpp_extension.CUDA_HOME or "") / "bin" / "nvcc"
    if cpp_extension.CUDA_HOME is None or not shutil.which(str(nvcc)):
        return "nvcc is not here: it comes with the CUDA toolkit (then set CUDA_HOME to its folder)"
    if not cpp_extension.is_ninja_available():
        return "ninja, which runs the compilers, is not here (pip install ninja)"
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "nvcc needs a C++ compiler for the host (g++), and there is none on the PATH"
    theirs, ours = _nvcc_version(nvcc), torch.version.cuda
    if theirs and theirs.split(".")[0] != ours.split(".")[0]:
        return f"nvcc is of CUDA {theirs} and PyTorch was built with CUDA {ours}: they do not mix"
    return ""


def _nvcc_version(nvcc: Path) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else ""


def run(command: list, timeout: float | None = None) -> subprocess.CompletedProcess:
    """Run a tool and keep what it says, in English whatever the user's language; timeout in s.

    OSError when it fails because a disk is full: its input is not to blame.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        timeout=timeout,
    )
    if done.returncode and "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, f"no space is left on a disk that {command[0]} writes to")
    return done


@functools.cache
def compiler_version(path: str) -> str:
    """The first line of what a compiler says about itself: its name, version and packager."""
    return next(iter(run([path, "--version"]).stdout.splitlines()), "")  # "": it does not run


@functools.cache
def machine() -> str:
    """What -march=native depends on, on Linux: the architecture, the CPU's model and features."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = [x for x in cpu.splitlines() if re.match(r"(model|flags|Features|CPU part)", x)]
    return platform.machine() + "".join(sorted(set(lines)))


# What the tools say, and what it means in a sentence; \1, \2 are taken from what they said.
_FAILURES = (
    (r"CUDA_HOME environment variable is not set", "nvcc was not found: set CUDA_HOME"),
    (r"nvcc: not found|No such file or directory: '\S*nvcc'", "nvcc was not found"),
    (r"Ninja is required", "ninja, which runs the compilers, is missing: pip install ninja"),
    (
        r"detected CUDA version \(([\d.]+)\)[\s\S]*?PyTorch \(([\d.]+)\)",
        r"nvcc is of CUDA \1, PyTorch was built with CUDA \2: the major versions must agree",
    ),
    (
        r"unsupported GNU version! gcc versions later than (\d+)",
        r"g++ is newer than this nvcc knows: it takes versions up to \1 (set CXX to one)",
    ),
    (r"Unsupported gpu architecture '(\w+)'", r"this nvcc does not know GPUs of generation \1"),
    (r"Python\.h: No such file", "Python's headers are missing: install python3-dev or similar"),
    (r"Permission denied: '?([^'\n]*)", r"the build folder cannot be written: \1"),
    (r"(?m)^.*?([\w.-]+)\((\d+)\): error: (.*)$", r"\1, line \2: \3"),
    (r"(?m)^.*?([\w.-]+):(\d+):\d+: (?:fatal )?error: (.*)$", r"\1, line \2: \3"),
)  # fmt: skip


def explain(error: BaseException | str) -> str:
    """One sentence on why a build failed, from what the compilers and PyTorch said.

    Of a build of this machine's, an exception, also the version that they did not tell.
    """
    text = str(error)
    for pattern, sentence in _FAILURES:
        if found := re.search(pattern, text):
            return found.expand(sentence) + _own_version(error, pattern)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _own_version(error: BaseException | str, pattern: str) -> str:
    path = shutil.which(os.environ.get("CXX", "g++"))
    if isinstance(error, str) or "GNU version" not in pattern or path is None:
        return ""
    return f"; here it is {compiler_version(path)}"


@contextlib.contextmanager
def inline_folder(name: str) -> Iterator[str]:
    """A build folder for `load_inline`, held by one process at a time.

    PyTorch marks a build with a file named lock, and waits for ever for one that a killed process
    has left behind. The system drops the lock taken here when its process ends, however it ends;
    who holds it therefore knows that such a file is stale, and removes it.
    """
    folder = cache.folder("load_inline") / f"{name}-torch{torch.__version__}"
    folder.mkdir(exist_ok=True)
    with (folder / "held").open("w") as held:
        try:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
        except ImportError:  # Windows has other locks; a stale file must be removed by hand there
            pass
        yield str(folder)
