"""One CUDA text runs on a GPU, in the emulator, and compiles to PTX; bad calls are refused."""

import contextlib
import sys
import types

import pytest
import torch

from helpers import cuda, emulator, ptx
from helpers.device import device, has_cuda

SCALE = cuda.Kernel(
    """extern "C" __global__ void scale(float* x, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = factor * x[i];
}""",
    "scale",
    "scale.cu",
)
COUNT = cuda.Kernel('extern "C" __global__ void count(int* n) { atomicAdd(n, 1); }', "count")
# Each block writes out the last element of what its threads left in shared memory.
SHARED = cuda.Kernel(
    """extern "C" __global__ void last(float* out, int count) {
    extern __shared__ float s[];
    for (int k = threadIdx.x; k < count; k += blockDim.x) s[k] = k + blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = s[count - 1];
}""",
    "last",
)
SPIN = cuda.Kernel(
    """extern "C" __global__ void spin(float* x, int n, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = 1.0f;
}""",
    "spin",
)

needs_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(
    not has_cuda() or torch.cuda.device_count() < 2, reason="needs two GPUs"
)


@pytest.mark.parametrize(
    "grid, block, threads",
    [
        (5, 32, 160),
        ((5,), (32,), 160),
        ([5, 1], (32, 1, 1), 160),
        ((2, 3, 5), (3, 2), 180),
        (1, 1024, 1024),
        (1, (1, 1024), 1024),
        (2, (16, 1, 64), 2048),
    ],
)
def test_sizes_may_be_given_in_one_to_three_numbers(grid, block, threads):
    count = torch.zeros(1, dtype=torch.int32, device=device())
    COUNT(grid, block, count)
    assert count.item() == threads


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3", None, (), (1, 1, 1, 1), (1, 0), (2, 1.0)])
@pytest.mark.parametrize("what", ["grid", "block"])
def test_sizes_that_are_no_sizes_are_refused(what, size):
    sizes = {"grid": 1, "block": 1} | {what: size}
    for run in (SCALE, SCALE.emulate):
        with pytest.raises(ValueError, match=f"^{what} must be 1 to 3 whole numbers"):
            run(sizes["grid"], sizes["block"], torch.ones(1), 1, 2.0)


@pytest.mark.parametrize(
    "grid, block",
    [
        (2**31, 1),
        ((1, 65_536), 1),
        ((1, 1, 65_536), 1),
        (1, 1025),
        (1, (1, 1025)),
        (1, (1, 1, 65)),
        (1, (32, 33)),
        (1, (8, 16, 9)),
    ],
)
def test_sizes_that_no_gpu_takes_are_refused(grid, block):
    with pytest.raises(ValueError, match="grid must|block must|at most 1024 threads"):
        SCALE(grid, block, torch.ones(1), 1, 2.0)


@pytest.mark.case("E13")
def test_arguments_are_checked_before_anything_runs():
    x = torch.ones(4)
    with pytest.raises(TypeError, match=r"x is a float\*: it takes torch.float32"):
        SCALE(1, 4, x.half(), 4, 2.0)  # case E13
    with pytest.raises(TypeError, match="scale takes 3 arguments"):
        SCALE(1, 4, x, 4)
    with pytest.raises(OverflowError, match="n = 4,294,967,300 does not fit"):
        SCALE(1, 4, x, 2**32 + 4, 2.0)
    assert x.eq(1).all()


def test_tensors_of_one_device_that_can_run_it():
    text = 'extern "C" __global__ void k(float* x, float* y) {} __global__ void none(int n) {}'
    x, meta = torch.ones(1), torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="k needs tensors of one device, and has cpu, meta"):
        cuda.Kernel(text, "k")(1, 1, x, meta)
    with pytest.raises(ValueError, match="none needs tensors of one device, and has none"):
        cuda.Kernel(text, "none")(1, 1, 3)
    with pytest.raises(ValueError, match="scale runs on an NVIDIA GPU or a CPU, not on meta"):
        SCALE(1, 1, meta, 1, 2.0)
    if has_cuda():
        with pytest.raises(ValueError, match="has cpu, cuda:0"):
            cuda.Kernel(text, "k")(1, 1, x, x.to("cuda:0"))


