"""A kernel can neither end the process, nor take its functions' names, nor spoil the cache."""

import ctypes
import re
import shutil
import threading

import numpy
import pytest
import torch
from emulation import needs_emulator

from helpers import cache, emulator
from tests.test_emulator import GELU, floats, link_runtime, run

pytestmark = needs_emulator


def test_launches_from_many_threads():
    right = []
    run(GELU, floats(1), torch.zeros(1))  # compiled once, not by each

    def work(n: int) -> None:
        for _ in range(4):
            counts = run(GELU, floats(n), torch.zeros(n), block=128, grid=24)
            right.append(counts.loads == counts.stores == n)

    threads = [threading.Thread(target=work, args=(3000 + k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 32


TRAPS = ["__trap();", "assert(i % 2 == 0 && x);", "__builtin_trap();", "__builtin_abort();"]


def test_traps():
    body = "".join(f"if (n == {k} && i == 3) {trap}\n" for k, trap in enumerate(TRAPS))
    words = ["__trap()", "assert(i % 2 == 0 && x)", "__builtin_trap()", "__builtin_abort()"]
    for k, word in enumerate(words):
        with pytest.raises(emulator.KernelFault, match=re.escape(word)) as caught:
            run(body, floats(1), torch.zeros(1), n=k)
        assert (caught.value.kind, caught.value.thread) == ("trap", (3, 0, 0))


NAMES = ["sigaction", "munmap", "launch", "current", "now", "warp_time", "index", "tanh", "remove"]


@pytest.mark.parametrize("form", ['extern "C" __global__ void {}', "__global__ void {}"])
def test_kernels_named_like_functions_of_the_process(form):
    # One text: the kernel that is launched is not the only one that has a name.
    text = "\n".join(form.format(name) + "(int* y) { y[threadIdx.x]++; }" for name in NAMES)
    y = torch.zeros(32, dtype=torch.int32)
    for name in ("launch", "index", "tanh"):
        assert emulator.run(text, name, 2, 32, {"y": y}).stores == 64
    assert y.eq(6).all()


@pytest.mark.parametrize(
    "before",
    [
        "__device__ unsigned long long t;", "__device__ int a, b;", "__device__ int* p;",
        "static __device__ float a[3] = {1};", "__device__ __align__(16) float q[4];",
        "__device__ float (*f)(float);", "__device__ const int* p;", "__device__ int q{3};",
    ],
)  # fmt: skip
def test_device_variables_are_refused(before):
    with pytest.raises(emulator.Unsupported, match=r"__device__ variables \(line 2\)"):
        run("", floats(1), floats(1), before="\n" + before)


def test_what_is_no_device_variable():
    before = """#define BOTH __host__ __device__
    struct S {
      int a;
      BOTH S(int b) : a(b) {}
      __device__ S& operator=(const S& o) { a = o.a; return *this; }
      __device__ int operator[](int k) const { return a + k; }
    };
    template <class T = int> __device__ __forceinline__ T f(T x = {}) { return x; }
    __device__ __noinline__
    float g(float x, float y = 3) { return x + y; }
    __constant__ __device__ float c[2] = {1, 2};
    __device__ const float d[2] = {10, 20};"""
    y = torch.zeros(1)
    body = (
        "auto l = [=] __device__ (int k) { return k + n; }; y[0] = l(1) + S(2)[3] + g(c[1], d[1]);"
    )
    run(body, floats(1), y, block=1, n=100, before=before)
    assert y.item() == 101 + 5 + 22


@pytest.mark.parametrize(
    "body, words", [("exit(3);", "exit and abort"), ("y[i] = __activemask();", "__activemask")]
)
def test_other_refusals(body, words):
    with pytest.raises(emulator.Unsupported, match=words):
        run(body, floats(1), floats(1))


def test_large_grids():
    with pytest.raises(emulator.Unsupported, match="at most 2,147,483,648 blocks"):
        run("", floats(1), floats(1), grid=(65536, 65535, 65535))
    with pytest.raises(emulator.Unsupported, match="in the order of a seed"):
        run("", floats(1), floats(1), grid=1 << 25, order=3)
    with pytest.raises(emulator.KernelFault) as caught:
        run("", floats(1), floats(1), grid=(1 << 30, 2), order="reverse", timeout_s=0.3)
    assert caught.value.kind == "timeout" and caught.value.block[1] == 1


def test_an_undefined_function_is_a_compile_error():
    with pytest.raises(emulator.CompileError) as caught:
        run("y[i] = f(x[i]);", floats(1), floats(1), before="__device__ float f(float);")
    assert str(caught.value) == "kernel.cu:3: 'f(float)' is nowhere defined"


@pytest.mark.parametrize("ending", [".so", "-counts.o"])
def test_a_broken_file_in_the_cache_is_made_again(monkeypatch, tmp_path, ending):
    body = "y[i] = x[i] + 1;"
    whole, broken = (tmp_path / name / "emulator" for name in ("whole", "broken"))
    link_runtime(whole, "*")
    link_runtime(broken, "*")
    monkeypatch.setenv("LECTURES_CACHE", str(whole.parent))
    run(body, floats(32), torch.zeros(32))
    (path,) = whole.glob(f"*{ending}")
    (broken / path.name).unlink(missing_ok=True)
    (broken / path.name).write_bytes(b"")
    # In another folder: what a process has loaded it does not load again.
    monkeypatch.setenv("LECTURES_CACHE", str(broken.parent))
    run(body, floats(32), y := torch.zeros(32))
    assert y.equal(floats(32) + 1)
    assert (broken / path.name).read_bytes()[:4] == b"\x7fELF"


def test_a_cache_from_which_nothing_may_be_executed(monkeypatch):
    def refuse(path):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(emulator.library, "load", refuse)
    with pytest.raises(emulator.Unsupported, match="cannot be loaded: failed to map"):
        run("y[i] = x[i];", floats(32), floats(32))


def test_without_objcopy(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "objcopy" else which(name))
    monkeypatch.setattr(cache, "file", lambda *_: pytest.fail("it must not compile"))
    with pytest.raises(emulator.Unsupported, match="needs objcopy"):
        run("y[i] = x[i];", floats(32), floats(32))


def test_tensors_over_overlapping_memory():
    array = numpy.arange(10, dtype=numpy.float32)
    x, y = torch.from_numpy(array[:9]), torch.from_numpy(array[1:])
    run("if (i == 0) y[0] = 50; __syncthreads(); if (i == 1) y[1] = x[1];", x, y)
    assert array.tolist() == [0, 50, 50, *range(3, 10)]
    with pytest.raises(emulator.KernelFault, match="element 9 of x, which has 9"):
        run("y[0] = x[n];", torch.from_numpy(array[:9].copy()), y, block=1)


@pytest.mark.parametrize("view", ["neg", "conj"])
def test_views_whose_memory_holds_other_values_are_refused(view):
    x = torch.zeros(32, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=f"resolve_{view}"):
        run("y[i] = 0;", x.imag if view == "neg" else x, torch.zeros(32))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"n": None}, "takes 3 arguments, not 2"),
        ({"y": ctypes.c_int(1)}, "y is a number, but k takes a pointer"),
        ({"n": torch.ones(1)}, "n is a tensor, but k takes a number"),
        ({"n": ctypes.c_float(1)}, "n is a c_float, but k takes a number of 4 bytes"),
        ({"n": ctypes.c_longlong(1)}, "n is a c_long"),
        ({"n": 1}, "n must be a tensor or a ctypes number"),
    ],
)
def test_arguments_that_do_not_fit(changes, words):
    text = 'extern "C" __global__ void k(const float* x, float* y, int n) { y[0] = x[0]; }'
    arguments = {"x": floats(1), "y": floats(1), "n": ctypes.c_int(1), **changes}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises(TypeError, match=re.escape(words)):
        emulator.run(text, "k", 1, 1, arguments)
