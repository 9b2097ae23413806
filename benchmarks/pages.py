"""Puts measured tables into their places in the documents: `<!-- NAME -->` … `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def read_block(page: str, name: str) -> list[str]:
    """Return the lines that stand at a place of a document."""
    places = re.findall(_block(name), (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(places) == 1, f"docs/{page} has {len(places)} places called {name!r}"
    return places[0].splitlines()


def write_block(page: str, name: str, lines: Iterable[str]) -> None:
    """Replace what stands at a place of a document with `lines`."""
    path = DOCS / page
    body = "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"])
    text, count = re.subn(_block(name), lambda _: body, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count == 1, f"docs/{page} has {count} places called {name!r}"
    path.write_text(text, encoding="utf-8")


def _block(name: str) -> str:
    return rf"<!-- {re.escape(name)} -->\n(.*?)<!-- end -->"
