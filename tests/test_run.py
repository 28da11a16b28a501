"""The runner, with real processes: what a notebook does to itself costs the others nothing."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from helpers import device, engine, execute, open_run, run, run_folder, runner

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 20  # for one notebook on a busy machine; the ones that hang take all of it


def make_notebook(folder: Path, name: str, *cells: str, kernel: str = "python3") -> Path:
    """A notebook of code cells; "# …" makes a markdown cell, "tag: …" on a first line tags."""
    made = []
    for source in cells:
        if source.startswith("# "):
            made.append(nbformat.v4.new_markdown_cell(source))
            continue
        tags = []
        if source.startswith("tag: "):
            tag, source = source.removeprefix("tag: ").split("\n", 1)
            tags += tag.split()
        made.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    spec = {"name": kernel, "display_name": kernel, "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": spec})
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def start(
    folder: Path, output: Path, *arguments: object, jobs: tuple = ("--jobs", 1), **options
) -> subprocess.Popen:
    # pytest's variable would switch off ipykernel's capture of what processes print
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    environment |= {"LECTURES_PROFILE": "smoke"}
    command = [sys.executable, "-m", "helpers.run", "--notebooks", folder, "--output", output]
    command += jobs
    return subprocess.Popen(
        [*map(str, command), *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def finish(runner: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = runner.communicate(timeout=240)
    return runner.returncode, output, errors


def entries(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())["notebooks"]


def statuses(output: Path) -> dict[str, str]:
    return {name: entry["status"] for name, entry in entries(output).items()}


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def run_main(folder: Path, output: Path, *arguments: object, jobs: tuple = ("--jobs", 1)) -> int:
    """The runner in this process; the notebooks have theirs as ever."""
    known = ["--notebooks", folder, "--output", output, *jobs]
    return run.main([*map(str, known), *map(str, arguments)])


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


# A cell that tells its kernel's pid and that of a process which it starts and leaves alone: the
# second one has a session of its own and, since its parent ends at once, no parent either.
TELL_PIDS = """\
import os, subprocess, sys, time
orphan = subprocess.run(
    [sys.executable, "-c", "import subprocess; "
     "print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"],
    capture_output=True, text=True).stdout
