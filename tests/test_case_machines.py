"""What people reported of machines, E01 to E24 of cases.jsonl, with what they had.

Where a module's own tests have that very machine they carry the mark instead. GPUs that are not
here are pretended.
"""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from helpers import bench, cuda, device, memory, ptx, specs, timers, toolchain, triton_mode
from helpers.check import assert_close
from helpers.kernels import (
    attention_plans,
    attention_tiles,
    gelu,
    matmul_plans,
    matmul_tiles,
    softmax,
)
from helpers.kernels.attention import flash_attention
from helpers.kernels.matmul import triton_matmul
from helpers.kernels.matmul_plans import ring_bytes
from helpers.kernels.matmul_tiles import Config, launch_tiles
from helpers.triton_mode import on_device_of, tl, triton
from tests.notebook_files import NOTEBOOKS, ROOT, code_cells, read
from tests.test_gelu import reference
from tests.triton_cases import recorded

pytestmark = pytest.mark.skipif(not device.triton_version(), reason="needs Triton")
needs_interpreter = pytest.mark.skipif(not device.interpreting(), reason="is of the interpreter")
DEVICE = device.device()
GB = 2**30
T4, RTX_3090, RTX_4090 = (7, 5), (8, 6), (8, 9)
case = pytest.mark.case


@triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def autotuned(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2.0, mask=at < n)


@case("E01")
@needs_interpreter
def test_without_a_gpu_kernels_are_timed_by_the_host():
    """Triton's own timer and tuner ask a driver; ours do not. This module has an autotuner."""
    x = torch.ones(64)
    m = bench.measure(lambda: gelu.triton_gelu(x), budget_ms=1)
    assert m.clock == "host" and m.median_ms > 0


