"""requirements.txt, pyproject.toml and environment.yml describe one environment."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LINES = [
    line
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
]
PINS = {canonicalize_name((pin := Requirement(line)).name): pin for line in LINES[:-1]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
FOR_TESTS = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]
RANGES = {canonicalize_name(range_.name): range_ for range_ in NEEDED + FOR_TESTS}

LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
MACOS = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
WINDOWS = {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64"}
LINUX_ONLY = {"triton"}  # packages without wheels for macOS and Windows
RANGED = {"nvidia-cuda-nvrtc"}  # each CUDA build of torch asks for its own, exact version


def applies(requirement: Requirement, machine: dict[str, str] | None) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(machine)


def test_requirements_end_with_this_project():
    assert LINES[-1] == "-e .[test]"


def test_every_requirement_is_an_exact_pin():
    for name, pin in PINS.items():
        if name in RANGED:
            continue
        assert [each.operator for each in pin.specifier] == ["=="], pin
        assert "*" not in str(pin.specifier), pin


def test_every_dependency_is_pinned_within_its_range():
    assert RANGES.keys() <= PINS.keys()
    for name, range_ in RANGES.items():
        if name in RANGED:
            assert PINS[name].specifier == range_.specifier
            continue
        (pinned,) = PINS[name].specifier
        assert range_.specifier.contains(pinned.version), (str(range_), str(pinned))


def test_pins_and_ranges_apply_to_the_same_machines():
    for name, range_ in RANGES.items():
        for machine in (LINUX, MACOS, WINDOWS):
            assert applies(range_, machine) == applies(PINS[name], machine), (name, machine)


@pytest.mark.parametrize(
    ("torch", "triton"), [("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.99.0", "3.99.0")]
)
def test_the_ranges_admit_the_recorded_and_the_newest_releases(torch, triton):
    assert RANGES["torch"].specifier.contains(torch)
    assert RANGES["triton"].specifier.contains(triton)


@pytest.mark.case("E20")
@pytest.mark.parametrize("machine", [MACOS, WINDOWS], ids=["macOS", "Windows"])
def test_installs_where_triton_has_no_wheels(machine):
    for requirements in (PINS, RANGES):
        left_out = {name for name, each in requirements.items() if not applies(each, machine)}
        assert left_out >= LINUX_ONLY
        # Nothing else may be missing there that the notebooks import.
        assert not left_out & {"torch", "numpy", "pandas", "matplotlib", "papermill", "ipykernel"}


def test_triton_is_installed_on_linux():
    assert applies(PINS["triton"], LINUX) and applies(RANGES["triton"], LINUX)


def conda() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def test_conda_gets_its_versions_from_the_requirements():
    environment = conda()
    assert environment["channels"] == ["conda-forge"]
    python, pip, delegated = environment["dependencies"]
    assert python.startswith("python ") and pip == "pip"
    assert delegated == {"pip": ["-r requirements.txt"]}


@pytest.mark.case("E22")
@pytest.mark.parametrize("source", ["pyproject.toml", "environment.yml"])
def test_the_supported_pythons_are_declared(source):
    declared = {
        "pyproject.toml": PROJECT["requires-python"],
        "environment.yml": conda()["dependencies"][0].removeprefix("python "),
    }[source]
    supported = SpecifierSet(declared)
    for version in ("3.11.0", "3.12.1", "3.13.0"):
        assert version in supported
    for version in ("3.10.9", "3.14.0"):
        assert version not in supported


def test_what_is_installed_lies_in_the_ranges():
    # Not the pins: a machine with a GPU keeps the PyTorch that its driver needs. What only the
    # tests need may be missing there.
    for range_ in NEEDED + FOR_TESTS:
        if not applies(range_, None):
            continue
        try:
            installed = importlib.metadata.version(range_.name)
        except importlib.metadata.PackageNotFoundError:
            assert range_ in FOR_TESTS, f"{range_} is not installed"
            continue
        assert range_.specifier.contains(installed, prereleases=True), (str(range_), installed)
