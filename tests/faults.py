"""Seeded faults for `python -m helpers.run`: runs into one folder while everything goes wrong.

A plan is made from a seed: a list of rounds, each of which damages files, starts the runner, makes
cells misbehave and interferes while they run. After every round `Campaign` checks that nothing
that was reported finished is lost; a last run, undisturbed, has to complete everything.

    python tests/faults.py --shrink 7    the campaign of seed 7, in case of failure with few faults
"""

import contextlib
import html.parser
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import nbformat
import psutil

from helpers import execute, results

ROOT = Path(__file__).resolve().parent.parent
MARK = "FAULTS_CAMPAIGN"  # an environment variable that all processes of a campaign inherit
LIMIT_S = 200  # of a notebook
HANGING_S = 25  # in a round with cells that hang, which take all of it
RUN_S = 240  # until the runner must have ended by itself
STRAY_S = 30  # until no process may be left

# What a cell does -> (its code, the statuses that its notebook may end with). In the code, `path`
# is the file of the notebook's records and `stem` its name.
CELLS = {
    "killed": ("os.kill(os.getpid(), 9)", "kernel died"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "kernel died"),
    "abort": ("os.abort()", "kernel died"),
    "exit": ("os._exit(3)", "kernel died"),
    "exception": ("1 / 0", "failed"),
    "system exit": ("import sys; sys.exit(0)", "failed"),
    "recursion": ("def f(): f()\nf()", "failed"),
    "memory": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\nbytearray(2**36)",
        "failed",
    ),
    "file size": (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))\n"
        "pathlib.Path(os.environ['LECTURES_SCRATCH'], stem).write_bytes(b'x' * 10**6)",
        "failed",
    ),
    "endless": ("while True: pass", "timeout"),
    "ignores signals": (
        "import signal\nfor number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_IGN)\ntime.sleep(600)",
        "timeout",
    ),
    "stopped": ("import signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "stops its parent": ("import signal; os.kill(os.getppid(), signal.SIGSTOP)", "timeout"),
    "kills its parent": ("os.kill(os.getppid(), 9); time.sleep(600)", "failed"),
    "grandchild": (
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
        "passed",
    ),
    "stubborn grandchild": (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'], start_new_session=True)",
        "passed",
    ),
    "fork": ("if not os.fork(): time.sleep(600)", "passed"),
    "thread": ("import threading; threading.Thread(target=time.sleep, args=(600,)).start()",
               "passed"),
    "flood": ("print('x' * 50_000_000)", "passed"),
    "flood of a descriptor": ("for _ in range(50): os.write(1, b'x' * 10**6)", "passed"),
    "flood of errors": ("import sys\nfor i in range(10**5): sys.stderr.write('x' * 500)", "passed"),
    "closed output": ("os.close(1); os.close(2)", "passed failed kernel died timeout"),
    "closed sockets": ("os.closerange(3, 200)", "passed failed kernel died timeout"),
    "surrogate": (r"print('\ud800')", "passed failed"),
    "no folder": ("os.rmdir(os.getcwd()) if 0 else os.chdir('/')", "passed"),
    "no scratch": ("import shutil; shutil.rmtree(os.environ['LECTURES_SCRATCH'])", "passed"),
    "garbage records": ("path.write_bytes(bytes(range(256)))", "passed"),
    "folder for a file": (
        "part = path.parents[1] / f'{stem}.partial.ipynb'\npart.unlink(); part.mkdir()", "failed"
    ),
    "no notebook": ("os.remove(f'{stem}.ipynb')", "passed"),
    "other notebooks": (
        "for file in pathlib.Path().glob('*.ipynb'): file.write_text('{')", "passed"
    ),
}  # fmt: skip
HANGS = {name for name, (_, ends) in CELLS.items() if "timeout" in ends}
DOES_NOT_RECORD = {"garbage records"}

# What happens to the run from outside, some time after its n-th line.
OUTSIDE = ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "kill a kernel", "crash a kernel",
           "kill a process", "second run", "no output folder", "no reader", "dead start",
           "mute start", "full disk"]  # fmt: skip
ENDS_THE_RUN = {"SIGINT": 130, "SIGTERM": 130, "SIGHUP": 130, "SIGKILL": -signal.SIGKILL}

