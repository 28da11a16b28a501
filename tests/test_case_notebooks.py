"""What people reported of measuring and of notebooks, M01 to B08 of cases.jsonl, as they did it.

Where a module's own tests have that very input they carry the mark instead. What no kernel and no
cell may do is looked for in all of them.
"""

import ast
import builtins
import re
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from helpers import bench, emulator, profiling, timers
from helpers.check import assert_close
from helpers.device import device, has_cuda, synchronize, triton_version
from helpers.kernels import gelu
from helpers.kernels.matmul import triton_matmul
from tests.notebook_files import NOTEBOOKS, ROOT, code_cells, read
from tests.test_emulator import run as emulate
from tests.test_run import entries, make_notebook, printed, run_main

DEVICE = device()
needs_triton = pytest.mark.skipif(not triton_version(), reason="needs Triton")
case = pytest.mark.case


# All kernels: every @triton.jit function of helpers and of the notebooks


def trees() -> dict[str, ast.Module]:
    """The code of every module of helpers, and that of every notebook as one module."""
    modules = sorted((ROOT / "helpers").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in modules}
    for path in NOTEBOOKS:
        sources = [cell.source for cell in code_cells(read(path))]
        lines = "\n".join(sources).splitlines()
        found[path.name] = "\n".join(x for x in lines if not x.startswith(("%", "!")))
    return {name: ast.parse(text) for name, text in found.items()}


TREES = trees()
NODES = {where: list(ast.walk(tree)) for where, tree in TREES.items()}


def jitted(nodes: Iterable[ast.AST]) -> list[ast.FunctionDef]:
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    kinds = ("triton.jit", "gluon.jit", "triton.constexpr_function")
    return [f for f in functions if any(ast.unparse(d).startswith(kinds) for d in f.decorator_list)]


def calls(nodes: Iterable[ast.AST], name: str) -> list[ast.Call]:
    """Those of a function of that name, in whatever module."""
    found = [node for node in nodes if isinstance(node, ast.Call)]
    return [c for c in found if name in (getattr(c.func, "id", ""), getattr(c.func, "attr", ""))]


KERNELS = [(where, kernel) for where, nodes in NODES.items() for kernel in jitted(nodes)]


