"""CUDA C++ to PTX and machine code, without a GPU."""

import re
import subprocess
import sys

import pytest

from helpers import ptx
from helpers.ptx import assembler
from helpers.ptx.kinds import kind
from helpers.ptx.text import instructions

pytest.importorskip("cuda.bindings.nvrtc")
needs_tools = pytest.mark.skipif(assembler.triton_backend() is None, reason="needs Triton")

NAIVE = """extern "C" __global__ void naive(float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 0.5 * in[i] *
        (1.0 + tanh(0.79788456 * (in[i] + 0.044715 * in[i] * in[i] * in[i])));
}
"""
SINGLE = re.sub(r"(\d\.\d+)", r"\1f", NAIVE.replace("tanh", "tanhf")).replace("naive", "single")
BRANCHY = """extern "C" __global__ void branchy(float* x, float* y, int n) {
    __shared__ float tile[1024];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = i < n ? x[i] : 0;
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
    tile[threadIdx.x] = __expf(v);
    __syncthreads();
    if (i < n) {
        if (v > 0) for (int k = 0; k < n; k++) v = tile[k % 1024] / v + __logf(v);
        else v = sqrtf(v + 3) / tile[0];
        y[i] = v;
        atomicAdd(y, v);
    }
}
"""
SPILLS = """extern "C" __global__ void __launch_bounds__(BOUND) spills(float* x) {
    float r[96];
    #pragma unroll
    for (int k = 0; k < 96; k++) r[k] = x[k * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 96; k++) x[k * 1024 + threadIdx.x] = r[k] * r[(k * 7 + 3) % 96];
}
"""


def kinds(text: str) -> dict[str, int]:
    frame = ptx.count(text)
    return dict(zip(frame.kind, frame.instructions, strict=True))


def unknown(text: str) -> set[str]:
    return {i.opcode for i in instructions(text) if kind(i) == "other"} - {"NOP"}


@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_nvrtc_compiles_for_every_generation(arch):
    text = ptx.cuda_ptx(NAIVE + SINGLE + BRANCHY, arch)
    assert f".target {arch}\n" in text and "\0" not in text
    assert [ptx.entry(text, name).strip() != "" for name in ("naive", "single", "branchy")]
    assert unknown(text) == set()
    # One instruction a line, and nothing else that ends in a semicolon but declarations.
    lines = re.sub(r"//.*|(?m:^\s*\.[^;]*;)", "", ptx.entry(text, "branchy"))
    assert len(instructions(ptx.entry(text, "branchy"))) == lines.count(";")


def test_double_literals_make_fp64_of_a_float_kernel():
    text = ptx.cuda_ptx(NAIVE + SINGLE)
    naive, single = ptx.entry(text, "naive"), ptx.entry(text, "single")
    mention = [line for line in naive.splitlines() if re.match(r"\s+[a-z@].*\.f64", line)]
    assert ptx.fp64_instructions(naive, moves=True) == len(mention) > 60
    assert len(mention) > ptx.fp64_instructions(naive) > kinds(naive)["fp64"] > 40
    assert ptx.fp64_instructions(single, moves=True) == 0 and "f64" not in single
    assert "fp64" not in kinds(single)
    folded = 'extern "C" __global__ void f(float* x) { x[0] = (float)0.5 * x[1]; }'
    assert ptx.fp64_instructions(ptx.cuda_ptx(folded), moves=True) == 0


