"""helpers.record: the normal form of a notebook, and what may be recorded where."""

import copy
import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from helpers import device, record, results, run
from helpers.normalise import normalise

BAR = "\r  0%|          | 0/2 [00:00<?, ?it/s]\r100%|██████████| 2/2 [00:00<00:00, 20.1it/s]\n"
PNG = "iVBORw0KGgo=\n"
PLACES = {"root": Path("/srv/repo"), "home": Path("/home/ada")}


def stream(text, name="stdout"):
    return new_output("stream", text=text, name=name)


def shown(**data):
    return new_output("display_data", data={key.replace("_", "/"): data[key] for key in data})


def notebook_with(*outputs, source="1"):
    return new_notebook(cells=[new_code_cell(source, id="02-a", outputs=list(outputs))])


def outputs_of(*outputs):
    return normalise(notebook_with(*outputs), **PLACES).cells[0].outputs


def impure_notebook():
    """A notebook as papermill leaves it on somebody's machine."""
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "x"}
    cell = new_code_cell(
        "x = 1   \nx\n\n",
        id="02-result",
        execution_count=7,
        metadata={
            "papermill": {"duration": 1.0},
            "execution": {"iopub.execute_input": "2026-01-31T00:00:00Z"},
            "ExecuteTime": {},
            "tags": ["core"],
            "jupyter": {"source_hidden": True},
        },
        outputs=[
            stream("one\n"),
            stream("two in /srv/repo/runs\n"),
            stream(BAR, "stderr"),
            stream(""),
            stream("/tmp/ipykernel_77/1234.py:3: UserWarning: x\n" + BAR, "stderr"),
            new_output("display_data", data=widget),
            new_output("display_data", data={}),
            new_output("execute_result", data={"text/plain": "1"}, execution_count=7),
            shown(image_png=PNG, text_plain="<Figure>"),
        ],
    )
    other = new_code_cell("y", id="02-empty", metadata={"tags": [], "papermill": {}})
    markdown = new_markdown_cell(
        "two spaces  \nbreak a line\n", id="02-title", metadata={"papermill": {}}
    )
    return new_notebook(
        cells=[markdown, cell, other],
        metadata={
            "kernelspec": {"name": "venv", "display_name": "Python 3 (x)", "language": "python"},
            "language_info": {"name": "python", "version": "3.12.1", "file_extension": ".py"},
            "papermill": {"duration": 2.0},
            "widgets": {},
        },
    )


def expected_notebook():
    cell = new_code_cell(
        "x = 1\nx",
        id="02-result",
        execution_count=7,
        metadata={"tags": ["core"], "jupyter": {"source_hidden": True}},
        outputs=[
            stream("one\ntwo in ./runs\n"),
            stream("<cell>:3: UserWarning: x\n", "stderr"),
            new_output("execute_result", data={"text/plain": "1"}, execution_count=7),
            shown(image_png=PNG, text_plain="<Figure>"),
        ],
    )
    return new_notebook(
        cells=[
            new_markdown_cell("two spaces  \nbreak a line", id="02-title"),
            cell,
            new_code_cell("y", id="02-empty"),
        ],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python", "file_extension": ".py"},
        },
    )


def test_normal_form_of_an_impure_notebook():
    assert normalise(impure_notebook(), **PLACES) == expected_notebook()


