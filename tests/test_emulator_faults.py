"""Wrong kernels: each is caught, named with its block and thread, and leaves the tensors alone."""

import os
import re
import shutil
import signal
import threading
import time

import pytest
import torch
from emulation import needs_emulator

from helpers import emulator
from tests.test_emulator import TILED, floats, number, run

pytestmark = needs_emulator


def fault(body, *, n=32, x=None, **options) -> emulator.KernelFault:
    """The fault of a kernel's body; the tensors must be as they were."""
    x = torch.arange(float(n)) if x is None else x
    y, before = torch.full((n,), 7.0), x.clone()
    with pytest.raises(emulator.KernelFault) as caught:
        run(body, x, y, n=n, **options)
    assert x.equal(before) and y.eq(7).all()
    assert caught.value.kernel == "k" and "\n" not in str(caught.value)
    return caught.value


@pytest.mark.case("B07")
@pytest.mark.parametrize(
    "body, thread, words",
    [
        ("y[i] = x[i];", 33, "reads 4 bytes at element 33 of x, which has 33 (kernel.cu:3)"),
        ("y[i + 1] = x[0];", 32, "writes 4 bytes at element 33 of y, which has 33 (kernel.cu:3)"),
        ("y[i] = x[i - 1];", 0, "reads 4 bytes at element -1 of x"),
        ("y[i] = ((float*)0)[i];", 0, "reads 4 bytes through a null pointer"),
        ("y[i] = x[i + (1LL << 40)];", 0, "reads 4 bytes at an address of no argument"),
        ("atomicAdd(y + n, 1.0f);", 0, "updates 4 bytes at element 33 of y"),
        ("((float4*)y)[i] = make_float4(0, 0, 0, 0);", 8, "writes 16 bytes at element 32 of y"),
    ],
)
def test_out_of_bounds(body, thread, words):
    if not shutil.which("addr2line"):
        words = words.removesuffix(" (kernel.cu:3)")
    found = fault(body, n=33, block=64)
    assert (found.kind, found.block, found.thread) == ("out of bounds", (0, 0, 0), (thread, 0, 0))
    assert words in str(found)


def test_the_block_and_the_thread_in_three_dimensions():
    body = "if (threadIdx.z == 1 && threadIdx.x == 3 && blockIdx.y == 1) y[n] = 1;"
    found = fault(body, block=(4, 2, 2), grid=(1, 2))
    assert (found.block, found.thread) == ((0, 1, 0), (3, 0, 1))


@pytest.mark.parametrize(
    "body, thread, words",
    [
        ("__shared__ float s[32]; s[i + 1] = x[i]; __syncthreads(); y[i] = s[i];", 31,
         "index 32 is outside an array of type float [32] (kernel.cu:3)"),
        ("extern __shared__ float s[]; s[i + 1] = x[i]; __syncthreads(); y[i] = s[i];", 31,
         "writes 4 bytes at byte 128 of the dynamic shared memory, which has 128"),
        ("float local[4] = {1, 2, 3, 4}; y[i] = local[i];", 4, "index 4 is outside an array"),
    ],
)  # fmt: skip
def test_overrun_arrays(body, thread, words):
    found = fault(body, shared_bytes=128)
    assert (found.kind, found.thread) == ("out of bounds", (thread, 0, 0)) and words in str(found)


def test_misaligned():
    found = fault("float4 v = *(const float4*)(x + 1); y[i] = v.x;")
    assert found.kind == "misaligned access"
    assert "reads 16 bytes at byte 4 of x, an address that is no multiple of 16" in str(found)


@pytest.mark.parametrize(
    "body, kind, words",
    [
        ("if (i < 16) __syncthreads();", "barrier", "16 never come: thread (16, 0, 0) has ended"),
        ("if (i < 8) __syncthreads(); else\n__syncthreads();", "barrier",
         "24 never come: thread (8, 0, 0) waits at line 4"),
        ("float v = x[i]; if (i < 16) y[i] = __shfl_down_sync(~0u, v, 8);", "warp operation",
         "lanes of mask 0xffffffff, but 16 of them never come: thread (16, 0, 0) has ended"),
        ("if (i < 16) __syncwarp(); else __syncthreads();", "warp operation", "16 of them"),
        ("y[i] = __shfl_sync(0xffff, x[i], 0);", "warp operation", "leaves out its lane"),
        ("if (i < 16) y[i] = __shfl_down_sync(0xffff, x[i], 8);", "warp operation",
         "thread (8, 0, 0): takes the value of lane 16 in a shuffle with the mask 0xffff"),
    ],
)  # fmt: skip
def test_threads_that_do_not_come(body, kind, words):
    found = fault(body)
    assert found.kind == kind and words in str(found)


STAGED = "__shared__ float s[64]; s[i] = x[i]; {} y[i] = s[63 - i]; {} s[i] = 0;"


@pytest.mark.parametrize("barriers", [("", "__syncthreads();"), ("__syncthreads();", ""),
                                      ("__syncwarp();", "__syncthreads();")])  # fmt: skip
@pytest.mark.parametrize("order", ["forward", "reverse", 2])
def test_races(barriers, order):
    found = fault(STAGED.format(*barriers), n=64, block=64, order=order)
    assert found.kind == "shared-memory race" and "static shared memory" in str(found)


@pytest.mark.parametrize("order", ["forward", "reverse"])  # a write after a read, and before it
def test_a_read_and_a_write_of_two_warps(order):
    body = "__shared__ float s[1]; if (i == 0) y[0] = s[0]; if (i == 40) s[0] = x[0];"
    found = fault(body, n=64, block=64, order=order)
    assert found.kind == "shared-memory race"
    assert found.thread == ((40, 0, 0) if order == "forward" else (0, 0, 0))


