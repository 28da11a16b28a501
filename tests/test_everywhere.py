"""Workflows, containers and CONTRIBUTING.md name commands, files and versions that there are."""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from notebook_files import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONTAINERS = sorted((ROOT / ".devcontainer").rglob("devcontainer.json"))
# actionlint's own list of what a `uses` may be is not at hand everywhere.
ACTIONS = {
    "actions/checkout": "v6",
    "actions/setup-python": "v6",
    "actions/upload-artifact": "v7",
    "actions/upload-pages-artifact": "v5",
    "actions/deploy-pages": "v5",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path) -> dict:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow | {"on": workflow[True]}  # YAML 1.1 reads `on` as a truth value


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(path) -> str:
    return "\n".join(step.get("run", "") for step in steps(load(path)))


def unknown_commands(text: str) -> list[str]:
    """The make targets and modules that a text calls and that do not exist."""
    targets = set(re.findall(r"^([\w.-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?<![\w-])make (?!it |no |two )([.a-z][\w-]*)", text))
    modules = re.findall(r"-m (helpers\.[\w.]+)", text)
    missing = [f"make {target}" for target in sorted(named - targets)]
    return missing + [name for name in modules if not importlib.util.find_spec(name)]


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not installed")
def test_actionlint():
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_workflows_and_containers():
    assert [path.stem for path in WORKFLOWS] == ["gpu", "newest", "site", "tests"]
    assert [path.parent.name for path in CONTAINERS] == [".devcontainer", "gpu"]


@each_workflow
def test_a_workflow_may_do_little_and_not_for_long(path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        allowed = {"pages": "write", "id-token": "write"} if "environment" in job else {}
        assert job.get("permissions", {}) == allowed
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
    text = path.read_text(encoding="utf-8")
    assert "secrets." not in text and "pull_request_target" not in text


@each_workflow
def test_the_actions_are_of_known_versions(path):
    used = [step["uses"] for step in steps(load(path)) if "uses" in step]
    assert used and set(used) <= {f"{name}@{version}" for name, version in ACTIONS.items()}


@each_workflow
def test_no_text_from_outside_stands_in_a_command(path):
    for expression in re.findall(r"\${{(.*?)}}", commands(path)):
        assert expression.strip() == "matrix.python"


@pytest.mark.parametrize("path", [*WORKFLOWS, *CONTAINERS], ids=lambda path: path.parent.name)
def test_the_commands_exist(path):
    is_workflow = path in WORKFLOWS
    text = commands(path) if is_workflow else json.loads(read(path))["postCreateCommand"]
    assert not unknown_commands(text)


@each_workflow
def test_the_pythons_are_supported(path):
    versions = re.findall(r'"(3\.\d+)"', path.read_text(encoding="utf-8"))
    assert set(versions) <= {"3.11", "3.12", "3.13"}


def test_the_small_pytorch_comes_as_the_readme_says():
    (pin,) = re.findall(r"^torch==.*", read("requirements.txt"), re.MULTILINE)
    shown = re.search(
        r"\.venv/bin/(python -m pip install) (torch==\S+) (--index-url \S+)", read("README.md")
    )
    assert shown[2] == pin
    asked = [commands(path) for path in WORKFLOWS if "--index-url" in commands(path)]
    asked += [json.loads(read(path))["postCreateCommand"] for path in CONTAINERS[:1]]
    pinned = f"""{shown[1]} "$(grep '^torch==' requirements.txt)" {shown[3]}"""
    newest = f"{shown[1]} torch {shown[3]}"
    assert len(asked) == 4
    assert sum(pinned in text for text in asked) == 3 and sum(newest in text for text in asked) == 1


def test_no_fork_reaches_a_machine_with_a_gpu():
    workflow = load(ROOT / ".github" / "workflows" / "gpu.yml")
    assert workflow["on"].keys() == {"workflow_dispatch", "pull_request"}
    assert workflow["on"]["pull_request"] == {"types": ["labeled"]}
    (job,) = workflow["jobs"].values()
    asked, labelled = job["if"].split(" || ")
    assert asked == "github.event_name == 'workflow_dispatch'"
    assert "github.event.label.name == 'gpu' && " in labelled
    assert "github.event.pull_request.head.repo.full_name == github.repository" in labelled
    assert all(
        "self-hosted" not in str(load(path)["jobs"]) for path in WORKFLOWS if path.stem != "gpu"
    )


def test_only_main_is_published():
    publish = load(ROOT / ".github" / "workflows" / "site.yml")["jobs"]["publish"]
    assert publish["if"] == "github.ref == 'refs/heads/main' && github.event_name != 'pull_request'"


def test_windows_and_macos_run_the_commands_of_the_readme():
    _, section = read("README.md").split("## Without make")
    told = re.findall(r"^\.venv\S+python (-m .*)", section.split("\n## ")[0], re.MULTILINE)
    job = load(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["without-make"]
    run = [step.get("run", "").removeprefix("${{ matrix.python }} ") for step in job["steps"]]
    run = [line.removesuffix(" --output runs/report") for line in run if line.startswith("-m")]
    assert told == [*run, *run]
    folders = [each["python"] for each in job["strategy"]["matrix"]["include"]]
    assert folders == [".venv/bin/python", r".venv\Scripts\python"]


def test_binder_installs_the_pins_with_the_small_pytorch():
    option, pins = read(".binder/requirements.txt").splitlines()[1:]
    index = re.search(r"--index-url (\S+/cpu)$", read("README.md"), re.MULTILINE)[1]
    assert (option, pins) == (f"--extra-index-url {index}", "-r ../requirements.txt")
    assert read(".binder/runtime.txt").strip() in ("python-3.11", "python-3.12", "python-3.13")


def test_the_citation_is_of_this_project():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["title"] == read("README.md").splitlines()[0].removeprefix("# ")
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == read("LICENSE").split()[0]
    assert citation.get("repository-code", "") == PROJECT.get("urls", {}).get("Repository", "")
    assert all(each["url"] in read("README.md") for each in citation["references"])


def test_contributing_names_what_there_is():
    text = read("CONTRIBUTING.md")
    assert not unknown_commands(text)
    quoted = re.findall(r"`([^`\n]+)`", text) + re.findall(r"(?:^| )(notebooks/\S+)", text, re.M)
    paths = [
        each for each in quoted if re.fullmatch(r"[\w.*-]*/[\w./*-]*|[\w*]+\.(py|txt|md)", each)
    ]
    assert len(paths) > 25
    assert [each for each in paths if not list(ROOT.glob(each))] == []
    for module in re.findall(r"`(helpers\.[a-z_]+)[.`]", text):
        assert importlib.util.find_spec(module), module
    for tag in re.findall(r"tag(?:ged)? `([^`]+)`", text):
        assert any(
            tag in path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*")
        )