def test_normalise_is_pure_and_idempotent():
    notebook = impure_notebook()
    before = copy.deepcopy(notebook)
    once = normalise(notebook, **PLACES)
    assert notebook == before
    assert normalise(once, **PLACES) == once


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/repo", "."),
        ("saved '/srv/repo/runs/x.json'", "saved './runs/x.json'"),
        ("/srv/repo2 /srv/repo.bak", "/srv/repo2 /srv/repo.bak"),
        ("/mnt/srv/repo", "/mnt/srv/repo"),
        ("/home/ada/x /home/adam/x", "~/x /home/adam/x"),
        ("/home/ada/v/lib/python3.12/site-packages/torch/x.py", "site-packages/torch/x.py"),
        ("/usr/lib/python3/dist-packages/a.py", "site-packages/a.py"),
        ("at /tmp/ipykernel_1/22.py:1", "at <cell>:1"),
        ("1 / 2 = 0.5 and a/b", "1 / 2 = 0.5 and a/b"),
    ],
)
def test_paths_of_the_machine_are_replaced(text, expected, monkeypatch):
    error = new_output("error", ename="E", evalue=text, traceback=[text])
    got = outputs_of(stream(text), shown(text_html=text, text_plain=text), error)
    assert got[0].text == expected
    assert got[1].data == {"text/html": expected, "text/plain": expected}
    assert (got[2].evalue, got[2].traceback) == (expected, [expected])


def test_the_repository_may_lie_in_the_home_folder():
    notebook = notebook_with(stream("/home/ada/repo/a /home/ada/b"))
    got = normalise(notebook, root=Path("/home/ada/repo"), home=Path("/home/ada"))
    assert got.cells[0].outputs[0].text == "./a ~/b"


def test_a_home_at_the_root_replaces_nothing():
    got = normalise(notebook_with(stream("/ and /x")), root=Path("/srv/repo"), home=Path("/"))
    assert got.cells[0].outputs[0].text == "/ and /x"


def test_only_progress_bars_are_dropped_from_stderr():
    assert outputs_of(stream(BAR, "stderr")) == []
    assert outputs_of(stream("3it [00:01, 2.9it/s]\n", "stderr")) == []
    warning = stream("a warning\nabout 50%\n", "stderr")
    assert outputs_of(warning) == [warning]
    assert outputs_of(stream(BAR + "a warning\n", "stderr")) == [stream("a warning\n", "stderr")]
    assert outputs_of(stream(BAR[:30], "stderr"), stream(BAR[30:], "stderr")) == []
    assert outputs_of(stream(BAR.strip() + "\r      \r", "stderr")) == []  # a bar that was wiped
    assert outputs_of(stream("100%|x| on stdout\n"))  # a table may look like this


def test_a_bar_between_two_prints_leaves_one_print():
    assert outputs_of(stream("a\n"), stream(BAR, "stderr"), stream("b\n")) == [stream("a\nb\n")]


def test_figures_stay_byte_for_byte():
    figure = shown(image_png=PNG + "/srv/repo")
    assert outputs_of(figure) == [figure]


