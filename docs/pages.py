"""Gathers what Sphinx reads: the notebooks, and pages made of the README and of data/.

Nothing is written twice: the front page, the table of notebooks, how to run them and the licence
come from README.md, the glossary and the lecture map from data/. Paths stay those of the
repository, so that links from one file to another mean the same on the site.
"""

import base64
import csv
import json
import re
from pathlib import Path

from links import PAGES, jupyter_anchor, read_glossary, term_id, term_names

DOCS = Path(__file__).resolve().parent
NOTEBOOKS, LICENCE = "Notebooks", "Licence"  # headings of the README
NOTEBOOK = re.compile(r"\[(.+)\]\((notebooks/(\w+))\.ipynb\)")
LINK = re.compile(r"\]\(([^)#:\s]+)")
CARD = """````{{grid-item-card}} {number} · {title}
:link: {link}
:link-type: doc
:img-top: {picture}
:img-alt: A figure of notebook {number}

{text}

```{{card-footer}}
{minutes}
```
````
"""
LECTURES = {
    "S": "Lecture 5, slide by slide",
    "L": "Lecture 6, part by part",
    "": "Exercises, glossary, reading",
}
VERDICT = re.compile(r"(?:^|(?<=; ))(reproduced|differs|cannot be measured here)(?=:)")


def gather(root: Path, source: Path) -> None:
    """Write into the folder `source` all that Sphinx reads of the collection in `root`."""
    sections = _sections((root / "README.md").read_text(encoding="utf-8"))
    listed = sections.pop(NOTEBOOKS)
    pictures = {path.stem: _first_picture(path) for path in root.glob("notebooks/*.ipynb")}
    parts = {
        "introduction": sections.pop(""),
        "notebooks": _cards(listed, pictures),
        "licence": sections.pop(LICENCE).split("\n", 2)[2],
        "running": "\n".join(sections.values()),
    }
    for name, text in parts.items():
        _write(source / "_parts" / f"{name}.md", text)
    for name, picture in pictures.items():
        _write(source / "_parts" / f"{name}.png", picture)
    for page in DOCS.glob("*.md"):
        _write(source / page.name, page.read_text(encoding="utf-8"))
    _write(source / f"{PAGES['data/glossary.csv']}.md", _glossary(read_glossary(root)))
    _write(source / f"{PAGES['data/lecture_map.csv']}.md", _lecture_map(root))
    _copy_linked(
        root, source, ["README.md", "LICENSE", "CONTRIBUTING.md", "tests/cases.md", *PAGES]
    )


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _copy_linked(root: Path, source: Path, names: list[str]) -> None:
    """Copy the notebooks and the files `names`, what they link to, and what that links to.

    The README itself is not a page. What a link names and is not there is Sphinx's to report.
    """
    waiting = [root / name for name in names] + sorted(root.glob("notebooks/*.ipynb"))
    done = {root / "README.md"}
    while waiting:
        path = waiting.pop()
        if path not in done:
            done.add(path)
            _write(source / path.relative_to(root), path.read_bytes())
        if path.suffix in (".md", ".ipynb"):
            linked = LINK.findall(path.read_text(encoding="utf-8"))
            files = {(path.parent / name).resolve() for name in linked} - done
            waiting += [file for file in files if file.is_file() and file.is_relative_to(root)]


def _sections(readme: str) -> dict[str, str]:
    """The README's parts by heading, what stands before the first under "".

    Each heading gets its GitHub anchor as a target, which links from other parts find.
    """
    parts = re.split(r"^(?=## )", readme, flags=re.MULTILINE)
    sections = {"": parts[0]}
    for part in parts[1:]:
        heading = part.partition("\n")[0].removeprefix("## ").strip()
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        sections[heading] = f"({anchor})=\n{part}"
    return sections


def _first_picture(path: Path) -> bytes:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                return base64.b64decode("".join(picture))
    raise ValueError(f"{path.name} has no picture among its outputs")


def _cards(section: str, pictures: dict[str, bytes]) -> str:
    """The README's table of notebooks as cards; what stands below the table as it is."""
    cards, rest = [], []
    for line in section.splitlines()[2:]:
        if match := NOTEBOOK.search(line) if line.startswith("|") else None:
            number, _, text, cpu, gpu = (cell.strip() for cell in line.strip("|").split(" | "))
            title, link, name = match.groups()
            card = {"number": number, "title": title, "link": link, "text": text}
            minutes = f"{cpu} without a GPU · {gpu} on an H200"
            cards.append(CARD.format(**card, picture=f"_parts/{name}.png", minutes=minutes))
        elif not line.startswith("|"):
            rest.append(line)
    if len(cards) != len(pictures):
        raise ValueError(f"The README's table has {len(cards)} of {len(pictures)} notebooks")
    grid = "\n".join(["`````{grid} 1 1 2 2", ":gutter: 3", "", *cards, "`````"])
    return "\n".join([grid, *rest])


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|$#^~])", r"\\\1", text)


def _section(where: str) -> str:
    """A link to `notebook#heading`, named `01 § 2`, or by its heading where that has no number."""
    notebook, _, heading = where.partition("#")
    number = re.match(r"(\d+)\.", heading)
    text = f"{notebook[:2]} § {number[1]}" if number else f"{notebook[:2]}, {heading}"
    # Angle brackets allow what a heading may have: commas, brackets, quotation marks.
    return f"[{text}](<notebooks/{notebook}.ipynb#{jupyter_anchor(heading)}>)"


def _glossary(rows: list[dict[str, str]]) -> str:
    lines = ["# Glossary", "", "The lectures' terms, in English and Russian, with what each means "]
    lines += ["here and where it is shown. The first mention of a term on a page leads here.", ""]
    for row in sorted(rows, key=lambda row: row["term"].lower()):
        names = ", ".join(term_names(row["term"]))
        lines += [f"({term_id(row['term'])})=", f"**{_escaped(names)}** · {row['russian']}\\"]
        lines += [f"{_escaped(row['meaning'])} ({_section(row['where'])})", ""]
    return "\n".join(lines)


def _lecture_map(root: Path) -> str:
    with open(root / "data" / "lecture_map.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ["# Lecture map", "", "Every slide and part of the two lectures: its claim, the "]
    lines += ["section that tries it, and a verdict on each number that it states.", ""]
    for kind, title in LECTURES.items():
        mine = [row for row in rows if (row["id"][0] if row["id"][0] in LECTURES else "") == kind]
        lines += ["", f"## {title}", "", "| | claim | section | verdict |", "|---|---|---|---|"]
        for row in mine:
            place = _section(row["where"]) if row["where"] else ""
            verdict = VERDICT.sub(r"**\1**", _escaped(row["verdict"]))
            lines.append(f"| {row['id']} | {_escaped(row['claim'])} | {place} | {verdict} |")
    return "\n".join(lines)
