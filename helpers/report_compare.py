"""Two runs side by side: `python -m helpers.run --compare A B [--output compare.html]`.

A and B are folders of runs, results.json files or other files of records, or "recorded" (the H200's
numbers that come with the collection) or "lecture". Where a run has several devices, RUN@H200 is
the one with "H200" in its name. Numbers that were computed are left out.
"""

import json
import math
from pathlib import Path

from helpers import machines, report, report_records, results
from helpers.run_folder import Refused

AGREE = 1.05  # two numbers agree when neither is more than 5% above the other
TIMES = ("s", "ms", "us", "µs", "ns", "cycles")  # units of which less is better
COLLECTION = {"recorded": machines.recorded, "lecture": machines.lecture}


def load(name: str) -> dict:
    """What results.json holds, of the folder, the file or the machine that is meant.

    Refused where there is no such thing, or nothing in it is a record.
    """
    path, wanted = Path(name), ""
    if "@" in name and not path.exists():
        path, wanted = Path(name.rpartition("@")[0]), name.rpartition("@")[2]
    if name in COLLECTION:
        found, run = list(COLLECTION[name]().records), name
    elif path.is_dir():
        found, run = report_records.gather(path)[0], path.resolve().name
        if not found and (path / report_records.FILE).is_file():
            found = _read(path / report_records.FILE)
    elif path.is_file():
        found, run = _read(path), path.name
    else:
        raise Refused(f"{name} is neither a run's folder nor a file of results")
    records = [record for record in found if machines.is_record(record)]
    if not records:
        raise Refused(f"{name} holds no records")
    if name not in COLLECTION:
        records = _of_one_device(records, str(path), wanted)
    profiles = sorted({record["profile"] for record in records if record["profile"]})
    return report_records.described(run, records, " and ".join(profiles))


def _of_one_device(records: list[dict], name: str, wanted: str) -> list[dict]:
    devices = list(dict.fromkeys(record["device"] for record in records))
    meant = [device for device in devices if wanted.lower() in device.lower()]
    if len(meant) != 1:
        there = ", ".join(devices)
        raise Refused(f"which device of {name}? Put @ and a part of its name behind it: {there}")
    return [record for record in records if record["device"] == meant[0]]


def _read(file: Path) -> list:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{file} cannot be read: {type(error).__name__}") from None
    records = content.get("records") if isinstance(content, dict) else content
    return records if isinstance(records, list) else []


def table(a: list[dict], b: list[dict]):
    """A pandas frame of what was measured in both, the largest changes first.

    Columns: `results.IDENTITY`; "A", "B"; "B / A", NaN where that is no ratio; "B is", faster or
    slower by more than 5% where the unit tells, else ""; "spreads", True where the two spreads
    (p20 to p80) overlap, None where one of them is missing.
    """
    import pandas as pd

    first, second = ({results.identity(r): r for r in reversed(_measured(side))} for side in (a, b))
    rows = []
    for key in [results.identity(record) for record in _measured(a)]:
        if key in second and (one := first.pop(key, None)):
            two = second[key]
            ratio = _ratio(one["value"], two["value"])
            rows.append((*key, one["value"], two["value"], ratio, _verdict(key[-1], ratio),
                         _overlap(one, two)))  # fmt: skip
    columns = [*results.IDENTITY, "A", "B", "B / A", "B is", "spreads"]
    frame = pd.DataFrame(rows, columns=columns)
    distance = [-abs(math.log(ratio)) for ratio in frame["B / A"]]  # NaN stays NaN and goes last
    order = pd.Series(distance, dtype=float).sort_values(kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _measured(records: list[dict]) -> list[dict]:
    return [record for record in records if record["clock"] != "model"]


def _ratio(a: float, b: float) -> float:
    if a == b:
        return 1.0
    return b / a if a > 0 and b > 0 else math.nan


def _agrees(ratio: float) -> bool:
    return 1 / AGREE <= ratio <= AGREE


def _verdict(unit: str, ratio: float) -> str:
    if math.isnan(ratio) or _agrees(ratio) or not (unit in TIMES or unit.endswith("/s")):
        return ""
    return "faster" if (ratio < 1) == (unit in TIMES) else "slower"


def _overlap(one: dict, two: dict) -> bool | None:
    ends = [record[key] for record in (one, two) for key in ("p20", "p80")]
    if None in ends:
        return None
    return max(ends[0], ends[2]) <= min(ends[1], ends[3])


def summary(a: dict, b: dict, frame) -> list[str]:
    """Sentences on two loaded sides and their table."""
    sentences = []
    if a["device"] != b["device"]:
        sentences.append("The devices differ: the ratios compare machines.")
    if a["profile"] != b["profile"]:
        sentences.append("The profiles differ: most sizes are only in one of them.")
    if frame.empty:
        return [*sentences, "No measurement is in both."]
    agreeing = sum(map(_agrees, frame["B / A"]))
    known = frame["spreads"].dropna()
    text = f"{len(frame)} measurements are in both: {agreeing} agree within {AGREE - 1:.0%}"
    if len(known):
        text += f"; of {len(known)} with a spread in both (p20 to p80), {sum(known)} overlap"
    alone = [len({results.identity(r) for r in _measured(side["records"])}) - len(frame)
             for side in (a, b)]  # fmt: skip
    sentences.append(f"{text}. {alone[0]} are only in A, {alone[1]} only in B.")
    faster, slower = ((frame["B is"] == word).sum() for word in ("faster", "slower"))
    return [
        *sentences,
        f"Where the unit tells, B is faster in {faster} and slower in {slower} of the others.",
    ]


def title(letter: str, side: dict) -> str:
    """One line on a side: its run, device, profile, date and versions."""
    versions = [f"{name} {version}" for name, version in side["versions"].items() if version]
    profile = side["profile"] and f"{side['profile']} profile"
    facts = [side["run"], side["device"], profile, side["date"], *versions]
    return f"{letter}: {' · '.join(filter(None, facts))}"


def main(a: str, b: str, output: Path | None = None) -> int:
    """Print the comparison, and write it as a page: to `output`, or compare.html in that folder.

    Returns the exit status, 0. Refused where a side cannot be loaded or the page not written.
    """
    sides = load(a), load(b)
    frame = table(sides[0]["records"], sides[1]["records"])
    titles = [title(letter, side) for letter, side in zip("AB", sides, strict=True)]
    sentences = summary(*sides, frame)
    shown = frame.drop(columns="spreads")
    print(*titles, sep="\n")
    if len(shown):
        print("", shown.to_string(index=False, na_rep="", float_format="{:.4g}".format), sep="\n")
    print("", *sentences, sep="\n")
    if output is not None:
        page = output if output.suffix in (".html", ".htm") else output / "compare.html"
        html = report.render("compare.html", titles=titles, sentences=sentences,
                             rows=shown.to_dict("records"), columns=list(shown))  # fmt: skip
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(html, encoding="utf-8")
        except OSError as error:
            raise Refused(f"{page} cannot be written: {error.strerror}") from None
        print(f"Page: {page}")
    return 0
