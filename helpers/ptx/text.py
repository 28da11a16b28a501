"""Reading PTX and SASS: which instructions there are, and of what kind. Needs no tools."""

import collections
import re
from collections.abc import Collection

from helpers.ptx.kinds import KINDS, Instruction, kind


def entry(ptx: str, kernel: str) -> str:
    """The body of one kernel of a PTX text, without its braces; KeyError when it is not there.

    A C++ name stands for its mangled form: "gelu" finds `_Z4geluPfS_i`.
    """
    found = {}
    for match in re.finditer(r"\.entry\s+([\w$]+)[^{;]*\{", ptx):
        depth, end = 1, match.end()
        while depth and end < len(ptx):
            depth += {"{": 1, "}": -1}.get(ptx[end], 0)
            end += 1
        found[match[1]] = ptx[match.end() : end - 1].strip("\n")
    return found[find_name(found, kernel)]


def find_name(names: Collection[str], kernel: str) -> str:
    """The name of `kernel` among compiled ones: its own, or the mangled one of a C++ function."""
    for name in names:
        if name == kernel or name.startswith(f"_Z{len(kernel)}{kernel}"):
            return name
    raise KeyError(f"no kernel {kernel!r}; there are {', '.join(names) or 'none'}")


_SASS = re.compile(
    r"^\s*(?:/\*)?[0-9a-f]{4,}(?:\*/)?\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)[ \t]*([^;\n]*)", re.M
)
_HEADER = re.compile(r"^\s*(?:\.\w+\s+)*\.(?:entry|func)\b[^{;]*[{;]", re.M)
_PTX = re.compile(r"(?:(@!?[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)


def instructions(text: str) -> list[Instruction]:
    """The instructions of a PTX or SASS text in order; declarations and labels are left out."""
    if not re.search(r"^\s*\.(version|reg|visible|entry)\b", text, re.M):
        found = [Instruction(m[1] or "", m[2], m[3].strip()) for m in _SASS.finditer(text)]
        if found:
            return found
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\0", " ", text, flags=re.S)
    text = _HEADER.sub("", text)
    text = re.sub(r"(?m)^\s*[.}][^;\n]*$", "", text)  # directives of one line, ends of scopes
    found = []
    for statement in text.split(";"):
        # Scopes and labels may stand in front of an instruction; "::" is part of an opcode.
        statement = re.sub(r"^(?:\s*(?:[{}]|[\w$]+:(?!:)))*\s*", "", statement).strip()
        if match := _PTX.fullmatch(statement):
            found.append(Instruction(match[1] or "", match[2], " ".join(match[3].split())))
    return found


def count(text: str):
    """A pandas frame: `kind`, `instructions`; each instruction of a PTX or SASS text in one kind.

    These are instructions in the text, not executed ones. In PTX a division counts as arithmetic,
    though the assembler makes several instructions of it; SASS shows them.
    """
    import pandas as pd

    totals = collections.Counter(map(kind, instructions(text)))
    rows = [(name, totals[name]) for name in KINDS if totals[name]]
    return pd.DataFrame(rows, columns=["kind", "instructions"])


def opcodes(text: str) -> collections.Counter:
    """How often each full opcode occurs: {"fma.rn.f64": 23}."""
    return collections.Counter(instruction.opcode for instruction in instructions(text))


def fp64_instructions(text: str, *, moves: bool = False) -> int:
    """Instructions that compute in fp64 or convert from or to it.

    That is `count`'s "fp64", approximations of fp64 and conversions. `moves=True` adds loads,
    stores, moves and selections, which need no fp64 unit: then it is all that mention f64 in PTX.
    """
    total = 0
    for instruction in instructions(text):
        what = kind(instruction)
        wide = re.search(r"\bf64|\bF64|64H\b", instruction.opcode) or what == "fp64"
        works = what in ("fp64", "special function", "conversion", "tensor core", "atomic")
        total += bool(wide and (works or moves))
    return total


def bytes_per_access(text: str):
    """A pandas frame of global memory accesses: `kind`, `bytes` (per thread), `instructions`.

    Asynchronous copies count when their size stands in the instruction: bulk copies (TMA) have
    theirs in a register or descriptor, and are left out.
    """
    import pandas as pd

    totals = collections.Counter()
    for instruction in instructions(text):
        what = kind(instruction)
        if what in ("load global", "store global"):
            totals[what, access_bytes(instruction)] += 1
        elif what == "async copy" and (size := access_bytes(instruction)):
            totals[what, size] += 1
    rows = [(*key, totals[key]) for key in sorted(totals, key=lambda k: (KINDS.index(k[0]), k[1]))]
    return pd.DataFrame(rows, columns=["kind", "bytes", "instructions"])


def access_bytes(instruction: Instruction) -> int:
    """Bytes a load, store or asynchronous copy moves for one thread; 0: the text does not say."""
    opcode = instruction.opcode
    if opcode.startswith("cp.async."):
        size = re.search(r"\]\s*,\s*\[[^]]*\]\s*,\s*(0x[0-9a-f]+|\d+)", instruction.operands)
        return int(size[1], 0) if size and ".bulk" not in opcode else 0
    if opcode[0].islower():
        vector = re.search(r"\.v(\d)\b", opcode)
        bits = re.search(r"\.[bsuf](\d+)$", opcode)
        return (int(vector[1]) if vector else 1) * int(bits[1]) // 8 if bits else 0
    bits = re.search(r"\.[US]?(8|16|64|128|256)\b", opcode)
    return int(bits[1]) // 8 if bits else 4  # SASS names every width but 32 bits
