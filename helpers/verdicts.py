"""A verdict for every number that the lectures state: `python -m helpers.verdicts [--check]`.

Writes the column `verdict` of data/lecture_map.csv, from the records of the lecture and of the
recorded machine and from the models of this collection. `helpers.verdict_rules` says how two
numbers are compared, `helpers.statements_slides` and `helpers.statements_code` which.
"""

import argparse
import csv
import itertools
import os
import sys
from pathlib import Path

from helpers import machines, results
from helpers.machines import Machine
from helpers.statements_code import STATEMENTS as CODE
from helpers.statements_slides import STATEMENTS as SLIDES
from helpers.verdict_rules import DIFFERS, MISSING, REPRODUCED, UNMEASURED, Judged, judge

MAP = results.ROOT / "data" / "lecture_map.csv"
STATEMENTS = (*SLIDES, *CODE)
VERDICTS = (REPRODUCED, DIFFERS, UNMEASURED, MISSING)
NONE_STATED = "no number to judge"
LONGEST = 300  # characters of a row's verdict
NOTABLE = 0.005  # what a number must be off to be shown as the farthest
# From the fullest form of a row's verdict to the shortest: of which verdicts every number is listed
# (of others, how many there are), whether times stand beside their ratio, whether the number that
# is farthest off is named.
DETAILS = (
    (VERDICTS, True, True),
    (VERDICTS, False, True),
    (VERDICTS[1:], True, True),
    (VERDICTS[1:], False, True),
    (VERDICTS[1:], False, False),
    (VERDICTS[2:], False, True),
    (VERDICTS[2:], False, False),
)


def judged(recorded: Machine | None = None, lecture: Machine | None = None) -> list[Judged]:
    """Every statement held against the records of the recorded machine, or of another."""
    recorded, lecture = recorded or machines.recorded(), lecture or machines.lecture()
    return [judge(statement, lecture, recorded) for statement in STATEMENTS]


def table(recorded: Machine | None = None):
    """A pandas frame, a statement a row: id, what, stated, found, unit, verdict, because,
    by, text.

    verdict is one of `VERDICTS`; stated and found are numbers, or names such as a kernel's.
    """
    import pandas as pd

    rows = [
        (
            one.statement.row,
            one.statement.what,
            one.stated,
            one.found,
            one.statement.unit,
            one.verdict,
            one.because,
            one.by,
            one.said(),
        )
        for one in judged(recorded)
    ]
    return pd.DataFrame(rows, columns="id what stated found unit verdict because by text".split())


def by_row(recorded: Machine | None = None) -> dict[str, str]:
    """Row id -> verdict, for every row of the lecture map; `NONE_STATED` where nothing is."""
    of_row = {}
    for one in judged(recorded):
        of_row.setdefault(one.statement.row, []).append(one)
    return {row["id"]: summary(of_row.get(row["id"], [])) for row in _read(MAP)[1]}


def summary(of_row: list[Judged]) -> str:
    """The statements of a row in one line: the fullest form that is no longer than `LONGEST`."""
    lines = [_line(of_row, *detail) for detail in DETAILS]
    return next((line for line in lines if len(line) <= LONGEST), lines[-1])


def rewrite(path: Path = MAP, check: bool = False) -> list[str]:
    """Bring the column up to date, all or nothing. Returns the rows that changed.

    check: only say which would.
    """
    columns, rows = _read(path)
    fresh = by_row()
    changed = [row["id"] for row in rows if row["verdict"] != fresh.get(row["id"], NONE_STATED)]
    if changed and not check:
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {"verdict": fresh.get(row["id"], NONE_STATED)} for row in rows)
        os.replace(partial, path)
    return changed


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 1 when --check finds rows out of date."""
    parser = argparse.ArgumentParser(prog="helpers.verdicts", description=__doc__.split(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    parser.add_argument("--map", type=Path, default=MAP, metavar="FILE")
    options = parser.parse_args(arguments)
    changed = rewrite(options.map, options.check)
    would = "would change" if options.check else "changed"
    print(f"{', '.join(changed) or 'No row'} {would} in {options.map.name}")
    return int(options.check and bool(changed))


def _line(of_row: list[Judged], listed: tuple[str, ...], parts: bool, farthest: bool) -> str:
    groups = []
    for verdict in VERDICTS:
        same = [one for one in of_row if one.verdict == verdict]
        reasons = [list(alike) for _, alike in itertools.groupby(same, lambda one: one.because)]
        said = []
        for alike in reasons:
            because = f", because {alike[0].because}" if alike[0].because else ""
            if len(alike) == 1 or verdict in listed:
                said.append("; ".join(one.said(parts) for one in alike) + because)
            else:
                most = max(alike, key=lambda one: one.distance)
                shown = farthest and most.distance > NOTABLE
                example = f", the farthest {most.said(parts)}" if shown else ""
                said.append(f"{len(alike)} of {len(of_row)} numbers{example}{because}")
        if same:
            groups.append(f"{verdict}: {'; '.join(said)}")
    return "; ".join(groups) or NONE_STATED


def _read(path: Path) -> tuple[list[str], list[dict]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        return reader.fieldnames, list(reader)


if __name__ == "__main__":
    sys.exit(main())