@case("E03")
def test_views_are_read_where_they_lie():
    """Older interpreters read views of torch.split and strides of 0 wrongly; 3.6's does not."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for view in (*torch.split(x, 16, dim=1), x[:1].expand(5, 40), x[:, :1].expand(6, 9)):
        assert_close(gelu.triton_gelu(view), reference(view))
        assert_close(softmax.triton_softmax(view), torch.softmax(view.double(), -1))
        assert_close(triton_matmul(view, view.t()), view.double() @ view.double().t())


@triton.jit
def sum_kernel(x_ptr, n_ptr, out_ptr):
    total = 0.0
    for i in range(tl.load(n_ptr)):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


def sum_of_seven() -> float:
    x, out = torch.arange(9.0, device=DEVICE), torch.zeros(1, device=DEVICE)
    with on_device_of(x):
        sum_kernel[(1,)](x, torch.tensor([7], dtype=torch.int32, device=DEVICE), out)
    return out.item()


@case("E06")
def test_a_loop_to_a_number_in_memory():
    """NumPy 2.4 takes no array of one number for a number any more."""
    assert sum_of_seven() == 21


OLDEST = ROOT / ".triton-3.6.0"
LOOP = """
import torch
from helpers.kernels.matmul import triton_matmul  # a loop to an argument
from helpers.triton_mode import triton
print(triton.__version__, triton_matmul(torch.ones(2, 70), torch.ones(70, 1)).tolist())
"""


@case("E06")
@needs_interpreter
@pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no Triton 3.6.0 here: make {OLDEST.name}")
def test_a_loop_under_the_oldest_triton():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (OLDEST, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "3.6.0 [[70.0], [70.0]]\n", done.stderr


@case("E09")
def test_a_compiler_that_is_too_new_is_named_with_its_version(monkeypatch):
    said = (
        "host_config.h:132:2: error: #error -- unsupported GNU version! gcc versions later than "
        "12 are not supported! The nvcc flag '-allow-unsupported-compiler' can be used"
    )
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/bin/g++")
    monkeypatch.setattr(toolchain, "compiler_version", lambda path: "g++ (Debian 14.2.0-19) 14.2.0")
    sentence = toolchain.explain(RuntimeError(said))
    assert "up to 12" in sentence and "14.2.0" in sentence and "\n" not in sentence


@case("E13")
def test_what_the_lectures_binding_checks():
    """It is built on a GPU only; there notebook 05 hands it each of these tensors."""
    cells = [cell for path in NOTEBOOKS for cell in code_cells(read(path))]
    (binding,) = [cell.source for cell in cells if "TORCH_CHECK" in cell.source]
    for condition in ("x.is_cuda()", "x.scalar_type() == torch::kFloat", "x.is_contiguous()"):
        assert f"TORCH_CHECK({condition}," in binding
    assert "CUDAGuard guard(x.device())" in binding and "getCurrentCUDAStream()" in binding


@case("E13")
@pytest.mark.skipif(not (shutil.which("g++") or device.has_cuda()), reason="needs g++")
@pytest.mark.parametrize("way", [gelu.cuda_gelu, gelu.triton_gelu])
def test_the_tensors_that_pointers_misread(way):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for given in (x.half(), x.t(), x[2, 3], x[:, ::2]):
        assert_close(way(given), reference(given))


# On another GPU than the current one


@case("E14")
@needs_interpreter
def test_every_launch_is_made_on_the_gpu_of_its_tensors(monkeypatch):
    """On the GPU that `on_device_of` makes the current one; what it would be is seen below."""
    inside, seen = [], {}
    interpreted = type(gelu.triton_gelu_kernel)
    run, quiet = interpreted.run, triton_mode._quiet

    @contextlib.contextmanager
    def entered():
        inside.append(True)
        with quiet():
            yield
        inside.pop()

    def watched(kernel, *values, **named):
        seen.setdefault(kernel.fn.__name__, set()).add(bool(inside))
        return run(kernel, *values, **named)

    monkeypatch.setattr(triton_mode, "_quiet", entered)
    monkeypatch.setattr(interpreted, "run", watched)
    x = torch.ones(2, 40, requires_grad=True)
    wide = torch.ones(2, 5000, requires_grad=True)
    q = torch.ones(1, 1, 20, 16, requires_grad=True)
    gelu.triton_gelu(x).sum().backward()
    softmax.triton_softmax(x).sum().backward()
    softmax.triton_softmax(wide).sum().backward()
    softmax.triton_softmax(torch.ones(1, 70_000))
    triton_matmul(x, x.t(), "gelu").sum().backward()
    flash_attention(q, q, q, causal=True).sum().backward()
    assert len(seen) >= 10, seen
    assert all(where == {True} for where in seen.values()), seen


@case("E14")
def test_the_gpu_of_a_tensor_is_made_the_current_one(monkeypatch):
    monkeypatch.setattr(triton_mode, "interpreting", lambda: False)
    monkeypatch.setattr(triton_mode, "cannot_launch", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: ("the GPU of", x))
    x = SimpleNamespace(device=torch.device("cuda", 1))
    assert on_device_of(x) == ("the GPU of", x)


@case("E14")
def test_a_cuda_kernel_is_launched_on_its_tensors_gpu_and_current_stream(monkeypatch):
    current, launched = [0], []

    @contextlib.contextmanager
    def on(where):
        current.append(where.index)
        yield
        current.pop()

    def launch(stream, config, compiled, *values):
        launched.append((current[-1], stream, compiled))

    core = SimpleNamespace(
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
        LaunchConfig=lambda **sizes: sizes,
        launch=launch,
    )
    here = SimpleNamespace(set_current=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cuda, "_core", lambda: core)
    monkeypatch.setattr(cuda, "_compiled", lambda kernel, index: (f"code of GPU {index}", here))
    for cached in ("_stream", "_config"):
        monkeypatch.setattr(cuda, cached, getattr(cuda, cached).__wrapped__)
    where = torch.device("cuda", 1)
    cuda._launch(gelu.gelu_kernel(torch.float32), where, (1, 1, 1), (32, 1, 1), [], 0)
    assert launched == [(1, 7, "code of GPU 1")] and current == [0]


# Old GPUs and small ones


@case("E15")
@pytest.mark.parametrize("capability", [(7, 5), (7, 0)], ids=str)
def test_an_old_gpu_has_plans_and_is_given_fp16(capability):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert matmul_plans.plans(capability, dtype, "ieee", True) == matmul_plans.TURING
        assert attention_plans.configs(capability, dtype, 64, "ieee")
    chosen = {path.stem: halves(path, capability) for path in NOTEBOOKS}
    assert sum(map(len, chosen.values())) >= 6
    assert {dtype for found in chosen.values() for dtype in found} == {torch.float16}
    newer = {dtype for path in NOTEBOOKS for dtype in halves(path, (8, 0))}
    assert newer == {torch.bfloat16}


def halves(path: Path, capability: tuple[int, int]) -> list[torch.dtype]:
    """The 16-bit dtypes that a notebook chooses for what it times on such a GPU."""
    names = {
        "torch": SimpleNamespace(
            float16=torch.float16,
            bfloat16=torch.bfloat16,
            cuda=SimpleNamespace(get_device_capability=lambda *_: capability),
        ),
        "has_cuda": lambda: True,
        "GPU": SimpleNamespace(compute_capability="{}.{}".format(*capability)),
        "float": float,
    }
    found = []
    for cell in code_cells(read(path)):
        if "16" not in cell.source or "%" in cell.source[:1]:
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Assign):
                target, value = ast.unparse(node.targets[0]), ast.unparse(node.value)
                if target in ("OLD", "AMPERE"):
                    names[target] = eval(value, names)
                elif {"torch.float16", "torch.bfloat16"} <= {*value.split()}:
                    found.append(eval(value, names))
    return found


@case("E15")
def test_bf16_is_compiled_for_a_t4():
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    made = ptx.triton_compiled(gelu.triton_gelu_kernel, signature, {"BLOCK": 1024}, "sm_75")
    assert "bf16" not in "".join(line for line in made.ptx.splitlines() if "cvt" in line)


@case("E15")
def test_cuda_for_a_generation_that_nvrtc_has_given_up_is_left_out(capsys):
    """CUDA 13 has no Volta any more, which PyTorch's builds for CUDA 12 still run on."""
    if not toolchain.installed("cuda.bindings.nvrtc"):
        pytest.skip("needs NVRTC")
    with cuda.where_possible():
        gelu.gelu_kernel(torch.float16).ptx("sm_50")
    said = capsys.readouterr().out
    assert said.startswith("Left out here: this NVRTC does not compile for sm_50; it knows sm_")


