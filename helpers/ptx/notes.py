"""PTX with every instruction explained in a few English words."""

import re
import struct

from helpers.ptx.kinds import Instruction, kind
from helpers.ptx.text import access_bytes, instructions

WIDTH = 58  # columns of code before the explanations; longer lines push theirs to the right

_SPECIAL_REGISTERS = {
    "ctaid": "block index",
    "nctaid": "blocks in the grid",
    "tid": "thread index",
    "ntid": "threads per block",
    "laneid": "lane: the thread's place in its warp",
    "warpid": "warp's place on the SM",
    "clusterid": "cluster index",
    "cluster_ctaid": "block index in the cluster",
    "cluster_ctarank": "block's rank in the cluster",
    "smid": "number of the SM",
    "clock": "clock counter",
    "clock64": "clock counter",
    "globaltimer": "time in nanoseconds",
    "activemask": "mask of the active lanes",
    "lanemask_lt": "mask of the lower lanes",
    "dynamic_smem_size": "bytes of dynamic shared memory",
}
_VERBS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "mad": "multiply-add",
    "fma": "multiply-add",
    "div": "divide",
    "rem": "remainder",
    "abs": "absolute value",
    "neg": "negate",
    "min": "minimum",
    "max": "maximum",
    "and": "bitwise and",
    "or": "bitwise or",
    "xor": "bitwise exclusive or",
    "not": "bitwise not",
    "shl": "shift left",
    "shr": "shift right",
    "shf": "funnel shift",
    "rcp": "reciprocal",
    "sqrt": "square root",
    "rsqrt": "1 / square root",
    "ex2": "2 to the power",
    "lg2": "logarithm to base 2",
    "sin": "sine",
    "cos": "cosine",
    "tanh": "tanh",
    "bfe": "take out a bit field",
    "bfi": "put in a bit field",
    "prmt": "rearrange bytes",
    "lop3": "bitwise logic of three inputs",
    "popc": "count the ones",
    "clz": "count leading zeros",
    "brev": "reverse the bits",
    "copysign": "copy a sign",
    "setp": "compare",
    "selp": "select one of two by a predicate",
}
_COMPARISONS = {"eq": "=", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<"}
_COMPARISONS |= {"ls": "<=", "hi": ">", "hs": ">=", "equ": "=", "neu": "!=", "ltu": "<"}
_COMPARISONS |= {"leu": "<=", "gtu": ">", "geu": ">=", "nan": "is one NaN:", "num": "is no NaN:"}
_FIXED = {
    "bra": "jump to {0}",
    "ret": "return: the thread is done",
    "exit": "the thread is done",
    "trap": "stop with an error",
    "call": "call a function that was not inlined",
    "bar": "wait for all threads of the block",
    "barrier": "wait for all threads of the block or cluster",
    "membar": "order memory accesses",
    "fence": "order memory accesses",
    "cvta": "turn an address from one address space into another's",
    "ldmatrix": "load 8 x 8 tiles from shared memory, laid out for the tensor cores",
    "stmatrix": "store 8 x 8 tiles to shared memory from the tensor cores' layout",
    "redux": "reduce over the warp",
    "vote": "combine a flag over the warp",
    "match": "find the lanes with the same value",
    "elect": "choose one lane of the warp",
    "activemask": "mask of the active lanes",
    "griddepcontrol": "wait for, or release, the next kernel",
    "setmaxnreg": "change the warps' share of registers",
    "prefetch": "ask for data ahead of time",
    "nanosleep": "sleep for a moment",
}
_SHUFFLES = {"bfly": "the lane with the index's bits flipped (xor)", "idx": "a given lane"}
_SHUFFLES |= {"up": "a lower lane", "down": "a higher lane"}


def annotate(ptx: str) -> str:
    """The text with " // what it does" behind every instruction; the compiler's comments dropped,
    and so are a debugger's tables.

    Labels and directives stay. Constants in hexadecimal are given in decimal too.
    """
    lines, meanings = [], {}
    for line in _lines(ptx):
        found = [] if line.lstrip().startswith(".") else instructions(line)
        if not found:
            if line.strip() or (lines and lines[-1].strip()):
                lines.append(line)
            continue
        notes = "; ".join(_explain(instruction, meanings) for instruction in found)
        lines.append(f"{line:{WIDTH}} // {notes}")
    return "\n".join(lines).strip("\n")


def _lines(ptx: str):
    """Lines without comments; an instruction that runs over several lines is made one."""
    ptx = re.sub(r"/\*.*?\*/|\0", "", ptx, flags=re.S).expandtabs(4)
    ptx = re.sub(r"(?m)^ *\.loc .*\n", "", ptx)
    ptx = re.split(r"(?m)^ *\.(?:file|section) ", ptx)[0]  # a debugger's tables, at the end
    pending = ""
    for line in ptx.splitlines():
        code = line.split("//", 1)[0].rstrip()
        if not code.strip() and line.strip():
            continue  # nothing but a comment
        if pending:
            code = f"{pending} {code.strip()}"
        # An opcode has begun when the line starts like one, and ends with its semicolon.
        begun = re.match(r"\s*(@!?%?\w+\s+)?[a-z][\w.:]*[\s(]", code) and ";" not in code
        if begun and not code.rstrip().endswith(":"):
            pending = code
            continue
        pending = ""
        yield re.sub(r"(?<=\S) {2,}", " ", code)


def _explain(instruction: Instruction, meanings: dict[str, str]) -> str:
    text = _action(instruction, meanings)
    constants = [f"{name} = {value:.6g}" for name, value in _constants(instruction.operands)]
    if constants:
        text += f" ({', '.join(constants)})"
    if instruction.predicate:
        condition = instruction.predicate.lstrip("@")
        text = f"if {condition.replace('!', 'not ')}: {text}"
    return text


def _constants(operands: str) -> list[tuple[str, float]]:
    found = []
    for name in re.findall(r"\b0[fF][0-9a-fA-F]{8}\b|\b0[dD][0-9a-fA-F]{16}\b", operands):
        layout = ">f" if name[1] in "fF" else ">d"
        found.append((name, struct.unpack(layout, bytes.fromhex(name[2:]))[0]))
    return found


def _action(instruction: Instruction, meanings: dict[str, str]) -> str:
    base, *parts = re.split(r"\.|::", instruction.opcode)
    operands = [part.strip() for part in instruction.operands.split(",")]
    what = kind(instruction)
    meaning = _meaning(base, parts, operands, meanings)
    if not instruction.predicate:
        # A register that is written again means something else.
        meanings.pop(operands[0], None)
        if meaning:
            meanings[operands[0]] = meaning
    if meaning:
        return meaning
    if what == "tensor core":
        shape = re.search(r"m\d+n\d+k\d+", instruction.opcode)
        return f"tensor cores: multiply tiles and add{f' ({shape[0]})' if shape else ''}"
    if what.startswith(("load ", "store ")) and base in ("ld", "ldu", "st"):
        size = access_bytes(instruction)
        verb, space = what.split(" ", 1)
        if space == "constant" and "param" in parts:
            return f"read an argument, {size} bytes"
        return f"{verb} {size} bytes {'from' if verb == 'load' else 'to'} {space} memory"
    if what == "async copy":
        size = access_bytes(instruction)
        amount = f"{size} bytes" if size else "a tile"
        return f"copy {amount} between global and shared memory in the background"
    if what == "atomic":
        operation = next((p for p in parts if p in (*_VERBS, "exch", "cas", "inc", "dec")), "")
        word = _VERBS.get(operation, operation)
        return f"atomic {word}: read, change and write, undisturbed by others"
    if base == "shfl":
        return f"take the value of {_SHUFFLES[parts[1]]} of the warp"
    if base in ("mbarrier", "cp", "wgmma", "tcgen05") and what == "barrier":
        return f"asynchronous work: {' '.join(parts[:2]).replace('_', ' ')}"
    if what == "tensor memory":
        return f"tensor memory: {parts[0].replace('_', ' ')}"
    if base in _FIXED:
        return _FIXED[base].format(*operands)
    if base == "cvt":
        types = [p for p in parts if _type(p)]
        return f"convert {_type(types[-1])} to {_type(types[0])}"
    if base == "mov":
        return _move(parts, operands)
    if base == "setp":
        sign = _COMPARISONS.get(parts[0], parts[0])
        return _typed(parts, what, f"{operands[0]} = ({operands[1]} {sign} {operands[2]})")
    if base in _VERBS:
        approximate = "approximate " if {"approx", "full"} & set(parts) else ""
        return _typed(parts, what, approximate + _VERBS[base])
    return f"{base}: {what}"


def _meaning(base: str, parts: list, operands: list, meanings: dict) -> str | None:
    """What a result stands for, where a few words name it: indices and arguments."""
    if base == "mov" and (register := re.fullmatch(r"%(\w+?)(?:\.([xyz]))?", operands[-1])):
        name = _SPECIAL_REGISTERS.get(register[1])
        return name and f"{name} {register[2] or ''}".strip()
    if base == "ld" and "param" in parts and (found := re.search(r"_param_(\d+)\]", operands[-1])):
        return f"argument {found[1]}"
    if base == "cvta" and (known := meanings.get(operands[-1])):
        return f"{known}, as an address in global memory"
    if base == "mad" and parts[0] == "lo":
        known = [meanings.get(operand) for operand in operands[1:4]]
        if all(known) and not any(" * " in word for word in known):
            return f"{known[0]} * {known[1]} + {known[2]}"
    return None


def _move(parts: list[str], operands: list[str]) -> str:
    joined = ", ".join(operands)
    if joined.startswith("{"):
        return "split a register into its parts"
    if "{" in joined:
        return "join parts into one register"
    if re.fullmatch(r"[\w$]+", operands[1]) and not re.match(r"\d", operands[1]):
        return "address of a variable"
    constant = re.match(r"-?\d", operands[1])
    return "set to a constant" if constant else "copy a register"


def _type(part: str) -> str | None:
    names = {"f16x2": "two 16-bit floats", "bf16x2": "two bfloat16", "bf16": "bfloat16"}
    names |= {"tf32": "tf32", "pred": "predicate", "f32x2": "two 32-bit floats"}
    if part in names:
        return names[part]
    if match := re.fullmatch(r"([fsub])(\d+)", part):
        kinds = {"f": "float", "s": "integer", "u": "unsigned integer", "b": "word"}
        return f"{match[2]}-bit {kinds[match[1]]}"
    return "8-bit float" if re.fullmatch(r"e[45]m[23](x2)?", part) else None


def _typed(parts: list[str], what: str, action: str) -> str:
    types = [name for name in map(_type, parts) if name]
    unit = {"fp64": " on the fp64 unit", "special function": ", special function unit"}
    return f"{f'{types[-1]}: ' if types else ''}{action}{unit.get(what, '')}"
