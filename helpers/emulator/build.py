"""A kernel's text to a shared library: checked, compiled by g++ and kept by what it depends on."""

import functools
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers import cache, toolchain
from helpers.cuda_source import code_alone
from helpers.emulator.errors import CompileError, Unsupported

HERE = Path(__file__).resolve().parent
RUNTIME = ("scheduler.cpp", "waiting.cpp", "intrinsics.cpp", "memory.cpp", "counts.cpp")
INCLUDES = """
cuda_fp16.h cuda_bf16.h cuda_runtime.h math_constants.h math.h cmath stdint.h cstdint float.h
cfloat limits.h climits stdio.h cstdio string.h cstring assert.h cassert
""".split()

# Without the passes that move, merge or repeat loads and stores: the counts are the text's own.
FLAGS = """
-std=c++20 -fPIC -fvisibility=hidden -fno-exceptions -fno-strict-aliasing -march=native
""".split()
KERNEL_FLAGS = """
-O1 -g1 -w -fsanitize=thread -fsanitize=bounds,integer-divide-by-zero
-fsanitize-coverage=trace-pc -fno-threadsafe-statics -fno-optimize-sibling-calls -fno-store-merging
-fno-tree-loop-distribute-patterns -fno-tree-vectorize -fno-ipa-reference-addressable
-fno-math-errno -ffp-contract=fast -fmax-errors=3 -fno-diagnostics-show-caret
-Werror=frame-larger-than=524288 -Wno-error=cpp
""".split()

_ALIGN = r"(?:__align__|alignas)\s*\([^)]*\)"
_UNSUPPORTED = {
    r"\basm\b|\b__asm__\b": "inline assembly",
    r"\bwmma\b|\bnvcuda\b|\bmma_sync\b|\bwgmma\b": "tensor-core instructions (wmma, mma)",
    r"\bcooperative_groups\b|\bthis_thread_block\b": "cooperative groups",
    r"\bcudaTextureObject_t\b|\btex[123]D\w*|\btexture\s*<|\bcudaSurfaceObject_t\b": "textures",
    r"\bcuda\s*::|\b__pipeline_\w+|\bcp_async\w*": "asynchronous copies and the cuda:: library",
    r"\bthrust\s*::|\bcub\s*::": "thrust and cub",
    r"<<<": "launching a kernel from the text",
    r"\b__activemask\b": "__activemask, which depends on what happens to run together",
    r"\b(?:_?exit|_Exit|abort)\s*\(": "exit and abort",
    r"\b(?:malloc|free)\s*\(|\bnew\b|\bdelete\b": "memory allocated by a kernel",
    r"\bmem(?:cpy|set|move)\s*\(": "memcpy and memset, whose accesses it would not see",
}

# What NVRTC alone compiles: __CUDACC_RTC__ is not defined here.
_FOR_GPUS = re.compile(r"(?ms)^[ \t]*#ifdef __CUDACC_RTC__\n.*?(?=^[ \t]*#[ \t]*(?:el|endif))")


def build(text: str, kernel: str, name: str, defines: dict[str, str]) -> Path:
    """The shared library that holds `kernel` and the runtime.

    Unsupported when there is no g++ or objcopy, or the text has what the emulator cannot run;
    CompileError with g++'s first three errors.
    """
    compiler = _compiler()
    _check(text)
    # After the header, whose own names they would change.
    macros = "".join(f"#define {macro} {value}\n" for macro, value in sorted(defines.items()))
    source = (
        f'#include "cuda.h"\n{macros}namespace {{\n'
        f'#line 1 "{_quoted(name)}"\n{_own_names(_dynamic_shared(text))}\n'
        f'#line 1 "launch of {_quoted(kernel)}"\nEMULATOR_LAUNCH({kernel})\n'
    )
    key = cache.key(compiler, toolchain.machine(), _own_files(), source)

    def compile_kernel(path: Path) -> None:
        unit, compiled = path.with_suffix(".cpp"), path.with_suffix(".o")
        unit.write_text(source, encoding="utf-8")
        with ThreadPoolExecutor() as pool:
            runtime = [pool.submit(_runtime_object, compiler, part) for part in RUNTIME]
            options = [*FLAGS, *KERNEL_FLAGS, "-I", _header(compiler), "-I", HERE]
            done = toolchain.run(["g++", *options, "-c", unit, "-o", compiled])
            objects = [part.result() for part in runtime]
        if done.returncode:
            raise CompileError(_errors(done.stderr, name, kernel))
        # In a template g++ forgets a variable's section: it is in .bss, like nothing else.
        flags = "cuda_shared,alloc,load,data,contents"
        toolchain.run(["objcopy", "--rename-section", f".bss={flags}", compiled])
        # Linked without -fsanitize: the runtime's own functions take the sanitizer's calls.
        link = ["g++", "-shared", "-Wl,-Bsymbolic,-z,defs", compiled, *objects, "-o", path]
        done = toolchain.run(link)
        if done.returncode:
            raise CompileError(_errors(done.stderr, name, kernel))

    try:
        return cache.file("emulator", f"{key}.so", compile_kernel)
    except OSError as error:
        if not cache.is_full(error):
            raise
        raise Unsupported(f"the emulator cannot be compiled: {error.strerror}") from None


def _header(compiler: str) -> Path:
    """The folder of cuda.h, compiled: to read it takes most of a small kernel's time.

    If g++ cannot use it, it goes on to the header itself.
    """

    def compile_header(path: Path) -> None:
        options = [*FLAGS, *KERNEL_FLAGS, "-x", "c++-header", HERE / "cuda.h", "-o", path]
        done = toolchain.run(["g++", *options])
        if done.returncode:
            raise Unsupported(f"g++ cannot compile the emulator: {done.stderr.strip()[:300]}")

    key = cache.key(compiler, toolchain.machine(), _own_files())
    return cache.file(f"emulator/{key}", "cuda.h.gch", compile_header).parent


