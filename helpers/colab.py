"""The notebooks on Colab: the cell that each begins with, its badge, and what that cell installs.

Colab brings a PyTorch, a Triton and a Jupyter of its own, and has loaded part of them before a
notebook's first cell runs. So whatever is installed there stays as it is; what is missing is added.
`python -m helpers.colab` renews the cells and badges after pyproject's Repository has changed.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
TAG = "colab"
CELL = """\
import sys

if "google.colab" in sys.modules:  # elsewhere this cell does nothing
    import subprocess
    from pathlib import Path

    repository, here = "{repository}", Path.cwd()
    places = [here, *here.parents, *here.iterdir(), here / "gpu-lectures"]
    project = next((p for p in places if (p / "helpers" / "colab.py").exists()), places[-1])
    if repository and not project.exists():
        subprocess.run(["git", "clone", "--quiet", "--depth=1", repository, project])
    if not project.exists():
        sys.exit("Upload the project as a .zip, unpack it with !unzip, and run this cell again.")
    sys.path.insert(0, str(project))
    from helpers import colab

    colab.install()"""
HOST = "https://colab.research.google.com"
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)\n\n")


def repository(root: Path = ROOT) -> str:
    """The project's address, pyproject's [project.urls] Repository; empty while it has none."""
    return _project(root).get("urls", {}).get("Repository", "")


def refresh(notebook: "NotebookNode", name: str, address: str) -> None:
    """Bring the cell tagged `colab` and the badge of the notebook file `name` up to date."""
    for cell in notebook.cells:
        if TAG in cell.metadata.get("tags", []):
            cell.source = CELL.format(repository=address)
    notebook.cells[0].source = with_badge(notebook.cells[0].source, name, address)


def with_badge(text: str, name: str, address: str) -> str:
    """The text with a link below its title that opens `name` in Colab, which reads GitHub only."""
    text = BADGE.sub("", text, count=1)
    github = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(?:\.git)?/?", address)
    title, below, rest = text.partition("\n\n")
    if not github or not title.startswith("# "):
        return text
    link = f"{HOST}/github/{github[1]}/blob/main/notebooks/{name}"
    return f"{title}\n\n[![Open in Colab]({HOST}/assets/colab-badge.svg)]({link}){below}{rest}"


def install(root: Path = ROOT) -> None:
    """Install the project and what it lacks, change nothing else, and go to its notebooks.

    SystemExit, in one sentence, when the PyTorch that is there is missing or too old, or pip fails.
    """
    needed = [Requirement(line) for line in _project(root)["dependencies"]]
    needed = [each for each in needed if each.marker is None or each.marker.evaluate()]
    installed = _installed()
    missing = [each for each in needed if canonicalize_name(each.name) not in installed]
    unfit = {
        each.name: f"{each.name} {version} ({each.specifier})"
        for each in needed
        if (version := installed.get(canonicalize_name(each.name)))
        and not each.specifier.contains(version, prereleases=True)
    }
    if "torch" not in installed or "torch" in unfit:
        found = installed.get("torch", "none")
        (torch,) = (each for each in needed if each.name == "torch")
        sys.exit(f"This runtime's PyTorch is {found}; the notebooks need {torch.specifier}.")
    own = canonicalize_name(_project(root)["name"])
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "held.txt"
        pins = (f"{name}=={version}\n" for name, version in installed.items() if name != own)
        held.write_text("".join(pins), encoding="utf-8")
        if missing:
            plain = [f"{each.name}{each.specifier}" for each in missing]
            _pip("--constraint", str(held), *plain)
    if own not in installed:
        _pip("--no-deps", "--editable", str(root))
    importlib.invalidate_caches()
    if missing:
        print(f"Installed: {', '.join(each.name for each in missing)}")
    if unfit:
        print(f"Not the versions that the notebooks were tested with: {', '.join(unfit.values())}")
    os.chdir(root / "notebooks")


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _installed() -> dict[str, str]:
    """Every distribution that Python finds, and its version, local part (+cu128) and all."""
    versions = {}
    for each in importlib.metadata.distributions():
        try:
            Version(each.version)
        except (InvalidVersion, TypeError):  # a system's package; pip would refuse the whole list
            continue
        versions.setdefault(canonicalize_name(each.name), each.version)
    return versions


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip could not install what the notebooks need:\n{done.stderr.strip()}")


def main() -> None:
    from helpers import record

    address = repository()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        record.rewrite(path, path)
    readme = ROOT / "README.md"
    text = with_badge(readme.read_text(encoding="utf-8"), "01_specs.ipynb", address)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
