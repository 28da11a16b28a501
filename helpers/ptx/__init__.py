"""What the compilers make of a kernel, for any GPU generation, without a GPU.

CUDA C++ or Triton -> PTX, the virtual machine's assembly -> SASS, the machine code of one chip.
`helpers.ptx.text` counts and `helpers.ptx.notes` explains what comes out; `helpers.ptx.layouts`
says which thread of a Triton kernel holds which element.
"""

import functools
import importlib
from pathlib import Path

from helpers import cache
from helpers.ptx.assembler import (
    Assembled,
    CompileError,
    ToolMissing,
    UnknownArchitecture,
    arch_number,
    assemble,
    sass,
    triton_backend,
)
from helpers.ptx.notes import annotate
from helpers.ptx.text import bytes_per_access, count, entry, fp64_instructions, opcodes
from helpers.ptx.triton_kernels import (
    Compiled,
    Request,
    triton_compile_many,
    triton_compiled,
    triton_ptx,
)

__all__ = [
    "ARCHITECTURES",
    "Assembled",
    "CompileError",
    "Compiled",
    "Request",
    "ToolMissing",
    "UnknownArchitecture",
    "annotate",
    "assemble",
    "bytes_per_access",
    "count",
    "cuda_include_paths",
    "cuda_ptx",
    "entry",
    "fp64_instructions",
    "opcodes",
    "sass",
    "triton_compile_many",
    "triton_compiled",
    "triton_ptx",
]

# Turing, Ampere (A100, GeForce), Ada, Hopper, Blackwell (B200, GeForce)
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_ERRORS = 3
STAND_INS = Path(__file__).with_name("include")


def cuda_include_paths() -> list[Path]:
    """Where <math.h>, <cuda_fp16.h> and their like are found; the latter may be missing.

    Stand-ins for the C headers that NVRTC lacks; then the first folder with cuda_fp16.h of the CUDA
    toolkit or wheel that cuda.pathfinder finds (CUDA_HOME and CUDA_PATH count), and the headers
    that Triton brings along.
    """
    candidates = []
    try:
        from cuda import pathfinder

        candidates.append(pathfinder.find_nvidia_header_directory("cudart"))
    except (ImportError, RuntimeError):
        pass
    backend = triton_backend()
    candidates.append(backend and backend / "include")
    for folder in filter(None, candidates):
        if (Path(folder) / "cuda_fp16.h").is_file():
            return [STAND_INS, Path(folder)]
    return [STAND_INS]


def cuda_ptx(
    text: str, arch: str = "sm_90", *, name: str = "kernel.cu", defines: dict | None = None
) -> str:
    """PTX of a CUDA C++ text, from NVRTC, NVIDIA's compiler as a library; it needs no driver.

    `name` is what errors call the text; `defines` are macros: {"TILE": 32}. Kernels that are
    declared `extern "C"` keep their names. CompileError when NVRTC refuses the text,
    UnknownArchitecture for a generation that it does not know, ToolMissing without NVRTC. The
    answer is kept on disk.
    """
    return _cuda_ptx(text, arch, name, tuple((defines or {}).items()))


@functools.lru_cache(maxsize=256)
def _cuda_ptx(text: str, arch: str, name: str, defines: tuple) -> str:
    number = arch_number(arch)
    nvrtc = _nvrtc()

    def call(function, *arguments):
        status, *values = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {nvrtc.nvrtcGetErrorString(status)[1]}")
        return values[0] if values else None

    def read(program, size, function) -> str:
        buffer = b" " * call(size, program)
        call(function, program, buffer)
        return buffer.decode().strip("\0")

    known = call(nvrtc.nvrtcGetSupportedArchs)
    if number not in known:
        names = ", ".join(f"sm_{k}" for k in known)
        raise UnknownArchitecture(f"this NVRTC does not compile for {arch}; it knows {names}")
    options = [f"--gpu-architecture={arch.replace('sm', 'compute')}"]
    options += [f"--include-path={folder}" for folder in cuda_include_paths()]
    options += [f"--define-macro={key}={value}" for key, value in defines]
    arguments = [option.encode() for option in options]

    def make(path: Path) -> None:
        program = call(nvrtc.nvrtcCreateProgram, text.encode(), name.encode(), 0, [], [])
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
                raise CompileError(_first_errors(log) or f"NVRTC: {status.name}")
            answer = read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            path.write_text(answer, encoding="utf-8")
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    key = cache.key(str(nvrtc.nvrtcVersion()), *_headers(), *options, name, text)
    return cache.file("ptx", f"{key}.ptx", make).read_text(encoding="utf-8")


@functools.cache
def _headers() -> list[str]:
    """What tells a change of the headers that a kernel may include."""
    files = [*STAND_INS.iterdir(), *(folder / "cuda_fp16.h" for folder in cuda_include_paths()[1:])]
    return [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in sorted(files)]


def _nvrtc():
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()  # loads the library itself
    except (ImportError, RuntimeError) as error:
        raise ToolMissing(
            "NVRTC is missing, so CUDA kernels cannot be shown as PTX here: install cuda-bindings "
            "and nvidia-cuda-nvrtc (Linux and Windows)"
        ) from error
    return nvrtc


def _first_errors(log: str) -> str:
    """NVRTC's first errors: each its message, the line of code and the mark under it."""
    errors, keep = [], False
    for line in log.splitlines():
        if ": error" in line or ": catastrophic error" in line:
            errors.append([])
            keep = True
        elif ": warning" in line or "errors detected" in line or "error detected" in line:
            keep = False
        if keep and line.strip():
            errors[-1].append(line)
    return "\n".join("\n".join(error) for error in errors[:MAX_ERRORS]) or log.strip()[:1000]
