"""The report of a run: index.html with every notebook's status, numbers and executed pages."""

import html
from pathlib import Path

import jinja2

from helpers import device, results, run_folder

TEMPLATES = Path(__file__).resolve().parent / "templates"


def where(entry: dict) -> str:
    """One line that names the cell in which a notebook stopped, "" when none did."""
    cell = entry.get("cell")
    if not cell:
        return ""
    parts = [f"cell {cell['index'] + 1} of {cell['cells']}", cell["heading"]]
    place = ", ".join(filter(None, parts))
    return f"{place}: {entry['error']}" if "error" in entry else place


def summary(entries: list[dict]) -> str:
    """The table that ends a run in the terminal."""
    rows = [("notebook", "status", "minutes", "where")]
    for entry in entries:
        minutes = f"{entry['seconds'] / 60:.1f}"
        rows.append((entry["notebook"], entry["status"], minutes, where(entry)))
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(
        f"{name:<{first}}  {status:<{second}}  {minutes:>{third}}  {place}".rstrip()
        for name, status, minutes, place in rows
    )


def write(run: Path, convert: bool = False) -> Path:
    """Write the folder's index.html from what lies in it and return its path.

    `convert` also makes a page of each executed notebook, where nbconvert is installed.
    """
    status = run_folder.read_status(run)
    entries = [entry for _, entry in sorted(status["notebooks"].items())]
    notice = convert_notebooks(run, entries) if convert else ""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(
        run=run.name,
        facts=device.facts(status["profile"]),
        notice=notice,
        notebooks=[
            entry
            | {"where": where(entry), "links": links(run, entry), "table": comparison(run, entry)}
            for entry in entries
        ],
        passed=sum(entry["status"] == "passed" for entry in entries),
    )
    index = run / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def links(run: Path, entry: dict) -> list[dict]:
    """The executed notebooks that there are: {"file", "text"}, pages before their notebooks."""
    files, found = run_folder.paths(run, entry["notebook"]), []
    texts = {"partial": "executed until it stopped", "finished": "executed notebook"}
    if entry["status"] != "passed":
        texts["finished"] = "finished earlier"
    for kind, text in texts.items():
        notebook = files[kind]
        if not notebook.exists():
            continue
        page = notebook.with_suffix(".html")
        if _is_current(page, notebook):
            found.append({"file": page.name, "text": text})
            text = ".ipynb"
        found.append({"file": notebook.name, "text": text})
    return found


def comparison(run: Path, entry: dict) -> str:
    """The notebook's numbers beside the lecture's and the H200's, as an HTML table; "" for none."""
    try:
        records = results.load(run_folder.paths(run, entry["notebook"])["records"])
        if not records:
            return ""
        frame = results.compare(records)
        return frame.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
    except Exception as error:  # one notebook's odd records must not cost the report
        reason = html.escape(f"{type(error).__name__}: {error}")
        return f"<p>The recorded numbers cannot be shown: {reason}</p>"


def convert_notebooks(run: Path, entries: list[dict]) -> str:
    """Make an HTML page beside each executed notebook. Returns a sentence where that failed."""
    try:
        import nbconvert
    except ImportError:
        return "Install nbconvert to have the executed notebooks as pages here."
    exporter = nbconvert.HTMLExporter(template_name="lab")
    failed = []
    for entry in entries:
        files = run_folder.paths(run, entry["notebook"])
        for notebook in (files["finished"], files["partial"]):
            page = notebook.with_suffix(".html")
            if not notebook.exists() or _is_current(page, notebook):
                continue
            try:
                page.write_text(exporter.from_filename(str(notebook))[0], encoding="utf-8")
            except Exception as error:
                # whatever a notebook holds, the run itself is done
                failed.append(f"{notebook.name} ({type(error).__name__})")
    return f"No page could be made of {', '.join(failed)}." if failed else ""


def _is_current(page: Path, notebook: Path) -> bool:
    return page.exists() and page.stat().st_mtime >= notebook.stat().st_mtime
