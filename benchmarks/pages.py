"""Puts measured tables into their places in the documents: `<!-- NAME -->` … `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write_block(page: str, name: str, lines: Iterable[str]) -> None:
    """Replace what stands at a place of a document with `lines`."""
    path = DOCS / page
    body = "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"])
    pattern = rf"<!-- {re.escape(name)} -->\n.*?<!-- end -->"
    text, count = re.subn(pattern, lambda _: body, path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count == 1, f"docs/{page} has {count} places called {name!r}"
    path.write_text(text, encoding="utf-8")
