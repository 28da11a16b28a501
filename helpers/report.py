"""The report of a run: index.html, a page that stands alone, and results.json beside it."""

import html
import re
from pathlib import Path

import jinja2

from helpers import device, machines, report_records, results, run_folder, specs

TEMPLATES = Path(__file__).resolve().parent / "templates"


def where(entry: dict) -> str:
    """One line that names the cell in which a notebook stopped, "" when none did."""
    cell = entry.get("cell")
    if not cell:
        return f"before the first cell: {entry['error']}" if "error" in entry else ""
    parts = [f"cell {cell['index'] + 1} of {cell['cells']}", cell["heading"]]
    place = ", ".join(filter(None, parts))
    return f"{place}: {entry['error']}" if "error" in entry else place


def summary(entries: list[dict]) -> str:
    """The table that ends a run in the terminal."""
    rows = [("notebook", "status", "minutes", "where")]
    for entry in entries:
        minutes = f"{entry['seconds'] / 60:.1f}"
        places = [machine["host"]] if (machine := entry.get("machine")) else []
        place = "; ".join(filter(None, [*places, where(entry)]))
        rows.append((entry["notebook"], entry["status"], minutes, place))
    first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(
        f"{name:<{first}}  {status:<{second}}  {minutes:>{third}}  {place}".rstrip()
        for name, status, minutes, place in rows
    )


def render(template: str, **content: object) -> str:
    """One of the templates, filled in; texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(content)


def write(run: Path, convert: bool = False, pictures: bool = False) -> Path:
    """Write the folder's results.json and index.html from what lies in it; return the page's path.

    `convert` also makes a page of each executed notebook, where nbconvert is installed. `pictures`
    draws the run's curves and the scoreboard, which takes seconds: for the end of a run.
    """
    status = run_folder.read_status(run)
    entries = [entry for _, entry in sorted(status["notebooks"].items())]
    records, notices = report_records.gather(run)
    content = report_records.described(run.name, records, status["profile"])
    try:
        report_records.write(run, content)
    except OSError as error:
        notices.append(f"{report_records.FILE} cannot be written: {error.strerror}.")
    notices += filter(None, [convert_notebooks(run, entries) if convert else ""])
    fleet = report_records.taking_part(entries)
    if len({(machine["torch"], machine["triton"]) for machine in fleet}) > 1:
        notices.append("The machines have different versions of PyTorch or Triton.")
    own = report_records.fleet(run) if fleet else [report_records.machine(run, records)]
    shown = _drawn(own) if pictures and records else {}
    page = render(
        "report.html",
        **{key: value for key, value in content.items() if key != "records"},
        **shown,
        pending=bool(records) and not pictures,
        tiles=glance(own[0]) if len(own) == 1 else [],
        glances=beside(own) if len(own) > 1 else "",
        fleet=fleet,
        facts=device.facts(status["profile"]),
        notices=notices,
        notebooks=[
            entry | {"where": where(entry), "links": links(run, entry)} for entry in entries
        ],
        tables={stem: comparison(run, stem, bool(fleet)) for stem in stems(entries)},
        passed=sum(entry["status"] == "passed" for entry in entries),
        minutes=sum(entry["seconds"] for entry in entries) / 60,
    )
    index = run / "index.html"
    run_folder.write_whole(index, page)
    return index


def glance(own: machines.Machine) -> list[dict]:
    """The few numbers that describe a machine: {"name", "value", "unit", "note"}."""
    try:
        gpu = specs.this_gpu() if own.device == device.device_name() else specs.find(own.device)
        found = [("copy in memory", own.copy_gb_per_s(), "GB/s", gpu and gpu.memory_gb_per_s)]
        half = "bfloat16" if own.matmul_tflop_per_s("bfloat16") else "float16"
        for name, dtype in ((half, half), ("fp32", "float32")):
            sheet = gpu and gpu.peak_tflop_per_s(dtype)
            name = name.replace("bfloat", "bf").replace("float", "fp")
            found.append((f"{name} matmul", own.matmul_tflop_per_s(dtype), "TFLOP/s", sheet))
        speeds = [
            record["value"]
            for record in own.records
            if record["op"] == "flash_attention" and record["unit"] == "TFLOP/s"
        ]
        found.append(("our FlashAttention", max(speeds, default=None), "TFLOP/s", None))
    except Exception:  # an odd GPU: the page does without
        return []
    return [
        {
            "name": name,
            "value": _digits(value if value >= 1 else value * 1000),
            "unit": unit if value >= 1 else unit.replace("G", "M").replace("T", "G"),
            "note": sheet and f"{value / sheet:.0%} of the datasheet's {sheet:,.4g}",
        }
        for name, value, unit, sheet in found
        if value
    ]


def beside(fleet: list[machines.Machine]) -> str:
    """`glance` of several machines as an HTML table, a column each."""
    import pandas as pd

    columns = {
        machine.name: {f"{tile['name']}, {tile['unit']}": tile["value"] for tile in glance(machine)}
        for machine in fleet
    }
    return _html(pd.DataFrame(columns), index=True)


def stems(entries: list[dict]) -> list[str]:
    """The notebooks; on a cluster each may have an entry for each device, as DEVICE/NOTEBOOK."""
    return sorted({entry["notebook"].split("/")[-1] for entry in entries})


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _drawn(own: list[machines.Machine]) -> dict:
    """What takes seconds: the pictures and the scoreboard, or a sentence in the place of each.

    Of several machines each has its pictures, those that it has measured.
    """
    recorded = machines.recorded(results.REFERENCE) if results.REFERENCE else None
    try:
        from helpers import report_figures

        found = [(m, p) for m in own for p in report_figures.pictures(m, recorded)]
        if len(own) > 1:
            found = [(m, p) for m, p in found if not (p.get("borrowed") or "problem" in p)]
            found = [(m, p | {"title": f"{p['title']}: {m.name}"}) for m, p in found]
        drawn = {
            "pictures": [picture for _, picture in found],
            "sources": report_figures.sources(own, recorded),
        }
    except Exception as error:  # such as a matplotlib that cannot be loaded
        drawn = {"pictures": [{"title": "Curves", "problem": _cannot("The curves", error)}]}
    try:
        from helpers import scoreboard

        columns = [machines.lecture(), recorded, *own]
        table = scoreboard.scoreboard_table([machine for machine in columns if machine])
        return drawn | {"scoreboard": _html(table, index=True)}
    except Exception as error:
        return drawn | {"scoreboard": f"<p>{html.escape(_cannot('The scoreboard', error))}</p>"}


def _cannot(what: str, error: Exception) -> str:
    return f"{what} cannot be shown: {type(error).__name__}: {error}"


def _html(frame, index: bool = False) -> str:
    return frame.to_html(index=index, border=0, na_rep="", float_format="{:.4g}".format)


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
            found.append({"file": page.relative_to(run).as_posix(), "text": text})
            text = ".ipynb"
        found.append({"file": notebook.relative_to(run).as_posix(), "text": text})
    return found


def comparison(run: Path, stem: str, by_device: bool = False) -> str:
    """The notebook's numbers beside the lecture's and the H200's, as an HTML table; "" for none."""
    try:
        records = []
        for folder in machines.folders(run / "records"):
            records += results.load(folder / f"{stem}.json")
        return _html(results.compare(records, by_device=by_device)) if records else ""
    except Exception as error:  # one notebook's odd records must not cost the report
        return f"<p>{html.escape(_cannot('The recorded numbers', error))}</p>"


