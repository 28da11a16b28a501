"""The collection on awkward machines, smoke profile: minutes each, so only `make test-conditions`.

test_conditions.py has what can be seen in seconds.
"""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
from awkward import ROOT, environment, mounted, without_compilers, without_triton

from helpers import cache

MOST_BYTES = 4 * 2**30


def command(output: Path, *notebooks: object) -> list[str]:
    options = ["--profile", "smoke", "--no-pages", "--output", output, *notebooks]
    return [sys.executable, "-m", "helpers.run", *map(str, options)]


def start(command: list[str], changed: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def entries(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())["notebooks"]


def passed(runner: subprocess.Popen, output: Path, number: int = 13) -> None:
    said = runner.communicate()[0]
    assert runner.returncode == 0, said
    assert "Traceback" not in said
    assert [entry["status"] for entry in entries(output).values()] == ["passed"] * number
    for path in output.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            for shown in cell.get("outputs", []):
                wanted = "raises-exception" in cell.metadata.get("tags", [])
                assert shown.output_type != "error" or wanted, (path.name, cell.source)
                assert "Matplotlib created a temporary" not in shown.get("text", ""), path.name


def processes(output: Path) -> list[psutil.Process]:
    """Those of a run's notebooks, living ones."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("LECTURES_RECORDS", "").startswith(str(output))
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_without_triton(tmp_path):
    passed(start(command(tmp_path / "run"), without_triton(tmp_path)), tmp_path / "run")


def test_without_compilers(tmp_path):
    passed(start(command(tmp_path / "run"), without_compilers(tmp_path)), tmp_path / "run")


def test_home_and_checkout_that_can_only_be_read(tmp_path):
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    changed = environment(HOME=tmp_path / "home", TMPDIR=tmp_path / "tmp")
    for name in (*cache.IN_HOME, "LECTURES_CACHE"):
        changed.pop(name, None)
    before = mounted(f"readonly {tmp_path / 'home'}", f"readonly {ROOT}")
    passed(start([*before, *command(tmp_path / "run")], changed), tmp_path / "run")


def test_two_notebooks_at_a_time_take_less_than_4_gb(tmp_path):
    """Memory that processes share counts for each of them, which is more than they take."""
    output, most = tmp_path / "run", 0
    runner = start([*command(output), "--jobs", "2"], environment())
    while runner.poll() is None:
        taken = 0
        for process in (psutil.Process(runner.pid), *processes(output)):
            with contextlib.suppress(psutil.Error):
                taken += process.memory_info().rss
        most = max(most, taken)
        time.sleep(0.2)
    passed(runner, output)
    print(f"at most {most / 2**30:.2f} GiB")
    assert most < MOST_BYTES


def test_two_runs_at_once_from_a_cold_cache(tmp_path):
    changed = environment(
        LECTURES_CACHE=tmp_path / "cache",
        TORCHINDUCTOR_CACHE_DIR=tmp_path / "inductor",
        TRITON_CACHE_DIR=tmp_path / "triton",
    )
    outputs = tmp_path / "a", tmp_path / "b"
    runners = [start(command(output, 4, 5, 7), changed) for output in outputs]
    for runner, output in zip(runners, outputs, strict=True):
        passed(runner, output, 3)


def test_a_run_that_is_killed_goes_on(tmp_path):
    for number, end in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        output = tmp_path / str(number)
        runner = start([*command(output, 5, 13), "--jobs", "1"], environment())
        while not (output / "05_cuda_gelu.ipynb").exists() or not processes(output):
            assert runner.poll() is None, runner.communicate()[0]
            time.sleep(0.1)
        before = entries(output)["05_cuda_gelu"]
        runner.send_signal(end)
        said, until = runner.communicate()[0], time.monotonic() + 15
        assert "Traceback" not in said
        assert runner.returncode == (130 if end != signal.SIGKILL else -signal.SIGKILL)
        while processes(output) and time.monotonic() < until:
            time.sleep(0.1)
        assert not processes(output)
        passed(start([*command(output, 5, 13), "--resume"], environment()), output, 2)
        if before["status"] == "passed":  # else it was killed before it could say so
            assert entries(output)["05_cuda_gelu"]["started"] == before["started"]


def test_a_disk_that_is_full_and_then_has_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run = shlex.join([*command(disk / "run", 5, 7, 10), "--jobs", "1"])
    room = f"mount -o remount,size=30m none {disk}"
    kept = f"cp -r {disk / 'run'} {tmp_path / 'first'}"
    script = f"{run}; echo status $?; {kept}; {room}; {run} --resume; echo status $?"
    script += f"; cp -r {disk / 'run'} {tmp_path / 'second'}"
    before = mounted(f"-t tmpfs -o size=900k none {disk}")
    said = start([*before, "sh", "-c", script], environment()).communicate()[0]
    assert "Traceback" not in said and "No space left on device" in said
    assert [line for line in said.splitlines() if line.startswith("status ")] == [
        "status 1",
        "status 0",
    ]
    for name in ("05_cuda_gelu", "07_triton_gelu"):  # finished while there was room: kept whole
        first, second = (nbformat.read(tmp_path / run / f"{name}.ipynb", as_version=4)
                         for run in ("first", "second"))  # fmt: skip
        assert first == second
    assert {entry["status"] for entry in entries(tmp_path / "second").values()} == {"passed"}
