"""Record a number with its machine; put it beside the lecture's and the H200's.

A record is a flat dictionary with the keys of `KEYS`. Three sources use the same keys: the
lecture's numbers (data/lecture_measurements.csv), the numbers recorded with the collection
(data/measurements/<device>.json), and those that a notebook has just measured.
"""

import csv
import datetime
import json
import math
import os
import re
from pathlib import Path

import torch

from helpers import cache
from helpers import device as machine

ROOT = Path(__file__).resolve().parent.parent
LECTURE = ROOT / "data" / "lecture_measurements.csv"
SOFTMAX_REFERENCES = ROOT / "data" / "softmax_references.csv"
# The machine that the committed notebooks were run on. Empty while they are being recorded: a
# machine is not put beside its own past.
REFERENCE = os.environ.get("LECTURES_REFERENCE", "nvidia_h200")
KEYS = (
    "claim op shape dtype clock value p20 p80 unit profile device torch triton date notebook"
).split()
NUMBERS = ("value", "p20", "p80")
IDENTITY = ("claim", "op", "shape", "dtype", "clock", "unit")  # what two machines can share
CLOCKS = {
    "host": "wall clock of the CPU, waiting for the GPU at the end",
    "event": "the GPU's clock between two CUDA events around the call",
    "kernel": "the sum of the kernels' own durations, from the profiler",
    "sm": "cycles that an SM counts, read inside the kernel",
    "cpu": "time the CPU spent in operators and launches, from the profiler",
    "counter": "a hardware counter, read by ncu",
    "model": "computed, not measured",
}


