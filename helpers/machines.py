"""Every machine whose numbers there are: the lecture's, the recorded one, and the reader's own.

for machine in (machines.lecture(), machines.recorded(), *machines.own()):
    print(machine.name, machine.value("L19", "triton_gelu", clock="host"))
"""

import contextlib
import dataclasses
import math
import os
from pathlib import Path

import torch

from helpers import results, specs

LECTURE, RECORDED = "the lecture, H100", "recorded, H200"
LECTURE_GPU = "H100 SXM"  # of data/gpus.csv
RUNS = results.ROOT / "runs"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Records, and where the curves that belong to them lie: the beginnings of their files' paths,
    of which the first that leads to one counts."""

    name: str
    records: tuple[dict, ...] = dataclasses.field(repr=False)
    curves: tuple[str, ...] = ()

    def series(self, notebook: str, name: str):
        """A curve of `results.Recorder.series` as a pandas frame; None where none can be read."""
        import pandas as pd

        if self.records and all(record["notebook"] != notebook for record in self.records):
            return None  # what lies there is another device's
        for path in (Path(f"{start}{notebook}.{name}.csv") for start in self.curves):
            with contextlib.suppress(FileNotFoundError, pd.errors.EmptyDataError):
                return pd.read_csv(path)
        return None

    def value(self, claim: str, op: str, **rest: str) -> float | None:
        """The first number that agrees; `rest` has some of shape, dtype, clock and unit."""
        asked = {"claim": claim, "op": op, **rest}
        for record in self.records:
            if all(record[key] == wanted for key, wanted in asked.items()):
                return record["value"]
        return None

    def copy_gb_per_s(self) -> float | None:
        """The memory's roof: measured by notebook 03, for the lecture's H100 from its datasheet."""
        if self.name == LECTURE:
            return specs.get(LECTURE_GPU).memory_gb_per_s
        return self.value("S20", "roof: memory, copy")

    def matmul_tflop_per_s(self, dtype: str) -> float | None:
        """The roof of a dtype's arithmetic ("bfloat16"), from where the memory's is."""
        if self.name == LECTURE:
            return specs.get(LECTURE_GPU).peak_tflop_per_s(getattr(torch, dtype))
        return self.value("S20", "roof: matmul", dtype=dtype)

    @property
    def device(self) -> str:
        """Of the newest record."""
        return max(self.records, key=lambda r: r["date"])["device"] if self.records else ""

    @property
    def profile(self) -> str:
        return "full" if any(r["profile"] == "full" for r in self.records) else "smoke"


def lecture() -> Machine:
    return Machine(LECTURE, tuple(results.load(results.LECTURE)))


def recorded(slug: str = "nvidia_h200") -> Machine:
    """The machine that the committed notebooks were run on.

    While they are being recorded anew, with what the recording has measured so far.
    """
    path = results.measurements_path(slug)
    records, curves = results.load(path), (f"{path.with_suffix('')}.",)
    if not results.REFERENCE and (folder := os.environ.get("LECTURES_RECORDS")):
        anew = _of_records("", Path(folder))
        records, curves = results.merge(records, [*anew.records]), (*anew.curves, *curves)
    return Machine(RECORDED, tuple(records), curves)


def of_run(run: Path) -> Machine:
    """A folder of `helpers.run`, or another that holds records/<notebook>.json."""
    return _of_records(run.name, run / "records")


def own(runs: Path = RUNS) -> list[Machine]:
    """The reader's, newest first: of each device and profile what the newest run has measured, and
    of notebooks that it did not run what an earlier one has.

    The run that is going on comes first; notebooks that were worked through one by one are last.
    None while the collection is being recorded.
    """
    if not results.REFERENCE:
        return []
    going_on = os.environ.get("LECTURES_RECORDS")
    found = by_device("this run", Path(going_on)) if going_on else []
    statuses = sorted(runs.glob("*/status.json"), key=lambda file: file.stat().st_mtime)
    for run in (file.parent for file in reversed(statuses)):
        found += by_device(run.name, run / "records")
    found += by_device("worked through here", runs / "scratch" / "records")
    merged = {}
    for machine in found:
        if machine.records:
            newer = merged.get((machine.device, machine.profile), Machine(machine.name, ()))
            records = results.merge([*machine.records], [*newer.records])
            curves = (*newer.curves, *machine.curves)
            key = machine.device, machine.profile
            merged[key] = Machine(newer.name, tuple(records), curves)
    return list(merged.values())


def _of_records(name: str, folder: Path) -> Machine:
    return Machine(name, tuple(gather(folder)[0]), (f"{folder}/",))


def by_device(name: str, folder: Path) -> list[Machine]:
    """A machine for each device with records in a folder, or in one of its own in there, where a
    run on a cluster has left them."""
    found: dict[str, Machine] = {}
    for place in folders(folder):
        records = gather(place)[0]
        for device in dict.fromkeys(record["device"] for record in records):
            mine = tuple(record for record in records if record["device"] == device)
            known = found.get(device, Machine(name, ()))
            found[device] = Machine(name, known.records + mine, (*known.curves, f"{place}/"))
    return list(found.values())


def folders(folder: Path) -> list[Path]:
    """A folder of records, and those of single devices in it."""
    return [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]


def is_record(record: object) -> bool:
    """True when it has every key of `results.KEYS`, with numbers and texts where they belong."""
    if not isinstance(record, dict) or not all(key in record for key in results.KEYS):
        return False
    numbers = [record[key] for key in results.NUMBERS]
    texts = [record[key] for key in results.KEYS if key not in results.NUMBERS]
    return (
        all(number is None or _is_finite(number) for number in numbers)
        and record["value"] is not None
        and all(isinstance(text, str) for text in texts)
    )


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


def gather(folder: Path) -> tuple[list[dict], list[str]]:
    """The records in its .json files, and a sentence on each file that holds something else."""
    records, notes = [], []
    for file in sorted(folder.glob("*.json")):
        try:
            found = results.load(file)
            good = [record for record in found if is_record(record)]
        except Exception as error:  # a process that was killed may leave anything
            notes.append(f"{file.name} cannot be read: {type(error).__name__}.")
            continue
        if len(good) < len(found):
            notes.append(f"{file.name}: {len(found) - len(good)} of {len(found)} are no records.")
        records += good
    return records, notes
