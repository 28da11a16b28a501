"""helpers.verdicts: a verdict for every number that the lectures state, from records and models."""

import csv
import dataclasses
import re
import shutil

import pandas as pd
import pytest

from helpers import (
    device,
    machines,
    record,
    results,
    run,
    run_folder,
    traffic,
    verdict_rules,
    verdicts,
)
from helpers.statement_models import FLOAT
from helpers.verdict_rules import (
    DIFFERS,
    MISSING,
    REPRODUCED,
    UNMEASURED,
    Quantity,
    Statement,
    computed,
    judge,
    number,
    over,
    travels,
)

with verdicts.MAP.open(encoding="utf-8", newline="") as file:
    ROWS = {row["id"]: row for row in csv.DictReader(file)}

# Digits in a claim that are part of a name, of a year, of a formula or of a reference.
NAMES = r"""(?x)
    \b(fp|bf|tf|int|sm_)\d+ | \d+-bit | \b(GA100|[AH]100|H200|[KM]80|L[12]|GPT-2|CS221)\b
    | \b(19|20)[0-2]\d\b | \^\d | [{][^}]*[}] | \b(slide|notebook)\S*\s\d+
    | triton_poi\S+ | \bv4\b | \bex2\b
"""
NOT_CLAIMS = {
    "L13": "the sizes and the indices of an example",
    "X2": "the size of an exercise",
    "G1": "how long the lecture's own list is",
    "G2": "numbers of other lectures",
}
IN_WORDS = {  # typed numbers that the claim gives in words, or as one side of a comparison
    "S06": "rising by Moore's law is 2 in 2 years, flat is 1",
    "S29": "one kernel",
    "S34": "one request",
    "S38": "N and N/T, here with N = 64",
    "S39": "five nearly empty",
    "S40": "one good tile, two sections",
    "S43": "faster: more than 1",
    "S44": "a second wave",
    "S49": "one pass less than three",
    "S32": "5 of 8",
    "L19": "slower: more than 1",
    "L21": "M: once",
    "L22": "thirds",
    "L25": "MKN and MN: once",
}


@pytest.fixture(scope="module")
def judged():
    return verdicts.judged()


def machine(values: dict[str, float], unit: str = "ms", **rest: str) -> machines.Machine:
    """An H200 with one number of row L05 for each op."""
    rest = {"claim": "L05", "unit": unit, "device": "NVIDIA H200", "profile": "full", **rest}
    names = dict.fromkeys(results.KEYS, "") | rest
    return machines.Machine("m", tuple(names | {"op": op, "value": v} for op, v in values.items()))


NOTHING = machines.Machine("nothing", ())
SLEEP = travels("L05", "sleep", verdict_rules.record("L05", "sleep", "ms"), because="of a reason")


# The committed column.


def test_the_committed_column_is_what_records_and_models_give():
    assert verdicts.rewrite(check=True) == []


def test_every_row_has_a_verdict_that_fits_into_a_line():
    wrong = {
        row: text
        for row, text in verdicts.by_row().items()
        if text != verdicts.NONE_STATED
        and not text.startswith(verdicts.VERDICTS[:3])
        or len(text) > verdicts.LONGEST
        or "None" in text
        or ROWS[row]["verdict"] != text
    }
    assert not wrong
    assert list(ROWS) == list(verdicts.by_row())


def test_every_row_that_states_a_number_has_a_statement():
    stating = {row for row in ROWS if re.search(r"\d", re.sub(NAMES, "", ROWS[row]["claim"]))}
    assert stating - {statement.row for statement in verdicts.STATEMENTS} == set(NOT_CLAIMS)


def test_every_statement_is_of_a_row():
    assert {statement.row for statement in verdicts.STATEMENTS} <= set(ROWS)


