"""What the site links by itself: glossary terms in prose, and files of the repository."""

import csv
import re
from pathlib import Path, PurePosixPath

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.typing import ExtensionMetadata

# Tables that are easier to read as the page that is made of them.
PAGES = {"data/glossary.csv": "glossary", "data/lecture_map.csv": "lecture_map"}
CODE = {".cpp", ".cu", ".h", ".py"}
# Terms are linked in running text only.
NO_PROSE = (
    nodes.title,
    nodes.reference,
    nodes.literal,
    nodes.literal_block,
    nodes.table,
    nodes.rubric,
    nodes.raw,
    nodes.math,
    nodes.math_block,
    addnodes.download_reference,
    addnodes.pending_xref,
)
NO_TERMS = {"cell_output", "sd-card"}  # nor in cards, which are links as a whole


def jupyter_anchor(title: str) -> str:
    """The anchor that Jupyter gives a heading: `2. How we got here` is at `2.-How-we-got-here`."""
    return title.replace(" ", "-")


def term_names(term: str) -> list[str]:
    """The names in a row of the glossary: `warp, the (W)` has `warp`, `the` and `W`."""
    return [name.strip() for name in re.split(r"[,()]", term) if name.strip()]


def term_id(term: str) -> str:
    """The id of a row of the glossary on the glossary's page."""
    return "term-" + nodes.make_id(term_names(term)[0])


def read_glossary(root: Path) -> list[dict[str, str]]:
    with open(root / "data" / "glossary.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Terms:
    """Finds the names of the glossary's terms in a text, their plurals included."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.row_of = {name.lower(): row for row in rows for name in term_names(row["term"])}
        names = sorted(self.row_of, key=len, reverse=True)
        plain = "|".join(map(re.escape, names)) or r"(?!)"
        self.pattern = re.compile(rf"(?<![\w-])({plain})s?(?![\w-])", re.IGNORECASE)
        # Abbreviations are not words: SP and CTA count, sp and cta do not.
        every = (name for row in rows for name in term_names(row["term"]))
        self.exact = {name.lower(): name for name in every if name.isupper()}

    def find(self, text: str):
        """(start, end, row) of every term in `text`."""
        for match in self.pattern.finditer(text):
            name = match[1]
            if self.exact.get(name.lower(), name) == name:
                yield *match.span(), self.row_of[name.lower()]


class LinkTerms(SphinxPostTransform):
    """Links the first mention of each term of a page to the glossary, its meaning as a tooltip."""

    default_priority = 400  # after references are resolved: no links inside links
    formats = ("html",)

    def run(self, **kwargs) -> None:
        page = self.env.docname
        if page == "glossary":
            return
        if not hasattr(self.app, "glossary_terms"):
            self.app.glossary_terms = Terms(read_glossary(Path(self.app.srcdir)))
        glossary = self.app.builder.get_relative_uri(page, "glossary")
        seen = set()
        for text in list(self.document.findall(nodes.Text)):
            if _is_prose(text):
                self.link(text, glossary, seen)

    def link(self, text: nodes.Text, glossary: str, seen: set[str]) -> None:
        parts, done = [], 0
        for start, end, row in self.app.glossary_terms.find(text):
            if row["term"] in seen:
                continue
            seen.add(row["term"])
            link = nodes.reference(
                "", text[start:end], refuri=f"{glossary}#{term_id(row['term'])}", internal=True
            )
            link["reftitle"] = row["meaning"]
            link["classes"] = ["term"]
            parts += [nodes.Text(text[done:start]), link]
            done = end
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(text[done:])])


def _is_prose(text: nodes.Text) -> bool:
    inside, node = False, text.parent
    while node is not None:
        if isinstance(node, NO_PROSE) or not NO_TERMS.isdisjoint(node.get("classes", ())):
            return False
        inside = inside or isinstance(node, nodes.paragraph)
        node = node.parent
    return inside


class LinkFiles(SphinxTransform):
    """Links files: tables to their page, code to the repository if it has an address.

    Other files stay what myst-parser made of them: downloads.
    """

    default_priority = 400

    def apply(self, **kwargs) -> None:
        repository = self.config.repository
        for node in list(self.document.findall(addnodes.download_reference)):
            name, _ = self.env.relfn2path(node["reftarget"], self.env.docname)
            file = PurePosixPath(name)
            if name in PAGES:
                link = addnodes.pending_xref(
                    "", refdomain="std", reftype="doc", reftarget="/" + PAGES[name]
                )
                link["refexplicit"] = True
                link["refdoc"] = self.env.docname
            elif repository and file.suffix in CODE:
                link = nodes.reference("", refuri=f"{repository}/blob/main/{file}")
            else:
                continue
            link += node.children
            node.replace_self(link)


def use_repository(app: Sphinx, config) -> None:
    """Buttons of the theme that need the address of a repository, for hosts that it knows."""
    if config.repository.startswith("https://github.com/"):
        config.html_theme_options |= {
            "repository_url": config.repository,
            "repository_branch": "main",
            "use_repository_button": True,
            "launch_buttons": {"colab_url": "https://colab.research.google.com"},
        }


def setup(app: Sphinx) -> ExtensionMetadata:
    app.add_config_value("repository", "", "env", types=frozenset({str}))
    app.connect("config-inited", use_repository, priority=100)
    app.add_transform(LinkFiles)
    app.add_post_transform(LinkTerms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