def global_names(kernel: ast.FunctionDef) -> set[str]:
    """What a kernel reads that is neither its own nor Python's."""
    names = [node for node in ast.walk(ast.Module(kernel.body, [])) if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    own |= {a.arg for a in (*kernel.args.args, *kernel.args.kwonlyargs)}
    return {node.id for node in names} - own - set(dir(builtins))


def constants(nodes: list[ast.AST]) -> set[str]:
    """Names that a kernel may read: modules, decorated functions, and what tl.constexpr made."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    found = {function.name for function in functions if function.decorator_list}
    allowed = r"\(?(tl\.constexpr\(|gl\.constexpr\(|hopper\.|getattr\(hopper\.)"
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Assign) and re.match(allowed, ast.unparse(node.value)):
            found |= {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
    return found


def test_kernels_are_found():
    names = {kernel.name for _, kernel in KERNELS}
    assert {"triton_gelu_kernel", "attention_hopper_kernel", "who_stores"} <= names
    assert len(KERNELS) > 60


@case("E05")
def test_kernels_read_no_ordinary_globals():
    """The interpreter lets them, the compiler does not."""
    known = {where: constants(nodes) for where, nodes in NODES.items()}
    wrong = {
        f"{where}: {kernel.name}": names
        for where, kernel in KERNELS
        if (names := global_names(kernel) - known[where])
    }
    assert not wrong
    plain = list(
        ast.walk(
            ast.parse("N = 3\n@triton.jit\ndef k(x_ptr, B: tl.constexpr):\n    tl.store(x_ptr, N)")
        )
    )
    assert "N" in global_names(jitted(plain)[0]) - constants(plain)


@case("E04")
def test_kernels_build_their_own_tanh():
    """tl.math has none any more, and the interpreter none of libdevice's."""
    for where, kernel in KERNELS:
        names = {n.attr for n in ast.walk(kernel) if isinstance(n, ast.Attribute)}
        assert not names & {"tanh", "libdevice"}, (where, kernel.name)


@case("E04")
@needs_triton
def test_gelu_far_from_zero():
    x = torch.tensor([1000.0, -1000.0], device=DEVICE)
    assert gelu.triton_gelu(x).tolist() == [1000, 0]


@case("N31", "E01")
def test_nothing_is_autotuned_by_triton():
    """Its trials would write to the result, and ask for a GPU's driver at import."""
    for where, nodes in NODES.items():
        names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        assert "autotune" not in names, where


@case("E01")
def test_do_bench_is_called_on_a_gpu_alone():
    for where, nodes in NODES.items():
        ifs = [n for n in nodes if isinstance(n, ast.If)]
        guarded = [n for n in ifs if "has_cuda()" in ast.unparse(n.test)]
        inside = {id(n) for each in guarded for n in ast.walk(each)}
        bare = [n for n in calls(nodes, "do_bench") if id(n) not in inside]
        assert not bare, where


@case("N20")
def test_tiles_of_products_are_at_least_16():
    """What the interpreter takes anyway. Sides that a cell computes are the plans' own."""
    few = []
    for where, nodes in NODES.items():
        for call in calls(nodes, "Config"):
            named = {k.arg: k.value for k in call.keywords}
            sides = [*call.args[: 3 if "attention" not in where else 2]]
            sides += [v for k, v in named.items() if k and k.startswith("tile_")]
            few += [(where, s.value) for s in sides if isinstance(s, ast.Constant) and s.value < 16]
    assert not few


@case("B08")
def test_kernels_and_their_imports_stand_at_the_top():
    for where, tree in TREES.items():
        top = {id(f) for node in tree.body for f in (node, *getattr(node, "body", []))
               if not isinstance(node, ast.FunctionDef) or f is node}  # fmt: skip
        inner = [k.name for k in jitted(NODES[where]) if id(k) not in top]
        assert not inner, (where, inner)


@case("N05")
def test_no_cell_looks_at_the_sign_of_zero():
    for where, nodes in NODES.items():
        names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        assert not names & {"signbit", "copysign"}, where


# Measuring


@case("M01")
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_a_timer_that_does_not_wait_sees_the_launch_alone():
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.float16)
    run = lambda: a @ a  # noqa: E731
    run()
    synchronize()
    start = time.perf_counter()
    run()
    launch_ms = 1000 * (time.perf_counter() - start)
    synchronize()
    assert bench.benchmark("matmul", run) > launch_ms


@case("M03")
def test_every_shape_compiles_once_and_outside_the_samples(monkeypatch):
    """A compiler that only notes when it is asked stands in for Inductor, which takes seconds."""
    events = []

    def backend(graph, _):
        events.append("compiled")
        return lambda *x: events.append("run") or graph.forward(*x)

    sample, compile_ = timers.host_sample_ms, torch.compile
    monkeypatch.setattr(
        timers, "host_sample_ms", lambda *run: events.append("sample") or sample(*run)
    )
    monkeypatch.setattr(
        torch, "compile", lambda f, dynamic, options: compile_(f, dynamic=dynamic, backend=backend)
    )
    gelu._compiled.cache_clear()
    try:
        for n in (1000, 1001):
            events.clear()
            x = torch.ones(n)
            bench.measure(lambda x=x: gelu.compiled_gelu(x), clock="host", budget_ms=1)
            assert events[:2] == ["compiled", "run"]  # before the first sample
            assert {*events[2:]} == {"run", "sample"} and events.index("sample") == 2
            assert_close(gelu.compiled_gelu(x), gelu.manual_gelu(x))
    finally:
        gelu._compiled.cache_clear()


@case("M04")
def test_16_mb_from_a_cache_are_no_bandwidth(monkeypatch):
    """On an H200 they would take 8 µs from its memory."""
    monkeypatch.setattr(bench, "memory_ceiling_gb_per_s", lambda: 4200.0)
    said = str(bench.Measurement((0.004,) * 9, "event", "warm L2", bytes=2 * 16e6))
    assert "8,000 GB/s is above the 4,200 GB/s" in said and "cache" in said
    assert "8,000.0 GB/s;" not in said


@case("M05")
def test_a_clock_that_falls_shows_in_the_spread():
    samples = tuple(1 + 0.2 * i / 99 for i in range(100))
    m = bench.Measurement(samples, "event", "100 calls")
    assert (m.p20_ms, m.median_ms, m.p80_ms) == pytest.approx((1.04, 1.1, 1.16), abs=2e-3)
    assert "1.1 ms (p20 1.04, p80 1.16)" in str(m)


