"""Awkward machines, each by a real process. conditions.py has the whole collection on them."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from awkward import ROOT, environment, forked, mounted, python, without_compilers, without_triton

from helpers import cache, cuda, device, native, toolchain

BUILD = """
import torch
from helpers import cuda, device, native, toolchain

with cuda.where_possible():
    assert native.read(torch.ones(100), threads=1)[1] == 100
    print("built")
"""
WRAPPERS = """
from helpers.kernels import attention, gelu, matmul, softmax

x, q = torch.randn(4, 16), torch.randn(1, 1, 4, 16)
for call in (lambda: gelu.cuda_gelu(x), lambda: gelu.triton_gelu(x),
             lambda: softmax.triton_softmax(x), lambda: matmul.triton_matmul(x, x.T),
             lambda: attention.flash_attention(q, q, q)):
    with cuda.where_possible():
        call()
        print("computed")
"""


@pytest.fixture
def gpu_that_nvidia_smi_lists(monkeypatch, tmp_path):
    """PyTorch, a build for CUDA, sees no GPU; nvidia-smi lists one. Give it another text to say."""
    tool = tmp_path / "nvidia-smi"

    def says(*lines: str) -> None:
        tool.write_text("\n".join(["#!/bin/sh", *lines]))
        tool.chmod(0o755)

    says("echo NVIDIA H200")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("No CUDA GPUs are available"))
    return says


def fail(message: str):
    raise RuntimeError(message)


def gpu_said() -> str:
    return toolchain.missing().split("; ")[0]


@pytest.mark.parametrize("hiding", ["", "-1", "GPU-00000000"])
def test_a_gpu_that_the_environment_hides(gpu_that_nvidia_smi_lists, monkeypatch, hiding, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
    sentence = (
        "no GPU that PyTorch can use, though nvidia-smi lists NVIDIA H200 "
        f"(CUDA_VISIBLE_DEVICES={hiding} hides it: unset that variable)"
    )
    assert gpu_said() == sentence
    device.describe()
    assert sentence in capsys.readouterr().out


def test_a_gpu_that_this_pytorch_cannot_use(gpu_that_nvidia_smi_lists, monkeypatch):
    old = "The NVIDIA driver on your system is too old (found version 11040). Please update …"
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(old))
    assert "(its driver is too old for a build for CUDA 13.0: see" in gpu_said()
    monkeypatch.setattr(torch.cuda, "init", lambda: fail("CUDA unknown error - this may be due …"))
    assert "(PyTorch says: CUDA unknown error" in gpu_said()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "(this PyTorch is a build for CPUs alone: see" in gpu_said()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "(this PyTorch is a build for AMD's GPUs: see" in gpu_said()


def test_nvidia_smi_without_a_gpu(gpu_that_nvidia_smi_lists, monkeypatch):
    gpu_that_nvidia_smi_lists("echo NVIDIA-SMI has failed.", "exit 9")
    assert gpu_said() == "no GPU that PyTorch can use (nvidia-smi fails: NVIDIA-SMI has failed)"
    gpu_that_nvidia_smi_lists("exit 0")
    assert gpu_said().endswith("(nvidia-smi fails: it says nothing)")
    monkeypatch.setattr(
        toolchain.subprocess, "run", lambda *_, **k: fail_slowly(k["timeout"]), raising=True
    )
    assert gpu_said() == "no GPU that PyTorch can use (and nvidia-smi does not answer)"


def fail_slowly(timeout: float):
    raise subprocess.TimeoutExpired("nvidia-smi", timeout)


def test_without_triton_every_module_loads_and_says_what_is_left_out(tmp_path):
    """As on a Mac."""
    script = (
        f"{BUILD}{WRAPPERS}device.describe()\n"
        "import importlib, pkgutil, helpers\n"
        "for module in pkgutil.walk_packages(helpers.__path__, 'helpers.'):\n"
        "    if module.name != 'helpers.ptx.child': importlib.import_module(module.name)\n"
    )
    lines = python(script, without_triton(tmp_path)).splitlines()
    native, emulator, *triton = lines[:6]
    assert native.startswith("Left out here: what a CPU's memory costs is measured by C++ that g++")
    assert emulator == "Left out here: the emulator needs Linux and g++: this is Darwin."
    assert len(set(triton)) == 1 and triton[0].startswith("Left out here: Triton is not installed")
    assert "Triton                   not installed" in lines
    assert "GPU                      none" in lines
    assert any("no Triton (its kernels are left out, recorded results stay)" in x for x in lines)


def test_without_a_compiler_what_needs_one_says_so(tmp_path):
    script = (
        f"{BUILD}{WRAPPERS}print(toolchain.missing())\n"
        "from helpers import compute_roofs; assert not compute_roofs.can_compile()\n"
    )
    native, emulator, *triton, missing = python(script, without_compilers(tmp_path)).splitlines()
    assert native.startswith("Left out here: what a CPU's memory costs is measured by C++ that g++")
    assert emulator == (
        "Left out here: the emulator compiles kernels with g++, and there is none here."
    )
    assert triton == ["computed"] * 4 and "no C++ compiler (" in missing


def test_a_home_and_a_checkout_that_can_only_be_read(tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    script = (
        "from helpers import cache, results, run\n"
        "import matplotlib.pyplot, IPython, os\n"  # warn where they cannot write
        "IPython.paths.get_ipython_dir()\n"
        "book = results.Recorder('01_specs', 'smoke')\n"
        "book.record('S1', 'op', 1.0, 'ms')\n"
        "print(book.path, cache.folder('ptx'), *map(os.environ.get, cache.IN_HOME), sep='\\n')\n"
        "print(run.main(['1']))\n"
    )
    changes = environment(HOME=home, TMPDIR=temporary)
    for name in (*cache.IN_HOME, "LECTURES_CACHE", "LECTURES_SCRATCH", "LECTURES_RECORDS"):
        changes.pop(name, None)
    readonly = mounted(f"readonly {home}", f"readonly {ROOT}")
    *paths, refusal, status = python(script, changes, readonly).splitlines()
    own = next(temporary.glob("gpu-lectures-*"))
    assert all(Path(path).is_relative_to(own) for path in paths)
    assert {Path(path).name for path in paths} == {
        "01_specs.json", "ptx", "triton", "matplotlib", "ipython",
    }  # fmt: skip
    assert refusal.endswith(
        "runs cannot be written: Read-only file system (--output chooses another)"
    )
    assert status == "2"


@pytest.mark.parametrize("home", [None, "/no/such/home"])
def test_without_a_home_programs_write_among_our_own_files(home, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.os, "environ", {"LECTURES_CACHE": str(tmp_path), "MPLCONFIGDIR": "x"})
    monkeypatch.setattr(cache.Path, "home", lambda: Path(home) if home else fail("none is known"))
    cache.leave_home()
    expected = {"MPLCONFIGDIR": "x"}  # the reader's own wish
    if home:
        expected |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
        expected |= {"IPYTHONDIR": str(tmp_path / "ipython")}
    assert {k: v for k, v in cache.os.environ.items() if k in cache.IN_HOME} == expected


def test_a_home_that_can_be_written_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.os, "environ", {})
    monkeypatch.setattr(cache.Path, "home", lambda: tmp_path)
    cache.leave_home()
    assert not cache.os.environ


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_a_full_disk_cannot_take_is_made_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr(cache, "ROOT", tmp_path / "checkout")

    def make(path):
        path.write_text("begun")
        if (tmp_path / "full") in path.parents:
            full_disk()

    path = cache.file("kind", "name", make)
    assert path == tmp_path / "checkout" / "runs" / "cache" / "kind" / "name"
    assert cache.file("kind", "name", full_disk) == path  # it is found again
    assert not any((tmp_path / "full" / "kind").iterdir())
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    with pytest.raises(OSError, match="No space left"):
        cache.file("kind", "another", full_disk)


def build() -> None:
    with cuda.where_possible():
        native.load()
        print("built")


@pytest.fixture
def cold(tmp_path, monkeypatch, compiled):
    """A folder for caches, and an empty one that can become a full disk."""
    for name in ("cold", "disk", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("LECTURES_CACHE", str(tmp_path / "cold"))
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    quick = [flag for flag in native.FLAGS if flag != "-O3"]
    monkeypatch.setattr(native, "FLAGS", quick)
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


def test_a_full_disk_of_temporary_files_is_a_sentence(cold, monkeypatch):
    """g++ writes there; the source is not to blame."""
    mounted()
    monkeypatch.setenv("TMPDIR", str(cold / "disk"))
    assert forked(build, cold / "disk")() == (
        "Left out here: cpu_memory.cpp cannot be compiled: "
        f"no space is left on a disk that {shutil.which('g++')} writes to.\n"
    )


def test_a_library_is_built_where_the_disk_of_the_cache_is_full(cold, monkeypatch):
    mounted()
    monkeypatch.setenv("LECTURES_CACHE", str(cold / "disk"))
    assert forked(build, cold / "disk")() == "built\n"
    assert list((cold / "runs" / "cache" / "native").glob("*.so"))


def test_two_processes_at_once_with_a_cold_cache_both_build(cold):
    running = [forked(build) for _ in range(2)]
    assert [answer() for answer in running] == ["built\n"] * 2
    (library,) = (cold / "cold" / "native").iterdir()  # whole, and nothing half-made beside it
    assert cache.is_whole(library)