def shared_bytes(launches: list, arch: str) -> list[int]:
    """What a block of each of these launches takes of shared memory there."""
    requests = [
        ptx.Request(c.kernel, c.signature, c.constexprs, arch, c.num_warps, c.num_stages)
        for c in launches
    ]
    return [made.shared_bytes for made in ptx.triton_compile_many(requests)]


@contextlib.contextmanager
def recorded_as_compiled():
    """`recorded`, with what the interpreter alone is told left out."""
    with mock.patch.object(attention_tiles, "interpreting", lambda: False):
        with mock.patch.object(matmul_tiles, "interpreting", lambda: False):
            with recorded() as launches:
                yield launches


@case("E16")
@pytest.mark.parametrize("capability", [T4, RTX_3090, RTX_4090], ids=str)
def test_tiles_of_an_a100_are_not_chosen_on_smaller_gpus(capability):
    """What was tuned for 164 KB and more a block; a 4090's blocks have a 3090's shared memory."""
    limit = matmul_plans.shared_limit_bytes(capability)
    q = torch.zeros(1, 1, 256, 128, dtype=torch.float16, device=DEVICE)
    a = torch.zeros(512, 512, dtype=torch.float16, device=DEVICE)
    plan, *_ = matmul_plans.plans(capability, torch.float16, "ieee", False)
    config, *_ = attention_plans.configs(capability, torch.float16, 128, "ieee")
    with recorded_as_compiled() as launches:
        attention_tiles.launch_tiles(q, q, q, q, config, True, 0.1)
        launch_tiles(a, a, a, plan.config)
    assert max(shared_bytes(launches, "sm_75" if capability == T4 else "sm_86")) <= limit
    if capability == T4:  # large products without tensor cores would take minutes to compile
        assert ring_bytes(Config(128, 256, 64, stages=3), 2, False) > limit
        return
    with recorded_as_compiled() as launches:
        attention_tiles.launch_tiles(q, q, q, q, attention_tiles.Config(128, 128, 8, 3), True, 0.1)
        launch_tiles(a, a, a, Config(128, 256, 64, 8, 8, 4))
    assert min(shared_bytes(launches, "sm_86")) > limit


