"""What a machine lacks is said in one line, and what compilers say in one sentence."""

import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from helpers import cache, device, toolchain


@pytest.fixture
def machine(monkeypatch):
    """A CPU machine that has everything; `machine.tools` and `machine.modules` can be reduced."""
    found = types.SimpleNamespace(
        tools={"g++", "gcc", "nvcc"}, modules={"cuda.bindings.nvrtc", "cuda.core"}, gpu=False
    )
    monkeypatch.setattr(
        toolchain.shutil, "which", lambda name: f"/bin/{name}" if name in found.tools else None
    )
    monkeypatch.setattr(toolchain, "installed", lambda module: module in found.modules)
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(toolchain, "has_cuda", lambda: found.gpu)
    monkeypatch.delenv("CC", raising=False)
    return found


def test_a_complete_machine_lacks_nothing(machine, monkeypatch):
    assert toolchain.missing() == ""
    assert "Missing" not in device.facts("smoke")
    machine.gpu = True
    monkeypatch.setattr(toolchain, "triton_can_build", lambda: True)
    assert toolchain.missing() == ""


def test_what_is_missing_is_one_line(machine, monkeypatch):
    machine.tools.clear()
    machine.modules.clear()
    monkeypatch.setattr(toolchain, "triton_version", lambda: "")
    said = toolchain.missing()
    parts = said.split("; ")
    assert [part.split(" (")[0] for part in parts] == [
        "no C++ compiler",
        "no Triton",
        "no cuda-bindings",
    ]
    assert all(part.endswith(")") for part in parts)  # each says what that costs
    assert "\n" not in said
    assert device.facts("smoke")["Missing"] == said


@pytest.mark.parametrize("compiler", ["g++", "clang++", "cl"])
def test_any_cpp_compiler_will_do(machine, compiler):
    machine.tools.intersection_update(())
    assert "no C++ compiler" in toolchain.missing()
    machine.tools.add(compiler)
    assert toolchain.missing() == ""


def test_a_gpu_needs_more(machine, monkeypatch):
    machine.modules.remove("cuda.core")
    assert toolchain.missing() == ""
    machine.gpu = True
    monkeypatch.setattr(toolchain, "triton_can_build", lambda: True)
    assert toolchain.missing().startswith("no cuda-core (")
    monkeypatch.setattr(torch.version, "hip", "6.2")  # of no use on an AMD GPU
    assert toolchain.missing() == ""


@pytest.mark.case("E19")
def test_triton_on_a_gpu_needs_a_c_compiler_and_python_headers(machine, monkeypatch, tmp_path):
    """Case E19: slim images have neither."""
    machine.gpu = True
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda *_: {"include": str(tmp_path)})
    headers = "no C compiler with Python's headers (gcc, python3-dev)"
    assert toolchain.missing().startswith(headers)  # no Python.h
    (tmp_path / "Python.h").touch()
    assert toolchain.missing() == ""
    machine.tools.remove("gcc")
    assert toolchain.missing().startswith(headers)
    machine.tools.add("icx")
    monkeypatch.setenv("CC", "icx")  # Triton asks CC first
    assert toolchain.missing() == ""
    machine.gpu = False
    machine.tools.remove("icx")
    assert toolchain.missing() == ""  # the interpreter compiles nothing


