"""A kernel's signature is read from its text, and what it is called with is checked by it."""

import ctypes

import numpy as np
import pytest
import torch

from helpers import cuda_source
from helpers.cuda_source import Parameter


def signature(text: str, name: str = "k", **defines: str) -> list[str]:
    found = cuda_source.parameters(text, name, tuple(defines.items()))
    return [f"{p.type}{'*' * p.pointer} {p.name}" for p in found]


def kernel(inside: str) -> str:
    return f'extern "C" __global__ void k({inside}) {{}}'


@pytest.mark.parametrize(
    "inside, expected",
    [
        ("", []),
        ("void", []),
        ("  ", []),
        ("int n", ["int n"]),
        ("const float* x", ["float* x"]),
        ("float const *x", ["float* x"]),
        ("float *__restrict__ x, const float* const y", ["float* x", "float* y"]),
        ("double* __restrict x, volatile int* flag", ["double* x", "int* flag"]),
        ("const  unsigned   int\n n", ["unsigned int n"]),
        ("unsigned n, size_t m, long long int l", ["unsigned n", "size_t m", "long long int l"]),
        ("unsigned char* b, int8_t c, bool d", ["unsigned char* b", "int8_t c", "bool d"]),
        (
            "__half* h, __nv_bfloat162* b, float4* f",
            ["__half* h", "__nv_bfloat162* b", "float4* f"],
        ),
        ("void* any, const void* other", ["void* any", "void* other"]),
        ("int /* rows, columns */ n, // of (x)\n float* x", ["int n", "float* x"]),
        ("int int32, float* floats, int constant", ["int int32", "float* floats", "int constant"]),
    ],
)
def test_parameters_in_order(inside, expected):
    assert signature(kernel(inside)) == expected


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void k",
        'extern "C"\n__global__\nvoid\nk\n',
        "static __global__ void k",
        "__global__ static void k",
        "void __global__ k",
        "__global__ void __launch_bounds__(256) k",
        "__global__ void __launch_bounds__(max(1, 2), 2) k",
        "__launch_bounds__(256) __global__ void k",
        "__global__ __launch_bounds__(f(3), 2) void k",
        "__global__ /* why */ void // where\n k",
    ],
)
def test_the_head_may_be_written_in_many_ways(head):
    assert signature(head + "(float* x, int n) { x[0] = n; }") == ["float* x", "int n"]


@pytest.mark.parametrize(
    "inside",
    [
        "T* x",
        "float** x",
        "float x[]",
        "float x[4]",
        "float& x",
        "dim3 d",
        "float4 v",  # a vector by value
        "__half h",
        "void v",
        "long n",  # 8 bytes on Linux, 4 on Windows
        "std::int32_t n",
        "int n = 3",
        "float*",
        "int",
        "float* x,",
        "unsigned float* x",
        "const* x",
    ],
)
def test_types_that_are_not_known_are_refused_by_name(inside):
    with pytest.raises(ValueError, match="type that is not known here") as refusal:
        signature(kernel(inside))
    assert "float4" in str(refusal.value) and "defines" in str(refusal.value)


def test_a_template_is_refused():
    with pytest.raises(ValueError, match=r"`const T\* x` has a type"):
        signature("template <typename T> __global__ void k(const T* x, int n) {}")


def test_macros_stand_for_types():
    text = kernel("const scalar* x, scalars* y, index n")
    with pytest.raises(ValueError, match="scalar"):
        signature(text)
    defines = dict(scalar="__half", scalars="__half2", index="long long")
    assert signature(text, **defines) == ["__half* x", "__half2* y", "long long n"]
    assert signature(kernel("tile tile_size"), tile="int") == ["int tile_size"]


def test_several_kernels_and_what_only_looks_like_one():
    text = """
    // __global__ void old(int n) {}
    /* __global__ void older(int n) {} */
    const char* said = "__global__ void quoted(int n) {}";
    __global__ void first(int n);  // a prototype
    __device__ float helper(float v) { return v; }
    __global__ void first(int n) {}
    extern "C" __global__ void second(float* x) {}
    """
    assert list(cuda_source.kernels(text)) == ["first", "second"]
    assert signature(text, "first") == ["int n"]
    assert signature(text, "second") == ["float* x"]
    with pytest.raises(ValueError, match="no __global__ function 'helper'.*it has first, second"):
        signature(text, "helper")
    with pytest.raises(ValueError, match="it has none"):
        signature("int main() {}", "main")


def test_names_that_the_text_gives_to_types():
    for named in ("#define T float", "using T = float;", "typedef float T;"):
        assert signature(named + "\n" + kernel("const T* x, int n")) == ["float* x", "int n"]
    assert signature("#define T float\n" + kernel("T* x"), T="__half") == ["__half* x"]


def test_two_definitions_of_one_name_are_refused_unless_they_agree():
    both = kernel("float* x") + "\n#else\n"
    with pytest.raises(ValueError, match="two kernels"):
        signature(both + kernel("__half* x"))
    assert signature(both + kernel("float* x")) == ["float* x"]


@pytest.mark.parametrize("view", [torch._neg_view, lambda x: x.to_sparse()])
def test_tensors_whose_memory_holds_something_else_are_refused(view):
    parameter = cuda_source.Parameter("x", "float", True)
    with pytest.raises((TypeError, ValueError), match="^x "):
        parameter.bind(view(torch.ones(3)))