def test_normalise_only_rewrites_files_in_place(tmp_path):
    file = tmp_path / "02_b.ipynb"
    nbformat.write(impure_notebook(), file)
    assert record.main(["--normalise-only", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert text.endswith("}\n") and "papermill" not in text and "02-result" in text
    assert record.main(["--normalise-only", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == text
    assert [each.name for each in tmp_path.iterdir()] == ["02_b.ipynb"]


# Recording: a run stood in for by the files that one leaves.


def measured(notebook, value, profile="full"):
    names = dict.fromkeys(results.KEYS, "")
    return names | {"notebook": notebook, "claim": "L05", "value": value, "profile": profile}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with two notebooks on a machine with a GPU called gpu_x."""
    monkeypatch.setattr(device, "slug", lambda: "gpu_x")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(results, "measurements_path", lambda slug: tmp_path / f"{slug}.json")
    monkeypatch.setenv("LECTURES_PROFILE", "full")
    (tmp_path / "notebooks").mkdir()
    for stem in ("02_b", "03_c"):
        nbformat.write(notebook_with(source="old"), tmp_path / "notebooks" / f"{stem}.ipynb")
    results.save([measured("01_a", 1.0), measured("02_b", 2.0)], tmp_path / "gpu_x.json")
    return tmp_path


def fake_run(monkeypatch, failing=(), profile="full"):
    def main(arguments):
        folder = Path(arguments[arguments.index("--output") + 1])
        (folder / "records").mkdir(parents=True)
        entries = {}
        for number, stem in enumerate(["02_b", "03_c"]):
            entries[stem] = {"status": "failed" if stem in failing else "passed"}
            if stem not in failing:
                executed = notebook_with(stream("fresh\n"), source="new")
                executed.metadata["papermill"] = {}
                nbformat.write(executed, folder / f"{stem}.ipynb")
                results.save(
                    [measured(stem, 10.0 + number, profile)], folder / "records" / f"{stem}.json"
                )
        (folder / "status.json").write_text(json.dumps({"notebooks": entries}), encoding="utf-8")
        return 1 if failing else 0

    monkeypatch.setattr(run, "main", main)


def recorded(place):
    """What the two notebooks and the file of measurements hold."""
    sources = {
        stem: nbformat.read(place / "notebooks" / f"{stem}.ipynb", as_version=4).cells[0].source
        for stem in ("02_b", "03_c")
    }
    values = {each["notebook"]: each["value"] for each in results.load(place / "gpu_x.json")}
    return sources, values


def record_all(place, *options):
    return record.main([*options, "--notebooks", str(place / "notebooks")])


UNTOUCHED = ({"02_b": "old", "03_c": "old"}, {"01_a": 1.0, "02_b": 2.0})


def test_record_replaces_notebooks_and_merges_numbers(place, monkeypatch):
    fake_run(monkeypatch)
    assert record_all(place) == 0
    assert recorded(place) == (
        {"02_b": "new", "03_c": "new"},
        {"01_a": 1.0, "02_b": 10.0, "03_c": 11.0},
    )
    assert "papermill" not in (place / "notebooks" / "02_b.ipynb").read_text(encoding="utf-8")


def test_nothing_is_recorded_when_a_notebook_fails(place, monkeypatch, capsys):
    fake_run(monkeypatch, failing=["03_c"])
    assert record_all(place) == 1
    assert recorded(place) == UNTOUCHED
    assert "03_c" in capsys.readouterr().err


def test_keep_going_records_the_good_ones(place, monkeypatch):
    fake_run(monkeypatch, failing=["03_c"])
    assert record_all(place, "--keep-going") == 1
    assert recorded(place) == (
        {"02_b": "new", "03_c": "old"},
        {"01_a": 1.0, "02_b": 10.0},
    )


def test_a_small_run_is_refused_on_a_gpu_before_it_starts(place, monkeypatch, capsys):
    monkeypatch.setenv("LECTURES_PROFILE", "smoke")
    monkeypatch.setattr(run, "main", lambda arguments: pytest.fail("was started"))
    assert record_all(place) == 1
    assert "smoke" in capsys.readouterr().err


def test_small_numbers_never_reach_the_file_of_a_gpu(place, monkeypatch, capsys):
    fake_run(monkeypatch, profile="smoke")  # a notebook whose parameter says "smoke"
    assert record_all(place) == 1
    assert recorded(place) == UNTOUCHED
    assert "02_b" in capsys.readouterr().err


def test_a_cpu_has_a_file_of_its_own(place, monkeypatch):
    monkeypatch.setattr(device, "slug", lambda: "cpu")
    monkeypatch.setenv("LECTURES_PROFILE", "smoke")
    fake_run(monkeypatch, profile="smoke")
    assert record_all(place) == 0
    assert recorded(place)[1] == UNTOUCHED[1]
    assert {each["value"] for each in results.load(place / "cpu.json")} == {10.0, 11.0}


def test_the_profile_is_full_unless_the_environment_says_otherwise(place, monkeypatch):
    monkeypatch.delenv("LECTURES_PROFILE")
    fake_run(monkeypatch)
    assert record_all(place) == 0
    assert device.profile() == "full"


def test_a_refused_run_leaves_everything_as_it_is(place, capsys):
    assert record_all(place, "7") == 2
    assert "Recorded" not in capsys.readouterr().out
    assert recorded(place) == UNTOUCHED


@pytest.mark.parametrize("wrong", ["missing.ipynb", "."])
def test_an_unreadable_file_is_one_sentence(wrong, tmp_path, capsys):
    assert record.main(["--normalise-only", str(tmp_path / wrong)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
