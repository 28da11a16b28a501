"""What a reader does on the site: search, read in the dark, open a page without a server."""

import io

import pytest
from PIL import Image, ImageStat
from places import SITE

READ = ["index.html", "glossary.html", "lecture_map.html", "notebooks/08_softmax.html"]
READ += ["notebooks/02_benchmarking.html", "notebooks/13_scoreboard.html"]
# The lowest contrast of text on its ground (WCAG 2), over what is read on a page.
CONTRAST = r"""() => {
  const numbers = (text) => text.match(/[\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    const layers = [];
    for (let up = one; up; up = up.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(up).backgroundColor);
      if (a > 0) layers.unshift([r, g, b, a]);
      if (a === 1) break;
    }
    return layers.reduce((below, [r, g, b, a]) =>
      [r, g, b].map((c, i) => a * c + (1 - a) * below[i]), [255, 255, 255]);
  };
  let lowest = [99, ""];
  const read = "p, li, td, th, dt, dd, pre, pre span, a, summary, h1, h2, h3";
  for (const one of document.querySelectorAll(".bd-article :is(" + read + ")")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.matches(".headerlink, .copybtn")) continue;
    const [x, y] = [luminance(numbers(getComputedStyle(one).color).slice(0, 3)),
                    luminance(ground(one))].sort((p, q) => q - p);
    const contrast = (x + 0.05) / (y + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, one.outerHTML.slice(0, 120)];
  }
  return lowest;
}"""


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(
    "words, expected",
    [("occupancy", "10_wave_quantization"), ("online softmax", "08_softmax"), ("варп", "glossary")],
)
def test_search_finds(page, address, words, expected):
    page.goto(f"{address}/index.html")
    page.locator("button.search-button-field:visible").first.click()
    page.locator("input[type=search]:visible").first.fill(words)
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("!document.querySelector('#search-progress')?.textContent.trim()")
    links = page.locator("#search-results li a").evaluate_all("all => all.map((one) => one.href)")
    assert any(expected in link for link in links), links


def test_search_finds_nothing_that_is_not_there(page, address):
    page.goto(f"{address}/search.html?q=zeppelin")
    page.wait_for_function("/did not match/.test(document.body.innerText)")


def test_the_dark_is_chosen_once(page, address):
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}/index.html")
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "light"
    page.locator("button.theme-switch-button:visible").click()
    page.locator("button.theme-change-button[data-mode=dark]:visible").click()
    assert page.evaluate(theme) == "dark"
    page.goto(f"{address}/notebooks/01_specs.html")
    assert page.evaluate(theme) == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", READ)
def test_text_stands_out(page, address, name, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{address}/{name}")
    contrast, where = page.evaluate(CONTRAST)
    assert contrast >= 4.5, where


@pytest.mark.parametrize("name", ["index.html", "notebooks/06_memory.html"])
def test_figures_are_dark_in_the_dark(page, address, name):
    brightness = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{address}/{name}")
        figure = page.locator(".bd-article img").first.screenshot()
        pixels = ImageStat.Stat(Image.open(io.BytesIO(figure)).convert("L"))
        (brightness[scheme],), (spread,) = pixels.mean, pixels.stddev
        assert spread > 20, "something is drawn"
    assert brightness["dark"] < 90 < 165 < brightness["light"]


def test_without_a_server(page):
    """Pages open from the disk as well, formulas and search included."""
    page.goto((SITE / "notebooks" / "08_softmax.html").as_uri())
    page.evaluate("window.MathJax.startup.promise")
    assert page.locator("mjx-container").count() > 10
    page.goto((SITE / "search.html").as_uri() + "?q=occupancy")
    page.wait_for_selector("#search-results li a")
