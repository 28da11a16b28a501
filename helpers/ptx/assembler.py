"""From PTX to machine code (SASS) with the assembler and disassembler that Triton brings along."""

import dataclasses
import functools
import importlib.util
import json
import re
import subprocess
import tempfile
from pathlib import Path

from helpers import cache
from helpers.ptx.text import find_name


class ToolMissing(RuntimeError):
    """A compiler or assembler is not installed: which, what that costs, what to install."""


class CompileError(RuntimeError):
    """The compiler's first errors, with the user's file and line."""


class UnknownArchitecture(CompileError, ToolMissing):
    """This compiler does not know a generation of GPUs; an older or a newer one may."""


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What one thread or block of a kernel occupies, as `ptxas -v` says, and the machine code.

    `registers` are 32 bits wide and a thread's. `spill_store_bytes` and `spill_load_bytes` are the
    bytes of the instructions that spill (one thread, each counted once, loops or not); the stack
    too is a thread's. `shared_bytes` are a block's static ones: Triton's are dynamic and not here.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    stack_bytes: int
    cubin: bytes = dataclasses.field(repr=False)  # of the whole PTX text


def arch_number(arch: str) -> int:
    """90 of "sm_90" or "sm_90a"; ValueError for anything else."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise ValueError(f'an architecture is written as "sm_90", not {arch!r}')
    return int(match[1])


def target(arch: str) -> str:
    """The assembler's name of an architecture: from Hopper on, all that the chip has ("sm_90a")."""
    number = arch_number(arch)
    return f"sm_{number}a" if number >= 90 and arch.endswith(str(number)) else arch


def triton_backend() -> Path | None:
    """The folder with Triton's copy of NVIDIA's tools and headers; None without Triton."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "backends" / "nvidia"


def _tool(name: str) -> str:
    own = triton_backend()
    if own is not None and (own / "bin" / name).is_file():
        return str(own / "bin" / name)
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_binary_utility(name)
    except (ImportError, RuntimeError):
        found = None
    if not found:
        raise ToolMissing(
            f"{name} is missing, so registers, spills and machine code cannot be shown: install "
            "triton (Linux), which brings it along, or the CUDA toolkit"
        )
    return found


@functools.lru_cache(maxsize=128)
def assemble(ptx: str, arch: str, *, max_registers: int | None = None) -> dict[str, Assembled]:
    """Every kernel of a PTX text, assembled for one architecture, by the kernel's name.

    `max_registers` caps a thread's registers (`-maxrregcount`), save where a kernel has launch
    bounds, as all of Triton's have. CompileError when ptxas refuses. The answer is kept on disk.
    """
    # From Blackwell on, Triton brings a newer assembler of its own.
    newer = arch_number(arch) >= 100 and triton_backend() is not None
    tool = _tool("ptxas-blackwell" if newer else "ptxas")
    cap = [] if max_registers is None else [f"-maxrregcount={max_registers}"]
    options = ["-v", f"-arch={target(arch)}", *cap]

    def make(path: Path) -> None:
        path.write_text(json.dumps(_run([tool, *options], ptx, arch)), encoding="utf-8")

    key = cache.key(_version(tool), *options, ptx)
    log, cubin = json.loads(cache.file("sass", f"{key}.json", make).read_text(encoding="utf-8"))
    return _resources(log, bytes.fromhex(cubin))


@functools.cache
def _version(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True).stdout


def _run(command: list[str], ptx: str, arch: str) -> tuple[str, str]:
    """What the assembler says, and the machine code in hexadecimal digits."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        command = [*command, str(source), "-o", str(cubin)]
        for _ in range(2):
            source.write_text(ptx.strip("\0"), encoding="utf-8")
            done = subprocess.run(command, capture_output=True, text=True)
            newest = re.search(
                r"Unsupported \.version \S+ current version is '([\d.]+)'", _log(done)
            )
            if newest is None:
                break
            # The version is the compiler's own, not the newest feature in use: a text that does
            # use what an older assembler lacks is refused in the second round.
            ptx = re.sub(r"(?m)^\.version .*$", f".version {newest[1]}", ptx)
        if done.returncode:
            lines = [line for line in _log(done).splitlines() if re.search("error|fatal", line)]
            raise CompileError(f"ptxas for {arch}: " + "\n".join(lines[:5] or [_log(done)[-500:]]))
        return _log(done), cubin.read_bytes().hex()


def _log(done: subprocess.CompletedProcess) -> str:
    return done.stdout + done.stderr


def _resources(log: str, cubin: bytes) -> dict[str, Assembled]:
    def read(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'", 1)[0]
        # Functions that were not inlined have a paragraph of their own: read only the kernel's.
        part = part[part.index(f"Function properties for {name}") :]
        stack, stores, loads = (
            read(rf"(\d+) bytes {what}", part)
            for what in ("stack frame", "spill stores", "spill loads")
        )
        stack = read(r"(\d+) bytes cumulative stack", part) or stack
        shared = read(r"(\d+) bytes smem", part)
        registers = read(r"Used (\d+) registers", part)
        found[name] = Assembled(registers, stores, loads, shared, stack, cubin)
    return found


def sass(ptx: str, arch: str, kernel: str | None = None) -> str:
    """The machine code of one kernel (by default all), one instruction a line.

    A line has the instruction's offset in hexadecimal, its predicate (@P0: only threads whose
    flag P0 is set take part) and its operands; lines that end in ":" are targets of jumps. The
    padding behind the last instruction is left out. KeyError when the kernel is not there.
    """
    kernels = assemble(ptx, arch)
    if kernel is not None:
        kernel = find_name(kernels, kernel)
    code = _disassembled(next(iter(kernels.values())).cubin) if kernels else {}
    if kernel is not None:
        return code[kernel]
    return "\n".join(f"{name}:\n{code[name]}" for name in kernels)


@functools.lru_cache(maxsize=128)
def _disassembled(cubin: bytes) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        # -ndf: no data-flow analysis, which only takes time here
        command = [_tool("nvdisasm"), "-c", "-ndf", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"nvdisasm: {done.stderr.strip()[-500:]}")
    sections = re.split(r"(?m)^\.text\.(\S+):$", done.stdout)
    return {name: _clean(body) for name, body in zip(sections[1::2], sections[2::2], strict=True)}


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^([.$\w]+):$")


def _clean(section: str) -> str:
    lines = []
    for line in section.splitlines():
        if match := _INSTRUCTION.match(line):
            text = re.sub(r"`\(([^)]*)\)", r"\1", match[2])
            predicate, rest = re.match(r"(@!?\w+)?\s*(.*)", text).groups()
            lines.append((f"{match[1]}  {predicate or '':5} {rest}", rest))
        elif match := _LABEL.match(line):
            lines.append((line, ""))
        elif line.startswith("\t.section"):
            break
    # An endless jump to itself and NOPs fill the space behind the code.
    used = {word for _, rest in lines for word in re.findall(r"[.$][\w.$]+", rest)}
    while lines and (not lines[-1][1] or lines[-1][1] == "NOP" or _jumps_to_itself(lines)):
        lines.pop()
    return "\n".join(text for text, rest in lines if rest or text.rstrip(":") in used)


def _jumps_to_itself(lines: list[tuple[str, str]]) -> bool:
    return len(lines) > 1 and lines[-1][1] == "BRA " + lines[-2][0].rstrip(":")