@case("M07")
def test_a_profiler_that_knows_no_gpu(monkeypatch):
    cpu = torch.profiler.ProfilerActivity.CPU
    monkeypatch.setattr(profiling.profiler, "supported_activities", lambda: {cpu})
    table = profiling.operations(profiling.capture(lambda: torch.ones(64, 64) @ torch.ones(64, 64)))
    assert "aten::mm" in table["name"].tolist()


@case("M08")
def test_the_top_kernels_time_by_the_old_name_and_the_new():
    for prefix in ("cuda", "device"):
        fields = {f"self_{prefix}_time_total": t for t in (9.0,)}
        kernel = SimpleNamespace(**fields, **{f"{prefix}_time_total": 9.0})
        assert profiling.device_time_us(kernel, own=True) == profiling.device_time_us(kernel) == 9.0


@case("M11")
@needs_triton
def test_a_matmul_of_512_ends_in_the_interpreter():
    """In tiles that a GPU would not take; with 64 x 64 it would take seconds."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_close(triton_matmul(x, x), x.double() @ x.double(), 1e-4)


@case("M11")
def test_small_sizes_are_chosen_where_kernels_are_interpreted():
    """No smoke size is that of a GPU: 16 M elements would take the interpreter seconds a launch."""
    for path in NOTEBOOKS:
        for node in NODES[path.name]:
            if isinstance(node, ast.IfExp) and ast.unparse(node.test) in ("FULL", "has_cuda()"):
                small = node.orelse
                if isinstance(small, ast.Constant) and isinstance(small.value, int):
                    assert small.value < 2**24, (path.name, ast.unparse(node))


# Notebooks


EDITED = """\
import helpers.device, torch
from helpers.triton_mode import tl, triton
FACTOR = tl.constexpr(2.0)

@triton.jit
def grow(x):
    return x * FACTOR

@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, grow(tl.load(x_ptr)))

def launch():
    x = torch.ones(1)
    kernel[(1,)](x)
    return x.item()

print("at first", launch())"""
OUT_OF_BOUNDS = """\
@triton.jit
def far(x_ptr):
    tl.store(x_ptr + 2**40, 1.0)

far[(1,)](torch.ones(1))"""


@case("B02", "B06")
@needs_triton
def test_edited_constants_are_used_and_a_dead_kernel_is_named(tmp_path, monkeypatch):
    """One notebook of the interpreter's: what is edited between launches, then a wild store."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    helper = "@triton.jit\ndef grow(x):\n    return x + FACTOR\n\nprint('edited', launch())"
    folder = tmp_path / "notebooks"
    make_notebook(
        folder,
        "01_edits",
        *("# Edits", EDITED, "FACTOR = tl.constexpr(5.0)\nprint('constant', launch())", helper),
        *("# Far away", OUT_OF_BOUNDS, "print('never')"),
    )
    assert run_main(folder, tmp_path / "run", "--timeout", 1) == 1
    said = printed(tmp_path / "run" / "01_edits.partial.ipynb")
    assert said.splitlines() == ["at first 2.0", "constant 5.0", "edited 6.0"]
    entry = entries(tmp_path / "run")["01_edits"]
    assert (entry["status"], entry["cell"]["heading"]) == ("kernel died", "Far away")
    assert "SIGSEGV" in entry["lines"][0]


@case("B07")
def test_a_wild_read_spoils_nothing_that_comes_after():
    """Notebook 05 shows it in the emulator, on a GPU too: there all later calls would fail."""
    catching = [
        cell.source
        for path in NOTEBOOKS
        for cell in code_cells(read(path))
        if "except KernelFault" in cell.source
    ]
    assert catching and all(".emulate(" in source for source in catching)
    x, y = torch.arange(32.0), torch.zeros(32)
    try:
        with pytest.raises(emulator.KernelFault, match="reads 4 bytes at element 1000 of x"):
            emulate("y[i] = x[i + 1000];", x, y, n=32)
    except emulator.Unsupported as reason:
        pytest.skip(str(reason))
    emulate("y[i] = x[i];", x, y, n=32)
    assert torch.equal(x, y)