@needs_tools
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100", "sm_120"])
def test_machine_code(arch):
    text = ptx.cuda_ptx(NAIVE + SINGLE + BRANCHY, arch)
    naive, single, branchy = (ptx.sass(text, arch, k) for k in ("naive", "single", "branchy"))
    assert kinds(naive)["fp64"] > 30 and "DFMA" in naive
    assert ptx.fp64_instructions(single) == 0
    assert unknown(naive + "\n" + single + "\n" + branchy) == set()
    for code in (naive, single, branchy):
        lines = [line for line in code.splitlines() if not line.endswith(":")]
        assert len(instructions(code)) == len(lines)
        assert [int(line.split()[0], 16) for line in lines] == list(range(0, 16 * len(lines), 16))
        assert "/*" not in code and "`" not in code and ";" not in code
        targets = set(re.findall(r"(?:BRA|BSSY)\S* .*?(\.L_x_\d+)", code))
        assert targets == set(re.findall(r"(?m)^(\.L_x_\d+):$", code))
        assert not lines[-1].endswith("NOP")
    assert re.search(r"@!?P\d ", branchy) and "BSSY" in branchy and "BSYNC" in branchy
    everything = ptx.sass(text, arch)
    assert everything.count("\nnaive:\n") + everything.startswith("naive:\n") == 1
    assert all(code in everything for code in (naive, single, branchy))
    with pytest.raises(KeyError, match="no kernel 'gelu'"):
        ptx.sass(text, arch, "gelu")