TARGETS = ["status.json", "results.json", "index.html", ".lock", "{}.ipynb", "{}.partial.ipynb",
           "records/{}.json", "scratch/{}.log"]  # fmt: skip
DAMAGES = ["truncated", "empty", "folder", "garbage", "older", "removed", "future"]
NOT_FINISHED_WITHOUT = ("{}.ipynb", "records/{}.json")

# Kernels that do not start, on demand; the wait for a mute one is made shorter than a minute.
SITE = """\
import os, sys, time
token = os.environ.get("FAULTS_START", "")
if any("ipykernel_launcher" in word for word in sys.orig_argv):
    for kind in ("dead", "mute"):
        try:
            os.remove(token + kind)
        except OSError:
            continue
        time.sleep(600) if kind == "mute" else os._exit(1)
elif "helpers.execute" in sys.orig_argv and os.path.exists(token + "mute"):
    import helpers.light_nbformat, nbclient
    vars(nbclient.NotebookClient)["startup_timeout"].default_value = 10
"""

RECORD = dict.fromkeys(results.KEYS, "") | {"p20": None, "p80": None, "claim": "S1", "op": "x"}
CODE = """\
import json, os, pathlib, time
stem, value = {stem!r}, time.time_ns() % 10**9
path = pathlib.Path(os.environ["LECTURES_RECORDS"], stem + ".json")
new = path.with_suffix(".new")
new.write_text(json.dumps([{record} | {{"value": value, "notebook": stem}}]))
os.replace(new, path)
print("value", value)"""
# As notebooks do it; dear, for it loads torch and matplotlib.
RECORDER = """\
import os, pathlib, time
from helpers import results
import matplotlib.pyplot as plt
stem, value = {stem!r}, time.time_ns() % 10**5
recorder = results.Recorder(stem, "smoke")
path = recorder.path
recorder.record("S1", "x", value, "ms")
plt.plot([1, 2]); plt.show()
print("value", value)"""
FAULT = """\
armed = pathlib.Path("armed", stem)
if armed.exists(): exec(armed.read_text())"""


def make_plan(seed: int, notebooks: int = 6, rounds: int = 2, harm: int = 3) -> dict:
    """What goes wrong in the campaign of a seed: `harm` files a round, all notebooks but two.

    Kinds are dealt in turn, so that seeds that follow one another have all of them. Returns
    {"notebooks", "rounds": [{"damages": [[target, how]], "cells": {stem: name}, "outside": [[what,
    line, seconds]]}]}: something happens so many seconds after the runner has printed a line.
    """
    chance = random.Random(seed)
    stems = [f"{number:02}_n" for number in range(1, notebooks + 1)]
    cells = dealt(CELLS, seed, rounds * (notebooks - 2))
    outside = dealt(OUTSIDE, seed, rounds)
    damages = dealt(itertools.product(TARGETS, DAMAGES), seed, rounds * harm)
    plan = [{"damages": [], "cells": {}, "outside": []} for _ in range(rounds + 1)]
    for number in range(rounds):
        chosen = chance.sample(stems, notebooks - 2)
        plan[number]["cells"] = {stem: cells.pop() for stem in chosen}
        moment = [chance.randrange(2 * notebooks), round(chance.random(), 3)]
        plan[number]["outside"] = [[outside.pop(), *moment]]
        for target, how in damages[number * harm : (number + 1) * harm]:
            plan[number + 1]["damages"].append([target.format(chance.choice(stems)), how])
    return {"notebooks": notebooks, "rounds": plan}


def dealt(kinds: Iterable, seed: int, number: int) -> list:
    """The next `number` kinds after those that the seeds before this one have got."""
    order = list(kinds)
    random.Random(0).shuffle(order)
    return [order[(seed * number + i) % len(order)] for i in range(number)]


def count(plan: dict) -> int:
    """The faults of a plan."""
    return sum(len(r["damages"]) + len(r["cells"]) + len(r["outside"]) for r in plan["rounds"])


class Lost(AssertionError):
    """An invariant does not hold; the message says which."""


def check(holds: object, what: str) -> None:
    if not holds:
        raise Lost(what)


