"""Every page of the site, in a browser: complete, and on its own."""

import dataclasses
import json

import nbformat
import pytest
from places import ROOT, SITE

PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
NOTEBOOKS = [f"notebooks/{path.stem}.html" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
WITHOUT_ORDER = {"genindex.html", "search.html"}  # Sphinx's own: no neighbours, no prose
TYPESET = "window.MathJax?.startup?.promise"  # done when all formulas are
# What a page has, read in one go.
FACTS = r"""() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const raw = [];
  const walker = document.createTreeWalker(
    document.querySelector(".bd-article") ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (text.parentElement.closest("pre, code, script, style, mjx-container")) continue;
    if (/\\\(|\\\[|\\begin|\$[^$]+\$/.test(text.data)) raw.push(text.data.trim().slice(0, 80));
  }
  return {
    paint: performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? NaN,
    formulas: all(".math").length,
    unrendered: all(".math").filter((one) => !one.querySelector("mjx-container")).length,
    errors: all("mjx-merror").length,
    raw,
    cells: all("div.cell_input").length,
    without_copy: all("div.cell_input div.highlight").filter(
      (one) => !one.querySelector("button.copybtn")).length,
    output_copies: all(".cell_output button.copybtn").length,
    previous: all(".prev-next-area a.left-prev").length,
    next: all(".prev-next-area a.right-next").length,
    terms: all("a.term").map((one) => [one.title, one.getAttribute("href")]),
    downloads: all("a[href$='.ipynb']").map((one) => one.href),
    colab: all("a[href*='colab']").length + all(".tag_colab").length,
    solutions: all(".tag_solution").length,
    shown_solutions: all(".tag_solution pre, .tag_solution img").filter(
      (one) => one.checkVisibility()).length,
    open_details: all("details[open]").length,
    embedded: all("img[src^='data:']").length,
    undescribed: all(".bd-article img").filter((one) => !one.alt).length,
    broken_images: all(".bd-article img").filter((one) => one.complete && !one.naturalWidth).length,
  };
}"""
# Elements that reach over the page's right edge, and lie in no box that scrolls.
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((one) => {
  const box = one.getBoundingClientRect();
  if (!one.checkVisibility() || box.width === 0 || box.right <= innerWidth + 1) return false;
  if (one.closest("mjx-assistive-mml, svg, dialog")) return false;
  for (let up = one; up !== document.body; up = up.parentElement) {
    const style = getComputedStyle(up);
    if (style.position === "fixed") return false;  // a drawer that is closed
    const inside = up.getBoundingClientRect().right <= innerWidth + 1;
    if (inside && ["auto", "scroll"].includes(style.overflowX)) return false;
  }
  return true;
}).slice(0, 5).map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 40)}`)"""


@dataclasses.dataclass
class Visit:
    facts: dict
    messages: list[str]
    failed: list[str]
    elsewhere: list[str]
    width: int
    overflowing: list[str]


@pytest.fixture(scope="session")
def visits(browser, address, paints):
    """A function that opens a page at two widths and tells what was seen; once for each page."""
    done = {}

    def visit(name):
        if name in done:
            return done[name]
        messages, failed, elsewhere = [], [], []
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        bad = ("error", "warning")
        page.on("console", lambda one: one.type in bad and messages.append(one.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("requestfailed", lambda one: failed.append(one.url))
        page.on("response", lambda one: one.status >= 400 and failed.append(one.url))
        page.on(
            "request",
            lambda one: one.url.startswith((address, "data:")) or elsewhere.append(one.url),
        )
        page.goto(f"{address}/{name}", wait_until="load")
        page.evaluate(TYPESET)
        facts = page.evaluate(FACTS)
        paints[name] = facts["paint"]
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(300)
        width = page.evaluate("document.documentElement.scrollWidth")
        done[name] = Visit(facts, messages, failed, elsewhere, width, page.evaluate(OVERFLOWING))
        context.close()
        return done[name]

    return visit


def test_every_notebook_is_a_page():
    assert set(NOTEBOOKS) < set(PAGES)
    assert {"index.html", "running.html", "glossary.html", "lecture_map.html"} < set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_whole_and_alone(visits, name):
    seen = visits(name)
    assert seen.messages == []
    assert seen.failed == []
    assert seen.elsewhere == []
    assert seen.facts["embedded"] == seen.facts["broken_images"] == seen.facts["undescribed"] == 0


@pytest.mark.parametrize("name", PAGES)
def test_formulas_are_rendered(visits, name):
    facts = visits(name).facts
    assert facts["unrendered"] == facts["errors"] == 0
    assert facts["raw"] == []


def test_there_are_formulas(visits):
    assert sum(visits(name).facts["formulas"] for name in NOTEBOOKS) > 50


@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_on_a_phone(visits, name):
    seen = visits(name)
    assert seen.overflowing == []
    assert seen.width <= 390


@pytest.mark.parametrize("name", sorted(set(PAGES) - WITHOUT_ORDER))
def test_a_page_has_neighbours(visits, name):
    facts = visits(name).facts
    assert facts["previous"] == (name != "index.html")
    assert facts["next"] == (name != "licence.html")


@pytest.mark.parametrize("name", sorted(set(PAGES) - WITHOUT_ORDER - {"glossary.html"}))
def test_terms_lead_to_the_glossary(visits, name):
    glossary = (SITE / "glossary.html").read_text(encoding="utf-8")
    terms = visits(name).facts["terms"]
    for meaning, target in terms:
        file, _, anchor = target.partition("#")
        assert meaning
        assert file.endswith("glossary.html")
        assert f'id="{anchor}"' in glossary
    assert len({target for _, target in terms}) == len(terms), "each term once"
    assert terms or name in {"licence.html", "lecture_map.html"}, name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_can_be_taken_along(visits, browser, name):
    facts = visits(name).facts
    committed = (ROOT / name).with_suffix(".ipynb")
    own = [link for link in facts["downloads"] if link.endswith("/" + committed.name)]
    assert own
    context = browser.new_context()
    got = context.request.get(own[0])
    assert got.ok
    assert got.body() == committed.read_bytes()
    nbformat.validate(nbformat.reads(got.text(), as_version=4))
    context.close()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_code_can_be_copied_and_solutions_are_folded(visits, name):
    facts = visits(name).facts
    committed = (ROOT / name).with_suffix(".ipynb").read_text(encoding="utf-8")
    cells = json.loads(committed)["cells"]
    tags = [cell["metadata"].get("tags", []) for cell in cells if cell["cell_type"] == "code"]
    assert facts["cells"] == sum("colab" not in one for one in tags)
    assert facts["without_copy"] == facts["output_copies"] == 0
    assert facts["solutions"] == sum("solution" in one for one in tags) > 0
    assert facts["shown_solutions"] == facts["open_details"] == 0
    assert facts["colab"] == 0  # a button only where the project has an address