def test_two_writes_race_unless_they_are_equal():
    body = "__shared__ int any; if (i == 0) any = 0; __syncthreads(); if (i % 2) any = {};"
    last = fault(body.format("i"), n=64, block=64)  # the race is in the thread's last access
    assert last.kind == "shared-memory race" and last.thread == (3, 0, 0)
    assert fault(body.format("i; y[i] = x[i]"), n=64, block=64).thread == (3, 0, 0)
    y = torch.zeros(64)
    run(body.format("1; __syncthreads(); y[i] = any;"), floats(64), y, block=64)
    assert y.eq(1).all()


def test_what_is_no_race():
    y = torch.zeros(64)
    body = STAGED.format("__syncthreads();", "__syncthreads();")
    run(body, floats(64), y, block=64)
    assert y.equal(floats(64).flip(0))
    body = "__shared__ float s[32]; s[i] = x[i]; __syncwarp(); y[i] = s[31 - i];"
    run(body, floats(32), y)
    # Bytes of one word are apart.
    run("__shared__ char s[32]; s[i] = i; y[i] = s[i] + x[i];", floats(32), y)


def test_an_atomic_races_with_a_plain_write():
    found = fault("__shared__ int s; if (i == 0) s = 0; atomicAdd(&s, i); y[i] = 0;")
    assert found.kind == "shared-memory race"


@pytest.mark.parametrize("left_out", [0, 1])
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_matmul_without_one_of_its_barriers(left_out, order):
    parts = TILED.split("__syncthreads();")
    text = "".join([parts[0], *(["", "__syncthreads();"][:: 1 - 2 * left_out][j] + parts[j + 1]
                                for j in range(2))])  # fmt: skip
    assert text.count("__syncthreads") == 1
    a = floats(32 * 32)
    arguments = {"a": a, "b": a.clone(), "c": torch.zeros(1024), **dict.fromkeys("mnk", number(32))}
    with pytest.raises(emulator.KernelFault, match="race|without a barrier"):
        emulator.run(text, "matmul", (2, 2), (16, 16), arguments, order=order)


def test_never_written_shared_memory_is_nan():
    y = torch.zeros(32)
    run("__shared__ float s[32]; y[i] = s[i];", floats(32), y)
    assert y.isnan().all()


@pytest.mark.parametrize("body", ["while (true) {}", "while (x[i] < 100) {}"])
def test_a_kernel_that_does_not_end(body):
    assert fault(body, timeout_s=0.3).kind == "timeout"


def test_ctrl_c():
    # A shell without job control starts what it puts into the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run("while (x[i] < 100) {}", torch.arange(32.0), torch.zeros(32))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 30
    run("y[i] = x[i];", x := floats(32), y := torch.zeros(32))
    assert y.equal(x)


def test_what_would_end_the_process():
    assert fault("y[i] = n / (n - 32);").kind == "division by zero"
    assert fault("y[i] = (n - 33 + (int)0x80000001u) % (31 - n);").kind != "timeout"
    before = "__device__ __noinline__ float f(int k) { volatile float q = k; return q + f(k + 1); }"
    assert fault("y[i] = f(n);", before=before).kind == "stack overflow"
    assert fault("float a[70000]; for (int j = 0; j < 70000; j++) a[j] = x[j % 32]; y[i] = a[n];")


@pytest.mark.parametrize(
    "before, body, words",
    [
        ("", 'asm("nop;");', "inline assembly (line 3)"),
        ("", '\n#ifdef __CUDACC_RTC__\n#else\nasm("nop;");\n#endif\n', "inline assembly (line 6)"),
        ("#include <mma.h>", "", "<mma.h>"),
        ("#include <cooperative_groups.h>", "", "cooperative groups"),
        ("", "wmma::fill_fragment(x, 0);", "tensor-core"),
        ("", "k<<<1, 1>>>(x, y, n);", "launching a kernel"),
        ("__device__ int counter;", "", "__device__ variables"),
        ("", "memcpy(y, x, 4);", "memcpy"),
        ("", "__shared__ float s[13000]; s[i] = 1; __syncthreads(); y[i] = s[n - i];", "48 KB"),
    ],
)
def test_refusals(before, body, words):
    with pytest.raises(emulator.Unsupported, match=re.escape(words)):
        run(body, floats(32), torch.zeros(32), before=before)


def test_refused_sizes():
    with pytest.raises(ValueError, match="1024 threads"):
        run("", floats(1), floats(1), block=(513, 2))
    with pytest.raises(emulator.Unsupported, match="227 KB"):
        run("y[i] = x[i];", floats(1), floats(1), shared_bytes=1 << 20)
    wrong_ones = {"grid": 0}, {"block": (1, 1, 65)}, {"grid": (1, 2, 3, 4)}, {"order": "sideways"}
    for wrong in wrong_ones:
        with pytest.raises(ValueError):
            run("y[i] = x[i];", floats(1), floats(1), **wrong)


def test_words_in_comments_are_not_refused():
    run('y[i] = x[i];  // no asm("nop"), no wmma, no <<<>>>', x := floats(32), y := floats(32))
    assert y.equal(x)


def test_compile_errors_are_the_text_s_own():
    with pytest.raises(emulator.CompileError) as caught:
        run("y[i] = x[i];\nfoo(i);\nbar;", floats(1), floats(1), name="gelu.cu")
    assert str(caught.value).splitlines() == [
        "gelu.cu:4: 'foo' was not declared in this scope",
        "gelu.cu:5: 'bar' was not declared in this scope",
    ]
    with pytest.raises(emulator.CompileError, match="no kernel that can be launched"):
        emulator.run("__global__ void k() {}", "nothing", 1, 1, {})


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulator.Unsupported, match="g\\+\\+"):
        run("y[i] = x[i];", floats(1), floats(1))
