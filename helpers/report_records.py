"""The records of a run in one piece: gathered from its folder, and kept as results.json.

{"run", "device", "profile", "date", "versions": {"torch", "triton"}, "records": [...]}
"""

import dataclasses
import datetime
import json
from pathlib import Path

import torch

from helpers import device, machines, run_folder

FILE = "results.json"
TOTALS = {"notebooks": 0, "minutes": 0.0}


def machine(run: Path, records: list[dict]) -> machines.Machine:
    """The run as a machine: its records, and the curves beside them."""
    return machines.Machine("this machine", tuple(records), (f"{run}/records/",))


def gather(run: Path) -> tuple[list[dict], list[str]]:
    """All records of a run, and a sentence on each file that holds something else."""
    found = [machines.gather(folder) for folder in machines.folders(run / "records")]
    return [r for records, _ in found for r in records], [n for _, notes in found for n in notes]


def fleet(run: Path) -> list[machines.Machine]:
    """The machines of a run on a cluster, named after their devices."""
    found = machines.by_device("", run / "records")
    return [dataclasses.replace(machine, name=machine.device) for machine in found]


def taking_part(entries: list[dict]) -> list[dict]:
    """The machines of a run on a cluster, as the workers have described themselves, each with the
    number of its "notebooks" and their "minutes" together."""
    found: dict[tuple, dict] = {}
    for entry in entries:
        if machine := entry.get("machine"):
            machine = {name: text for name, text in machine.items() if name != "visible"}
            known = found.setdefault(tuple(machine.values()), machine | TOTALS)
            known["notebooks"] += 1
            known["minutes"] += entry["seconds"] / 60
    return sorted(found.values(), key=lambda machine: (machine["device"], machine["host"]))


def described(run: str, records: list[dict], profile: str) -> dict:
    """What results.json holds. Without records the facts are those of this machine, today."""
    here = {
        "device": device.device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": device.triton_version(),
    }
    newest = max(records, key=lambda record: record["date"], default=here)
    return {
        "run": run,
        "device": " and ".join(dict.fromkeys(r["device"] for r in records or [newest])),
        "profile": profile,
        "date": newest["date"],
        "versions": {"torch": newest["torch"], "triton": newest["triton"]},
        "records": records,
    }


def write(run: Path, content: dict) -> None:
    run_folder.write_whole(run / FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