def test_a_typed_number_stands_in_the_claim(judged):
    typed = [one for one in judged if not isinstance(one.statement.stated, Quantity)]
    wrong = []
    for one in typed:
        row = one.statement.row
        numbers = re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", ROWS[row]["claim"].replace("x128", " 128"))
        same = isinstance(one.stated, str) or abs(one.stated) in map(float, numbers)
        if not same and row not in IN_WORDS:
            wrong.append((row, one.said()))
    assert not wrong


def test_a_number_of_the_lectures_records_is_taken_from_there():
    lecture = {(r["claim"], r["value"]) for r in machines.lecture().records}
    twice = [s.row for s in verdicts.STATEMENTS if (s.row, s.stated) in lecture]
    assert not twice


def test_every_record_of_the_lecture_is_judged():
    asked = set()

    class Spy(machines.Machine):
        def value(self, claim, op, **rest):
            wanted = {"claim": claim, "op": op, **rest}
            for place, each in enumerate(self.records):
                if all(each[key] == value for key, value in wanted.items()):
                    asked.add(place)
                    return each["value"]
            return None

    records = machines.lecture().records
    verdicts.judged(lecture=Spy("the lecture", records))
    left = [records[place] for place in set(range(len(records))) - asked]
    # Slide 46's ratio is that of its times, which are judged.
    assert [(r["claim"], r["unit"]) for r in left] == [("S46", "x")]


def test_nothing_is_missing_from_the_records(judged):
    assert [one.said() for one in judged if one.verdict == MISSING] == []


def test_a_difference_and_what_cannot_be_measured_have_a_reason(judged):
    assert [one.said() for one in judged if one.verdict != REPRODUCED and not one.because] == []


# What the course says of some claims in its notebooks.


@pytest.mark.parametrize(
    ("row", "what", "verdict"),
    [
        ("L12", "manual / PyTorch, kernels", REPRODUCED),
        ("L12", "manual / PyTorch, host", DIFFERS),
        ("S10", "memory", DIFFERS),
        ("S16", "bf16 matmul / multiply-adds", REPRODUCED),
        ("S17", "FLOP/s in 2 years", REPRODUCED),
        ("S31", "accesses", DIFFERS),
        ("S44", "tiles (1793)", REPRODUCED),
        ("S46", "standard GFLOP", DIFFERS),
        ("L19", "Triton / CUDA, in words", DIFFERS),
        ("L21", "reads, M", DIFFERS),
        ("L25", "reads / MKN", DIFFERS),
        ("S05", "exponent", UNMEASURED),
    ],
)
def test_known_verdicts(judged, row, what, verdict):
    found = {o.verdict for o in judged if (o.statement.row, o.statement.what) == (row, what)}
    assert found == {verdict}


# Other records, other verdicts.


def with_factor(recorded: machines.Machine, claim: str, op: str, factor: float):
    records = (
        r | {"value": r["value"] * factor} if (r["claim"], r["op"]) == (claim, op) else r
        for r in recorded.records
    )
    return dataclasses.replace(recorded, records=tuple(records))


def test_a_changed_record_turns_its_verdict_and_no_other():
    before = verdicts.by_row()
    changed = with_factor(machines.recorded(), "L05", "sleep", 2)
    after = verdicts.by_row(changed)
    assert {row for row in before if before[row] != after[row]} == {"L05"}
    assert after["L05"].startswith("differs: sleep 50.6 ms, H200 101")


def test_without_records_only_models_are_judged():
    table = verdicts.table(NOTHING)
    assert set(table["verdict"]) == set(verdicts.VERDICTS)
    missing = table[table["verdict"] == MISSING]
    assert missing["found"].isna().all() and len(missing) > 50
    assert verdicts.by_row(NOTHING)["L05"] == "not recorded: sleep 50.6 ms"
    assert verdicts.by_row(NOTHING)["S44"] == verdicts.by_row()["S44"]


def test_the_table_has_a_row_for_each_statement(judged):
    table = verdicts.table()
    assert len(table) == len(verdicts.STATEMENTS)
    assert list(table) == "id what stated found unit verdict because by text".split()
    assert set(table["verdict"]) <= set(verdicts.VERDICTS)
    assert table["text"].tolist() == [one.said() for one in judged]