@needs_tools
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_spills_and_resources(arch, tmp_path):
    def assembled(bound, **choice):
        text = ptx.cuda_ptx(SPILLS + BRANCHY, arch, defines={"BOUND": bound})
        return ptx.assemble(text, arch, **choice)

    roomy, tight = assembled(128), assembled(1024)
    assert roomy["spills"].registers > 96 and roomy["spills"].spill_store_bytes == 0
    assert roomy["spills"].spill_load_bytes == roomy["spills"].stack_bytes == 0
    assert tight["spills"].registers <= 65536 // 1024  # an SM's registers for 1024 threads
    assert tight["spills"].spill_store_bytes >= 4 * (96 - 64)
    assert tight["spills"].spill_load_bytes >= 4 * (96 - 64) <= tight["spills"].stack_bytes
    assert tight["branchy"].spill_store_bytes == 0  # each kernel has its own numbers
    assert tight["branchy"].shared_bytes == 4096 and tight["spills"].shared_bytes == 0
    free = ptx.cuda_ptx(SPILLS.replace("__launch_bounds__(BOUND)", ""), arch)
    assert ptx.assemble(free, arch)["spills"].registers > 96
    capped = ptx.assemble(free, arch, max_registers=48)["spills"]
    assert capped.registers <= 48 and capped.spill_store_bytes >= 4 * (96 - 48)

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(tight["spills"].cubin)
    command = [assembler._tool("cuobjdump"), "--dump-resource-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"Function (\w+):\s+REG:(\d+)", said))
    assert {name: int(n) for name, n in found.items()} == {
        name: one.registers for name, one in tight.items()
    }


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for helper
    8 bytes stack frame, 900 bytes spill stores, 901 bytes spill loads
ptxas info    : Function properties for first
    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 40 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 372 bytes cmem[0]
"""


def test_the_assemblers_report_is_read_kernel_by_kernel():
    assert assembler._resources(LOG, b"code") == {
        "first": ptx.Assembled(64, 24, 28, 1024, 40, b"code"),
        "second": ptx.Assembled(10, 0, 0, 0, 0, b"code"),
    }


def test_errors_name_the_users_file_and_line():
    text = "// a line\n__global__ void f(float* x) {\n    x[0] = nothing;\n}\n"
    with pytest.raises(ptx.CompileError, match=r'^mine\.cu\(3\): error: .*"nothing"') as caught:
        ptx.cuda_ptx(text, name="mine.cu")
    assert "x[0] = nothing;" in str(caught.value)
    many = "\n".join(f"int a{k} = ;" for k in range(20))
    with pytest.raises(ptx.CompileError) as caught:
        ptx.cuda_ptx(many)
    assert str(caught.value).count(": error") == 3
    with pytest.raises(ptx.CompileError, match="does not compile for sm_50; it knows .*sm_90"):
        ptx.cuda_ptx(NAIVE, "sm_50")
    for arch in ("90", "compute_90", "sm90", ""):
        with pytest.raises(ValueError, match='written as "sm_90"'):
            ptx.cuda_ptx(NAIVE, arch)


@needs_tools
def test_a_mangled_name_is_found():
    text = ptx.cuda_ptx(
        "template <int N> __global__ void f(int* x) { x[0] = N; }\n"
        "__global__ void fill(float* x) { x[0] = 1; }",
        "sm_90",
    )
    assert list(ptx.assemble(text, "sm_90")) == ["_Z4fillPf"]
    assert "STG" in ptx.sass(text, "sm_90", "fill") and "st.global" in ptx.entry(text, "fill")


@needs_tools
@needs_tools
def test_what_was_assembled_is_kept(monkeypatch):
    text = ptx.cuda_ptx(SINGLE, "sm_80")
    before = ptx.assemble(text, "sm_80"), ptx.assemble(text, "sm_80", max_registers=32)
    monkeypatch.setattr(assembler, "_run", None)  # would start a process
    assert (ptx.assemble(text, "sm_80"), ptx.assemble(text, "sm_80", max_registers=32)) == before
    with pytest.raises(TypeError):
        ptx.assemble(text, "sm_86")


def test_what_the_assembler_refuses():
    with pytest.raises(ptx.CompileError, match="ptxas for sm_80: .*error"):
        ptx.assemble(ptx.cuda_ptx(NAIVE, "sm_80").replace("fma.rn.f64", "fuse.f64"), "sm_80")
    newer = re.sub(r"\.version .*", ".version 99.9", ptx.cuda_ptx(NAIVE, "sm_80"))
    assert list(ptx.assemble(newer, "sm_80")) == ["naive"]


def test_macros_and_memory():
    text = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = SIZE; }'
    found = {value: ptx.cuda_ptx(text, defines={"SIZE": value}) for value in (42, 44)}
    assert re.search(r"0f42280000|\b1109917696;", found[42])  # 42 as a float
    assert re.search(r"0f42300000|\b1110441984;", found[44])
    assert ptx.cuda_ptx(text, defines={"SIZE": 42}) is found[42]


@needs_tools
@pytest.mark.parametrize("found", [True, False])
def test_headers_of_16_bit_floats(found, monkeypatch):
    if not found:  # no toolkit: Triton's copy
        pathfinder = pytest.importorskip("cuda.pathfinder")
        monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
        headers = assembler.triton_backend() / "include"
        assert ptx.cuda_include_paths() == [ptx.STAND_INS, headers]
    text = f"""// {found}
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void f(__half* x, __nv_bfloat16* y) {{
        x[0] = x[0] * x[1];
        y[0] = __hfma(y[0], y[1], y[2]);
    }}"""
    assert kinds(ptx.cuda_ptx(text))["fp16/bf16"] == 2


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ptx.ToolMissing, match="NVRTC is missing.*install cuda-bindings"):
        ptx.cuda_ptx(NAIVE + "// not compiled before")
    monkeypatch.setattr(assembler, "triton_backend", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(ptx.ToolMissing, match="ptxas is missing.*install triton"):
        ptx.assemble(".version 8.0", "sm_90")
    assert assembler.target("sm_90") == "sm_90a" and assembler.target("sm_89") == "sm_89"


def test_c_headers_that_nvrtc_lacks_have_stand_ins():
    names = sorted(path.name for path in ptx.STAND_INS.iterdir())
    assert "math.h" in names and "cstdint" in names
    text = "".join(f"#include <{name}>\n" for name in names)
    text += 'extern "C" __global__ void k(float* x, int32_t n) { if (n < INT_MAX) x[n] = FLT_MAX; }'
    for arch in (ptx.ARCHITECTURES[0], ptx.ARCHITECTURES[-1]):
        assert "st.global" in ptx.cuda_ptx(text, arch)