def convert_notebooks(run: Path, entries: list[dict]) -> str:
    """Make an HTML page beside each executed notebook. Returns a sentence where that failed."""
    try:
        import nbconvert
    except ImportError:
        return "Install nbconvert to have the executed notebooks as pages here."
    exporter = nbconvert.HTMLExporter(template_name="lab")
    there = {run_folder.paths(run, entry["notebook"])["finished"] for entry in entries}
    there = {notebook.stem for notebook in there if notebook.exists()}
    failed = []
    for entry in entries:
        files = run_folder.paths(run, entry["notebook"])
        for notebook in (files["finished"], files["partial"]):
            page = notebook.with_suffix(".html")
            if not notebook.exists() or _is_current(page, notebook):
                continue
            try:
                html_text = exporter.from_filename(str(notebook))[0]
                run_folder.write_whole(page, relinked(html_text, there))
            except Exception as error:
                # whatever a notebook holds, the run itself is done
                failed.append(f"{notebook.name} ({type(error).__name__})")
    return f"No page could be made of {', '.join(failed)}." if failed else ""


def relinked(page: str, stems: set[str]) -> str:
    """A page whose links lead to the pages of these notebooks; to other files of the collection,
    which do not lie beside it, no link is left."""

    def link(match: re.Match) -> str:
        stem, anchor = match["stem"], match["anchor"] or ""
        return f'<a href="{stem}.html{anchor}"' if stem in stems else "<a"

    page = re.sub(r'<a href="(?P<stem>\d\d_\w+)\.ipynb(?P<anchor>#[^"]*)?"', link, page)
    return re.sub(r'<a href="\.\./[^"]*"', "<a", page)


def _is_current(page: Path, notebook: Path) -> bool:
    return page.exists() and page.stat().st_mtime >= notebook.stat().st_mtime