# One statement.


@pytest.mark.parametrize(
    ("stated", "found", "rest", "verdict"),
    [
        (100, 115, {}, REPRODUCED),
        (100, 85, {}, REPRODUCED),
        (100, 116, {}, DIFFERS),
        (-1, -1.1, {}, REPRODUCED),
        (98, 98, {"within": 0}, REPRODUCED),
        (98, 99, {"within": 0}, DIFFERS),
        (10, 10.1, {"bound": "over", "within": 0}, REPRODUCED),
        (10, 10, {"bound": "over", "within": 0}, DIFFERS),
        (1, 1.01, {"bound": "over", "within": 0.02}, DIFFERS),
        (4, 100, {"bound": "at least"}, REPRODUCED),
        (128, 120, {"bound": "at least"}, REPRODUCED),
        (128, 75, {"bound": "at least"}, DIFFERS),
        (2048, 2049, {"bound": "at most", "within": 0}, DIFFERS),
        (2048, 1793, {"bound": "at most", "within": 0}, REPRODUCED),
        ("256x128", "256x128", {}, REPRODUCED),
        ("256x128", "128x128", {}, DIFFERS),
    ],
)
def test_how_close_is_close_enough(stated, found, rest, verdict):
    statement = Statement("L05", "x", stated, computed(lambda: found), **rest)
    assert judge(statement, NOTHING, NOTHING).verdict == verdict


def test_a_reason_is_given_only_with_a_difference():
    near, far = machine({"sleep": 51.0}), machine({"sleep": 80.0})
    lecture = machine({"sleep": 50.6})
    assert verdicts.summary([judge(SLEEP, lecture, near)]) == "reproduced: sleep 50.6 ms, H200 51"
    differs = "differs: sleep 50.6 ms, H200 80, because of a reason"
    assert verdicts.summary([judge(SLEEP, lecture, far)]) == differs
    assert verdicts.summary([judge(SLEEP, lecture, NOTHING)]) == "not recorded: sleep 50.6 ms"
    assert verdicts.summary([judge(SLEEP, NOTHING, near)]) == "not recorded: sleep ? ms"
    assert verdicts.summary([]) == verdicts.NONE_STATED


def test_a_ratio_shows_its_times():
    a, b = (verdict_rules.record("L05", op, "ms") for op in "ab")
    there, here = machine({"a": 8.15, "b": 1.13}), machine({"a": 5.539, "b": 0.55352})
    one = judge(travels("L05", "a / b", over(a, b)), there, here)
    assert one.said() == "a / b 7.21 (8.15 / 1.13 ms), H200 10.0 (5.54 / 0.554 ms)"
    assert one.said(parts=False) == "a / b 7.21, H200 10.0"
    assert judge(travels("L05", "a / b", over(a, b)), there, machine({"a": 1.0})).found is None


def test_the_first_row_that_has_the_record_counts():
    quantity = verdict_rules.record("L15 L05", "a", "ms")
    assert quantity(machine({"a": 2.0})) == 2.0
    assert quantity(NOTHING) is None


def test_the_share_of_the_memorys_rate_is_of_the_own_datasheet():
    share = verdict_rules.share_of_memory(
        verdict_rules.record("L05", "copy", "us"), traffic.copy(6 * 10**8, FLOAT)
    )
    h200, h100 = (
        machine({"copy": 1000.0}, device=d) for d in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    )
    assert share(h200) == pytest.approx(100)
    assert share(h100) == pytest.approx(100 * 4800 / 3352)
    assert share(machine({"copy": 1000.0}, device="an unknown GPU")) is None
    assert share(NOTHING) is None


