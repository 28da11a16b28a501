"""Machines that lack something, as environments and namespaces for the processes of a test."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "gcc", "c++", "cc", "cpp", "clang", "clang++", "cl", "nvcc", "c89", "c99")

# For sitecustomize: neither the modules nor their versions can be found. PyTorch goes by
# platform.system() to find its own libraries, so only our modules see another one.
NO_TRITON = """\
import importlib.metadata, platform, sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    @staticmethod
    def find_distributions(*_):
        return ()

from_name, system = importlib.metadata.Distribution.from_name.__func__, platform.system

@classmethod
def only_others(cls, name):
    if name.startswith(("triton", "cuda-")):
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(cls, name)

def darwin():
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return "Darwin" if caller.startswith("helpers.") else system()

sys.meta_path.insert(0, Absent)
importlib.metadata.Distribution.from_name, platform.system = only_others, darwin
"""


def environment(**changes: str | Path) -> dict[str, str]:
    """This process's own, with changes, and without what pytest adds."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return environment | {name: str(value) for name, value in changes.items()}


def without_triton(folder: Path) -> dict[str, str]:
    """A Mac's: no Triton, no CUDA packages. `folder` takes a file."""
    (folder / "sitecustomize.py").write_text(NO_TRITON)
    return environment(
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        LECTURES_CACHE=folder / "cache",
        CUDA_VISIBLE_DEVICES="",
    )  # what is kept would be found without Triton, too


def without_compilers(folder: Path) -> dict[str, str]:
    """A slim image's: the tools of /usr/bin, but no compiler. `folder` takes links."""
    for tool in Path("/usr/bin").iterdir():
        name = tool.name.removeprefix("x86_64-linux-gnu-")
        if name.split("-")[0] not in COMPILERS:
            (folder / tool.name).symlink_to(tool)
    changed = environment(PATH=folder, LECTURES_CACHE=folder / "cache", CUDA_VISIBLE_DEVICES="")
    return {k: v for k, v in changed.items() if k not in ("CC", "CXX", "CUDA_HOME")}


def mounted(*mounts: str) -> list[str]:
    """A command's beginning: it runs with these mounts, which nobody else sees (Linux, root).

    A mount is the arguments of `mount`; after "readonly " a folder, which can then only be read.
    """
    if not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("mounts need Linux and root")
    lines = []
    for mount in mounts:
        if mount.startswith("readonly "):
            folder = mount.removeprefix("readonly ")
            lines.append(f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}")
        else:
            lines.append(f"mount {mount}")
    command = ["unshare", "--mount", "sh", "-c", " && ".join([*lines, 'exec "$@"']), "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    return command


def python(
    script: str, environment: dict[str, str] | None = None, before: list[str] | None = None
) -> str:
    """What a script prints, errors included; it must end well, and without a traceback."""
    done = subprocess.run(
        [*(before or []), sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout
    return done.stdout


def forked(work: Callable[[], object], disk: Path | None = None) -> Callable[[], str]:
    """Start `work` in a copy of this process; call what is returned to wait for what it prints.

    `disk`: a folder that becomes a full disk for it, and for nobody else.
    """
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        with open(write, "w") as out, contextlib.redirect_stdout(out):
            try:
                if disk:
                    ctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS: mounts of its own
                    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
                    size = "size=16k,nr_inodes=50"
                    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", disk], check=True)
                work()
            except BaseException:
                print(traceback.format_exc())
            out.flush()
            os._exit(0)
    os.close(write)

    def answer() -> str:
        with open(read) as lines:
            said = lines.read()
        os.waitpid(child, 0)
        return said

    return answer
