"""The exercises of the collection as one ladder, and how far the reader has come on it."""

import contextlib
import csv
import dataclasses
import datetime
import json
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = 3
BAR = 12  # characters


@dataclasses.dataclass(frozen=True)
class Exercise:
    """A row of data/exercises.csv.

    level: 1 to `LEVELS`. minutes: an estimate. builds_on: earlier exercises ("03.1") and sections
    of notebooks ("04#2"). checker: "module:function"; the function raises AssertionError with a
    hint for a wrong answer.
    """

    exercise: str
    title: str
    level: int
    minutes: int
    practises: str
    builds_on: tuple[str, ...]
    checker: str

    def __str__(self) -> str:
        return f"{self.exercise} {self.title}"

    @property
    def notebook(self) -> str:
        """The notebook's name: "04_fusion"."""
        return _notebook(self.exercise[:2])


def _notebook(number: str) -> str:
    # Jupyter's own copies, 04_fusion-Copy1, are longer.
    stems = (file.stem for file in (ROOT / "notebooks").glob(f"{number}_*.ipynb"))
    return min(stems, key=len, default=number)


def _read_ladder() -> dict[str, Exercise]:
    with (ROOT / "data" / "exercises.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {"level": int(row["level"]), "minutes": int(row["minutes"])}
        row["builds_on"] = tuple(row["builds_on"].split())
    return {row["exercise"]: Exercise(**row) for row in rows}


LADDER = _read_ladder()  # in the order of the notebooks


def path() -> Path | None:
    """The file of the reader's progress: LECTURES_PROGRESS, else runs/progress.json.

    None where that variable is empty: then nothing is remembered.
    """
    place = os.environ.get("LECTURES_PROGRESS")
    if place == "":
        return None
    return Path(place).expanduser() if place else ROOT / "runs" / "progress.json"


def remember(exercise: str, accepted: bool) -> None:
    """Keep the outcome of an answer; a sentence, no error, where the file cannot be written.

    Of two processes at once the later one may win, but the file is always whole.
    """
    if not (file := path()):
        return
    try:
        known, today = _load(file), datetime.date.today().isoformat()
        entry = known.get(exercise, {}) | {"last": today, "accepted": accepted}
        if accepted:
            entry.setdefault("solved", today)
        if entry != known.get(exercise):
            _replace(file, known | {exercise: entry})
    except OSError as error:
        print(f"(It cannot be remembered in {file.name}: {error.strerror}.)")


def _load(file: Path) -> dict[str, dict]:
    """By exercise: the days "solved" (once it is) and "last", and whether that was "accepted".

    A damaged file is set aside.
    """
    try:
        known = json.loads(file.read_bytes())
        if all(_is_entry(entry) for entry in known.values()):
            return known
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, RecursionError):
        pass
    aside = file.with_name(f"{file.stem}.damaged{file.suffix}")
    os.replace(file, aside)
    print(f"{file.name} was damaged: it is called {aside.name} now, and the exercises are open.")
    return {}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("last"), str)
        and isinstance(entry.get("accepted"), bool)
        and isinstance(entry.get("solved", ""), str)
    )


def _replace(file: Path, known: dict[str, dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(number, "w", encoding="utf-8") as new:
            json.dump(known, new, indent=1)
        os.replace(partial, file)
    except BaseException:
        os.unlink(partial)
        raise


def _known() -> dict[str, dict]:
    file = path()
    with contextlib.suppress(OSError):
        return _load(file) if file else {}
    return {}


def table():
    """A pandas frame, an exercise a row in the order of the ladder.

    state: "solved" once an answer has been accepted, "tried" after others, else "open". when: the
    day of that, "" if open. last: whether the last answer was "accepted" or "rejected", which may
    come after it was solved; "" without one.
    """
    import pandas as pd

    rows, known = [], _known()
    for exercise, rung in LADDER.items():
        entry = known.get(exercise, {})
        state = "solved" if "solved" in entry else "tried" if entry else "open"
        rows.append(
            {
                "exercise": exercise,
                "notebook": rung.notebook,
                "title": rung.title,
                "level": rung.level,
                "minutes": rung.minutes,
                "state": state,
                "when": entry.get("solved") or entry.get("last", ""),
                "last": ("accepted" if entry["accepted"] else "rejected") if entry else "",
            }
        )
    return pd.DataFrame(rows)


def show() -> None:
    """Print the ladder with a bar for each notebook, and the next exercise to do."""
    frame = table()
    solved = frame["state"] == "solved"
    print(f"Exercises solved: {solved.sum()} of {len(frame)}. Stars are levels, minutes estimates.")
    for notebook, rows in frame.groupby("notebook", sort=False):
        done = int(solved[rows.index].sum())
        bar = "#" * (BAR * done // len(rows))
        print(f"{notebook:24}[{bar:.<{BAR}}] {done}/{len(rows)}")
        for row in rows.itertuples():
            state = f"{row.state} {row.when}".strip()
            stars = "*" * row.level
            print(f"  {row.exercise} {row.title:42}{stars:4}{row.minutes:2} min  {state}")
            if (row.state, row.last) == ("solved", "rejected"):
                print("       The last answer was not accepted: its check prints the reason.")
    left = frame["exercise"][~solved]
    if len(left):
        rung = LADDER[left.iloc[0]]
        print(f"Next: {rung}\n      {_where(rung)}")
    else:
        print("All are solved.")


def _where(rung: Exercise) -> str:
    return f"notebooks/{rung.notebook}.ipynb, section Exercises"


def describe(exercise: str) -> None:
    """Print what an exercise is, what it builds on, where it is, and how far the reader is."""
    rung, row = LADDER[exercise], table().set_index("exercise").loc[exercise]
    print(f"{rung}: {row['state']} {row['when']}".rstrip())
    print(f"  level      {rung.level} of {LEVELS}, about {rung.minutes} minutes")
    print(f"  practises  {rung.practises}")
    for head, each in zip(["builds on", *[""] * len(rung.builds_on)], rung.builds_on, strict=False):
        number, _, section = each.partition("#")
        what = f"notebook {_notebook(number)}, section {section}" if section else LADDER[each]
        print(f"  {head:11}{what}")
    print(f"  where      {_where(rung)}")


def forget() -> None:
    """Remove what was remembered. OSError where the file cannot be removed."""
    if file := path():
        file.unlink(missing_ok=True)