def test_installed_looks_without_importing():
    assert toolchain.installed("json") and toolchain.installed("xml.etree")
    assert not toolchain.installed("no_such_module")
    assert not toolchain.installed("no_such_package.module")
    assert not toolchain.installed("json.no_such_module")
    code = (
        "import sys; from helpers import toolchain; had = 'cuda.core' in sys.modules;"
        "toolchain.installed('cuda.core'); print(had or 'cuda.core' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


# load_inline


@pytest.fixture
def builder(machine, monkeypatch, tmp_path):
    """A GPU machine on which load_inline works; nvcc is a script that tells a version."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    machine.gpu, machine.nvcc = True, nvcc
    machine.tools.add(str(nvcc))

    def version(text: str) -> None:
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {text}'\n")
        nvcc.chmod(0o755)

    machine.version = version
    version("release 12.6, V12.6.85")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
    machine.cpp_extension = cpp_extension
    return machine


def test_inline_can_be_built_where_all_is_there(builder):
    assert toolchain.inline_missing() == ""


@pytest.mark.case("E07")
def test_a_cpu_build_of_pytorch_cannot_launch_what_nvcc_builds(builder, monkeypatch):
    """Case E07: nvcc on the PATH is not enough."""
    monkeypatch.setattr(torch.version, "cuda", None)
    for gpu in (True, False):
        builder.gpu = gpu
        assert "built for CPUs" in toolchain.inline_missing()


def test_inline_without_a_gpu(builder):
    builder.gpu = False
    assert toolchain.inline_missing() == "there is no GPU that PyTorch can use"


@pytest.mark.case("E07")
@pytest.mark.parametrize("home", [None, "", "/nowhere"])
def test_inline_without_nvcc(builder, monkeypatch, home):
    monkeypatch.setattr(builder.cpp_extension, "CUDA_HOME", home)
    assert toolchain.inline_missing().startswith("nvcc is not here")
    assert "CUDA_HOME" in toolchain.inline_missing()


def test_inline_without_ninja(builder, monkeypatch):
    monkeypatch.setattr(builder.cpp_extension, "is_ninja_available", lambda: False)
    assert "ninja" in toolchain.inline_missing()


def test_inline_without_a_host_compiler(builder, monkeypatch):
    builder.tools.remove("g++")
    assert "g++" in toolchain.inline_missing()
    monkeypatch.setenv("CXX", "clang++-18")
    assert "g++" in toolchain.inline_missing()
    builder.tools.add("clang++-18")
    assert toolchain.inline_missing() == ""


@pytest.mark.case("E09")
@pytest.mark.parametrize(
    "nvcc, torch_cuda, fits",
    [
        ("release 12.0, V12.0.1", "12.8", True),
        ("release 11.8, V11.8.89", "12.8", False),
        ("release 13.0, V13.0.1", "12.8", False),
        ("release 1.2", "12.8", False),
        ("no version at all", "12.8", True),  # let nvcc itself find out
    ],
)
def test_major_versions_must_agree(builder, monkeypatch, nvcc, torch_cuda, fits):
    """Case E09."""
    builder.version(nvcc)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    said = toolchain.inline_missing()
    assert (said == "") is fits
    if not fits:
        assert f"CUDA {nvcc.split()[1].strip(',')}" in said and "CUDA 12.8" in said


@pytest.mark.case("E09")
@pytest.mark.parametrize(
    "error, sentence",
    [
        (
            "CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
            "nvcc was not found: set CUDA_HOME",
        ),
        ("/bin/sh: 1: nvcc: not found", "nvcc was not found"),
        (
            "[Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
            "nvcc was not found",
        ),
        (
            "Ninja is required to load C++ extensions (pip install ninja to get it)",
            "ninja, which runs the compilers, is missing: pip install ninja",
        ),
        (
            "\nThe detected CUDA version (11.8) mismatches the version that was used to compile\n"
            "PyTorch (12.8). Please make sure to use the same CUDA versions.\n",
            "nvcc is of CUDA 11.8, PyTorch was built with CUDA 12.8: the major versions must agree",
        ),
        (
            "error: #error -- unsupported GNU version! gcc versions later than 12 are not "
            "supported! The nvcc flag '-allow-unsupported-compiler' can be used",
            "g++ is newer than this nvcc knows: it takes versions up to 12 (set CXX to one)",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
            "this nvcc does not know GPUs of generation compute_120",
        ),
        (
            "main.cpp:3:10: fatal error: Python.h: No such file or directory",
            "Python's headers are missing: install python3-dev or similar",
        ),
        (
            "[Errno 13] Permission denied: '/root/cache/lock'",
            "the build folder cannot be written: /root/cache/lock",
        ),
        (
            "Error building extension 'gelu': [1/3] nvcc -c\n"
            '/tmp/build/cuda.cu(12): error: identifier "undefinedd" is undefined\n'
            "        y[i] = undefinedd;\n               ^\n\n1 error detected\n",
            'cuda.cu, line 12: identifier "undefinedd" is undefined',
        ),
        (
            "FAILED: main.o\n/tmp/build/main.cpp:7:5: error: 'gelu' was not declared\n    7 | g",
            "main.cpp, line 7: 'gelu' was not declared",
        ),
        ("first line\n  the last line says it \n\n", "the last line says it"),
        ("x" * 1000, "x" * 200),
        ("", "str"),
    ],
)
def test_explain(error, sentence):
    assert toolchain.explain(error) == sentence
    if error:
        assert toolchain.explain(RuntimeError(error)).startswith(sentence)


def test_an_error_without_words_is_named():
    assert toolchain.explain(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert toolchain.explain(RuntimeError("\n \n")) == "RuntimeError"


# The build folder


@pytest.fixture
def cold(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path))
    return tmp_path


def test_the_folder_is_of_one_build_of_pytorch_and_of_one_user(cold, monkeypatch):
    with toolchain.inline_folder("gelu") as folder:
        assert Path(folder).is_dir()
        assert Path(folder).parent == cache.folder("load_inline")
        assert "gelu" in folder and torch.__version__ in folder
    monkeypatch.setattr(torch, "__version__", "9.9")
    with toolchain.inline_folder("gelu") as other:
        assert other != folder


@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
def test_a_lock_that_a_killed_build_left_behind_is_removed(cold):
    with toolchain.inline_folder("gelu") as folder:
        (Path(folder) / "lock").touch()  # PyTorch's, which it would remove when done
        (Path(folder) / "gelu.o").touch()
    with toolchain.inline_folder("gelu") as folder:
        assert not (Path(folder) / "lock").exists()
        assert (Path(folder) / "gelu.o").exists()


HOLD = textwrap.dedent("""
    import sys, time
    from helpers import toolchain
    with toolchain.inline_folder("gelu") as folder:
        print("held", flush=True)
        sys.stdin.readline()
        open(folder + "/done", "a").write(sys.argv[1])
""")


def holder(name: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


@pytest.mark.case("E11")
@pytest.mark.skipif(os.name == "nt", reason="Windows has other locks")
def test_processes_wait_for_one_another_and_for_no_dead_one(cold):
    """Case E11: the second gets the folder when the first is done, or has been killed."""
    import fcntl

    first, second = holder("1"), holder("2")
    try:
        # Whichever comes first holds the folder, and the other does not get it.
        with_it, without = (first, second) if _first_line(first, second) else (second, first)
        (folder,) = (cold / "load_inline").iterdir()
        with (folder / "held").open() as held, pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "lock").touch()
        with_it.kill()
        with_it.wait(timeout=20)
        assert without.stdout.readline() == "held\n"
        assert not (folder / "lock").exists()
        without.communicate("go\n", timeout=20)
        assert (folder / "done").read_text() == ("2" if without is second else "1")
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def _first_line(first: subprocess.Popen, second: subprocess.Popen) -> bool:
    """True when the first process holds the folder, False when the second does."""
    import select

    ready, _, _ = select.select([first.stdout, second.stdout], [], [], 60)
    assert len(ready) == 1, "both hold the folder" if ready else "neither got the folder"
    assert ready[0].readline() == "held\n"
    return ready[0] is first.stdout


def test_run_keeps_what_a_tool_says_in_english(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    script = "import os, sys; print(os.environ['LC_ALL']); sys.stderr.write('no'); sys.exit(3)"
    done = toolchain.run([Path(sys.executable), "-c", script])
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("C", "no", 3)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_compiler_tells_its_version():
    said = toolchain.compiler_version(shutil.which("g++"))
    assert re.search(r"\d+\.\d+", said) and "\n" not in said


@pytest.mark.skipif(platform.system() != "Linux", reason="read from Linux")
def test_the_machine_names_its_features_once():
    assert toolchain.machine().startswith(platform.machine())
    assert "processor" not in toolchain.machine() and toolchain.machine() == toolchain.machine()