def test_a_kernel_that_is_not_there_is_refused_early():
    with pytest.raises(ValueError, match="no __global__ function 'scales'.*has scale"):
        cuda.Kernel(SCALE.text, "scales")
    with pytest.raises(ValueError, match="a type that is not known"):
        cuda.Kernel("__global__ void k(T* x) {}", "k")


def test_a_pointer_is_to_the_first_element_of_a_view():
    """A kernel knows no strides: it gets the view's first address, and sees what follows there."""
    whole = torch.ones(10, device=device())
    SCALE(1, 4, whole[3:], 2, 5.0)
    assert whole.tolist() == [1, 1, 1, 5, 5, 1, 1, 1, 1, 1]
    every_third = torch.arange(12.0, device=device()).view(4, 3)[:, 1]  # 1, 4, 7, 10
    SCALE(1, 4, every_third, 4, 10.0)
    assert every_third.tolist() == [10, 40, 7, 10]  # elements 1 to 4 were scaled: 1, 2, 3, 4


def test_emulate_runs_on_the_cpu_and_returns_counts():
    x = torch.ones(70)
    counts = SCALE.emulate(3, 32, x, 70, 2.0, order="reverse")
    assert (counts.loads, counts.stores) == (70, 70)
    assert x.eq(2).all()
    assert SCALE(3, 32, x, 70, 2.0) == counts


def test_messages_name_the_file_and_the_line():
    with pytest.raises(emulator.KernelFault, match=r"element 4 of x, which has 4 \(scale.cu:3\)"):
        SCALE.emulate(1, 32, torch.ones(4), 5, 2.0)
    wrong = cuda.Kernel(SCALE.text.replace("factor * x", "factr * x"), "scale", "mine.cu")
    with pytest.raises(emulator.CompileError, match="mine.cu:3.*factr"):
        wrong.emulate(1, 32, torch.ones(4), 4, 2.0)
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(ptx.CompileError, match=r"mine.cu\(3\).*factr"):
        wrong.ptx()


@pytest.mark.parametrize("bytes_", [4, 48 * 1024, 64 * 1024])
def test_dynamic_shared_memory(bytes_):
    out = torch.zeros(2, device=device())
    SHARED(2, 64, out, bytes_ // 4, shared_bytes=bytes_)
    assert out.tolist() == [bytes_ / 4 - 1, bytes_ / 4]


def test_defines_reach_every_way_of_running():
    text = """#ifndef SHIFT
#define SHIFT 1
#endif
extern "C" __global__ void k(scalar* x) { x[0] = x[0] + SHIFT; }"""
    with pytest.raises(ValueError, match="scalar"):
        cuda.Kernel(text, "k")
    kernel = cuda.Kernel(text, "k", defines=(("scalar", "int"), ("SHIFT", "20")))
    x = torch.ones(1, dtype=torch.int32, device=device())
    kernel(1, 1, x)
    kernel.emulate(1, 1, y := torch.ones(1, dtype=torch.int32))
    assert x.item() == y.item() == 21
    pytest.importorskip("cuda.bindings.nvrtc")
    assert "20;" in kernel.ptx("sm_80")
    assert "f64" in cuda.Kernel(text, "k", defines=(("scalar", "double"),)).ptx()


def test_load_takes_a_file_and_macros():
    kernel = cuda.load("gelu.cu", "gelu_kernel", vector_bytes="16", scalar="__half")
    assert kernel.file == "gelu.cu"
    assert kernel.defines == (("scalar", "__half"), ("vector_bytes", "16"))
    assert [(p.name, p.type) for p in kernel.parameters][0] == ("x", "__half")
    assert kernel == cuda.load("gelu.cu", "gelu_kernel", scalar="__half", vector_bytes="16")
    with pytest.raises(FileNotFoundError):
        cuda.load("nothing.cu", "k")


def test_function_is_the_kernels_own_text():
    kernel = cuda.load("gelu_steps.cu", "gelu_float")
    assert kernel.function.startswith('extern "C" __global__ void gelu_float(')
    assert kernel.function.count("__global__") == 1


def test_ptx_and_machine_code_are_of_one_kernel():
    pytest.importorskip("cuda.bindings.nvrtc")
    text = SCALE.text + '\nextern "C" __global__ void other(double* d) { d[0] *= 3.0; }'
    kernel = cuda.Kernel(text, "scale")
    assert "f64" not in kernel.ptx() and "mul.f32" in kernel.ptx("sm_75")
    assert "f64" in cuda.Kernel(text, "other").ptx()
    try:
        listing = kernel.sass("sm_90")
    except ptx.ToolMissing as missing:
        pytest.skip(str(missing))
    assert "FMUL" in listing and "DMUL" not in listing


def test_without_cuda_core_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)  # as where it cannot be imported
    with pytest.raises(ptx.ToolMissing, match="cuda-core.*pip install cuda-core") as refusal:
        cuda._launch(SCALE, torch.device("cuda", 0), (1, 1, 1), (1, 1, 1), [], 0)
    assert "\n" not in str(refusal.value)


