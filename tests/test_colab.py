"""helpers.colab: the cell that every notebook begins with, and what it installs.

Colab itself is stood in for by a module of its name, its packages by descriptions of packages.
"""

import importlib.metadata
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import types
import venv
import zipfile
from pathlib import Path

import pytest

from helpers import colab

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/ada/gpu-lectures"
ON_COLAB = """\
import sys, types
for name in ("google", "google.colab"):
    sys.modules[name] = types.ModuleType(name)
"""
STUB = "from pathlib import Path\ndef install(): print(Path(__file__).parent.parent.name)\n"


def run_cell(python, folder, address="", **environment):
    """The cell, run there by that Python as if Colab had started it; its output and messages."""
    script = f"{ON_COLAB}{colab.CELL.format(repository=address)}\nimport os; print(os.getcwd())"
    done = subprocess.run(
        [python, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr


def test_outside_colab_the_cell_does_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    names = {}
    exec(colab.CELL.format(repository=ADDRESS), names)
    assert names.keys() == {"__builtins__", "sys"}
    assert Path.cwd() == tmp_path and sys.path == before and not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("place", ["", "project", "project/notebooks"])
def test_the_cell_finds_the_project(place, tmp_path):
    for folder in ("project/helpers", "project/notebooks", "sample_data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "helpers" / "colab.py").write_text(STUB, encoding="utf-8")
    said, _ = run_cell(sys.executable, tmp_path / place, "file:///nowhere")
    assert said.splitlines()[0] == "project"


@pytest.mark.parametrize("address", ["", "file:///nowhere"])
def test_without_the_project_the_cell_says_what_to_do(address, tmp_path):
    said, message = run_cell(sys.executable, tmp_path, address)
    assert said == "" and "Traceback" not in message
    assert message.splitlines()[-1].startswith("Upload the project as a .zip")


# What it installs, with pip, from a folder of packages that hold nothing but their requirements.


def wheel(folder, name, version, *requires):
    """Write a package that needs others; returns the name of its file."""
    import pathlib
    import zipfile

    file = pathlib.Path(folder) / f"{name}-{version}-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for each, text in texts.items():
            archive.writestr(f"{name}-{version}.dist-info/{each}", text)
    return file.name


BACKEND = f"""
{inspect.getsource(wheel)}

def build_editable(folder, config_settings=None, metadata_directory=None):
    return wheel(folder, "gpu_lectures", "0.1.0", "torch>=99")
"""
INSTALLED = {
    "torch": "2.11.0+cu128",  # a build of PyTorch's own index: no other index has that version
    "triton": "3.6.0",
    "numpy": "2.0.2",
    "ipykernel": "6.17.1",  # older than the range: it is Colab's own, and runs
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A Python with Colab's packages, a repository to clone, and a folder of newer packages."""
    if not importlib.util.find_spec("pip") or os.name == "nt":
        pytest.skip("needs pip and symbolic links")
    folder = tmp_path_factory.mktemp("colab")
    venv.create(folder / "python", with_pip=False)
    (site,) = (folder / "python" / "lib").glob("python3*/site-packages")
    for name in ("pip", "packaging"):
        (site / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    for name, version in INSTALLED.items():
        with zipfile.ZipFile(folder / wheel(folder, name, version)) as archive:
            archive.extractall(site)
    packages = folder / "packages"
    packages.mkdir()
    for name in ("torch", "triton", "numpy", "ipykernel"):
        wheel(packages, name, "99")
    wheel(packages, "papermill", "2.6")
    wheel(packages, "papermill", "99", "torch>=99", "triton>=99", "numpy>=99")  # would change all

    project = folder / "origin"
    (project / "helpers").mkdir(parents=True)
    (project / "notebooks").mkdir()
    shutil.copy(ROOT / "helpers" / "colab.py", project / "helpers")
    for empty in ("helpers/__init__.py", "notebooks/empty"):
        (project / empty).touch()
    (project / "backend.py").write_text(BACKEND, encoding="utf-8")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "gpu-lectures"\nversion = "0.1.0"\ndependencies = [\n'
        '"torch>=2.11", \'triton>=3.6; sys_platform != "none"\', "numpy>=2", "ipykernel>=6.29",\n'
        '"papermill>=2.6", \'absent>=1; sys_platform == "none"\']\n',
        encoding="utf-8",
    )
    git = ["git", "-C", project, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "all"], check=True)
    return types.SimpleNamespace(
        python=folder / "python" / "bin" / "python",
        site=site,
        address=project.as_uri(),
        environment={
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(packages),
            "PIP_CONFIG_FILE": os.devnull,
        },
    )


def versions(site):
    found = importlib.metadata.distributions(path=[str(site)])
    return {each.name: each.version for each in found}


def test_on_colab_the_project_is_cloned_and_installed_and_nothing_else_changes(machine, tmp_path):
    assert versions(machine.site) == INSTALLED
    said, message = run_cell(machine.python, tmp_path, machine.address, **machine.environment)
    notebooks = tmp_path / "gpu-lectures" / "notebooks"
    assert said.splitlines() == [
        "Installed: papermill",
        "Not the versions that the notebooks were tested with: ipykernel 6.17.1 (>=6.29)",
        str(notebooks),
    ], message
    added = {"papermill": "2.6", "gpu_lectures": "0.1.0"}
    assert versions(machine.site) == INSTALLED | added
    # A second time, from where the first one went, with a pip that refuses to do anything.
    again, _ = run_cell(machine.python, notebooks, "", PIP_TIMEOUT="none")
    assert again.splitlines() == said.splitlines()[1:]
    assert versions(machine.site) == INSTALLED | added


FITTING = {"torch": "2.11.0+cu128", "triton": "3.6.0"}


@pytest.fixture
def here(monkeypatch):
    """Stands in for what is installed here: packages by name, and the calls of pip."""
    here = types.SimpleNamespace(installed=dict(FITTING), calls=[], fails=False)

    def run(command, **_):
        here.calls.append(command[3:])
        return types.SimpleNamespace(returncode=int(here.fails), stderr="ERROR: no network\n")

    monkeypatch.setattr(colab, "_installed", lambda: here.installed)
    monkeypatch.setattr(colab.subprocess, "run", run)
    monkeypatch.chdir(ROOT)  # restored afterwards
    return here


@pytest.mark.parametrize("version", ["2.10.0+cu128", "1.13.1", "none"])
def test_a_pytorch_that_is_too_old_is_one_sentence(version, here):
    here.installed["torch"] = version
    if version == "none":
        del here.installed["torch"]
    with pytest.raises(SystemExit) as refusal:
        colab.install()
    assert str(refusal.value) == f"This runtime's PyTorch is {version}; the notebooks need >=2.11."
    assert here.calls == []


def test_a_newer_pytorch_is_kept(here):
    here.installed["torch"] = "2.14.0a0+git1"
    colab.install()
    assert here.calls


def test_a_failure_of_pip_is_passed_on(here):
    here.fails = True
    with pytest.raises(SystemExit, match="pip could not install .*\nERROR: no network$"):
        colab.install()


def test_a_version_that_pip_would_refuse_is_left_out(monkeypatch):
    def distributions():
        for name, version in (("Torch", "2.11"), ("python-apt", "2.4-u.b_1~"), ("torch", "1.0")):
            yield types.SimpleNamespace(name=name, version=version)
        yield types.SimpleNamespace(name="broken", version=None)

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    assert colab._installed() == {"torch": "2.11"}