child = subprocess.Popen(["sleep", "600"]).pid
open("{file}.new", "w").write(f"{os.getpid()} {child} {orphan}")
os.replace("{file}.new", "{file}")"""


@pytest.fixture(autouse=True)
def smoke(monkeypatch):
    monkeypatch.setenv("LECTURES_PROFILE", "smoke")


@pytest.fixture(scope="module", autouse=True)
def troubled_runner(tmp_path_factory):
    """One run over a collection in which nearly everything goes wrong.

    It starts before the first test and goes on beside the others, to save time.
    """
    folder = tmp_path_factory.mktemp("troubled {braces}")  # papermill fills in {names} in paths
    output = tmp_path_factory.mktemp("runs") / "new" / "folder"
    tell = TELL_PIDS.replace("{file}", "pids")
    make_notebook(
        folder, "01_passes", "# 01. Passes", "tag: parameters\nprofile = 'auto'\nsize = 3",
        "import os, sys\nprint('python', sys.executable)\nprint('profile', profile, size)\n"
        "print(os.environ['LECTURES_PROFILE'])\nprint('cwd', os.getcwd())\n"
        "import helpers.device",
        "open(os.environ['LECTURES_SCRATCH'] + '/file', 'w').close()\n"
        "import json; json.dump([], open(os.environ['LECTURES_RECORDS'] + '/01_passes.json', 'w'))",
        "tag: raises-exception\n1 / 0",
        "import subprocess; print('pid', subprocess.Popen(['sleep', '600']).pid)",
        kernel="a-kernel-that-is-installed-nowhere",
    )  # fmt: skip
    make_notebook(
        folder, "02_raises", "# 02. Raises", "tag: parameters\nsize = 1",
        "# Part one\n\n```python\n# not a heading\n```\nand text",
        "fine = 1", "print('before')\nraise ValueError('with <b>markup</b>')", "print('never')",
    )  # fmt: skip
    make_notebook(folder, "03_hangs", tell, "print('hanging', flush=True)\ntime.sleep(600)")
    make_notebook(
        folder, "04_killed", "# Kills", "1", "import os\nos.kill(os.getpid(), 9)", "print('never')"
    )
    make_notebook(folder, "05_crashes", "import ctypes\nctypes.string_at(0)")
    make_notebook(
        folder, "06_prints", "print('x' * 50_000_000)",
        "for i in range(40_000): print('line', i, 'y' * 100)",
        "print('end')",
    )  # fmt: skip
    make_notebook(folder, "07_exits", "import sys; sys.exit(0)", "print('never')")
    make_notebook(
        folder, "08_loses_its_parent", "import os, psutil\nfor p in psutil.Process().parents():\n"
        "    if 'helpers.execute' in p.cmdline(): p.kill()\nimport time; time.sleep(600)",
    )  # fmt: skip
    make_notebook(folder, "09_last", "print('still here')")
    # A kernelspec of the user's that stands for another Python, as a "python3" often does
    spec = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = ["no-such-python", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Mine", "language": "python"}))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("JUPYTER_PATH", str(spec.parents[2]))
    arguments = ["--profile", "smoke", "-p", "size", "7", "--timeout", LIMIT_S / 60]
    runner = start(folder, output, *arguments)
    monkeypatch.undo()
    yield folder, output, runner
    if runner.poll() is None:  # only some of the tests were asked for
        runner.terminate()
        finish(runner)


@pytest.fixture(scope="module")
def troubled(troubled_runner) -> tuple[Path, Path, tuple[int, str, str]]:
    """The notebooks' folder, the run's folder, and the exit status, output and errors."""
    folder, output, runner = troubled_runner
    return folder, output, finish(runner)


WAIT = """\
import pathlib, time
def there(*names): return all(pathlib.Path(name).exists() for name in names)
def wait(*names):
    end = time.monotonic() + 60
    while not there(*names) and time.monotonic() < end: time.sleep(0.05)
    assert there(*names)