def test_cuda_core_has_what_a_launch_needs():
    pytest.importorskip("cuda.core")
    for name in ("Device", "LaunchConfig", "Program", "ProgramOptions", "Stream", "launch"):
        assert hasattr(cuda._core(), name)


# Without a GPU: what is handed to cuda.core


class Core:
    """As cuda.core on a GPU of compute capability 9.0 that compiles what NVRTC compiles."""

    def __init__(self):
        self.launched, self.compiled = [], []
        self.Stream = types.SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
        self.LaunchConfig = self.ProgramOptions = types.SimpleNamespace

    def Device(self, index):
        return types.SimpleNamespace(arch="90", index=index, set_current=lambda: None)

    def Program(self, text, language, options):
        def compile(kind, name_expressions):
            if "factr" in text:
                raise RuntimeError("all options, then all of the log")
            self.compiled.append((kind, options.arch, options.define_macro))
            (name,) = name_expressions
            return types.SimpleNamespace(
                get_kernel=lambda wanted: types.SimpleNamespace(name=wanted, handle=name)
            )

        return types.SimpleNamespace(compile=compile)

    def launch(self, stream, config, kernel, *values):
        self.launched.append((stream, config.grid, config.block, config.shmem_size, *values))


@pytest.fixture
def core(monkeypatch):
    core = Core()
    monkeypatch.setattr(cuda, "_core", lambda: core)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    caches = cuda._compiled, cuda._stream, cuda._config
    for cache in caches:
        cache.cache_clear()
    yield core
    for cache in caches:
        cache.cache_clear()


def launch(kernel, *arguments, shared_bytes=0):
    cuda._launch(kernel, torch.device("cuda", 1), (3, 1, 1), (64, 1, 1), arguments, shared_bytes)


def test_a_launch_hands_over_pointers_and_the_current_stream(core):
    x = torch.arange(8.0)
    for _ in range(2):
        launch(SCALE, x[2:], 6, 0.5)
    expected = ("stream 77", (3, 1, 1), (64, 1, 1), 0, x.data_ptr() + 8, 6, 0.5)
    assert core.launched == [expected] * 2
    assert core.compiled == [("cubin", "sm_90", None)]  # once


def test_macros_are_compiled_apart(core):
    for name in ("a", "b", "a"):
        launch(cuda.Kernel(SCALE.text, "scale", defines=(("NAME", name),)), torch.ones(1), 1, 1.0)
    assert [macros for _, _, macros in core.compiled] == [[("NAME", "a")], [("NAME", "b")]]


def test_what_does_not_compile_on_a_gpu_is_told_shortly(core):
    pytest.importorskip("cuda.bindings.nvrtc")
    wrong = cuda.Kernel(SCALE.text.replace("factor * x", "factr * x"), "scale", "mine.cu")
    with pytest.raises(ptx.CompileError, match=r"mine.cu\(3\).*factr") as refusal:
        launch(wrong, torch.ones(4), 4, 2.0)
    assert "all options" not in str(refusal.value)


