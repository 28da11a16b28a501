"""Two runs side by side, from records made by hand and those of the collection."""

import json
import math

import pytest

from helpers import machines, report_compare, results, run

RECORD = {
    "claim": "L05", "op": "matmul", "shape": "", "dtype": "float32", "clock": "host",
    "value": 10.0, "p20": None, "p80": None, "unit": "ms", "profile": "full", "device": "GPU one",
    "torch": "2.11", "triton": "3.6", "date": "2026-01-31", "notebook": "01_a",
}  # fmt: skip


def records(**values) -> list[dict]:
    """A record for each op, whose value is a number or (value, p20, p80, unit)."""
    made = []
    for op, value in values.items():
        value, p20, p80, unit = value if isinstance(value, tuple) else (value, None, None, "ms")
        made.append(RECORD | {"op": op, "value": value, "p20": p20, "p80": p80, "unit": unit})
    return made


A = records(
    same=10.0, near=(10.0, 9.8, 10.4, "ms"), double=10.0, half=10.0,
    rate=(100.0, None, None, "GB/s"), ratio=(2.0, None, None, "x"),
    zero=0.0, negative=-1.0, nothing=0.0, only_a=1.0,
)  # fmt: skip
B = records(
    only_b=1.0, same=10.0, near=(10.5, 10.3, 10.9, "ms"), double=(20.0, 19.0, 21.0, "ms"), half=5.0,
    rate=(50.0, None, None, "GB/s"), ratio=(6.0, None, None, "x"), zero=1.0, negative=1.0,
    nothing=0.0,
)  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    for name, content, change in (("one", A, {}), ("two", B, {"device": "GPU two"})):
        own = [record | change for record in content]
        results.save(own, tmp_path / name / "records" / "01_a.json")
    return tmp_path / "one", tmp_path / "two"


def test_values_and_order():
    model = [RECORD | {"op": "model", "clock": "model"}]
    frame = report_compare.table(A + model, B + model).set_index("op")
    assert list(frame.index[:4]) == ["ratio", "double", "half", "rate"]  # 3, 2, 2, 2 times
    assert frame["B / A"].dropna().to_dict() == {
        "ratio": 3, "double": 2, "half": 0.5, "rate": 0.5, "near": 1.05, "same": 1, "nothing": 1,
    }  # fmt: skip
    assert list(frame.index[-2:]) == ["zero", "negative"]  # where no ratio says anything
    words = {"double": "slower", "half": "faster", "rate": "slower"}
    assert {op: word for op, word in frame["B is"].items() if word} == words
    assert frame["spreads"].dropna().to_dict() == {"near": True}
    assert (frame.loc["rate", "A"], frame.loc["rate", "B"]) == (100, 50)


def test_spreads():
    def overlap(one, two):
        sides = (records(op=(1.0, *spread, "ms")) for spread in (one, two))
        return report_compare.table(*sides)["spreads"][0]

    assert overlap((0.9, 1.1), (1.1, 1.2)) and overlap((0.5, 2.0), (0.9, 1.1))
    assert not overlap((0.9, 1.0), (1.01, 1.2)) and not overlap((1.01, 1.2), (0.9, 1.0))
    assert overlap((0.9, 1.1), (None, 1.1)) is None


def test_a_measurement_is_the_same_one_only_with_the_same_identity():
    for key in results.IDENTITY:
        assert report_compare.table([RECORD], [RECORD | {key: "other"}]).empty
    other = {key: "other" for key in ("device", "torch", "date", "notebook", "profile")}
    assert len(report_compare.table([RECORD], [RECORD | other])) == 1
    assert len(report_compare.table([RECORD, RECORD | {"value": 3.0}], [RECORD, RECORD])) == 1


def test_the_command_line(folders, capsys):
    one, two = folders
    assert run.main(["--compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == (
        "A: one · GPU one · full profile · 2026-01-31 · torch 2.11 · triton 3.6"
    )
    assert text.index("ratio") < text.index("double") < text.index("near") < text.index("negative")
    assert "The devices differ" in text and "profiles differ" not in text
    assert "9 measurements are in both: 3 agree within 5%; of 1 with a spread in both" in text
    assert "1 overlap. 1 are only in A, 1 only in B." in text
    assert "B is faster in 1 and slower in 2 of the others" in text
    assert "nan" not in text.lower()
    assert not list(one.parent.glob("**/*.html"))


@pytest.mark.parametrize("name", ["page.html", "folder"])
def test_a_page_where_one_is_asked_for(folders, name, capsys):
    one, two = folders
    for folder in folders:
        change = {"device": f"GPU {folder.name}"}
        odd = [record | change | {"op": f"<b>{record['op']}</b>"} for record in A]
        results.save(odd, folder / "records" / "02_b.json")
    output = one.parent / name
    assert run.main(["--compare", str(one), str(two), "--output", str(output)]) == 0
    page = (output if output.suffix else output / "compare.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;near" in page and "<b>near" not in page and "://" not in page
    assert '<td class="slower">slower</td>' in page and ">nan<" not in page
    assert "A: one · GPU one" in page and "9 are only" not in page
    assert str(output) in capsys.readouterr().out


def test_what_can_be_compared(folders, tmp_path, capsys):
    content = {"profile": "smoke", "records": [record | {"profile": "smoke"} for record in A]}
    file = tmp_path / "three" / "results.json"
    file.parent.mkdir()
    file.write_text(json.dumps(content))
    for name in (file, file.parent):  # a results.json alone, as sent by somebody
        assert run.main(["--compare", str(folders[0]), str(name)]) == 0
        text = capsys.readouterr().out
        assert "The profiles differ" in text and "devices differ" not in text
        assert "10 measurements are in both: 10 agree within 5%" in text
    assert run.main(["--compare", "lecture", "recorded"]) == 0
    text = capsys.readouterr().out
    assert "A: lecture · NVIDIA H100 80GB HBM3" in text and "B: recorded · NVIDIA H200" in text
    gelu = machines.lecture().value("L12", "manual_gelu", clock="host")
    assert f"{gelu:.4g}" in text
    assert run.main(["--compare", str(folders[0]), "recorded"]) == 0
    assert "No measurement is in both." in capsys.readouterr().out


def test_the_same_twice_agrees_in_all():
    mine = list(machines.recorded().records)
    frame = report_compare.table(mine, mine)
    assert len(frame) == sum(record["clock"] != "model" for record in mine)
    assert set(frame["B / A"]) == {1.0} and set(frame["B is"]) == {""}
    assert all(frame["spreads"].dropna()) and not any(map(math.isnan, frame["B / A"]))


def test_refused_in_one_sentence(folders, tmp_path, capsys):
    empty, damaged, blocked = tmp_path / "empty", tmp_path / "damaged.json", tmp_path / "blocked"
    empty.mkdir()
    damaged.write_text("{")
    (tmp_path / "odd.json").write_text('{"records": [3, {}]}')
    blocked.touch()
    refused = {
        tmp_path / "nowhere": "is neither a run's folder nor a file of results",
        empty: "holds no records",
        tmp_path / "odd.json": "holds no records",
        damaged: "cannot be read: JSONDecodeError",
    }
    for name, message in refused.items():
        assert run.main(["--compare", "recorded", str(name)]) == 2, name
        errors = capsys.readouterr().err
        assert message in errors and errors.count("\n") == 1
    arguments = ["--compare", *map(str, folders), "--output", str(blocked / "page.html")]
    assert run.main(arguments) == 2
    assert "cannot be written" in capsys.readouterr().err