def _runtime_object(compiler: str, source: str) -> Path:
    def compile_file(path: Path) -> None:
        done = toolchain.run(["g++", *FLAGS, "-O2", "-c", HERE / source, "-o", path])
        if done.returncode:
            raise Unsupported(f"g++ cannot compile the emulator: {done.stderr.strip()[:300]}")

    key = cache.key(compiler, toolchain.machine(), _own_files())
    name = f"{key}-{Path(source).stem}.o"
    path = cache.file("emulator", name, compile_file)
    if path.read_bytes()[:4] != b"\x7fELF":  # what a full disk or a lost machine leaves
        path.unlink(missing_ok=True)
        path = cache.file("emulator", name, compile_file)
    return path


def _compiler() -> str:
    """g++'s version and machine; Unsupported when it is missing or is another compiler."""
    path = shutil.which("g++")
    if platform.system() != "Linux":
        raise Unsupported("the emulator needs Linux and g++: this is " + platform.system())
    if path is None:
        raise Unsupported("the emulator compiles kernels with g++, and there is none here")
    if shutil.which("objcopy") is None:
        raise Unsupported("the emulator needs objcopy (of binutils), and there is none here")
    version = toolchain.compiler_version(path)
    if not version:
        raise Unsupported(f"the emulator compiles kernels with g++, and {path} does not run")
    if "clang" in version:
        raise Unsupported(f"the emulator needs GCC's g++, and {path} is clang")
    return version


@functools.cache
def _own_files() -> str:
    files = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp"), HERE / "build.py"])
    return cache.key(*(file.read_text(encoding="utf-8") for file in files))


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _check(text: str) -> None:
    code = _FOR_GPUS.sub(lambda found: "\n" * found[0].count("\n"), code_alone(text))
    for pattern, what in _UNSUPPORTED.items():
        found = re.search(pattern, code)
        if found:
            line = code.count("\n", 0, found.start()) + 1
            raise Unsupported(f"the emulator does not run {what} (line {line})")
    _check_device_variables(code)
    for found in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]*)[>"]', text, flags=re.M):
        if found.group(1) not in INCLUDES:
            line = text.count("\n", 0, found.start()) + 1
            raise Unsupported(f"the emulator has no <{found.group(1)}> (line {line})")


def _check_device_variables(code: str) -> None:
    """Refuses what would lie in shared memory here; a constant is never written."""
    code = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda m: "\n" * m[0].count("\n"), code, flags=re.M)
    # To the first character that tells a variable from a function.
    declaration = rf"\b__device__\b((?:{_ALIGN}|[^(;={{\[])*)(?:[;={{\[]|\(\s*\*)"
    for found in re.finditer(declaration, code):
        words = code[: found.start()].split()[-1:] + re.findall(r"\w+|\*", found[1])
        constant = "__constant__" in words or (
            {"const", "constexpr"} & {*words} and "*" not in words
        )
        if not constant and "operator" not in words:
            line = code.count("\n", 0, found.start()) + 1
            raise Unsupported(f"the emulator does not run __device__ variables (line {line})")


def _dynamic_shared(text: str) -> str:
    """`extern __shared__ T s[];` becomes a pointer to where the dynamic shared memory lies.

    Includes go: cuda.h has them all, and a header would end up in the kernel's namespace.
    """
    declaration = (
        rf"((?:\b(?:extern|volatile|__shared__|{_ALIGN})\s*)+)((?:{_ALIGN}|[\w:<>]|\s)*?)"
        r"\s*\b(\w+)\s*\[\s*\]\s*;"
    )

    def pointer(match: re.Match) -> str:
        before = match.group(1)
        if "extern" not in before or "__shared__" not in before:
            return match.group()
        kind = re.sub(_ALIGN, "", match.group(2)).strip()
        kind = f"volatile {kind}" if "volatile" in before else kind
        lines = "\n" * match.group().count("\n")
        name = match.group(3)
        return f"{kind}* const {name} = reinterpret_cast<{kind}*>(emulator_dynamic_shared);{lines}"

    text = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", text, flags=re.M)
    text = re.sub(r"\bstatic(\s+)__shared__\b", r"\1__shared__", text)
    return re.sub(declaration, pointer, text)


def _own_names(text: str) -> str:
    """Without `extern "C"`: a kernel may be called what it likes, `launch` or `munmap`.

    And those that are not launched vanish, with their shared memory.
    """
    text = re.sub(r'\bextern(\s*)"C"(\s*)\{', r"namespace\1\2{", text)
    return re.sub(r'\bextern(\s*)"C"', r"\1", text)


# Newer linkers name the place in the section as well.
_UNDEFINED = r":(\d+):(?:\(.*?\):)? undefined reference to `(.*)'$"


def _errors(output: str, name: str, kernel: str) -> str:
    """The first three errors, each as "kernel.cu:7: what is wrong"."""
    if f"launch of {kernel}" in output and f"{name}:" not in output:
        return f"{name} has no kernel that can be launched as {kernel}"
    found = re.findall(r"^(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", output, flags=re.M)
    own = [f"{file}:{line}: {text}" for file, line, text in found if file == name]
    other = [text for file, _, text in found if file != name]
    own += [
        f"{name}:{line}: '{what.replace('(anonymous namespace)::', '')}' is nowhere defined"
        for line, what in re.findall(_UNDEFINED, output, flags=re.M)
    ]
    plain = [line for line in output.splitlines() if "error" in line or "undefined" in line]
    return "\n".join((own or other or plain or ["g++ failed without a message"])[:3])
