"""Notebooks on a cluster: real workers of this machine, deaths and differences included.

One local cluster serves most tests. Its two workers have two GPUs that are names alone and do
without PyTorch, and what they start in place of a kernel executes the cells at once.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import types

import nbformat
import pytest
from test_run import (
    TELL_PIDS,
    entries,
    is_alive,
    make_notebook,
    pids,
    printed,
    run_main,
    statuses,
    wait_for,
)

pytest.importorskip("distributed", reason="needs the extra `cluster`")

from helpers import (
    cluster,
    device,
    engine,
    machines,
    report,
    report_compare,
    run,
    run_folder,
    runner,
    worker,
)

GPUS = ["GPU-aaaa", "MIG-bbbb"]
STAND_IN = """\
import sys, types
if "dask_worker" in " ".join(sys.orig_argv) or "spawn_main" in " ".join(sys.orig_argv):
    torch = sys.modules["torch"] = types.ModuleType("torch")
    torch.cuda, torch.__version__ = types.SimpleNamespace(is_available=lambda: False), "0.1"
    torch.device = object
if sys.orig_argv[-2:] == ["-m", "helpers.execute"]:
    import contextlib, io, json, os, threading
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    notebook = json.load(open(job["notebook"]))
    os.chdir(job["folder"])
    names, outcome, count = {}, {"status": "passed"}, 0
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        count, text = count + 1, io.StringIO()
        print(json.dumps({"index": index, "execution_count": count}), flush=True)
        try:
            with contextlib.redirect_stdout(text):
                exec("".join(cell["source"]), names)
        except Exception as error:
            outcome = {"status": "failed", "error": type(error).__name__, "lines": [str(error)]}
            break
        names |= job["parameters"]
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text.getvalue()}]
        cell["execution_count"] = count
    with open(job["output"], "w") as file:
        json.dump(notebook, file)
    print(json.dumps(outcome), flush=True)
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def smoke(monkeypatch):
    monkeypatch.setenv("LECTURES_PROFILE", "smoke")


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """A pool of two workers."""
    folder = tmp_path_factory.mktemp("stand in")
    # Python loads a module of this name before all else.
    (folder / "sitecustomize.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setattr(worker, "gpus", lambda: GPUS)
        with cluster.local(2) as pool:
            patch.undo()
            yield pool


def options(folder, output):
    return [*map(str, ("--notebooks", folder, "--output", output, "--no-pages"))]


@pytest.fixture
def on_workers(workers, monkeypatch):
    """The runner in this process, on the workers, which stay for the next test."""
    wait_for(lambda: len(workers.workers) == 2)
    monkeypatch.setattr(cluster, "connected", lambda address: contextlib.nullcontext(workers))
    return lambda folder, output, *more: run.main(
        [*options(folder, output), "--scheduler", "here", *more]
    )


TELL = """\
import json, os, time
from pathlib import Path
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
began = time.time()
record = {{"claim": "L05", "op": "made up", "shape": "", "dtype": "", "clock": "event",
    "value": 2.0 if "GPU" in gpu else 3.0, "p20": None, "p80": None, "unit": "ms",
    "profile": "smoke", "device": "NVIDIA " + gpu, "torch": "2", "triton": "3",
    "date": "2026-01-31", "notebook": "{name}"}}
Path(os.environ["LECTURES_RECORDS"], "{name}.json").write_text(json.dumps([record]))
Path(os.environ["LECTURES_RECORDS"], "{name}.curve.csv").write_text("ms\\n1")
time.sleep(0.6)
print(json.dumps([gpu, began, time.time(), os.getcwd(), size]))"""


def test_each_worker_has_its_gpu_and_one_notebook_at_a_time(on_workers, tmp_path):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    names = ["01_a", "02_b", "03_c", "04_alone", "05_e"]
    for name in names:
        tags = "parameters alone" if name == "04_alone" else "parameters"
        make_notebook(folder, name, f"tag: {tags}\nsize = 1", TELL.format(name=name))
    make_notebook(folder, "06_fails", "# Why", "1 / 0")
    assert on_workers(folder, output, "-p", "size", "7") == 1
    assert statuses(output) == dict.fromkeys(names, "passed") | {"06_fails": "failed"}
    failed = entries(output)["06_fails"]
    assert failed["error"] == "ZeroDivisionError" and failed["cell"]["heading"] == "Why"
    spans = {}
    for name in names:
        gpu, began, ended, place, size = json.loads(printed(output / f"{name}.ipynb"))
        spans[name] = (gpu, began, ended)
        assert (place, size) == (str(folder), 7)
        assert entries(output)[name]["machine"]["visible"] == gpu
        assert (output / "records" / f"{name}.json").exists()
        assert (output / "records" / f"{name}.curve.csv").exists()
    assert {gpu for gpu, *_ in spans.values()} == set(GPUS)
    for one, two in itertools.combinations(names, 2):  # in this order
        if spans[one][0] == spans[two][0] or "04_alone" in (one, two):
            assert spans[one][2] <= spans[two][1]
    page = (output / "index.html").read_text()
    assert "<h2>Machines</h2>" in page and entries(output)["01_a"]["machine"]["host"] in page
    before = (output / "01_a.ipynb").stat().st_mtime_ns
    assert on_workers(folder, output, "-p", "size", "7", "--resume", "1") == 0
    assert (output / "01_a.ipynb").stat().st_mtime_ns == before


def test_every_notebook_on_each_device(on_workers, workers, monkeypatch, tmp_path, capsys):
    """The workers are told to be two devices; a notebook sees the records of its own alone."""
    for facts, slug in zip(workers.workers.values(), ("one", "two"), strict=True):
        monkeypatch.setitem(facts, "slug", slug)
        monkeypatch.setitem(facts, "device", f"NVIDIA {facts['visible']}")
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    make_notebook(folder, "01_a", "size = 1\n" + TELL.format(name="01_a"))
    see = "import os; print(sorted(os.listdir(os.environ['LECTURES_RECORDS'])))"
    make_notebook(folder, "02_b", "tag: parameters alone\nx = 1", see)
    assert on_workers(folder, output, "--each-device") == 0
    names = ["one/01_a", "one/02_b", "two/01_a", "two/02_b"]
    assert statuses(output) == dict.fromkeys(names, "passed")
    seen = {json.loads(printed(output / slug / "01_a.ipynb"))[0] for slug in ("one", "two")}
    assert seen == set(GPUS)
    for slug in ("one", "two"):  # in truth both are this machine, which made no record
        assert printed(output / slug / "02_b.ipynb") == "[]\n"
    page = (output / "index.html").read_text()
    table = report.comparison(output, "01_a", by_device=True)
    assert all(f"<th>NVIDIA {gpu}</th>" in table for gpu in GPUS) and table in page
    assert 'href="one/01_a.ipynb"' in page and page.count('<h3 id="01_a">') == 1
    own = {one.device: one for one in machines.by_device("x", output / "records")}
    assert {one.value("L05", "made up") for one in own.values()} == {2.0, 3.0}
    assert all(one.series("01_a", "curve") is not None for one in own.values())
    before = [(output / f"{name}.ipynb").stat().st_mtime_ns for name in names]
    assert on_workers(folder, output, "--each-device", "--resume") == 0
    assert before == [(output / f"{name}.ipynb").stat().st_mtime_ns for name in names]
    capsys.readouterr()
    for where in (output, output / "results.json"):
        assert report_compare.main(f"{where}@aaaa", f"{where}@bbbb") == 0
        assert "NVIDIA GPU-aaaa" in (text := capsys.readouterr().out) and "1.5" in text
        with pytest.raises(run_folder.Refused, match="which device"):
            report_compare.load(str(where))


KILL = """\
import os, psutil, time
from pathlib import Path
if Path("deaths").exists():
    print("at last")
else:
    Path("deaths").write_text("x")
    Path("pid").write_text(str(os.getpid()))
    psutil.Process().parent().kill()
    time.sleep(600)"""


def test_a_worker_that_dies_costs_one_retry(on_workers, tmp_path, capsys):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    make_notebook(folder, "01_once", "1", KILL)
    make_notebook(folder, "02_fine", "print('fine')")
    assert on_workers(folder, output) == 0
    assert (folder / "deaths").read_text() == "x"
    assert printed(output / "01_once.ipynb") == "at last\n"
    errors = capsys.readouterr().err
    assert errors.count("01_once: its worker died; once more") == 1
    assert "Traceback" not in errors and "distributed" not in errors
    wait_for(lambda: not is_alive(int((folder / "pid").read_text())), 20)


class Dying(runner.Here):
    """A pool whose places are lost so and so often under a notebook."""

    def __init__(self, deaths: dict[str, int]):
        super().__init__(2)
        self.deaths, self.machine = deaths, {"host": "a", "device": "b", "torch": "", "triton": ""}

    def execute(self, notebook, output, *_):
        stem = output.name.removesuffix(".partial.ipynb")
        self.deaths[stem] -= 1
        if self.deaths[stem] >= 0:
            return {"status": "failed", "error": worker.DIED, "lines": ["lost"]}
        nbformat.write(engine.read(notebook), output)
        return {"status": "passed"}


def test_two_deaths_cost_a_notebook_and_no_other_one(tmp_path, monkeypatch):
    pool = Dying({"01_a": 0, "02_b": 1, "03_c": 9, "04_d": 0})
    monkeypatch.setattr(cluster, "connected", lambda address: contextlib.nullcontext(pool))
    for name in pool.deaths:
        make_notebook(tmp_path / "notebooks", name, "1")
    arguments = [*options(tmp_path / "notebooks", tmp_path / "run"), "--scheduler", "here"]
    assert run.main(arguments) == 1
    found = entries(tmp_path / "run")
    assert [found[name]["status"] for name in pool.deaths] == [
        "passed",
        "passed",
        "failed",
        "passed",
    ]
    assert found["03_c"]["error"] == worker.DIED and pool.deaths["03_c"] == 7


def test_no_worker_is_left(workers, monkeypatch, tmp_path):
    """Where none comes a notebook fails, and says why."""
    monkeypatch.setattr(cluster, "WAIT_S", 0)
    nowhere = cluster.Cluster(workers.client, contextlib.nullcontext())
    nowhere.seen[None] = 0.0
    with nowhere.place(0, None, threading.Event()) as place:
        found = place.execute(*[None] * 8)
    assert found["status"] == "failed" and found["error"] == "NoWorker"
    with pytest.raises(run_folder.Refused, match="no worker has come"):
        nowhere.wait(5)


def test_who_is_refused(workers, monkeypatch, capsys):
    """Another copy of the helpers, one that cannot be used, and a GPU that is another's."""
    address = workers.client.scheduler.address
    wait_for(lambda: len(workers.workers) == 2)  # one has died before, and comes back
    with cluster.connected(address) as same:
        wait_for(lambda: {*same.workers} == {*workers.workers})
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "code", lambda: [b"another copy"])
        refused = pytest.raises(run_folder.Refused, match="the helpers or data on .* differ")
        with refused, cluster.connected(address):
            pytest.fail("a worker was accepted")
    assert capsys.readouterr().err.count("is refused") >= 1
    facts = next(iter(workers.workers.values())) | {"gpu": "1234"}
    strict = cluster.Cluster(workers.client, contextlib.nullcontext())
    assert strict.objection(facts) == ""
    strict.workers["tcp://a"] = facts
    assert strict.objection(facts) == "its GPU is also that of tcp://a"
    assert strict.objection(facts | {"host": "elsewhere"}) == ""
    assert "ImportError: no module" in strict.objection(ImportError("no module"))