class Campaign:
    """One plan, carried out in `folder`. Raises Lost."""

    def __init__(self, plan: dict, folder: Path, recorder: bool = False):
        self.plan, self.folder, self.output = plan, folder, folder / "run"
        self.notebooks, self.armed = folder / "notebooks", folder / "notebooks" / "armed"
        self.armed.mkdir(parents=True)
        self.stems = [f"{number:02}_n" for number in range(1, plan["notebooks"] + 1)]
        self.finished, self.seen = {}, {}  # stem -> its file's bytes; path -> older bytes
        self.token, self.name = folder / "start-", uuid.uuid4().hex
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self.sources = {}
        for stem in self.stems:
            code = RECORDER if recorder and stem == self.stems[0] else CODE
            cells = [code.format(stem=stem, record=RECORD), FAULT, "print('end')"]
            made = [nbformat.v4.new_code_cell(cell) for cell in cells]
            text = nbformat.writes(nbformat.v4.new_notebook(cells=made))
            self.sources[self.notebooks / f"{stem}.ipynb"] = text

    def carry_out(self) -> None:
        disk = self.folder / "disk"
        full = any(what == "full disk" for r in self.plan["rounds"] for what, *_ in r["outside"])
        if full and mount(disk):
            self.output = disk / "run"
        try:
            for number, each in enumerate(self.plan["rounds"]):
                self.round(each, last=number == len(self.plan["rounds"]) - 1)
        finally:
            for process in self.processes():
                process.kill()
            if os.path.ismount(disk):
                subprocess.run(["umount", "--lazy", disk], check=True)

    def round(self, each: dict, last: bool) -> None:
        (self.output.parent / "filler").unlink(missing_ok=True)
        known = {file: file.read_bytes() for file in self.output.rglob("*") if file.is_file()}
        for target, how in each["damages"]:
            self.damage(self.output / target, how)
            for name in NOT_FINISHED_WITHOUT:
                for stem in self.stems:
                    if target == name.format(stem) and how != "future":
                        self.finished.pop(stem, None)
        self.seen = known | self.seen
        for file, text in self.sources.items():
            file.write_text(text)
        shutil.rmtree(self.armed)
        self.armed.mkdir()
        for stem, name in each["cells"].items():
            (self.armed / stem).write_text(CELLS[name][0])
        before = dict(self.finished)
        runner = Runner(self, each["outside"], hangs=bool(HANGS & {*each["cells"].values()}))
        code, lines, text = runner.follow()
        self.check_round(each, runner, code, lines, text, before)
        if last:
            check(code == 0, f"the last run ended with {code}: {lines}")
            check(len(self.finished) == len(self.stems), f"only {[*self.finished]} are finished")

    def damage(self, path: Path, how: str) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
        content = path.read_bytes()
        if how == "removed":
            path.unlink()
        elif how == "folder":
            path.unlink()
            path.mkdir()
            (path / "file").touch()
        elif how == "future":
            os.utime(path, (time.time() + 1e8,) * 2)
        else:
            path.write_bytes({
                "truncated": content[: len(content) // 2],
                "empty": b"",
                "garbage": bytes(range(256)) * 9,
                "older": self.seen.get(path, b"{}"),
            }[how])  # fmt: skip

    def check_round(
        self, each: dict, runner: "Runner", code: int, lines: list[str], text: str, before: dict
    ) -> None:
        happened, everything = runner.happened, "\n".join(lines) + text
        check("Traceback" not in everything, everything)
        until = time.monotonic() + STRAY_S
        while strays := self.processes():
            check(time.monotonic() < until, f"processes are left: {[p.cmdline() for p in strays]}")
            time.sleep(0.1)
        if "no output folder" in happened:
            self.finished.clear()
        for stem in before:
            check(f"{stem}: started" not in everything, f"{stem} was finished and is run again")
        disturbed = {"no output folder", "full disk"} & happened
        for line in lines:
            if (
                line.endswith("minutes")
                and ": passed, " in line
                and "no output folder" not in happened
            ):
                stem = line.split(":")[0]
                self.finished[stem] = b""
        ends = {ENDS_THE_RUN[what] for what in happened & {*ENDS_THE_RUN}}
        if not (self.output / "status.json").exists():
            check(disturbed or ends, f"status.json is gone: {everything}")
            check(not self.finished, "status.json is gone")
            return
        entries = json.loads((self.output / "status.json").read_text())["notebooks"]
        for stem, entry in entries.items():
            gone = "no output folder" in happened and not (self.output / f"{stem}.ipynb").exists()
            if entry["status"] == "passed" and not gone:
                self.finished.setdefault(stem, b"")
        for stem, content in self.finished.items():
            check(entries[stem]["status"] == "passed", f"{stem} was finished: {entries[stem]}")
            self.check_finished(stem, content, each["cells"].get(stem))
        if not (disturbed or ends):
            statuses = {stem: entry["status"] for stem, entry in entries.items()}
            for stem in {*self.stems} - {*before} - runner.hit:
                expected = CELLS[each["cells"][stem]][1] if stem in each["cells"] else "passed"
                if runner.limit_s == HANGING_S:  # short for a notebook on a busy machine
                    expected += " timeout"
                check(
                    statuses[stem] in expected, f"{stem}: {entries[stem]}, not {expected}; {lines}"
                )
            check(code == int({*statuses.values()} != {"passed"}), f"exit status {code}")
        else:
            check(code in ends | {1} if disturbed else code in ends | {0, 1}, f"status {code}")
        if code not in ENDS_THE_RUN.values() and not disturbed:
            self.check_page()

    def check_finished(self, stem: str, content: bytes, fault: str | None) -> None:
        file, found = self.output / f"{stem}.ipynb", ""
        now = file.read_bytes()
        check(content in (b"", now), f"{file.name} has changed")
        self.finished[stem] = now
        cells = nbformat.read(file, as_version=4).cells
        for cell in cells:
            found += "".join(output.get("text", "") for output in cell.outputs)
        check([cell.execution_count for cell in cells] == [1, 2, 3], f"{stem}: cells did not run")
        check(found.endswith("end\n") or fault in HANGS, f"{stem}: its last cell says nothing")
        records = self.output / "records" / f"{stem}.json"
        if fault not in DOES_NOT_RECORD:
            value = json.loads(records.read_text())[0]["value"]
            check(f"value {value:.0f}\n" in found, f"{stem}: the records are another execution's")

    def check_page(self) -> None:
        page = (self.output / "index.html").read_text()
        parser = html.parser.HTMLParser()
        parser.feed(page)
        parser.close()
        check(page.rstrip().endswith("</html>"), "index.html is cut off")
        check(all(f'id="{stem}"' in page for stem in self.stems), "index.html lacks a notebook")
        check((self.output / "results.json").is_file(), "results.json is gone")

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The campaign's processes that have this word in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.name and word in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return [process for process in found if execute._is_living(process)]


class Runner:
    """A run and what happens to it: `happened`, and to which notebooks: `hit`."""

    def __init__(self, campaign: Campaign, outside: list, hangs: bool):
        self.campaign, self.outside = campaign, list(outside)
        self.happened, self.hit, self.refused = set(), set(), None
        self.limit_s = HANGING_S if hangs else LIMIT_S
        for what, *_ in outside:
            if what in ("dead start", "mute start"):
                Path(f"{campaign.token}{what.split()[0]}").touch()
                self.happened.add(what)
        self.process = self.start(stderr=subprocess.PIPE)

    def start(self, **streams) -> subprocess.Popen:
        campaign = self.campaign
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        environment |= {
            "LECTURES_PROFILE": "smoke",
            "PYTHONPATH": os.pathsep.join(
                [str(campaign.folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "FAULTS_START": str(campaign.token),
            MARK: campaign.name,
        }
        command = [sys.executable, "-m", "helpers.run", "--resume", "--no-pages"]
        command += ["--notebooks", campaign.notebooks, "--output", campaign.output]
        command += ["--timeout", f"{self.limit_s / 60}"]
        return subprocess.Popen(
            [*map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, **streams
        )

    def follow(self) -> tuple[int, list[str], str]:
        """Until it ends. Returns the exit status, the lines of its errors, and its output."""
        watchdog = threading.Timer(RUN_S, self.process.send_signal, [signal.SIGABRT])
        watchdog.start()
        lines, threads = [], []
        self.trigger(0, threads)
        for line in self.process.stderr:
            lines.append(line.rstrip())
            self.trigger(len(lines), threads)
            if "no reader" in self.happened:
                break
        if "no reader" in self.happened:
            self.process.stderr.close()
            self.process.stdout.close()
            text = ""
        else:
            text = self.process.stdout.read()
        code = self.process.wait()
        watchdog.cancel()
        for thread in threads:
            thread.join()
        check(code != -signal.SIGABRT, f"the runner did not end: {lines}")
        if self.refused:
            check(self.refused[0] == 2 and "in use by another run" in self.refused[1], self.refused)
        return code, lines, text

    def trigger(self, number: int, threads: list[threading.Thread]) -> None:
        for what, line, seconds in self.outside:
            if line == number:
                if what == "no reader":
                    self.happened.add(what)
                else:
                    threads.append(threading.Thread(target=self.happen, args=(what, seconds)))
                    threads[-1].start()

    def happen(self, what: str, seconds: float) -> None:
        time.sleep(seconds)
        campaign = self.campaign
        if self.process.poll() is not None:
            return
        if what in ENDS_THE_RUN:
            self.happened.add(what)
            self.process.send_signal(getattr(signal, what))
        elif what in ("kill a kernel", "crash a kernel", "kill a process"):
            word = "helpers.execute" if what == "kill a process" else "ipykernel_launcher"
            for process in campaign.processes(word)[:1]:
                self.happened.add(what)
                number = signal.SIGSEGV if what == "crash a kernel" else signal.SIGKILL
                try:
                    output = process.environ()[execute.MARK]
                    process.send_signal(number)
                except (psutil.Error, KeyError):
                    continue
                self.hit.add(Path(output).name.removesuffix(".partial.ipynb"))
        elif what == "second run" and (campaign.output / "status.json").exists():
            other = self.start(stderr=subprocess.PIPE)
            _, errors = other.communicate()
            if self.process.poll() is None:
                self.happened.add(what)
                self.refused = other.returncode, errors
        elif what == "no output folder":
            self.happened.add(what)
            for _ in range(5):  # it is being written to
                shutil.rmtree(campaign.output, ignore_errors=True)
        elif what == "full disk" and os.path.ismount(campaign.output.parent):
            self.happened.add(what)
            fill(campaign.output.parent / "filler")


def mount(folder: Path) -> bool:
    """A disk of 100 MB, where this user may make one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def fill(file: Path) -> None:
    for size in (2**20, 2**12, 1):
        with contextlib.suppress(OSError), file.open("ab", buffering=0) as stream:
            while stream.write(bytes(size)) == size:
                pass


def shrink(plan: dict, folder: Path, seconds: float = 300.0) -> dict:
    """A plan with fewer faults that is still Lost; the smallest that is found in time."""
    until = time.monotonic() + seconds
    for number in range(len(plan["rounds"])):
        for kind in ("outside", "damages", "cells"):
            for key in list(plan["rounds"][number][kind]):
                smaller = json.loads(json.dumps(plan))
                faults = smaller["rounds"][number][kind]
                faults.pop(key) if kind == "cells" else faults.remove(key)
                if time.monotonic() > until:
                    return plan
                if failure(smaller, folder / uuid.uuid4().hex):
                    plan = smaller
    return plan


def failure(plan: dict, folder: Path, **options: bool) -> str:
    """What is lost in a plan, "" when nothing is."""
    folder.mkdir(parents=True)
    try:
        Campaign(plan, folder, **options).carry_out()
    except Exception as lost:
        return f"{type(lost).__name__}: {lost}"
    return ""


def main() -> None:
    words = sys.argv[1:]
    for word in (word for word in words if word != "--shrink"):
        plan = make_plan(int(word)) if word.isdecimal() else json.loads(word)
        print(f"{word}: {count(plan)} faults", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if lost := failure(plan, Path(folder) / "whole", recorder=True):
                print(lost, "is lost in", json.dumps(plan), flush=True)
                if "--shrink" in words:
                    print("and in", json.dumps(shrink(plan, Path(folder))), flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
