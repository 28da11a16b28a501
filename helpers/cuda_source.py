"""The signature of a CUDA kernel, read from its text: what it may be called with.

A kernel gets addresses and bits. Nothing on a GPU notices that a `float*` was given half-precision
numbers, or an `int` a number that does not fit, so it is checked here, for every way of running it.
"""

import ctypes
import dataclasses
import functools
import math
import numbers
import operator
import re
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# What a pointer's tensor must hold, what a number becomes, and the types' names in CUDA C++.
_TYPES = (
    (torch.float32, ctypes.c_float, "float"),
    (torch.float32, None, "float2|float3|float4"),
    (torch.float64, ctypes.c_double, "double"),
    (torch.float64, None, "double2|double4"),
    (torch.float16, None, "__half|half|__half2|half2"),
    (torch.bfloat16, None, "__nv_bfloat16|nv_bfloat16|__nv_bfloat162|nv_bfloat162"),
    (torch.bool, ctypes.c_bool, "bool"),
    (torch.int8, ctypes.c_int8, "char|signed char|int8_t"),
    (torch.uint8, ctypes.c_uint8, "unsigned char|uint8_t"),
    (torch.uint8, None, "uchar4"),
    (torch.int16, ctypes.c_int16, "short|int16_t"),
    (torch.int16, None, "short2"),
    (torch.uint16, ctypes.c_uint16, "unsigned short|uint16_t"),
    (torch.int32, ctypes.c_int32, "int|int32_t"),
    (torch.int32, None, "int2|int3|int4"),
    (torch.uint32, ctypes.c_uint32, "unsigned|unsigned int|uint32_t"),
    (torch.uint32, None, "uint2|uint3|uint4"),
    (torch.int64, ctypes.c_int64, "long long|long long int|int64_t"),
    (torch.uint64, ctypes.c_uint64, "unsigned long long|unsigned long long int|uint64_t|size_t"),
)
LIMITS = {"grid": (2**31 - 1, 65_535, 65_535), "block": (1024, 1024, 64)}  # in x, y, z
MAX_THREADS = 1024
TYPES = {name: (dtype, kind) for dtype, kind, names in _TYPES for name in names.split("|")}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: its name, its type without const and *, and whether it points."""

    name: str
    type: str
    pointer: bool

    def bind(self, value) -> torch.Tensor | ctypes._SimpleCData:
        """`value` as the kernel will see it: the tensor itself, or a number of the C type.

        TypeError for another kind or dtype, OverflowError for a number that does not fit.
        """
        dtype, kind = TYPES[self.type] if self.type != "void" else (None, None)
        if self.pointer:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{self.name} is a pointer ({self.type}*): it takes a tensor")
            if dtype not in (None, value.dtype):
                raise TypeError(
                    f"{self.name} is a {self.type}*: it takes {dtype}, not {value.dtype}"
                )
            check_memory(self.name, value)
            return value
        if isinstance(value, torch.Tensor):
            raise TypeError(f"{self.name} is a number ({self.type}), not a tensor")
        try:
            if kind is ctypes.c_bool:  # which would take anything, "False" as true
                operator.index(value)
            bound = kind(value)
        except TypeError:
            raise TypeError(f"{self.name} is a number ({self.type}), not {value!r}") from None
        # ctypes keeps the low bits of whole numbers, and makes large ones infinite, without a word.
        whole = isinstance(value, numbers.Integral) and isinstance(bound.value, int)
        if bound.value != value if whole else math.isinf(bound.value) and not math.isinf(value):
            raise OverflowError(f"{self.name} = {value:,} does not fit the kernel's {self.type}")
        return bound


def check_traced(name: str, tensor: torch.Tensor) -> None:
    """TypeError while PyTorch traces: a launch would be missing in what it writes down."""
    if isinstance(tensor, FakeTensor) or get_proxy_mode() is not None:
        raise TypeError(f"{name} is being traced, and PyTorch cannot look into a kernel's launch")


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """TypeError for a tensor whose numbers are not those that its memory holds, or is traced."""
    check_traced(name, tensor)
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be an ordinary tensor, not {tensor.layout}")
    if tensor.is_neg() or tensor.is_conj():
        resolve = "resolve_neg" if tensor.is_neg() else "resolve_conj"
        raise TypeError(f"{name} is a view whose memory holds other values: call {resolve}() first")


def sizes(what: str, given) -> tuple[int, int, int]:
    """A "grid" or a "block", an int or up to three, as three; ValueError if no GPU takes it."""
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    try:  # NumPy's integers are welcome, True is a slip
        sizes = tuple(0 if isinstance(size, bool) else operator.index(size) for size in sizes)
    except TypeError:
        sizes = ()
    fits = 1 <= len(sizes) <= 3 and all(
        1 <= size <= limit for size, limit in zip(sizes, LIMITS[what], strict=False)
    )
    if not fits:
        limits = ", ".join(f"{limit:,}" for limit in LIMITS[what])
        raise ValueError(f"{what} must be 1 to 3 whole numbers from 1 to ({limits}), not {given}")
    if what == "block" and math.prod(sizes) > MAX_THREADS:
        raise ValueError(f"a block has at most {MAX_THREADS} threads, not {sizes}")
    return (*sizes, 1, 1)[:3]


def code_alone(text: str) -> str:
    """CUDA C++ with spaces for comments and strings: all the rest keeps its place."""
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)


# What may stand between __global__ and the name: void, static, __launch_bounds__(256) …
_KERNEL = re.compile(
    r"__global__\s+((?:(?:void|static|inline|__\w+__(?:\s*\((?:[^()]|\([^()]*\))*\))?)\s*\b)*)"
    r"\b(\w+)\s*\(([^()]*)\)\s*({)?"
)
# Names that a text gives to types: #define T float, using T = float, typedef float T.
_NAMED_TYPES = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\w[\w \t]*?)[ \t]*$"
    r"|\busing\s+(\w+)\s*=\s*(\w[\w\s]*?)\s*;|\btypedef\s+(\w[\w\s]*?)\s+(\w+)\s*;",
    re.MULTILINE,
)


def kernels(text: str) -> dict[str, str]:
    """The `__global__` functions of a text: name -> the text between its parentheses.

    A definition counts before its prototypes. ValueError for two definitions of one name that take
    different parameters: which of them is compiled, a preprocessor would know.
    """
    prototypes, found = {}, {}
    for _, name, inside, body in _KERNEL.findall(code_alone(text)):
        kept = (found if body else prototypes).setdefault(name, inside)
        if body and kept.split() != inside.split():
            raise ValueError(f"this text has two kernels {name!r} with different parameters")
    return prototypes | found


def function(text: str, name: str) -> str:
    """The text of one kernel with the comment above it; ValueError when there is none."""
    code = code_alone(text)
    found = re.search(rf"^[^\n]*\b__global__\b[^;{{]*\b{name}\s*\([^;{{]*{{", code, re.MULTILINE)
    if name not in kernels(text) or not found:
        raise ValueError(f"there is no __global__ function {name!r} in this text")
    above = re.search(r"(?:^//[^\n]*\n)*\Z", text[: found.start()], re.MULTILINE)
    end, depth = found.end(), 1
    while depth and end < len(code):
        depth += {"{": 1, "}": -1}.get(code[end], 0)
        end += 1
    return text[above.start() : end]


@functools.lru_cache
def parameters(
    text: str, kernel: str, defines: tuple[tuple[str, str], ...] = ()
) -> tuple[Parameter, ...]:
    """The parameters of a kernel in order.

    `defines`: (name, value) of the macros that the text is compiled with; names that the text
    itself gives to types are known as well. ValueError when it has no such kernel, or a parameter
    of a type that is not in `TYPES`.
    """
    found = kernels(text)
    if kernel not in found:
        names = ", ".join(found) or "none"
        raise ValueError(f"there is no __global__ function {kernel!r} in this text; it has {names}")
    inside = " ".join(found[kernel].split())
    own = [
        (a or c or f, b or d or e) for a, b, c, d, e, f in _NAMED_TYPES.findall(code_alone(text))
    ]
    for name, value in (*defines, *own):
        inside = re.sub(rf"\b{re.escape(name)}\b", lambda _, value=value: value, inside)
    parts = inside.split(",") if inside not in ("", "void") else []
    return tuple(_parameter(part) for part in parts)


_QUALIFIERS = ("const", "volatile", "__restrict__", "__restrict")


def _parameter(declaration: str) -> Parameter:
    words = re.findall(r"\w+|\S", declaration)
    *kind, name = [word for word in words if word not in _QUALIFIERS] or [""]
    pointer = kind[-1:] == ["*"]
    kind = " ".join(kind[:-1] if pointer else kind)
    known = kind in TYPES and (pointer or TYPES[kind][1]) or (kind == "void" and pointer)
    if not known or not name.isidentifier():
        raise ValueError(
            f"the parameter `{declaration.strip()}` has a type that is not known here: "
            f"known are {', '.join(TYPES)}, pointers to them, and macros given as `defines`"
        )
    return Parameter(name, kind, pointer)


def bind(
    text: str, kernel: str, arguments: Sequence, defines: tuple[tuple[str, str], ...] = ()
) -> dict[str, torch.Tensor | ctypes._SimpleCData]:
    """Name -> argument for one call of a kernel, checked one by one (`Parameter.bind`)."""
    found = parameters(text, kernel, defines)
    if len(found) != len(arguments):
        names = ", ".join(parameter.name for parameter in found)
        raise TypeError(f"{kernel} takes {len(found)} arguments ({names}), not {len(arguments)}")
    return {p.name: p.bind(value) for p, value in zip(found, arguments, strict=True)}
