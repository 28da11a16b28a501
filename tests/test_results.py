"""Records: the same keys everywhere, nothing lost, nothing invented."""

import json
import math

import pandas as pd
import pytest

from helpers import results
from helpers.bench import Measurement


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURES_RECORDS", str(tmp_path / "records"))
    return results.Recorder("02_benchmarking", "smoke")


def test_a_record_has_every_key_and_is_kept_on_disk(book, tmp_path):
    book.record("L05", "sleep", 50.61234567, "ms", shape="50 ms", clock="host")
    (record,) = json.loads((tmp_path / "records" / "02_benchmarking.json").read_text())
    assert list(record) == list(results.KEYS)
    assert record["value"] == 50.612  # five digits: more would be noise
    assert record["device"] and record["torch"] and record["date"]


def test_running_a_cell_again_replaces_its_record(book):
    for value in (1.0, 2.0):
        book.record("L06", "matmul", value, "ms", shape="8x8x8", clock="host")
    book.record("L06", "matmul", 3.0, "ms", shape="8x8x8", clock="event")
    assert [r["value"] for r in book.records] == [2.0, 3.0]


def test_a_measurement_is_recorded_with_its_clock_and_spread(book):
    m = Measurement((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), "host", "made up")
    book.record_measurement("L08", "add", m, shape="8x8")
    (record,) = book.records
    assert (record["value"], record["p20"], record["p80"]) == (3.5, 2.0, 5.0)
    assert record["clock"] == "host" and record["unit"] == "ms"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused(book, value):
    with pytest.raises(ValueError, match="not a finite number"):
        book.record("L06", "matmul", value, "ms")
    assert book.records == []


def test_a_bad_record_does_not_harm_the_others(book):
    with pytest.raises(TypeError, match="dtype must be a string"):
        book.record("L06", "matmul", 1.0, "ms", dtype=3)
    with pytest.raises(ValueError, match="not a finite number"):
        book.record("L06", "matmul", 1.0, "ms", p80=math.inf)
    book.record("L06", "matmul", 2.0, "ms")
    assert [r["value"] for r in results.load(book.path)] == [2.0]


def test_a_notebooks_name_is_not_a_path():
    with pytest.raises(ValueError, match="02_benchmarking"):
        results.Recorder("../elsewhere", "smoke")


def test_unknown_clock_and_profile_are_refused(book):
    with pytest.raises(ValueError, match="sundial"):
        book.record("L06", "matmul", 1.0, "ms", clock="sundial")
    with pytest.raises(ValueError, match="auto"):
        results.Recorder("02_benchmarking", "auto")


def test_merge_replaces_a_notebook_and_keeps_the_others():
    old = [{"notebook": "02", "value": 1}, {"notebook": "05", "value": 2}]
    new = [{"notebook": "02", "value": 3}, {"notebook": "02", "value": 4}]
    assert results.merge(old, new) == [new[0], new[1], old[1]]
    assert results.merge(old, []) == old
    assert results.merge(results.merge(old, new), new) == results.merge(old, new)


def test_save_and_load_round_trip(tmp_path):
    records = [{"claim": "L05", "value": 1.5, "op": "µs ‖"}, {"claim": "L06", "value": None}]
    results.save(records, tmp_path / "new" / "x.json")
    assert results.load(tmp_path / "new" / "x.json") == records
    assert results.load(tmp_path / "missing.json") == []


def test_series_round_trip(book, tmp_path, monkeypatch):
    frame = pd.DataFrame({"MB": [1.0, 2.0], "cold": [True, False]})
    book.series("cache", frame)
    monkeypatch.setattr(results, "measurements_path", lambda slug: tmp_path / f"{slug}.json")
    source = tmp_path / "records" / "02_benchmarking.cache.csv"
    source.rename(tmp_path / "nvidia_h200.02_benchmarking.cache.csv")
    pd.testing.assert_frame_equal(results.recorded_series("02_benchmarking", "cache"), frame)
    assert results.recorded_series("02_benchmarking", "nothing") is None


def test_the_lectures_numbers_use_the_same_keys():
    records = results.load(results.LECTURE)
    assert all(list(record) == list(results.KEYS) for record in records)
    assert all(isinstance(record["value"], float) for record in records)
    assert len({results.identity(r) for r in records}) == len(records)
    assert {r["clock"] for r in records} <= set(results.CLOCKS)
    matmul = {r["shape"]: r["value"] for r in results.lecture("L06")}
    assert matmul["16384x16384x16384"] == 162.94 and len(matmul) == 5
    sweep = {r["shape"]: r["value"] for r in results.lecture("L07")}
    assert len(sweep) == 17  # the base and four multiples of four sizes
    assert sweep["steps=10 layers=4 batch=256 dim=256"] == 27.31
    assert sweep["steps=2 layers=4 batch=256 dim=1280"] == 6.09


def test_compare_puts_three_sources_side_by_side(book, tmp_path, monkeypatch):
    recorded = tmp_path / "nvidia_h200.json"
    monkeypatch.setattr(results, "measurements_path", lambda slug: recorded)
    book.record("L05", "sleep", 50.0, "ms", shape="50 ms", clock="host")
    results.save([{**book.records[0], "value": 40.0}], recorded)
    book.record("L05", "nap", 7.0, "ms", clock="host")
    frame = results.compare(book.records).set_index("op")
    assert frame.loc["sleep", "lecture, H100"] == 50.6
    assert frame.loc["sleep", "recorded, H200"] == 40.0
    assert frame.loc["sleep", "this / recorded"] == pytest.approx(1.25)
    assert frame.loc["nap", "this machine"] == 7.0
    assert math.isnan(frame.loc["nap", "lecture, H100"])
    assert len(frame) == 2
    recorded.unlink()
    assert "recorded, H200" not in results.compare(book.records)
    assert results.compare([]).empty
    only_lecture = results.compare([], ["L05"])
    assert only_lecture["lecture, H100"].tolist() == [50.6] and "this machine" not in only_lecture