@case("E17")
@pytest.mark.parametrize("gb, share", [(4, 1.0), (8, 1.0), (4, 0.25)])
def test_buffers_leave_a_small_card_its_memory(monkeypatch, gb, share):
    for name, value in (
        ("mem_get_info", (int(0.9 * gb * GB), gb * GB)),
        ("memory_reserved", 0),
        ("memory_allocated", 0),
        ("get_per_process_memory_fraction", share),
        ("get_device_properties", SimpleNamespace(L2_cache_size=64 * 2**20)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    free = memory.free_bytes()
    assert free == min(int(0.9 * gb * GB), int(share * gb * GB))
    made = []
    zeros = SimpleNamespace(zero_=None, max=None)
    with mock.patch.object(torch, "zeros", lambda n, **_: made.append(4 * n) or zeros):
        timers._preparation("cold")
    assert made and made[0] <= free / 8
    assert memory.uncached_bytes() <= free / 8


@case("E19")
def test_without_a_c_compiler_triton_is_left_out_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(triton_mode, "interpreting", lambda: False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    triton_mode.cannot_launch.cache_clear()
    try:
        with cuda.where_possible():
            on_device_of(SimpleNamespace(device=torch.device("cuda", 0)))
    finally:
        triton_mode.cannot_launch.cache_clear()
    assert capsys.readouterr().out == f"Left out here: {triton_mode.NO_COMPILER}.\n"
    monkeypatch.undo()
    assert triton_mode.cannot_launch() == ""


@case("E23")
def test_a_uuid_is_no_number(monkeypatch):
    """In CUDA_VISIBLE_DEVICES, which a machine with a MIG slice has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8f2c4e1a-0b7d-5c3e-9a61-2d4f6b8c0e13")
    assert device.facts("smoke")["Device"] and device.slug()
    for path in sorted((ROOT / "helpers").rglob("*.py")):
        assert not re.search(r"\bint\([^)]*VISIBLE_DEVICES", path.read_text(encoding="utf-8")), path


@case("M10")
def test_peaks_are_dense_and_each_products_own():
    """TFLOP/s of bf16 (fp16 on a T4) and GB/s by NVIDIA's datasheets, sparsity halved away."""
    expected = {
        "H100 SXM": (989.4, 3352),
        "H100 PCIe": (756, 2039),
        "H100 NVL": (835, 3938),
        "A100 SXM4 80GB": (312, 2039),
        "T4": (65, 320),
        "RTX 3090": (71, 936),
        "RTX 4090": (165.2, 1008),
    }
    for name, (tflops, gb_per_s) in expected.items():
        gpu = specs.get(name)
        assert gpu.peak_tflop_per_s("float16") == pytest.approx(tflops, rel=0.005), name
        assert gpu.memory_gb_per_s == pytest.approx(gb_per_s, rel=0.005), name
    assert specs.find("NVIDIA H300") is None
