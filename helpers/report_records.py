"""The records of a run in one piece: gathered from its folder, and kept as results.json.

{"run", "device", "profile", "date", "versions": {"torch", "triton"}, "records": [...]}
"""

import datetime
import json
import os
from pathlib import Path

import torch

from helpers import device, machines

FILE = "results.json"


def machine(run: Path, records: list[dict]) -> machines.Machine:
    """The run as a machine: its records, and the curves beside them."""
    return machines.Machine("this machine", tuple(records), (f"{run}/records/",))


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
        "device": newest["device"],
        "profile": profile,
        "date": newest["date"],
        "versions": {"torch": newest["torch"], "triton": newest["triton"]},
        "records": records,
    }


def write(run: Path, content: dict) -> None:
    """Write results.json as a whole: no moment leaves half of it."""
    temporary = run / f"{FILE}.new"
    text = json.dumps(content, indent=1, ensure_ascii=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, run / FILE)