def scratch() -> Path:
    """A folder outside version control for files that a notebook writes, made when missing."""
    named = os.environ.get("LECTURES_SCRATCH")
    folder = Path(named) if named else next(cache.writable("scratch", ROOT / "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measurements_path(slug: str) -> Path:
    """Where the numbers recorded on a machine (`helpers.device.slug`) are kept."""
    return ROOT / "data" / "measurements" / f"{slug}.json"


def load(path: Path) -> list[dict]:
    """The records of a .json or .csv file, numbers as floats; empty when there is no such file."""
    path = Path(path)
    if not path.exists():
        return []
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key in NUMBERS:
            row[key] = float(row[key]) if row[key] else None
    return rows


def save(records: list[dict], path: Path) -> None:
    """Write records so that an interrupted write never leaves half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(partial, path)


def merge(old: list[dict], new: list[dict]) -> list[dict]:
    """`old` with the records of every notebook that `new` speaks of replaced by the new ones."""
    renewed = {record["notebook"] for record in new}
    kept = [record for record in old if record["notebook"] not in renewed]
    return sorted(kept + new, key=lambda record: record["notebook"])  # stable within a notebook


class Recorder:
    """Collects one notebook's numbers and keeps them in a file beside the run.

    Running a cell again replaces its records, so that a notebook can be worked through in any
    order. The file lies in the folder LECTURES_RECORDS, else in runs/scratch/records.
    """

    def __init__(self, notebook: str, profile: str):
        if not re.fullmatch(r"\w+", notebook):
            raise ValueError(f"a notebook's name is like 02_benchmarking, not {notebook!r}")
        if profile not in machine.PROFILES:
            raise ValueError(f"profile must be one of {machine.PROFILES}, not {profile!r}")
        self.notebook, self.profile = notebook, profile
        folder = os.environ.get("LECTURES_RECORDS")
        self.path = (Path(folder) if folder else scratch() / "records") / f"{notebook}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._records: dict[tuple, dict] = {}

    @property
    def records(self) -> list[dict]:
        return list(self._records.values())

    def record(
        self,
        claim: str,
        op: str,
        value: float,
        unit: str,
        *,
        shape: str = "",
        dtype: str = "",
        clock: str = "event",
        p20: float | None = None,
        p80: float | None = None,
    ) -> float:
        """Keep one number and return it. `claim` is a row id of data/lecture_map.csv.

        `clock` is one of `CLOCKS`. ValueError for a number that is not finite: a record is a fact.
        """
        if clock not in CLOCKS:
            raise ValueError(f"clock must be one of {sorted(CLOCKS)}, not {clock!r}")
        for number in (value, p20, p80):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{claim} {op} {shape}: {number} is not a finite number")
        texts = {"claim": claim, "op": op, "unit": unit, "shape": shape, "dtype": dtype}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a string, not {text!r}")
        record = {
            **texts,
            "clock": clock,
            "value": _rounded(value),
            "p20": _rounded(p20),
            "p80": _rounded(p80),
            "profile": self.profile,
            "device": machine.device_name(),
            "torch": torch.__version__,
            "triton": machine.triton_version(),
            "date": datetime.date.today().isoformat(),
            "notebook": self.notebook,
        }
        record = {key: record[key] for key in KEYS}
        self._records[identity(record)] = record
        save(self.records, self.path)
        return value

    def series(self, name: str, frame) -> None:
        """Keep a curve (a pandas frame, one point a row) as CSV beside the records."""
        path = self.path.with_name(f"{self.notebook}.{name}.csv")
        frame.to_csv(path.with_suffix(".partial"), index=False)
        os.replace(path.with_suffix(".partial"), path)

    def record_measurement(self, claim: str, op: str, measurement, **names) -> float:
        """Keep the median and the spread of a `helpers.bench.Measurement`, in ms."""
        return self.record(
            claim,
            op,
            measurement.median_ms,
            "ms",
            clock=measurement.clock,
            p20=measurement.p20_ms,
            p80=measurement.p80_ms,
            **names,
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")  # more digits would be noise


def identity(record: dict) -> tuple:
    """What makes two records the same measurement, on whatever machine."""
    return tuple(record[key] for key in IDENTITY)


def lecture(claim: str) -> list[dict]:
    """The lecture's numbers for one row of the lecture map."""
    return [record for record in load(LECTURE) if record["claim"] == claim]


def recorded(claim: str, slug: str = REFERENCE) -> list[dict]:
    """The numbers recorded with the collection for one row of the lecture map."""
    return [record for record in load(measurements_path(slug)) if record["claim"] == claim]


def recorded_series(notebook: str, name: str, slug: str = REFERENCE):
    """A curve recorded with the collection, as a pandas frame; None when there is none."""
    import pandas as pd

    path = measurements_path(slug).with_name(f"{slug}.{notebook}.{name}.csv")
    return pd.read_csv(path) if path.exists() else None


def softmax_references():
    """Others' softmax kernels as measured on an H200 (data/README.md), as a pandas frame.

    Added to the file's columns: the numbers "rows" and "columns" of `shape`, and
    "fraction_of_copy", the bandwidth as a fraction of a copy's in the same run.
    """
    import pandas as pd

    table = pd.read_csv(SOFTMAX_REFERENCES)
    table[["rows", "columns"]] = table["shape"].str.split("x", expand=True).astype(int)
    return table.assign(fraction_of_copy=table["copy_ms"] / table["ms"])


def compare(records: list[dict], claims: list[str] | None = None, by_device: bool = False):
    """A pandas frame: the lecture's number, the H200's and this machine's, row by row.

    Rows are those of `records` and of the lecture's and the H200's records for `claims`, row ids
    of the lecture map; by default the claims of `records`.
    With `by_device` each device of `records` has a column, in place of this machine.
    Columns without a number are left out. "this / lecture" and "this / recorded" are the ratios of
    the values, worth more than the values where machines differ.
    """
    import pandas as pd

    if claims is None:
        claims = list(dict.fromkeys(record["claim"] for record in records))
    records = [record for record in records if record["claim"] in claims]
    mine: dict[str, list[dict]] = {}
    for record in records:
        mine.setdefault(record["device"] if by_device else "this machine", []).append(record)
    sources = {
        "lecture, H100": [r for claim in claims for r in lecture(claim)],
        "recorded, H200": [r for claim in claims for r in recorded(claim)],
        **mine,
    }
    columns = {
        name: {identity(record): record["value"] for record in source}
        for name, source in sources.items()
        if source
    }
    rows = list(dict.fromkeys(key for column in columns.values() for key in column))
    rows.sort(key=lambda key: claims.index(key[0]))  # stable: within a claim as recorded
    frame = pd.DataFrame(rows, columns=list(IDENTITY))
    for name, column in columns.items():
        frame[name] = pd.Series([column.get(key) for key in rows], dtype=float)
    for name in ("lecture, H100", "recorded, H200"):
        for own in mine if name in frame else ():
            ratio = f"{own.removesuffix(' machine')} / {name.partition(',')[0]}"
            frame[ratio] = frame[own] / frame[name]
    return frame
