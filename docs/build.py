"""Builds the site: `python docs/build.py [output]`; `make site` installs what it needs first.

Nothing is executed: pages show the outputs that the notebooks were committed with. A page may ask
no other host for anything; MathJax, the one part that no Python package brings, is put beside it.
"""

import argparse
import re
import shutil
import sys
import tomllib
from multiprocessing.pool import ThreadPool
from pathlib import Path

from PIL import Image
from sphinx.cmd.build import build_main

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import mathjax  # noqa: E402
import pages  # noqa: E402


def repository(root: Path) -> str:
    """The value of Repository under [project.urls] in pyproject.toml; empty where there is none."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").removesuffix(".git").rstrip("/")


def build(root: Path, output: Path) -> int:
    """Build the site of the collection in `root` into the folder `output`; Sphinx's exit code.

    What `output` held before is removed, so that no page outlives its source; a build that fails
    leaves nothing there. What is made on the way (Sphinx's input, its doctrees, figures) lies in
    the folder `output`-parts.
    """
    parts = output.with_name(output.name + "-parts")
    for folder in (output, parts):
        shutil.rmtree(folder, ignore_errors=True)
    source = parts / "source"
    pages.gather(root, source)
    scripts = mathjax.fetch(ROOT / "build")
    settings = [f"repository={repository(root)}", f"html_static_path=_static,{scripts}"]
    options = ["-b", "html", "-W", "--keep-going", "-q", "-j", "auto", "-c", str(DOCS)]
    options += [text for setting in settings for text in ("-D", setting)]
    # myst-nb extracts figures beside the output folder, so that one lies inside the parts first.
    code = build_main([*options, "-d", str(parts / "doctrees"), str(source), str(parts / "html")])
    if code == 0:
        shutil.move(parts / "html", output)
        _lighten(output)
    return code


def _lighten(site: Path) -> None:
    """Remove what the theme brings for its makers; make figures lossless WebP, half as large."""
    for path in [*site.glob("_static/**/*.map"), *site.glob("_static/*-macros.html")]:
        path.unlink()
    shutil.rmtree(site / "_static" / "locales", ignore_errors=True)
    with ThreadPool() as threads:
        threads.map(_to_webp, (site / "_images").glob("*.png"))
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'(["/]_images/[^"]*)\.png"', r'\1.webp"', text), encoding="utf-8")


def _to_webp(path: Path) -> None:
    Image.open(path).save(path.with_suffix(".webp"), lossless=True)
    path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site from the committed notebooks.")
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--root", type=Path, default=ROOT, help="another collection than this one")
    options = parser.parse_args()
    output = options.output.resolve()
    code = build(options.root.resolve(), output)
    if code == 0:
        size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
        print(f"{output / 'index.html'}: {size / 1e6:.1f} MB in all")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