def test_a_curve_that_is_not_recorded_gives_no_number(tmp_path):
    rows = verdict_rules.series("05_x", "curve", len)
    assert rows(NOTHING) is None
    pd.DataFrame({"a": [1, 2]}).to_csv(tmp_path / "05_x.curve.csv", index=False)
    assert rows(machines.Machine("m", (), (f"{tmp_path}/",))) == 2


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (10.0071, None, "10.0"),
        (7.3, None, "7.3"),
        (0.8412, None, "0.8412"),
        (0.84119, 0.8412, "0.8412"),
        (287.6, 200, "288"),
        (81090, None, "81,090"),
        (3.7835e-44, 3.78e-44, "3.78e-44"),
        (824.63, 66.6, "825"),
        ("256x128", None, "256x128"),
        (None, None, "?"),
    ],
)
def test_numbers_for_a_reader(value, like, text):
    assert number(value, like) == text


# A row that has much to say.


def many(*found: float, what: str = "a number with a rather long name") -> list:
    return [
        judge(
            Statement("L05", f"{what} {i}", 100, computed(lambda f=f: f), because="x"),
            NOTHING,
            NOTHING,
        )
        for i, f in enumerate(found)
    ]


def test_what_does_not_fit_is_counted_and_the_farthest_is_shown():
    text = verdicts.summary(many(*[101] * 10, 110, 200))
    assert text == (
        "reproduced: 11 of 12 numbers, the farthest a number with a rather long name 10 100, "
        "here 110; differs: a number with a rather long name 11 100, here 200, because x"
    )


def test_numbers_that_agree_have_no_farthest():
    assert verdicts.summary(many(*[100] * 10)) == "reproduced: 10 of 10 numbers"


def test_even_many_differences_fit():
    text = verdicts.summary(many(*range(300, 320)))
    assert text.startswith("differs: 20 of 20 numbers, the farthest") and text.endswith("because x")
    assert len(text) <= verdicts.LONGEST


# The command.


@pytest.fixture
def stale(tmp_path):
    """A copy of the map in which a verdict is out of date, and one is blank."""
    copy = tmp_path / "map.csv"
    shutil.copyfile(verdicts.MAP, copy)
    with copy.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    for row in rows:
        row[-1] = {"L05": "reproduced: 1", "S22": ""}.get(row[0], row[-1])
    with copy.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return copy


def test_check_names_what_would_change_and_writes_nothing(stale, capsys):
    before = stale.read_bytes()
    assert verdicts.main(["--check", "--map", str(stale)]) == 1
    assert capsys.readouterr().out == "S22, L05 would change in map.csv\n"
    assert stale.read_bytes() == before


def test_the_column_is_rewritten_and_nothing_else(stale, capsys):
    assert verdicts.main(["--map", str(stale)]) == 0
    assert capsys.readouterr().out == "S22, L05 changed in map.csv\n"
    assert stale.read_bytes() == verdicts.MAP.read_bytes()
    assert [file.name for file in stale.parent.iterdir()] == ["map.csv"]
    assert verdicts.main(["--check", "--map", str(stale)]) == 0
    assert capsys.readouterr().out == "No row would change in map.csv\n"


@pytest.mark.parametrize("slug", [results.REFERENCE, "gpu_x"])
def test_recording_the_reference_renews_the_verdicts(slug, tmp_path, monkeypatch):
    renewed = []
    status = {"notebooks": {"02_b": {"status": "passed"}}}

    def run_main(arguments):
        (tmp_path / "runs").mkdir()
        return 0

    monkeypatch.setenv("LECTURES_REFERENCE", results.REFERENCE)
    monkeypatch.setenv("LECTURES_PROFILE", "full")
    monkeypatch.setattr(device, "slug", lambda: slug)
    monkeypatch.setattr(run, "main", run_main)
    monkeypatch.setattr(run_folder, "read_status", lambda folder: status)
    monkeypatch.setattr(record.Path, "exists", lambda path: True)
    monkeypatch.setattr(record, "keep", lambda *arguments: renewed.append("kept"))
    monkeypatch.setattr(verdicts, "rewrite", lambda: renewed.append("renewed"))
    assert record.main([]) == 0
    assert renewed == (["kept", "renewed"] if slug == results.REFERENCE else ["kept"])
