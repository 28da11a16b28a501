"""The report, from run folders made by hand."""

import base64
import html.parser
import importlib.util
import json
import re
import shutil
import sys
import xml.etree.ElementTree

import nbformat
import pytest

from helpers import (
    device,
    machines,
    report,
    report_figures,
    report_records,
    results,
    run_folder,
    scoreboard,
)

RECORD = {
    "claim": "L05", "op": "<matmul>", "shape": "", "dtype": "float32", "clock": "host",
    "value": 12.5, "p20": None, "p80": None, "unit": "ms", "profile": "smoke", "device": "cpu",
    "torch": "2", "triton": "3", "date": "2026-01-31", "notebook": "01_a",
}  # fmt: skip
FAILURE = {
    "notebook": "02_b", "status": "failed", "seconds": 90.0, "fingerprint": "",
    "error": "TypeError",
    "lines": ["first", "TypeError: <script>alert(1)</script>"],
    "cell": {"index": 4, "cells": 9, "execution_count": 3, "source": "a < b", "heading": "H & M"},
}  # fmt: skip


class Links(html.parser.HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src")]


@pytest.fixture
def folder(tmp_path):
    passed = {"notebook": "01_a", "status": "passed", "seconds": 30.0, "fingerprint": ""}
    waiting = {"notebook": "03_c", "status": "not run", "seconds": 0.0, "fingerprint": ""}
    entries = {entry["notebook"]: entry for entry in (waiting, FAILURE, passed)}
    run_folder.write_status(tmp_path, {"device": "cpu", "profile": "full", "notebooks": entries})
    results.save([RECORD], tmp_path / "records" / "01_a.json")
    source = nbformat.v4.new_code_cell("print(1)")
    for name in ("01_a", "02_b.partial"):
        nbformat.write(nbformat.v4.new_notebook(cells=[source]), tmp_path / f"{name}.ipynb")
    return tmp_path


def test_the_page_says_what_happened(folder):
    page = report.write(folder).read_text(encoding="utf-8")
    assert "<b>1 <span>of 3</span></b>" in page and "notebooks passed" in page
    assert "cell 5 of 9, H &amp; M: TypeError" in page
    assert "a &lt; b" in page and "&lt;script&gt;" in page and "<script" not in page
    assert "drawn at the end of a run" in page and "img" not in Links(page).tags
    assert "<td>&lt;matmul&gt;</td>" in page and "12.5" in page
    assert "1.5</td>" in page  # minutes
    assert "PyTorch" in page and "<dd>full</dd>" in page  # the machine and the run's profile
    assert page.index('id="01_a"') < page.index('id="02_b"') < page.index('id="03_c"')
    assert "Nothing was executed" in page.split('id="03_c"')[1]


def test_the_page_stands_alone(folder):
    page = report.write(folder).read_text(encoding="utf-8")
    links = Links(page)
    assert "<h1>cpu</h1>" in page and "full profile · 2026-01-31 · PyTorch 2 · Triton 3" in page
    assert "://" not in page
    assert not {"script", "link", "img"} & set(links.tags)
    files = [address for address in links.addresses if not address.startswith("#")]
    assert files == ["01_a.ipynb", "02_b.partial.ipynb"]
    assert all((folder / file).exists() for file in files)
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_executed_notebooks_become_pages(folder):
    if importlib.util.find_spec("nbconvert") is None:
        assert "Install nbconvert" in report.write(folder, convert=True).read_text()
        return
    files = Links(report.write(folder, convert=True).read_text(encoding="utf-8")).addresses
    assert "01_a.html" in files and "02_b.partial.html" in files
    assert "print" in (folder / "01_a.html").read_text(encoding="utf-8")
    # a notebook that cannot be converted is named, and costs nothing else
    (folder / "01_a.html").unlink()
    (folder / "01_a.ipynb").write_text("{}")
    page = report.write(folder, convert=True).read_text(encoding="utf-8")
    assert "No page could be made of 01_a.ipynb" in page
    assert "01_a.html" not in page and "02_b.partial.html" in page


def test_without_nbconvert_one_sentence_says_so(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nbconvert", None)
    page = report.write(folder, convert=True).read_text(encoding="utf-8")
    assert page.count("Install nbconvert") == 1
    assert 'href="01_a.ipynb"' in page


def test_damaged_records_do_not_cost_the_report(folder):
    (folder / "records" / "01_a.json").write_text('[{"claim": "L05"}]')
    page = report.write(folder).read_text(encoding="utf-8")
    assert "cannot be shown: KeyError" in page


def test_results_json_holds_the_same_records(folder):
    second = [RECORD | {"notebook": "03_c", "op": str(number)} for number in range(3)]
    results.save(second, folder / "records" / "03_c.json")
    report.write(folder)
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert content.pop("records") == [RECORD, *second]
    assert content == {
        "run": folder.name,
        "device": "cpu",
        "profile": "full",
        "date": "2026-01-31",
        "versions": {"torch": "2", "triton": "3"},
    }


ODD = [
    None, 3, "text", {}, RECORD | {"value": None}, RECORD | {"value": "1"}, RECORD | {"p20": "1"},
    RECORD | {"value": float("nan")}, RECORD | {"p80": float("inf")}, RECORD | {"device": None},
    {key: value for key, value in RECORD.items() if key != "unit"},
]  # fmt: skip


def test_odd_records_are_left_out_and_named(folder):
    file = folder / "records" / "01_a.json"
    file.write_text(json.dumps([*ODD, RECORD]))
    (folder / "records" / "02_b.json").write_text("[{")
    (folder / "records" / "03_c.json").write_text("3")
    assert machines.gather(folder / "records")[0] == [RECORD]
    page = report.write(folder).read_text(encoding="utf-8")
    assert f"01_a.json: {len(ODD)} of {len(ODD) + 1} are no records" in page
    assert "02_b.json cannot be read: JSONDecodeError" in page
    assert "03_c.json cannot be read: TypeError" in page
    assert json.loads((folder / "results.json").read_text())["records"] == [RECORD]


def test_a_run_without_records_has_a_page_and_no_pictures(folder):
    (folder / "records" / "01_a.json").unlink()
    page = report.write(folder, pictures=True).read_text(encoding="utf-8")
    assert "img" not in Links(page).tags and "Scoreboard" not in page
    assert f"<h1>{device.device_name()}</h1>" in page
    assert json.loads((folder / "results.json").read_text())["records"] == []


def test_results_that_cannot_be_written_cost_nothing_else(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (folder / "results.json").mkdir()
    report.write(folder)
    assert (folder / "results.json").is_file()  # what was in its place has been moved aside
    monkeypatch.setattr(report.report_records, "write", full)
    page = report.write(folder).read_text(encoding="utf-8")
    assert "results.json cannot be written: No space" in page and "12.5" in page


GPU = "NVIDIA <A100-SXM4-80GB>"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A full run on another GPU: the recorded H200's numbers and curves under another name."""
    run = tmp_path_factory.mktemp("run {0}")  # braces are no place to fill in
    recorded = machines.recorded()
    stems = sorted({record["notebook"] for record in recorded.records})
    for stem in stems:
        own = [r | {"device": GPU} for r in recorded.records if r["notebook"] == stem]
        results.save(own, run / "records" / f"{stem}.json")
    for file in results.measurements_path("x").parent.glob("nvidia_h200.*.csv"):
        shutil.copy(file, run / "records" / file.name.removeprefix("nvidia_h200."))
    entries = {
        stem: {"notebook": stem, "status": "passed", "seconds": 6.0, "fingerprint": ""}
        for stem in stems
    }
    run_folder.write_status(run, {"device": "x", "profile": "full", "notebooks": entries})
    return run


@pytest.fixture(scope="module")
def measured_page(measured):
    return report.write(measured, pictures=True)


def test_a_gpu_has_all_its_curves_in_one_file(measured_page):
    page = measured_page.read_text(encoding="utf-8")
    links = Links(page)
    assert measured_page.stat().st_size < 1_500_000
    assert "cannot be shown" not in page and "Not this machine" not in page
    assert "NVIDIA &lt;A100-SXM4-80GB&gt;" in page and GPU not in page
    assert "://" not in page and "<script" not in page and "<link" not in page
    images = [address for address in links.addresses if address.startswith("data:")]
    assert links.tags.count("img") == len(images) == len(report_figures.PICTURES)
    for image in images:
        kind, content = image.split(",")
        assert kind == "data:image/svg+xml;base64"
        xml.etree.ElementTree.fromstring(base64.b64decode(content))
    for picture in report_figures.PICTURES:
        assert f"<h3>{picture.title}</h3>" in page
    assert page.count("<p>This machine: ") == len(images)
    assert "Recorded, H200:" not in page  # conclusions are on the run's own curves
    assert "drawn at the end of a run" not in page
    assert "4,248 <span>GB/s" in page and "710 <span>TFLOP/s" in page
    assert page.index("Scoreboard") < page.index("<h2>Notebooks</h2>")
    assert "<th>GeLU</th>" in page or 'valign="top">GeLU</th>' in page


def test_sentences_are_made_from_the_curves(measured, measured_page):
    own = report_records.machine(measured, machines.gather(measured / "records")[0])
    page = measured_page.read_text(encoding="utf-8")
    shown = dict(re.findall(r"(?s)<h3>([^<]*)</h3>.*?<p>This machine: ([^<]*)</p>", page))
    ladder = own.series("03_roofline", "ladder")
    assert f"{ladder['gb_per_s'].max():,.0f} GB/s from the caches" in shown["Bandwidth"]
    assert "each 132 tiles more cost one wave" in shown["Staircase"]
    assert "from N = 2,049 on" in shown["Sawtooth"]
    coarse = own.series("10_wave_quantization", "coarse")
    best = coarse.groupby("n")["tflop_per_s"].median()
    assert f"at N = {best.idxmax():,}" in shown["Size of a matmul"]
    lengths = own.series("11_flash_attention", "lengths").query("backend == 'ours' and causal")
    assert f"{lengths['tflop_per_s'].max():,.3g} TFLOP/s causal" in shown["Attention, forward"]
    operations = own.series("03_roofline", "operations")
    ratio = operations["ms"] / operations["predicted_ms"]
    number = ratio.between(1 / 1.5, 1.5).sum()
    assert f"{number} of {len(operations)} operations" in shown["Roofline"]


def test_a_damaged_curve_costs_its_own_picture(measured, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(measured, run)
    damage = {
        "03_roofline.ladder": "footprint_bytes,path\n1,<b>\n",
        "03_roofline.operations": "op\n\x01\n",
        "06_memory.in_flight": "bytes_in_flight,gb_per_s\n",  # a heading alone: nothing measured
        "10_wave_quantization.stairs": "kernel,tiles,ms,slots\nfixed tiles,1,1,132\n",
        "11_flash_attention.lengths": "",
    }
    for name, content in damage.items():
        (run / "records" / f"{name}.csv").write_text(content)
    own = report_records.machine(run, machines.gather(run / "records")[0])
    found = {p["title"]: p for p in report_figures.pictures(own, machines.recorded())}
    for title in ("Roofline", "Bandwidth", "Staircase"):
        assert found[title]["problem"].startswith("It cannot be shown"), title
    for title in ("Bytes in flight", "Attention, forward"):
        assert found[title]["borrowed"].startswith("Not this machine: ")
    assert found["Bytes in flight"]["sentence"].startswith("Recorded, H200: ")
    for title in ("Size of a matmul", "Sawtooth", "Attention, backward"):
        assert found[title]["src"] and not found[title]["borrowed"]


def test_a_cpu_borrows_what_it_cannot_measure_and_says_so(folder, monkeypatch):
    quick = [picture for picture in report_figures.PICTURES if not picture.wide]
    monkeypatch.setattr(report_figures, "PICTURES", quick)
    smoke = RECORD | {"notebook": "03_roofline", "claim": "S20", "unit": "GB/s", "value": 16.5}
    smoke |= {"op": "roof: memory, copy"}
    results.save([smoke], folder / "records" / "03_roofline.json")
    (folder / "records" / "03_roofline.ladder.csv").write_text(
        "footprint_bytes,path,gb_per_s\n1048576,all caches,80.0\n16777216,all caches,20.0\n"
    )
    page = report.write(folder, pictures=True).read_text(encoding="utf-8")
    assert "16.5 <span>GB/s" in page and "of the datasheet" not in page
    assert "This machine, smoke: 80 GB/s from the caches at best" in page
    if not device.has_cuda():
        assert "Not this machine: 10_wave_quantization measures it on a GPU" in page
        assert "Not this machine: 03_roofline has left no curve in this run" in page  # but could
    # without the collection's own numbers, as while they are being recorded, a line is left
    monkeypatch.setattr(results, "REFERENCE", "")
    page = report.write(folder, pictures=True).read_text(encoding="utf-8")
    assert "10_wave_quantization has left no curve here" in page
    assert "Not this machine" not in page and "recorded, H200" not in page.split("<h2>Numbers")[0]


def test_pictures_that_cannot_be_drawn_cost_a_line(folder, monkeypatch):
    def fail(*_):
        raise ImportError("no <pictures> here")

    monkeypatch.setattr(report_figures, "pictures", fail)
    monkeypatch.setattr(scoreboard, "scoreboard_table", fail)
    page = report.write(folder, pictures=True).read_text(encoding="utf-8")
    assert "The curves cannot be shown: ImportError: no &lt;pictures&gt; here" in page
    assert "The scoreboard cannot be shown: ImportError: no &lt;pictures" in page
    assert "12.5" in page


def test_summary_lines_up():
    passed = {"notebook": "10_longer", "status": "passed", "seconds": 12.0}
    lines = report.summary([FAILURE, passed]).splitlines()
    assert lines == [
        "notebook   status  minutes  where",
        "02_b       failed      1.5  cell 5 of 9, H & M: TypeError",
        "10_longer  passed      0.2",
    ]


def test_links_lead_to_the_pages_that_are_there():
    page = (
        '<a href="02_b.ipynb#4.-Clocks">x</a> <a href="03_c.ipynb">y</a> '
        '<a href="../data/map.csv">z</a> <a href="https://a.b/02_b.ipynb">w</a>'
    )
    assert report.relinked(page, {"02_b"}) == (
        '<a href="02_b.html#4.-Clocks">x</a> <a>y</a> <a>z</a> '
        '<a href="https://a.b/02_b.ipynb">w</a>'
    )
