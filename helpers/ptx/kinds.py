"""The kinds of PTX and SASS instructions: which unit of an SM executes them."""

import dataclasses
import re

KINDS = (
    "tensor core",
    "fp64",
    "fp32",
    "fp16/bf16",
    "special function",
    "integer",
    "conversion",
    "move",
    "predicate",
    "branch",
    *(f"{what} {space}" for space in ("global", "shared") for what in ("load", "store")),
    "async copy",
    "load local",
    "store local",
    "load constant",  # PTX: ld.param, ld.const; a kernel's arguments lie in constant memory
    "load generic",
    "store generic",
    "store parameter",  # for a function that was not inlined
    "tensor memory",
    "atomic",
    "shuffle",
    "warp vote/reduce",
    "barrier",  # also fences and waiting for asynchronous work
    "cache hint",
    "other",  # NOP, sleep
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its predicate ("@%p1", "@!P0" or ""), full opcode, and operands."""

    predicate: str
    opcode: str
    operands: str


_SYNC = "bar barrier mbarrier membar fence griddepcontrol setmaxnreg clusterlaunchcontrol".split()
_BRANCH = "bra brx call ret exit trap brkpt".split()
_VOTE = "vote match redux elect activemask".split()
_HINT = "prefetch prefetchu applypriority discard createpolicy".split()
_PREDICATE = "selp slct set setp testp".split()
_MOVE = "mov mapa getctarank isspacep istypep alloca stackrestore stacksave".split()
_ALWAYS_SPECIAL = "ex2 lg2 sin cos tanh".split()
_APPROXIMATE = "rcp rsqrt sqrt".split()
_ARITHMETIC = (
    "add addc sub subc mul mul24 mad madc mad24 fma div rem abs neg min max sad popc clz bfind "
    "fns brev bfe bfi bmsk szext dp2a dp4a and or xor not cnot lop3 shf shl shr prmt copysign"
).split()
_SPACES = {"param": "constant", "const": "constant"}


def _ptx_kind(opcode: str) -> str:
    base, *parts = re.split(r"\.|::", opcode)
    if base in ("mma", "wmma", "wgmma", "tcgen05") and parts[0] not in ("load", "store"):
        if base == "mma" or parts[0].startswith("mma"):
            return "tensor core"
        waits = ("fence", "commit_group", "wait_group", "commit", "wait")
        return "barrier" if parts[0] in waits else "tensor memory"
    if base == "cp":
        waits = {"commit_group", "wait_group", "wait_all", "mbarrier"} & set(parts[1:3])
        return "barrier" if waits else "cache hint" if "prefetch" in parts else "async copy"
    if base in ("ldmatrix", "stmatrix", "wmma", "ld", "ldu", "st", "movmatrix"):
        if base == "movmatrix":
            return "shuffle"
        loads = base.startswith("ld") or (base == "wmma" and parts[0] == "load")
        space = next((p for p in parts if p in _SPACE_NAMES), "generic")
        if not loads:
            return "store parameter" if space == "param" else f"store {space}"
        return f"load {_SPACES.get(space, space)}"
    if base in ("atom", "red", "multimem"):
        return "atomic"
    if base in _PREDICATE or parts[-1:] == ["pred"]:
        return "fp64" if base in ("setp", "set", "testp") and "f64" in parts else "predicate"
    if base in _ALWAYS_SPECIAL or (base in _APPROXIMATE and "approx" in parts):
        return "special function"
    if base in (*_ARITHMETIC, *_APPROXIMATE):
        return _arithmetic(parts)
    return _SIMPLE.get(base, "other")


_SPACE_NAMES = ("global", "shared", "local", "param", "const")
_SIMPLE = {"cvt": "conversion", "cvta": "conversion", "shfl": "shuffle"}
_SIMPLE |= dict.fromkeys(_SYNC, "barrier") | dict.fromkeys(_BRANCH, "branch")
_SIMPLE |= dict.fromkeys(_VOTE, "warp vote/reduce") | dict.fromkeys(_HINT, "cache hint")
_SIMPLE |= dict.fromkeys(_MOVE, "move")


def _arithmetic(parts: list[str]) -> str:
    if "f64" in parts:
        return "fp64"
    if any(part in ("f32", "f32x2") for part in parts):
        return "fp32"
    return "fp16/bf16" if any(re.match(r"b?f16|e\dm\d", part) for part in parts) else "integer"


_SASS_KINDS = {
    "fp64": "DADD DFMA DMUL DSETP DMNMX",
    "fp32": "FADD FADD2 FADD32I FCHK FFMA FFMA2 FFMA32I FMNMX FMNMX3 FMUL FMUL2 FMUL32I FSWZADD",
    "fp16/bf16": "HADD2 HADD2_32I HFMA2 HFMA2_32I HMNMX2 HMUL2 HMUL2_32I",
    "special function": "MUFU",
    "integer": "BFE BFI BMSK BREV FLO IABS IADD IADD2 IADD3 IADD32I IDP IDP4A IMAD IMAD32I IMNMX "
    "IMUL ISCADD LEA LOP LOP3 LOP32I POPC PRMT SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VIADD "
    "VIADDMNMX VIMNMX VIMNMX3 VHMNMX XMAD",
    "conversion": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP",
    "move": "B2R CS2R MOV MOV32I MOVM P2R R2B R2P R2UR S2R S2UR",
    "predicate": "FSEL FSET FSETP HSET2 HSETP2 ISETP PLOP3 PSETP SEL",
    "branch": "BMOV BPT BRA BREAK BRX BSSY BSYNC CALL EXIT JMP JMX KILL RET RPCMOV YIELD",
    "load global": "LDG",
    "store global": "STG",
    "load shared": "LDS LDSM",
    "store shared": "STS STSM",
    "async copy": "LDGSTS BLKCP TMALDG TMASTG TMAREDG BLKRED STAS",
    "load local": "LDL",
    "store local": "STL",
    "load constant": "LDC LDCU",
    "load generic": "LD",
    "store generic": "ST",
    "tensor memory": "LDTM STTM TCCP TCSHIFT TCATOMSWS",
    "atomic": "ATOM ATOMG ATOMS RED REDAS REDG REDS",
    "shuffle": "SHFL",
    "warp vote/reduce": "CREDUX ELECT MATCH REDUX VOTE VOTEU",
    "barrier": "ACQBULK ARRIVES BAR CGABAR_ARV CGABAR_WAIT CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR "
    "FENCE LDGDEPBAR MEMBAR PREEXIT SYNCS TCBAR TMACMDFLUSH WARPGROUP WARPSYNC",
    "cache hint": "BLKPF CCTL CCTLL TMACCTL TMAPF",
}
_BY_MNEMONIC = {word: kind for kind, words in _SASS_KINDS.items() for word in words.split()}


def _sass_kind(instruction: Instruction) -> str:
    base, *parts = instruction.opcode.split(".")
    if base.endswith("MMA"):
        return "tensor core"
    # The compiler also moves through whichever arithmetic unit is free.
    if parts[:1] == ["MOV"] or (base == "HFMA2" and ", -RZ, RZ, " in instruction.operands):
        return "move"
    # U: the same on the scalar ("uniform") unit that all threads of a warp share.
    return _BY_MNEMONIC.get(base) or _BY_MNEMONIC.get(base.removeprefix("U"), "other")


def kind(instruction: Instruction) -> str:
    """One of `KINDS`. Arithmetic goes by the type it computes in, compares of fp64 included."""
    if instruction.opcode[0].isupper():
        return _sass_kind(instruction)
    return _ptx_kind(instruction.opcode)