pathlib.Path("{me}").touch()
"""


def test_two_at_a_time_but_for_those_that_run_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    end = "pathlib.Path('{me} ended').touch()"
    make_notebook(folder, "01_a", WAIT.format(me="a"), "wait('b')", end.format(me="a"))
    make_notebook(folder, "02_b", WAIT.format(me="b"), "wait('a')", end.format(me="b"))
    alone = "assert there('a ended', 'b ended') and not there('d'); time.sleep(1)"
    tagged = f"tag: parameters alone\n{WAIT.format(me='c')}"
    make_notebook(folder, "03_c", tagged, alone, end.format(me="c"))
    make_notebook(folder, "04_d", WAIT.format(me="d"), "assert there('c ended')")
    monkeypatch.setattr(runner, "default_jobs", lambda: 2)
    assert run_main(folder, output, "--no-pages", jobs=()) == 0
    assert statuses(output) == dict.fromkeys(("01_a", "02_b", "03_c", "04_d"), "passed")
    assert all(f'id="{name}"' in (output / "index.html").read_text() for name in statuses(output))
    assert run_main(folder, tmp_path / "none", "--jobs", 0) == 2


def test_kernels_start_one_after_the_other(tmp_path, monkeypatch):
    """Free ports are found by trying, so that two that look at once may find the same."""
    starting, most = [], []

    def stand_in(notebook, output, log, parameters, environment, limit_s, on_cell, *_):
        starting.append(notebook)
        time.sleep(0.2)
        most.append(len(starting))
        starting.remove(notebook)
        on_cell({"index": 0, "execution_count": 1})
        time.sleep(0.4)
        return {"status": "passed"}

    monkeypatch.setattr(execute, "execute", stand_in)
    names = ("01_a", "02_b", "03_c")
    for name in names:
        make_notebook(tmp_path / "notebooks", name, "1")
    began = time.monotonic()
    monkeypatch.setattr(runner, "default_jobs", lambda: 3)
    assert run_main(tmp_path / "notebooks", tmp_path / "run", "--no-pages", jobs=()) == 0
    assert most == [1, 1, 1] and time.monotonic() - began < 60
    assert statuses(tmp_path / "run") == dict.fromkeys(names, "passed")


@pytest.mark.skipif(device.has_cuda(), reason="one at a time on a GPU: tests/test_cluster.py")
def test_an_interruption_ends_all_that_run(tmp_path):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    for name in ("01_a", "02_b", "03_c"):
        tell = TELL_PIDS.replace("{file}", f"pids {name}")
        make_notebook(folder, name, tell, "import time; time.sleep(600)")
    runner = start(folder, output, jobs=())
    files = [folder / "pids 01_a", folder / "pids 02_b"]
    wait_for(lambda: all(file.exists() for file in files))
    runner.send_signal(signal.SIGINT)
    code, text, _ = finish(runner)
    assert code == 130 and "--resume" in text
    assert statuses(output) == {"01_a": "interrupted", "02_b": "interrupted", "03_c": "not run"}
    assert not any(is_alive(pid) for file in files for pid in pids(file))


def test_how_many_at_a_time(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for gpu, jobs in ((True, 1), (False, 2)):
        monkeypatch.setattr(device, "has_cuda", lambda gpu=gpu: gpu)
        assert runner.default_jobs() == jobs
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert runner.default_jobs() == 1


def test_interrupted_resumed_and_run_again_with_other_inputs(tmp_path, monkeypatch, capsys):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    make_notebook(folder, "01_a", "tag: parameters\nsize = 1", "print(size)")
    hang = "import pathlib, time\nif not pathlib.Path('go').exists(): time.sleep(600)"
    make_notebook(folder, "02_b", TELL_PIDS.replace("{file}", "pids"), hang)
    record = "import os; open(os.environ['LECTURES_RECORDS'] + '/03_c.json', 'w').write('[]')"
    make_notebook(folder, "03_c", record, "print('good')")
    runner = start(folder, output)
    wait_for(lambda: (folder / "pids").exists())
    runner.send_signal(signal.SIGINT)
    code, text, _ = finish(runner)
    assert code == 130 and "--resume" in text
    assert statuses(output) == {"01_a": "passed", "02_b": "interrupted", "03_c": "not run"}
    assert (output / "02_b.partial.ipynb").exists() and (output / "index.html").exists()
    assert len(pids(folder / "pids")) == 3
    assert not any(is_alive(pid) for pid in pids(folder / "pids"))

    (folder / "go").touch()
    first = output / "01_a.ipynb"
    finished = (first.stat().st_mtime_ns, first.read_bytes())
    assert run_main(folder, output, "--resume", "--no-pages") == 0
    errors = capsys.readouterr().err
    assert "01_a: finished before" in errors and "02_b: started" in errors
    assert set(statuses(output).values()) == {"passed"}
    assert (first.stat().st_mtime_ns, first.read_bytes()) == finished
    assert not (output / "02_b.partial.ipynb").exists()

    # A parameter is an input of the notebook that has it. A changed notebook is run again; since
    # it fails now, the finished one and its records stay.
    third = (output / "03_c.ipynb").read_bytes()
    make_notebook(folder, "03_c", record.replace("[]", "worse"), "1 / 0")
    assert run_main(folder, output, "--resume", "--no-pages", "-p", "size", 2) == 1
    errors = capsys.readouterr().err
    assert "01_a: started" in errors and "02_b: finished before" in errors
    assert printed(first) == "2\n"
    assert statuses(output) == {"01_a": "passed", "02_b": "passed", "03_c": "failed"}
    assert (output / "03_c.ipynb").read_bytes() == third
    assert (output / "records" / "03_c.json").read_text() == "[]"
    assert "worse" in "".join(sources(output / "03_c.partial.ipynb"))
    page = (output / "index.html").read_text()
    assert "finished earlier" in page and "ZeroDivisionError" in page


def test_nothing_survives_a_runner_that_is_killed(tmp_path):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    tell = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    make_notebook(folder, "01_a", tell)
    runner = start(folder, output)
    wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
    runner.kill()
    finish(runner)
    wait_for(lambda: not is_alive(int((folder / "pid").read_text())), seconds=20)
    assert statuses(output) == {"01_a": "interrupted"}
    nbformat.read(output / "01_a.partial.ipynb", as_version=4)


REFUSED = {
    "no notebook '7'": ["7"],
    "no notebook 'waves'": ["2", "waves"],
    "profile must be": ["--profile", "huge"],
    "different things": ["--profile", "smoke", "-p", "profile", "full"],
    "--timeout must be a number of minutes up to 100000, not '0'": ["--timeout", "0"],
    "not '-1'": ["--timeout=-1"],
    "not 'nan'": ["--timeout", "nan"],
    "not 'long'": ["--timeout", "long"],
    "no chosen notebook has a parameter 'width'; there are: profile, size": ["-p", "width", "3"],
    "no chosen notebook has a parameter 'size'": ["2", "-p", "size", "3"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_anything_starts(message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(execute, "execute", lambda *_: pytest.fail("a notebook was started"))
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    make_notebook(folder, "01_a", "tag: parameters\nsize = 1\nprofile = 'auto'")
    make_notebook(folder, "02_b", "1")
    arguments = [*REFUSED[message], "--notebooks", str(folder), "--output", str(output)]
    assert run.main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not output.exists()


def test_output_folders_that_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(execute, "execute", lambda *_: pytest.fail("a notebook was started"))
    folder = tmp_path / "notebooks"
    source = make_notebook(folder, "01_a", "1")
    before = source.read_bytes()
    file = tmp_path / "file"
    file.touch()
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "status.json").write_text('{"device": "cpu", "notebooks": {}}')
    read_only = tmp_path / "read_only"
    read_only.mkdir(mode=0o555)
    # root writes everywhere but into /proc, where nobody can
    unwritable = Path("/proc/run") if os.geteuid() == 0 and Path("/proc").exists() else read_only
    expected = {
        file: "cannot be written",
        unwritable: "cannot be written",
        earlier: "--resume",
        folder: "is not empty",
    }
    for output, message in expected.items():
        assert run.main(["--notebooks", str(folder), "--output", str(output)]) == 2, output
        assert message in capsys.readouterr().err
    assert source.read_bytes() == before


def test_a_file_that_is_no_notebook_is_refused(tmp_path, capsys):
    (tmp_path / "01_a.ipynb").write_text("{")
    arguments = ["--notebooks", str(tmp_path), "--output", str(tmp_path / "run")]
    assert run.main(arguments) == 2
    assert "cannot be read as a notebook" in capsys.readouterr().err
    assert run.main(["--notebooks", str(tmp_path / "nowhere")]) == 2


def test_choose_by_number_and_name(tmp_path):
    for name in ("02_b", "10_c", "01_a"):
        make_notebook(tmp_path, name)
    make_notebook(tmp_path, "02_b.partial")

    def stems(*chosen):
        return [path.stem for path in run.choose(list(chosen), tmp_path)]

    assert stems() == ["01_a", "02_b", "10_c"]
    assert stems("10", "2", "02") == ["02_b", "10_c"]
    assert stems("10_c", "01_a.ipynb", "notebooks/02_b.ipynb") == ["01_a", "02_b", "10_c"]


def test_values_of_parameters():
    values = {"3": 3, "[512, 1024]": [512, 1024], "{'a': (1, None)}": {"a": (1, None)}, "x": "x"}
    values |= {"0.5": 0.5, "True": True, "None": None, "[not python": "[not python"}
    for text, value in values.items():
        assert engine.parameter_value(text) == value


def test_the_commands_of_the_readme_are_accepted(tmp_path):
    """Up to the point where notebooks would start."""
    lines = re.findall(
        r"^python -m helpers\.run (.*?) *(?:#.*)?$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(lines) >= 3
    for line in lines:
        options = run.parse(shlex.split(line))
        notebooks = {
            path: engine.read(path) for path in run.choose(options.chosen, options.notebooks)
        }
        given = {name: engine.parameter_value(text) for name, text in options.parameters}
        assert all(not isinstance(value, str) for value in given.values())
        run.parameters_of(notebooks, given)


def finish_notebook(output: Path, name: str, started: str, **changes: object) -> None:
    """What a run leaves of a notebook that has passed, at once."""
    entry = {"notebook": name, "status": "passed", "seconds": 1.0, "fingerprint": "f"}
    make_notebook(output, f"{name}.partial", "1")
    run_folder.make_folders(output)
    run_folder.paths(output, name)["records"].write_text(f'["{started}"]')
    run_folder.end(output, entry | {"started": started} | changes)


def reopened(output: Path) -> dict[str, str]:
    """The statuses of a run that is to be continued."""
    open_run.unlock(open_run.open_folder(output, True, "cpu"))
    return statuses(output)


def test_a_damaged_status_is_put_together_anew(tmp_path, capsys):
    output = tmp_path / "run"
    for name in ("01_a", "02_b"):
        finish_notebook(output, name, "2026-01-31T10:00:00")
    wanted = {"01_a": "passed", "02_b": "passed"}
    for content in ("", "[]", '{"notebooks": {"01_a": 3}}', '{"device"', "\0", "{}",
                    '{"notebooks": {"01_a": {"status": 1}}}'):  # fmt: skip
        (output / "status.json").write_text(content)
        with pytest.raises(run_folder.Refused, match="status.json is damaged"):
            run_folder.read_status(output)
        assert reopened(output) == wanted
        assert "status.json is damaged" in capsys.readouterr().err
    (output / "status.json").unlink()
    assert reopened(output) == wanted
    (output / "status.json").unlink()
    (output / "status.json").mkdir()
    (output / "status.json" / "mine").touch()
    assert reopened(output) == wanted
    assert len([*output.glob("aside-*/status.json/mine")]) == 1  # nothing of the reader's is lost


def test_an_entry_must_be_borne_out_by_the_files(tmp_path):
    """Which of the entry, the notebook and its records is right, whatever happened to each."""
    output, early, late = tmp_path / "run", "2026-01-31T10:00:00", "2026-01-31T11:00:00"
    files = run_folder.paths(output, "01_a")
    missing = {"notebook": "01_a", **run_folder.ENTRY}

    def borne_out(**known: str) -> tuple[str, str | None]:
        entry = run_folder.borne_out(output, missing | known)
        return entry["status"], entry.get("started")

    finish_notebook(output, "01_a", early)
    assert borne_out() == borne_out(status="passed", started=early) == ("passed", early)
    assert borne_out(status="interrupted", started=early) == ("passed", early)
    assert borne_out(status="failed", started=late) == ("failed", late)
    # An entry of another execution than the file
    assert borne_out(status="passed", started=late) == ("passed", early)
    # Killed while it was executed again: the records of the finished execution come back.
    run_folder.begin(output, "01_a")
    files["records"].write_text("half")
    assert borne_out(status="interrupted", started=late) == ("interrupted", late)
    assert files["records"].read_text() == f'["{early}"]' and not files["kept"].exists()
    # Killed after the new execution took the place of the old one, before the old records went
    finish_notebook(output, "01_a", late)
    files["kept"].write_text(f'["{early}"]')
    assert borne_out(status="interrupted", started=late) == ("passed", late)
    assert files["records"].read_text() == f'["{late}"]' and not files["kept"].exists()
    files["records"].write_text(f'["{early}"]')
    assert borne_out(status="passed", started=late) == ("not run", None)
    for content in ("", "{", "[]", '{"cells": []}', "\0"):
        files["finished"].write_text(content)
        assert borne_out(status="passed", started=late) == ("not run", None)
        assert borne_out(status="failed", started=late) == ("failed", late)
    files["finished"].unlink()
    assert borne_out(status="passed", started=late) == ("not run", None)


def test_a_folder_in_use_is_refused(tmp_path):
    output = open_run.open_folder(tmp_path / "run", False, "cpu")
    open_run.unlock(output)
    code = f"import filelock; lock = filelock.FileLock({str(output / open_run.LOCK)!r})\n"
    code += "lock.acquire(); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    other.stdout.readline()
    with pytest.raises(run_folder.Refused, match="in use"):
        open_run.open_folder(output, True, "cpu")
    other.kill()
    other.communicate()
    assert open_run.open_folder(output, True, "cpu") == output
    open_run.unlock(output)


def test_automatic_folders(tmp_path):
    def opened(resume: bool, *wanted: str) -> str:
        run = open_run.open_folder(None, resume, "cpu", wanted, tmp_path)
        open_run.unlock(run)
        return run.name

    first = opened(True)  # nothing to resume yet
    assert first.startswith("cpu-20") and opened(False) == first + "-2"
    for name in ("-9", "-10", "-11"):  # numbers, not letters: 10 comes after 9
        (tmp_path / (first + name)).mkdir()
    entry = {"notebook": "01_a", **run_folder.ENTRY}
    for name, stems in {"-9": ["01_a", "02_b"], "-10": ["01_a"]}.items():  # -11 holds no run
        status = {"notebooks": {stem: entry | {"notebook": stem} for stem in stems}}
        run_folder.write_status(tmp_path / (first + name), status)
    assert opened(True) == opened(True, "01_a") == opened(True, "03_c") == first + "-10"
    # a run of one notebook does not stand before the collection that it came between
    assert opened(True, "01_a", "02_b") == first + "-9"
    assert opened(False) == first + "-3"
    assert "0 of its 1 notebooks" in open_run.described(tmp_path / (first + "-10"))


def test_what_gathers_is_run_again_after_what_it_gathers(tmp_path):
    notebook = engine.read(make_notebook(tmp_path, "13_c", "tag: parameters gathers\n1"))
    entries = {
        name: {"notebook": name, "status": status, "started": name}
        for name, status in {"02_b": "passed", "01_a": "failed", "14_d": "passed"}.items()
    }
    assert run_folder.gathered(notebook, "13_c", entries) == [["02_b", "02_b"]]
    seen = {run_folder.fingerprint(notebook, {}, "smoke", x) for x in ([], [["02_b", "1"]])}
    assert len(seen) == 2
    plain = engine.read(make_notebook(tmp_path, "13_c", "tag: parameters\n1"))
    assert run_folder.gathered(plain, "13_c", entries) == []


@pytest.mark.parametrize("times, status", [(1, "passed"), (2, "failed")])
def test_a_kernel_that_does_not_start_is_started_once_more(times, status, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    spec = engine.get_kernel_dict
    dead = [spec() | {"argv": ["false"]}] * times
    monkeypatch.setattr(engine, "get_kernel_dict", lambda: dead.pop() if dead else spec())
    notebook = make_notebook(tmp_path, "01_a", "1")
    outcome = engine.run(notebook, tmp_path / "out.ipynb", tmp_path, {}, lambda *_: None)
    assert outcome["status"] == status and not dead


def test_fingerprint_sees_every_input(tmp_path, monkeypatch):
    def changed(**change):
        notebook = engine.read(make_notebook(tmp_path, "01_a", change.pop("source", "1")))
        notebook.cells[0].metadata.tags = change.pop("tags", [])
        given = {"parameters": {}, "profile": "smoke"} | change
        return run_folder.fingerprint(notebook, **given)

    monkeypatch.setattr(run_folder, "ROOT", tmp_path)
    for name in ("helpers/kernels", "data"):
        (tmp_path / name).mkdir(parents=True)
    seen = [changed(), changed(source="2"), changed(tags=["core"]), changed(profile="full"),
            changed(parameters={"size": 1}), changed(parameters={"size": "1"})]  # fmt: skip
    for name in ("helpers/a.py", "helpers/kernels/b.cu", "data/gpus.csv"):
        (tmp_path / name).write_text("1")
        seen.append(changed())
        (tmp_path / name).write_text("2")
        seen.append(changed())
    monkeypatch.setattr(device, "triton_version", lambda: "0")
    seen.append(changed())
    assert len(set(seen)) == len(seen)
    assert changed() == seen[-1]
    (tmp_path / "helpers" / "notes.txt").write_text("no input")
    assert changed() == seen[-1]


def test_each_notebook_has_its_status_and_the_run_fails(troubled):
    _, output, (code, text, errors) = troubled
    assert code == 1
    assert statuses(output) == {
        "01_passes": "passed",
        "02_raises": "failed",
        "03_hangs": "timeout",
        "04_killed": "kernel died",
        "05_crashes": "kernel died",
        "06_prints": "passed",
        "07_exits": "failed",
        "08_loses_its_parent": "failed",
        "09_last": "passed",
    }
    for name, status in statuses(output).items():
        finished, partial = output / f"{name}.ipynb", output / f"{name}.partial.ipynb"
        assert (finished.exists(), partial.exists()) == (status == "passed", status != "passed")
        assert any(line.split()[:2] == [name, *status.split()][:2] for line in text.splitlines())
        assert f"{name}: started" in errors
    assert str(output / "index.html") in text
    assert "\r" not in errors  # a progress bar belongs to a terminal


def test_parameters_profile_python_and_folders_reach_the_notebook(troubled):
    folder, output, _ = troubled
    text = printed(output / "01_passes.ipynb")
    assert f"python {sys.executable}\n" in text
    assert "profile smoke 7\nsmoke\n" in text
    assert f"cwd {folder.resolve()}\n" in text
    assert (output / "scratch" / "file").exists()
    assert (output / "records" / "01_passes.json").exists()


def test_the_failing_cell_is_named(troubled):
    _, output, (_, text, _) = troubled
    all_entries = entries(output)
    entry = all_entries["02_raises"]
    cell = entry["cell"]
    assert (cell["index"], cell["execution_count"], cell["cells"]) == (4, 4, 6)  # 1 was injected
    assert cell["heading"] == "Part one"
    assert cell["source"].startswith("print('before')")
    assert entry["error"] == "ValueError"
    assert entry["lines"][-1] == "ValueError: with <b>markup</b>"
    assert not any("\x1b" in line for line in entry["lines"])
    assert "cell 5 of 6, Part one: ValueError" in text
    assert "before" in printed(output / "02_raises.partial.ipynb")

    assert all_entries["04_killed"]["cell"]["index"] == 2
    assert all_entries["04_killed"]["cell"]["heading"] == "Kills"
    assert "SIGKILL" in all_entries["04_killed"]["lines"][0]
    crash = "\n".join(all_entries["05_crashes"]["lines"])
    assert "SIGSEGV" in crash and "string_at" in crash and "kernelbase" not in crash
    assert all_entries["07_exits"]["cell"]["index"] == 0
    assert "SIGKILL" in all_entries["08_loses_its_parent"]["lines"][0]


def test_a_dead_kernel_is_noticed_soon(troubled):
    _, output, _ = troubled
    assert all(
        entries(output)[name]["seconds"] < LIMIT_S - 5 for name in ("04_killed", "05_crashes")
    )


def test_the_time_limit_ends_every_process(troubled):
    folder, output, _ = troubled
    entry = entries(output)["03_hangs"]
    assert LIMIT_S <= entry["seconds"] < LIMIT_S + 2 * execute.GRACE_S
    assert entry["cell"]["index"] == 1
    assert "time limit" in entry["lines"][0]
    kernel_child_orphan = pids(folder / "pids")
    assert len(kernel_child_orphan) == 3
    assert not any(is_alive(pid) for pid in kernel_child_orphan)
    assert "hanging" in printed(output / "03_hangs.partial.ipynb")  # saved on the way out


def test_a_notebook_that_passes_leaves_no_process_either(troubled):
    _, output, _ = troubled
    pid = printed(output / "01_passes.ipynb").split("pid ")[1].split()[0]
    assert not is_alive(int(pid))


def test_long_output_is_cut_and_says_so(troubled):
    _, output, _ = troubled
    path = output / "06_prints.ipynb"
    assert path.stat().st_size < 3_000_000
    first, second, third = nbformat.read(path, as_version=4).cells
    assert [len(out.text) for out in first.outputs][0] == engine.STREAM_LIMIT
    assert first.outputs[1].text == "\n[49,000,001 characters of output are left out here]\n"
    kept, notice = second.outputs
    assert kept.text.startswith("line 0 y") and "left out" in notice.text
    assert third.outputs[0].text == "end\n"
    assert entries(output)["06_prints"]["seconds"] < LIMIT_S
    assert (output / "index.html").stat().st_size < 100_000
