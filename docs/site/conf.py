"""Sphinx's configuration: the Markdown files of docs/, and an API reference from the docstrings.
`make site` builds it, without network."""

from __future__ import annotations

from pathlib import Path

import foredraft
from sphinx.application import Sphinx

project = "Foredraft"
release = version = foredraft.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
smartquotes_action = "qe"  # quotes and ellipses: `--` begins an option
html_theme = "furo"
html_title = "Foredraft"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["attrs_block"]
myst_fence_as_directive = ["mermaid"]
# A line that begins with % or +++ is text, as on GitHub.
myst_disable_syntax = ["myst_line_comment", "myst_block_break"]
myst_heading_anchors = 4  # links such as simulate.md#summaryjson

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False


ROOT = Path(__file__).resolve().parents[2]
ROOT_FILES = {"index": "README.md", "site/contributing": "CONTRIBUTING.md", "site/changelog": "CHANGELOG.md"}  # by page


def read_root_file(app: Sphinx, page: str, content: list[str]) -> None:
    """Put a file of the repository's root at the head of its page, with links that hold there."""
    if page not in ROOT_FILES:
        return
    text = (ROOT / ROOT_FILES[page]).read_text(encoding="utf-8").replace("](docs/", "](/")
    for other, name in ROOT_FILES.items():
        text = text.replace(f"]({name})", f"](/{other}.md)")
    content[0] = text + "\n" + content[0]


def keep_layout(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Show the indented blocks of a docstring, which are drawings and examples, as they stand."""
    kept: list[str] = []
    last = ""  # the last line that is not indented
    for line in lines:
        if line.strip() and not line.startswith(" "):
            last = line
        elif line.strip() and not last.startswith((":", "..")) and not last.endswith("::"):  # an unmarked block
            kept += ["", "::", ""]
            last = "::"
        kept.append(line)
    lines[:] = kept


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_root_file)
    app.connect("autodoc-process-docstring", keep_layout, priority=900)  # after napoleon
