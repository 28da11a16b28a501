"""data/lecture_map.csv: every claim of the lectures is tied to the section that treats it."""

import csv
import re

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook
from notebook_files import NOTEBOOKS, ROOT, read

COLUMNS = "id,part,claim,notebook,how,gpu,cpu,where,verdict".split(",")
NOTEBOOK_OF = {path.stem: read(path) for path in NOTEBOOKS}


def rows() -> list[dict]:
    with (ROOT / "data" / "lecture_map.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def sections(notebook) -> dict[str, str]:
    """The text of a notebook by heading; a section holds its subsections."""
    text = "\n".join(
        cell.source if cell.cell_type == "markdown" else f"```\n{cell.source}\n```"
        for cell in notebook.cells
    )
    headings, in_code, offset = [], False, 0
    for line in text.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        if not in_code and (match := re.match(r"(#+) (.+)", line)):
            headings.append((len(match[1]), match[2].strip(), offset))
        offset += len(line)
    found = {}
    for place, (level, title, start) in enumerate(headings):
        ends = [begin for depth, _, begin in headings[place + 1 :] if depth <= level]
        found[title] = text[start : min(ends, default=len(text))]
    return found


def problem(row: dict, notebooks: dict) -> str:
    """What is wrong with where a row points to; empty when nothing is."""
    if not row["where"]:
        missing = [stem for stem in notebooks if stem[:2] == row["notebook"]]
        return f"{missing[0]} exists and does not say where" if missing else ""
    stem, _, heading = row["where"].partition("#")
    if stem not in notebooks:
        return f"there is no notebook {stem!r}"
    if stem[:2] != row["notebook"]:
        return f"belongs to notebook {row['notebook']}"
    found = sections(notebooks[stem])
    if heading not in found:
        return f"{stem} has no heading {heading!r}, only {list(found)}"
    if not re.search(rf"\b{row['id']}\b", found[heading]):
        return f"the section {heading!r} does not name {row['id']}"
    return ""


def test_ids_are_unique():
    ids = [row["id"] for row in rows()]
    assert ids and len(set(ids)) == len(ids)


def test_every_row_points_to_its_section():
    found = [f"{row['id']}: {wrong}" for row in rows() if (wrong := problem(row, NOTEBOOK_OF))]
    assert not found, "\n".join(found)


SAMPLE = {
    "02_b": new_notebook(
        cells=[
            new_markdown_cell("# 02. Title\nAll about L05"),
            new_markdown_cell("## Clocks\nThe claim L05a, and\n### Cold cache\nL06\n"),
            new_markdown_cell("## Launches\n```\n## L07\n```\nL08"),
        ]
    )
}


@pytest.mark.parametrize(
    ("row_id", "notebook", "where", "expected"),
    [
        ("L06", "02", "02_b#Cold cache", ""),
        ("L06", "02", "02_b#Clocks", ""),
        ("L08", "02", "02_b#Launches", ""),
        ("L09", "03", "", ""),
        ("L09", "02", "", "does not say where"),
        ("L05", "02", "02_b#Clocks", "does not name L05"),
        ("L06", "02", "02_b#Launches", "does not name L06"),
        ("L06", "02", "02_b#Cold", "no heading 'Cold'"),
        ("L07", "02", "02_b#L07", "no heading 'L07'"),
        ("L06", "02", "02_b", "no heading ''"),
        ("L06", "03", "02_b#Cold cache", "belongs to notebook 03"),
        ("L06", "02", "03_c#Cold cache", "no notebook '03_c'"),
    ],
)
def test_the_check_itself(row_id, notebook, where, expected):
    found = problem({"id": row_id, "notebook": notebook, "where": where}, SAMPLE)
    assert expected in found and bool(expected) == bool(found)
