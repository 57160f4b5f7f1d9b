"""The configuration of the site: `sphinx-build -W docs OUT` builds it from the pages that GitHub shows as well."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from pytest_accel import __version__

_DOCS = Path(__file__).resolve().parent
_INCLUDED_FILES = {
    (_DOCS / "project" / match[1]).resolve(): page
    for page in (_DOCS / "project").glob("*.md")
    for match in re.finditer(r"^```\{include\} (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}
"""The pages by the file of the repository that each of them includes."""
_EXAMPLE = re.compile(r"^\[(`[^`]*`)\]\(((?:\.\./)+examples/ci/[^)]*)\)$", re.MULTILINE)
"""Pattern of a line that is a link to an example, which the site shows in place of the link."""
_LANGUAGES = {".sbatch": "bash", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".py": "python"}
_LINK_UPWARDS = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")

project = "pytest-accel"
author = "The pytest-accel authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images"]

# Links to headings have the same targets as on GitHub.
myst_heading_anchors = 4

# Two hyphens in the text are an option's, not a dash.
smartquotes = False

# Docstrings have `single` backticks for code.
default_role = "literal"
add_module_names = False
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]


def setup(app: Sphinx) -> None:
    """Connect the functions of this file to Sphinx's events."""
    app.connect("source-read", _show_examples)
    app.connect("source-read", _adapt_links)
    app.connect("source-read", _add_toctrees)


def _add_toctrees(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add the navigation to a page `index`: the pages to which it links, in the order of their links.

    On the site's front page, each heading of the third level is a group of the navigation. Pages in a folder that has
    an index are below that index.
    """
    folder = (_DOCS / docname).parent
    if not docname.endswith("index"):
        return
    groups = re.split(r"^### (.*)\n", content[0], flags=re.MULTILINE) if docname == "index" else ["", "", content[0]]
    for caption, text in zip(groups[1::2], groups[2::2], strict=True):
        linked = dict.fromkeys((folder / page).resolve() for page in re.findall(r"\]\(([\w./-]+)\.md", text))
        own = [page.relative_to(folder) for page in linked if _index_above(page) == _DOCS / docname]
        options = [*([f":caption: {caption}"] if caption else []), ":hidden:", ":titlesonly:", ""]
        lines = ["", "```{toctree}", *options, *(page.as_posix() for page in own), "```", ""]
        content[0] += "\n".join(lines)


def _index_above(page: Path) -> Path:
    """Return the index below which `page` stands, without suffix: the nearest one above it other than itself."""
    indexes = (folder / "index" for folder in page.parents if (folder / "index.md").exists())
    return next(index for index in indexes if index != page)


def _show_examples(app: Sphinx, docname: str, content: list[str]) -> None:
    """Show the files to which a page links with lines of their own. On GitHub the link leads to the file."""
    folder = (_DOCS / docname).parent

    def show(link: re.Match[str]) -> str:
        path = (folder / link[2]).resolve()
        return f"{link[1]}:\n\n```{_LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}```"

    content[0] = _EXAMPLE.sub(show, content[0])


def _adapt_links(app: Sphinx, docname: str, content: list[str]) -> None:
    """Adapt a page's links to files outside `docs/`.

    A link to a file that a page includes leads to this page. Other files are not on the site: their links become text.
    """
    folder = (_DOCS / docname).parent

    def adapt(link: re.Match[str]) -> str:
        text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if target.is_relative_to(_DOCS):
            return link[0]
        page = _INCLUDED_FILES.get(target)
        return f"[{text}](/{page.relative_to(_DOCS).as_posix()}{anchor})" if page else text

    content[0] = _LINK_UPWARDS.sub(adapt, content[0])