def test_sizes():
    sizes = cuda_source.sizes
    assert sizes("grid", np.int64(7)) == (7, 1, 1) == sizes("grid", [7])
    assert all(type(size) is int for size in sizes("block", (np.int32(2), 3)))
    for wrong in (True, 1.0, 0, -1, (), (1, 1, 1, 1), "8", None, (1, 2.0), 2**31):
        with pytest.raises(ValueError, match="whole numbers"):
            sizes("grid", wrong)


def test_comments_and_strings_become_spaces_in_place():
    text = 'a // b "c"\n/* d\n e */ f("g // h"); "i\\"j" /* k " */ l'
    code = cuda_source.code_alone(text)
    assert len(code) == len(text) and code.count("\n") == text.count("\n")
    assert code.split() == ["a", "f(", ");", "l"]
    assert all(code[k] in (" ", character) for k, character in enumerate(text))


THREE = """#include <cuda_fp16.h>
// Not of any kernel.

// Doubles.
// Two lines.
extern "C" __global__ void one(float* x) {
    // an unmatched { in a comment, and one in a string
    if (x[0] > 0) { printf("{"); }
}

__global__ void two(float* x);
__device__ float helper(float v) { return v; }
__global__ void __launch_bounds__(128)
two(float* x) { x[0] = helper(x[1]); }
__global__ void twofold(float* x) {}
"""


def test_the_text_of_one_kernel_has_its_comment_and_nothing_else():
    one = cuda_source.function(THREE, "one")
    assert one.startswith("// Doubles.\n// Two lines.\nextern") and one.endswith(
        'printf("{"); }\n}'
    )
    two = cuda_source.function(THREE, "two")
    assert two.startswith("__global__ void __launch_bounds__(128)")
    assert two.endswith("{ x[0] = helper(x[1]); }")
    assert cuda_source.function(THREE, "twofold") == "__global__ void twofold(float* x) {}"
    for name in ("helper", "tw", "x"):
        with pytest.raises(ValueError, match=f"no __global__ function '{name}'"):
            cuda_source.function(THREE, name)


@pytest.mark.parametrize(
    "kind, value, expected",
    [
        ("int", -(2**31), ctypes.c_int32),
        ("int", np.int64(7), ctypes.c_int32),
        ("int", True, ctypes.c_int32),
        ("unsigned", 2**32 - 1, ctypes.c_uint32),
        ("long long", -(2**63), ctypes.c_int64),
        ("size_t", 2**64 - 1, ctypes.c_uint64),
        ("char", -128, ctypes.c_int8),
        ("bool", False, ctypes.c_bool),
        ("float", 0.1, ctypes.c_float),
        ("float", 2, ctypes.c_float),
        ("float", float("inf"), ctypes.c_float),
        ("double", 0.1, ctypes.c_double),
    ],
)
def test_numbers_become_the_kernels_own(kind, value, expected):
    bound = Parameter("n", kind, False).bind(value)
    assert type(bound) is expected
    assert bound.value == expected(value).value
    assert float(bound.value) == pytest.approx(float(value))


@pytest.mark.parametrize(
    "kind, value",
    [
        ("int", 2**31),
        ("int", -(2**31) - 1),
        ("int", np.int64(2**40)),
        ("unsigned", -1),
        ("unsigned int", 2**32),
        ("long long", 2**63),
        ("size_t", -1),
        ("unsigned char", 256),
        ("short", 32768),
        ("bool", 2),
        ("float", 1e39),
        ("float", -(10**400)),
        ("double", 10**400),
    ],
)
def test_numbers_that_do_not_fit_are_refused(kind, value):
    with pytest.raises(OverflowError):
        Parameter("n", kind, False).bind(value)


@pytest.mark.parametrize("value", [1.5, "3", None, [3], np.float32(2), np.zeros(2)])
def test_what_is_no_whole_number_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^n is a number \(int\), not "):
        Parameter("n", "int", False).bind(value)


@pytest.mark.case("E13")
def test_pointers_take_tensors_of_their_dtype_alone():
    """Case E13: half-precision numbers read as floats are junk, without a word."""
    x = torch.zeros(4)
    pointer = Parameter("x", "float", True)
    assert pointer.bind(x) is x
    assert Parameter("x", "float4", True).bind(x) is x
    for other in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(
            TypeError, match=rf"x is a float\*: it takes torch.float32, not {other}"
        ):
            pointer.bind(x.to(other))
    for value in (None, 3, x.data_ptr(), [0.0], x.numpy()):
        with pytest.raises(TypeError, match=r"x is a pointer \(float\*\): it takes a tensor"):
            pointer.bind(value)
    with pytest.raises(TypeError, match=r"n is a number \(int\), not a tensor"):
        Parameter("n", "int", False).bind(torch.tensor(3))


@pytest.mark.parametrize("kind", cuda_source.TYPES)
def test_every_type_has_the_size_of_its_dtype(kind):
    dtype, number = cuda_source.TYPES[kind]
    if number:
        assert ctypes.sizeof(number) == dtype.itemsize
    tensor = torch.zeros(2, dtype=dtype)
    assert Parameter("x", kind, True).bind(tensor) is tensor
    assert Parameter("x", "void", True).bind(tensor) is tensor


def test_a_call_is_bound_by_name_in_order():
    text = kernel("float* x, int n, double scale")
    x = torch.zeros(3)
    bound = cuda_source.bind(text, "k", (x, 3, 0.5))
    assert list(bound) == ["x", "n", "scale"] and bound["x"] is x
    assert (bound["n"].value, bound["scale"].value) == (3, 0.5)
    for arguments in ((), (x, 3), (x, 3, 0.5, 1)):
        with pytest.raises(TypeError, match=rf"k takes 3 .*x, n, scale.*not {len(arguments)}$"):
            cuda_source.bind(text, "k", arguments)
