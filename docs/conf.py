"""Sphinx's settings for the site. docs/build.py starts Sphinx and gathers what it reads."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "How GPUs run machine learning"
author = "the authors of this collection"
html_title = project
html_show_copyright = False
html_show_sphinx = False
language = "en"

extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design", "links"]
exclude_patterns = ["_parts"]
smartquotes = False  # pages say what the notebooks say
suppress_warnings = [
    "toc.not_included",  # what a page links to is a page, in a table of contents or not
    "misc.highlighting_failure",  # parts of kernels, with … for the rest
]

# Notebooks: shown as they were committed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}  # these would come from other hosts
nb_custom_formats = {".ipynb": ["reader.read", {}, False]}
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
# Links into notebooks are written as Jupyter makes its anchors: case and punctuation kept.
myst_heading_slug_func = "links.jupyter_anchor"

mathjax_path = "mathjax/es5/tex-chtml.js"
# The menu offers parts that are not here; without it MathML for screen readers stays.
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "sphinx_book_theme"
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = True
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],  # the search field stands in the sidebar
    "use_fullscreen_button": False,
    "pygments_light_style": "github-light-high-contrast",
    "pygments_dark_style": "github-dark-high-contrast",
}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system has it
copybutton_selector = "div.cell_input pre, div.highlight:not(.cell_output *) > pre"
