"""Triton kernels to PTX, from a process that may be interpreting them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from helpers import ptx, specs
from helpers.ptx import triton_kernels, triton_source
from helpers.ptx.kinds import kind
from helpers.ptx.text import instructions

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.language import sigmoid as logistic  # noqa: E402

SCALE = tl.constexpr(1.5)
KIND = tl.float32
PLAIN = 3


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def copy_rows(x_ptr, out_ptr, stride):
    i, j = tl.arange(0, 8)[:, None], tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + i * stride[0] + j * stride[1])
    tl.store(out_ptr + i * 64 + j, x)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, n, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, n, TILE):
        a = tl.load(a_ptr + i[:, None] * n + (k + i)[None, :])
        b = tl.load(b_ptr + (k + i)[:, None] * n + i[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + i[:, None] * n + i[None, :], total.to(tl.bfloat16))


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def negated(x):
    return -x


@triton.autotune([triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def composed(x_ptr, n, LAST: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr = 64):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(KIND)
    tl.store(x_ptr + i, LAST(scaled(logistic(x)).to(TYPE)), mask=i < n)


@triton.jit
def reads_a_plain_global(x_ptr):
    tl.store(x_ptr, PLAIN)


@triton.jit
def wrong(x):
    return x + tl.arange(0, 63)


@triton.jit
def calls_wrong(x_ptr):
    i = tl.arange(0, 64)
    tl.store(x_ptr + i, wrong(i))


ADD = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32:16"}
MATMUL = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "n": "i32:16"}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def children(monkeypatch, shared_cache):
    """The child processes that a test starts; all tests of this file share a fresh cache."""
    started, run = [], subprocess.run

    def spy(command, *args, **kwargs):
        if str(triton_kernels.CHILD) in command:
            started.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(triton_kernels.subprocess, "run", spy)
    monkeypatch.setenv("LECTURES_CACHE", str(shared_cache))
    return started


def requests():
    for arch in ptx.ARCHITECTURES:
        yield ptx.Request(add, ADD, {"BLOCK": 1024}, arch)
        yield ptx.Request(matmul, MATMUL, {"TILE": 64}, arch)


def kinds(text: str) -> dict[str, int]:
    frame = ptx.count(text)
    return dict(zip(frame.kind, frame.instructions, strict=True))


def test_every_generation_in_one_child(children):
    compiled = ptx.triton_compile_many(list(requests()))
    assert len(children) == 1
    for request, one in zip(requests(), compiled, strict=True):
        capability = f"{request.arch[3:-1]}.{request.arch[-1]}"
        assert re.search(rf"\.target {request.arch}a?\n", one.ptx)
        assert one.name == request.kernel.__name__ and one.num_warps == 4 and one.num_stages == 3
        # 1 KB of a block's shared memory is the system's
        assert one.shared_bytes <= (specs.UNITS[capability]["shared"] - 1) * 1024
        assert {i.opcode for i in instructions(one.ptx) if kind(i) == "other"} == set()
        assert "/tmp" not in one.ptx and ".loc" not in one.ptx
        # Both of Triton's own forms, under the arguments' names and without places in the source.
        for form in (one.ttir, one.ttgir):
            assert f"tt.func public @{one.name}(%{next(iter(request.signature))}: " in form
            assert "tt.store" in form and "loc(" not in form and "#loc" not in form
        assert "#ttg" not in one.ttir and "#ttg.blocked<{" in one.ttgir
        found = kinds(one.ptx)
        if request.kernel is matmul:
            assert one.shared_bytes >= 2 * 64 * 64 * 2
            assert ("tensor core" in found) == (request.arch != "sm_75")
            assert (one.tensor_memory_columns > 0) == (request.arch == "sm_100")
        else:
            assert one.shared_bytes == 0 and found["fp32"] == 1024 // 128
            accesses = ptx.bytes_per_access(one.ptx)
            assert accesses.values.tolist() == [["load global", 16, 4], ["store global", 16, 2]]
    again = ptx.triton_compile_many(list(requests()))
    assert again == compiled and len(children) == 1


def test_the_assembler_takes_it():
    names = ("sm_80", "sm_90", "sm_100")
    for arch in names:
        one = ptx.triton_compiled(matmul, MATMUL, {"TILE": 64}, arch)
        resources = ptx.assemble(one.ptx, arch)
        assert list(resources) == ["matmul"] and resources["matmul"].spill_store_bytes == 0
        assert resources["matmul"].registers > 32
    assert re.search("UTC.?HMMA", ptx.sass(one.ptx, "sm_100", "matmul"))


def test_the_same_as_triton_alone(tmp_path):
    code = """
        import triton, triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        %s
        types = dict(x_ptr="*fp32", y_ptr="*fp32", out_ptr="*fp32", n="i32", BLOCK="constexpr")
        aligned = {(k,): [["tt.divisibility", 16]] for k in range(4)}
        source = ASTSource(add, signature=types, constexprs={"BLOCK": 1024}, attrs=aligned)
        print(triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"], end="")
        """
    lines = open(__file__, encoding="utf-8").read().split("\n\n\n")
    kernel = next(part for part in lines if part.startswith("@triton.jit\ndef add("))
    path = tmp_path / "alone.py"
    path.write_text(textwrap.dedent(code) % kernel)
    environment = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(path)]
    alone = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ptx.triton_ptx(add, ADD, {"BLOCK": 1024}, "sm_80") == alone.stdout


def test_what_is_known_of_an_argument_widens_its_accesses():
    unaligned = {f"{name}_ptr": "*fp32:4" for name in ("x", "y", "out")}
    signatures = [ADD, ADD | {"n": "i32"}, ADD | unaligned]
    found = ptx.triton_compile_many([ptx.Request(add, s, {"BLOCK": 1024}) for s in signatures])
    assert [max(ptx.bytes_per_access(one.ptx).bytes) for one in found] == [16, 4, 4]


def test_tuples_are_arguments():
    """As a launch has strides: 1 compiled in, others known to be multiples of 16 or not."""

    def accesses(*strides):
        types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": strides}
        return [i for i in instructions(ptx.triton_ptx(copy_rows, types)) if "ld.global" in str(i)]

    wide = accesses("i32:16", 1)
    assert wide and all(".v4" in str(one) for one in wide)
    for strides in (("i32", 1), ("i32:16", "i32:16")):
        assert not any(".v4" in str(one) for one in accesses(*strides))
    for wrong in ("i32", 1.5), ("i32", None), ["i32", 1]:
        with pytest.raises(ValueError, match="a type is written as text"):
            ptx.triton_ptx(copy_rows, {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": wrong})


def test_helpers_constants_and_functions_as_arguments(children):
    values = {"LAST": negated, "TYPE": tl.float16}
    text = ptx.triton_ptx(composed, {"x_ptr": "*fp32", "n": "i32"}, values)
    assert "0fBFC00000" in text  # -1.5: scaled, then negated
    assert "cvt.rn.f16" in text and "ex2.approx" in text
    with_blocks = ptx.triton_ptx(
        composed, {"x_ptr": "*fp32", "n": "i32"}, values | {"LAST": scaled, "BLOCK": 512}
    )
    assert with_blocks.count("ex2.approx") > text.count("ex2.approx")
    assert len(children) == 2


def load(path, number):
    spec = importlib.util.spec_from_file_location(f"{path.stem}{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.case("B02")
def test_an_edited_kernel_is_compiled_anew(tmp_path, children):
    text = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2.5)


@triton.jit
def helper(x):
    return x * FACTOR


@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, helper(tl.load(x_ptr)) + 8.0)
"""
    edits = [("2.5", "3.5"), ("x * FACTOR", "x + FACTOR")]
    versions = [text, *(text.replace(*edit) for edit in edits)]
    found = []
    for number, version in enumerate(versions):
        path = tmp_path / f"edited{number}.py"
        path.write_text(version)
        found.append(ptx.triton_ptx(load(path, number).kernel, {"x_ptr": "*fp32"}))
        assert ptx.triton_ptx(load(path, number).kernel, {"x_ptr": "*fp32"}) == found[-1]
        assert len(children) == number + 1
    assert len(set(found)) == len(versions)
    assert "kernel" in ptx.triton_ptx(text, {"x_ptr": "*fp32"})  # the text itself


def test_another_triton_compiles_anew(monkeypatch):
    jobs = []
    monkeypatch.setattr(triton_kernels, "_run", lambda missing: jobs.append(missing) or missing)
    ptx.triton_compile_many([ptx.Request(add, ADD, {"BLOCK": 1024})])
    monkeypatch.setattr(triton_kernels, "triton_version", lambda: "another")
    with pytest.raises(KeyError):  # the job is no answer: it only shows that one was asked for
        ptx.triton_compile_many([ptx.Request(add, ADD, {"BLOCK": 1024})])
    assert list(map(len, jobs)) == [0, 1]


def line_of(text: str) -> int:
    lines = open(__file__, encoding="utf-8").read().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


@pytest.mark.case("E05")
def test_errors_name_file_and_line_and_spare_the_others(children):
    bad = [ptx.Request(kernel, {"x_ptr": "*i32"}) for kernel in (reads_a_plain_global, calls_wrong)]
    good = ptx.Request(add, ADD, {"BLOCK": 256})
    with pytest.raises(ptx.CompileError) as caught:
        ptx.triton_compile_many([bad[0], good, bad[1]])
    message = str(caught.value)
    assert "reads_a_plain_global for sm_90: " in message and "Cannot access global" in message
    assert f"{__file__}:{line_of('tl.store(x_ptr, PLAIN)')}: tl.store(x_ptr, PLAIN)" in message
    assert "calls_wrong for sm_90: ValueError: arange's range must be a power of 2" in message
    line = "return x + tl.arange(0, 63)"
    assert f"{__file__}:{line_of(line)}: {line}" in message
    ptx.triton_compile_many([good])
    assert len(children) == 1


def test_a_compiler_that_dies_is_followed_by_another(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, sys\n"
        "for job in json.load(sys.stdin):\n"
        "    if job == 'deadly': os._exit(7)\n"
        "    print(json.dumps({'ptx': job}), flush=True)\n"
    )
    monkeypatch.setattr(triton_kernels, "CHILD", child)
    answers = triton_kernels._run(["deadly", "a", "deadly", "b"])
    assert [answer.get("ptx") for answer in answers] == [None, "a", None, "b"]
    assert "exit status 7" in answers[0]["error"] and json.dumps(answers)
    child.write_text("raise ImportError('no such thing')")
    with pytest.raises(ptx.CompileError, match="(?s)does not start: .*no such thing"):
        triton_kernels._run(["a"])


def test_wrong_arguments(monkeypatch, children):
    with pytest.raises(ValueError, match="without a type or value: BLOCK, n; not arguments: m"):
        ptx.triton_ptx(add, {key: "*fp32" for key in ("x_ptr", "y_ptr", "out_ptr", "m")})
    with pytest.raises(ValueError, match="a type and a value: n"):
        ptx.triton_ptx(add, ADD, {"BLOCK": 64, "n": 3})
    with pytest.raises(ValueError, match='written as "sm_90"'):
        ptx.triton_ptx(add, ADD, {"BLOCK": 64}, "hopper")
    with pytest.raises(TypeError, match="a kernel is a @triton.jit function"):
        ptx.triton_ptx(3, {})
    monkeypatch.setattr(triton_kernels, "triton_version", lambda: "")
    with pytest.raises(ptx.ToolMissing, match="Triton is missing.*install triton"):
        ptx.triton_ptx(add, ADD, {"BLOCK": 64})
    assert children == []


def test_a_default_counts_unless_the_argument_has_a_type():
    values = {"LAST": negated, "TYPE": tl.float16}
    source = triton_source.gather(composed, ["x_ptr", "n"], values)
    assert source.constants == {"BLOCK": "64", "LAST": "negated", "TYPE": "tl.dtype('fp16')"}
    source = triton_source.gather(composed, ["x_ptr", "n", "BLOCK"], values)
    assert set(source.constants) == {"LAST", "TYPE"}
    assert "SCALE = tl.constexpr(float('1.5'))\n" in source.text
