"""Whose numbers there are, and how they are asked for."""

import json
import os

import pandas as pd
import pytest

from helpers import machines, results, specs


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder of runs, and how to add one: device, profile, value, age in days."""
    monkeypatch.delenv("LECTURES_RECORDS", raising=False)

    def add(name: str, device: str, profile: str, value: float, days: int = 0):
        folder = tmp_path / name / "records"
        write(folder, device, profile, value)
        status = tmp_path / name / "status.json"
        status.write_text("{}")
        os.utime(status, (10**9 - 86400 * days,) * 2)

    return tmp_path, add


def write(folder, device="NVIDIA X", profile="full", value=1.0, notebook="03_roofline"):
    folder.mkdir(parents=True, exist_ok=True)
    record = dict.fromkeys(results.KEYS, "") | dict.fromkeys(results.NUMBERS) | {
        "claim": "S20", "op": "roof: memory, copy", "value": value, "device": device,
        "profile": profile, "date": "2026-01-02", "notebook": notebook,
    }  # fmt: skip
    (folder / f"{notebook}.json").write_text(json.dumps([record]))
    pd.DataFrame({"ms": [value]}).to_csv(folder / f"{notebook}.curve.csv", index=False)


def test_own_runs_are_the_newest_of_each_device_and_profile(runs):
    folder, add = runs
    assert machines.own(folder) == []
    add("old", "NVIDIA X", "full", 1.0, days=3)
    add("new", "NVIDIA X", "full", 2.0, days=1)
    add("cpu", "a CPU", "smoke", 3.0, days=2)
    (folder / "other").mkdir()  # no run
    write(folder / "scratch" / "records", "NVIDIA X", "smoke", 4.0)
    found = machines.own(folder)
    assert [one.name for one in found] == ["new", "cpu", "worked through here"]
    assert [one.copy_gb_per_s() for one in found] == [2.0, 3.0, 4.0]
    assert [one.profile for one in found] == ["full", "smoke", "smoke"]
    assert found[0].device == "NVIDIA X" and found[0].series("03_roofline", "curve")["ms"][0] == 2
    assert found[0].series("03_roofline", "none") is None


def test_a_run_of_one_notebook_does_not_hide_the_others(runs):
    folder, add = runs
    add("all", "NVIDIA X", "full", 1.0, days=2)
    write_more = folder / "all" / "records"
    write(write_more, value=7.0, notebook="06_memory")
    add("one", "NVIDIA X", "full", 2.0, days=1)
    (only,) = machines.own(folder)
    assert only.name == "one" and [r["value"] for r in only.records] == [2.0, 7.0]
    assert only.series("03_roofline", "curve")["ms"][0] == 2.0
    assert only.series("06_memory", "curve")["ms"][0] == 7.0


def test_a_curve_that_was_cut_off_is_none(tmp_path):
    write(tmp_path / "records")
    (tmp_path / "records" / "03_roofline.curve.csv").write_text("")
    assert machines.of_run(tmp_path).series("03_roofline", "curve") is None


def test_the_run_that_is_going_on_comes_first(runs, monkeypatch, tmp_path):
    folder, add = runs
    add("finished", "NVIDIA X", "full", 1.0)
    write(tmp_path / "now", value=5.0)
    monkeypatch.setenv("LECTURES_RECORDS", str(tmp_path / "now"))
    (only,) = machines.own(folder)
    assert only.name == "this run" and only.copy_gb_per_s() == 5.0


def test_while_the_collection_is_recorded_the_new_numbers_are_the_recorded_ones(
    runs, monkeypatch, tmp_path
):
    before = machines.recorded()
    write(tmp_path / "now", value=5.0)
    monkeypatch.setenv("LECTURES_RECORDS", str(tmp_path / "now"))
    assert machines.recorded().copy_gb_per_s() == before.copy_gb_per_s() != 5.0
    monkeypatch.setattr(results, "REFERENCE", "")
    assert machines.own(runs[0]) == []
    anew = machines.recorded()
    assert anew.copy_gb_per_s() == 5.0  # all of notebook 03 is new
    assert anew.value("S10", "latency, memory") == before.value("S10", "latency, memory")
    assert anew.series("03_roofline", "curve")["ms"][0] == 5.0
    assert anew.series("03_roofline", "ladder").equals(before.series("03_roofline", "ladder"))


def test_numbers_are_found_by_all_that_is_asked():
    h200 = machines.recorded()
    manual = [h200.value("L19", "manual_gelu", clock=clock) for clock in ("host", "event")]
    assert manual[0] > manual[1] > 1 and h200.value("L19", "manual_gelu", clock="sm") is None
    assert h200.value("L19", "nothing") is None
    assert h200.matmul_tflop_per_s("bfloat16") > h200.matmul_tflop_per_s("float32")
    assert h200.profile == "full" and h200.device == "NVIDIA H200"


def test_the_lectures_roofs_are_its_datasheets():
    sheet = specs.get(machines.LECTURE_GPU)
    lecture = machines.lecture()
    assert lecture.copy_gb_per_s() == sheet.memory_gb_per_s
    assert lecture.matmul_tflop_per_s("bfloat16") == sheet.fp16_tflops
    assert lecture.series("03_roofline", "operations") is None


def test_what_is_no_record_is_left_out(tmp_path):
    folder = tmp_path / "records"
    write(folder, value=2.0)
    (folder / "01_specs.json").write_text("[{")
    (folder / "02_benchmarking.json").write_text('[{"claim": "L06"}, 3]')
    records, notes = machines.gather(folder)
    assert [record["value"] for record in records] == [2.0]
    assert len(notes) == 2 and "01_specs.json cannot be read" in notes[0] and "2 of 2" in notes[1]


def test_a_folder_may_have_any_name(tmp_path):
    write(tmp_path / "{a}" / "records", value=2.0)
    assert machines.of_run(tmp_path / "{a}").series("03_roofline", "curve")["ms"][0] == 2.0
