"""The documentation as a site: it builds without a warning and without the network, and every page is reached."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = """
import socket, sys
def refuse(*arguments, **settings):
    raise OSError("the site must build without the network")
socket.socket.connect = socket.getaddrinfo = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


PAGES = {"index": "README.md", "site/contributing": "CONTRIBUTING.md", "site/changelog": "CHANGELOG.md"}
"""The pages that show a file of the repository's root."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    line = [sys.executable, "-c", NO_NETWORK, "-q", "-W", "--keep-going", "-c", "docs/site", "docs", folder]
    built = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_COLOR": "1"}
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def page_of(source: Path) -> str:
    """Return the page of a document by its name on the site, without `.html`."""
    by_file = {ROOT / name: page for page, name in PAGES.items()}
    return by_file.get(source) or source.relative_to(ROOT / "docs").with_suffix("").as_posix()


def documents() -> Iterator[tuple[Path, str]]:
    """Yield every document whose text the site shows, and its page."""
    for source in (
        *(ROOT / name for name in PAGES.values()),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "evidence").glob("*.md"),
    ):
        if source.name != "index.md":
            yield source, page_of(source)


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


def paragraphs(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each paragraph, heading and table cell of a Markdown text, and the targets of its links."""
    from markdown_it import MarkdownIt

    for token in MarkdownIt("commonmark").enable("table").parse(text):
        children = token.children or []
        parts = (" " if child.type.endswith("break") else child.content for child in children if child.type != "image")
        yield words("".join(parts)), [child.attrs["href"] for child in children if child.type == "link_open"]


@pytest.mark.slow  # the links and the names in the pages are tested in test_documents.py
def test_the_site_builds_without_a_warning(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    for source in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")):
        page = source.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / page).is_file()
        assert page == "index.html" or f'href="{page}"' in home, f"no way from the first page to {page}"


@pytest.mark.slow
def test_the_site_documents_the_api(site):
    api = (site / "site" / "api.html").read_text(encoding="utf-8")
    for name in (
        "foredraft.simulate",
        "foredraft.session.Session.generate",
        "foredraft.core.scheduler.engine.Engine.plan",
    ):
        assert f'id="{name}"' in api
    text = re.sub(r"<[^>]+>", "", api)
    assert "Return whether at least this share of the requests" in text


@pytest.mark.slow
def test_the_site_has_the_whole_text_and_every_link_of_every_document(site):
    """A line that one of the two renderers takes for a comment would be missing here without a warning."""
    seen = 0
    for source, page in documents():
        article = (
            (site / f"{page}.html").read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        )
        shown = words(html.unescape(re.sub(r"<[^>]+>", "", article)))
        hrefs = {html.unescape(href) for href in re.findall(r'href="([^"]+)"', article)}
        linked_to = hrefs | {href.partition("#")[0] for href in hrefs} | {href.rpartition("/")[2] for href in hrefs}
        for paragraph, targets in paragraphs(source.read_text(encoding="utf-8")):
            assert paragraph in shown, f"{page} lacks: {paragraph}"
            for target in targets:  # test_documents.py has the anchors
                file = (source.parent / target.partition("#")[0]).resolve()
                if target.startswith(("http", "#")):
                    expected = target
                elif file.suffix == ".md":
                    expected = os.path.relpath(site / f"{page_of(file)}.html", (site / page).parent)
                else:  # a file to download, in a folder of the site's own
                    expected = file.name
                assert expected in linked_to, f"{page} lacks a link to {target}"
                seen += 1
    assert seen >= 50