def test_profile_is_that_of_the_workers(workers, monkeypatch):
    monkeypatch.delenv("LECTURES_PROFILE")
    assert workers.profile("auto") == "smoke"  # they have no GPU, whatever this machine has
    for facts in workers.workers.values():
        monkeypatch.setitem(facts, "slug", "nvidia_h200")
    assert workers.profile("auto") == "full" and workers.profile("smoke") == "smoke"


@pytest.mark.parametrize(
    "visible, count, names",
    [
        (None, 2, ["0", "1"]),
        ("3, 1", 2, ["3", "1"]),
        ("GPU-8932f937,1", 1, ["GPU-8932f937"]),  # CUDA ends its list at what it does not know
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"]),
    ],
)
def test_gpus_keep_the_names_that_they_have(visible, count, names, monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert worker.gpus() == names


def test_records_of_other_devices_are_left_out():
    mine, other = (
        json.dumps([{"device": name}]).encode() for name in (device.device_name(), "NVIDIA X")
    )
    files = {"01_a.json": mine, "01_a.x.csv": b"1", "02_b.json": other, "02_b.x.csv": b"2"}
    assert set(worker._of_this_device(files)) == {"01_a.json", "01_a.x.csv"}


REFUSED = {
    "measurements must not share a GPU, and this machine has 2": ["--jobs", 3],
    "no Dask scheduler answers at tcp://127.0.0.1:9": ["--scheduler", "tcp://127.0.0.1:9"],
    "no Dask scheduler answers at nonsense://": ["--scheduler", "nonsense://x"],
    "--jobs is for this machine": ["--scheduler", "tcp://127.0.0.1:9", "--jobs", 2],
    "--each-device is for the devices of a cluster": ["--each-device"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_in_one_sentence(message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "gpus", lambda: GPUS)
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    make_notebook(tmp_path / "notebooks", "01_a", "1")
    arguments = [*options(tmp_path / "notebooks", tmp_path / "run"), *REFUSED[message]]
    assert run.main([*map(str, arguments)]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_without_dask_one_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "helpers.cluster", None)
    monkeypatch.delattr("helpers.cluster", raising=False)
    make_notebook(tmp_path / "notebooks", "01_a", "1")
    assert run_main(tmp_path / "notebooks", tmp_path / "run", "--jobs", 2) == 2
    assert "'.[cluster]'" in capsys.readouterr().err
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: None)
    assert worker.main(["tcp://127.0.0.1:9"]) == 2
    assert "'.[cluster]'" in capsys.readouterr().err


def test_an_interruption_ends_the_notebooks_and_no_worker(on_workers, workers, tmp_path):
    folder, output = tmp_path / "notebooks", tmp_path / "run"
    make_notebook(folder, "01_a", "print('good')")
    hang = "import pathlib, time\nif not pathlib.Path('go').exists(): time.sleep(600)"
    make_notebook(folder, "02_b", TELL_PIDS.replace("{file}", "pids"), hang)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a background job's is ignored

    def interrupt():
        wait_for(lambda: (folder / "pids").exists() and statuses(output)["01_a"] == "passed")
        os.kill(os.getpid(), signal.SIGINT)

    known = {*workers.workers}
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert on_workers(folder, output) == 130
    thread.join()
    assert statuses(output) == {"01_a": "passed", "02_b": "interrupted"}
    wait_for(lambda: not any(map(is_alive, pids(folder / "pids"))))
    (folder / "go").touch()
    before = (output / "01_a.ipynb").stat().st_mtime_ns
    assert on_workers(folder, output, "--resume") == 0
    assert set(statuses(output).values()) == {"passed"} and {*workers.workers} == known
    assert (output / "01_a.ipynb").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "state, status, unwanted",
    [("executing", "running", False), ("cancelled", "running", True),
     ("executing", "closing", True), (None, "running", True)],
)  # fmt: skip
def test_a_worker_gives_up_what_nobody_waits_for(state, status, unwanted):
    tasks = {"key": types.SimpleNamespace(state=state)} if state else {}
    lost = types.SimpleNamespace(
        state=types.SimpleNamespace(tasks=tasks), status=types.SimpleNamespace(name=status)
    )
    assert worker._Unwanted(lost, "key").is_set() == unwanted


def test_the_command_for_a_machine_of_a_fleet(monkeypatch, capsys):
    asked = []

    @contextlib.contextmanager
    def started(address, visible):
        asked.append((address, visible))
        yield {}

    monkeypatch.setattr(worker, "started", started)
    monkeypatch.setattr(worker, "ended", lambda workers: "its last words")
    monkeypatch.setattr(worker, "gpus", lambda: GPUS)
    assert worker.main(["tcp://a:1"]) == 1
    assert capsys.readouterr().err.endswith("its last words\n")
    monkeypatch.setattr(worker, "gpus", list)
    assert worker.main(["tcp://a:1", "--workers", "3"]) == 1
    assert asked == [("tcp://a:1", GPUS), ("tcp://a:1", [None] * 3)]