@pytest.mark.parametrize("most_bytes", [1000, 100])
def test_shared_memory_is_asked_of_the_driver(core, monkeypatch, most_bytes):
    driver = pytest.importorskip("cuda.bindings.driver")
    asked = []

    def set_attribute(attribute, value, kernel, index):
        asked.append((attribute.name, value, kernel, index))
        result = driver.CUresult
        return (result.CUDA_SUCCESS if value <= most_bytes else result.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", set_attribute)
    refused = most_bytes < 400
    expected = (
        pytest.raises(ValueError, match="no 400 bytes") if refused else contextlib.nullcontext()
    )
    with expected:
        launch(SHARED, torch.zeros(2), 100, shared_bytes=400)
    name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert asked == [(name, 400, "last", 1)]
    assert [config[3] for config in core.launched] == [400] * (not refused)


# On a GPU


@needs_gpu
@pytest.mark.parametrize("n", [1, 1023, 1025])
def test_a_launch_equals_the_emulator(n):
    x = torch.randn(n)
    there = x.cuda()
    SCALE(-(-n // 128), 128, there, n, 0.3)
    SCALE.emulate(-(-n // 128), 128, x, n, 0.3)
    assert torch.equal(there.cpu(), x)


@pytest.mark.case("E14")
@needs_gpu
def test_a_launch_is_queued_on_the_current_stream():
    """Case E14. A slow kernel is queued on a side stream; what follows there must wait for it."""
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    SPIN(1, 32, x, 0, 1)  # compiled before the clock matters
    SCALE(1, 32, x, 0, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        SPIN(1, 32, x, 1000, 300_000_000)  # some tenths of a second, then ones
        SCALE(8, 128, x, 1000, 7.0)
        assert not side.query(), "the launch was waited for"
        assert torch.cuda.default_stream().query(), "it was queued on the default stream"
        assert x.eq(7).all()


@needs_gpu
def test_a_launch_can_be_captured_in_a_graph():
    x = torch.ones(10, device="cuda")
    SCALE(1, 32, x, 10, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SCALE(1, 32, x, 10, 2.0)
    for _ in range(3):
        graph.replay()
    assert x.eq(8).all()


@pytest.mark.case("E14")
@needs_two_gpus
def test_a_launch_goes_to_the_tensors_gpu():
    """Case E14: a tensor on cuda:1 while device 0 is current."""
    assert torch.cuda.current_device() == 0
    for index in (1, 0, 1):
        x = torch.ones(1000, device=f"cuda:{index}")
        SCALE(8, 128, x, 1000, 7.0)
        assert torch.cuda.current_device() == 0
        assert x.eq(7).all()


@needs_gpu
def test_a_compile_error_on_a_gpu_is_short():
    wrong = cuda.Kernel(SCALE.text.replace("factor * x", "factr * x"), "scale", "mine.cu")
    with pytest.raises(ptx.CompileError, match=r"mine.cu\(3\).*factr") as refusal:
        wrong(1, 32, torch.ones(4, device="cuda"), 4, 2.0)
    assert len(str(refusal.value).splitlines()) <= 5


@needs_gpu
def test_more_shared_memory_than_the_gpu_has_is_refused():
    out = torch.zeros(2, device="cuda")
    with pytest.raises(ValueError, match="1,000,000 bytes of shared memory"):
        SHARED(2, 64, out, 1, shared_bytes=10**6)
    SHARED(2, 64, out, 1, shared_bytes=4)  # and the GPU is as before
    assert out.tolist() == [0, 1]


@pytest.mark.parametrize("missing", [emulator.Unsupported("no g++"), ptx.ToolMissing("no NVRTC")])
def test_what_a_tool_is_missing_for_is_left_out_in_one_sentence(capsys, missing):
    with cuda.where_possible():
        raise missing
    assert capsys.readouterr().out == f"Left out here: {missing}.\n"


def test_nothing_else_is_left_out():
    for error in (emulator.CompileError, ptx.CompileError, ValueError):
        with pytest.raises(error), cuda.where_possible():
            raise error("wrong")
