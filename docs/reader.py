"""Reads a notebook for the site: which cells a page shows, hides, or folds."""

import re
import sys

sys.modules.setdefault("rfc3987_syntax", None)  # helpers/light_nbformat.py says why

import nbformat  # noqa: E402

FOLDED = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}


def read(text: str) -> nbformat.NotebookNode:
    """The notebook in `text`, with myst-nb's marks beside its own.

    A cell tagged `colab` prepares another machine than the reader's page, and is left out. One that
    JupyterLab shows folded, a solution, is folded here too. A figure's description is the heading
    that it stands under.
    """
    notebook = nbformat.reads(text, as_version=4)
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+ (.*)", cell.source, re.MULTILINE) or [heading])[-1]
            continue
        settings = {"image": {"alt": f"Figure: {heading}"}}
        tags = cell.metadata.setdefault("tags", [])
        if "colab" in tags:
            tags.append("remove-cell")
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            tags.append("hide-cell")
            settings |= FOLDED
        cell.metadata["mystnb"] = settings
    return notebook
