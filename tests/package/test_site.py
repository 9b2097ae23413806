"""The documentation as a site: it builds without a warning and without the network, and every page is reached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.mark.slow  # the links and the names in the pages are tested in test_documents.py
def test_the_site_builds_without_a_warning(tmp_path):
    line = [sys.executable, "-c", NO_NETWORK, "-q", "-W", "--keep-going", "-c", "docs/site", "docs", tmp_path / "site"]
    built = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_COLOR": "1"}
    )
    assert (built.returncode, built.stderr) == (0, "")
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for source in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "site").glob("*.md")):
        page = source.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (tmp_path / "site" / page).is_file()
        assert page == "index.html" or f'href="{page}"' in home, f"no way from the first page to {page}"
    api = (tmp_path / "site" / "site" / "api.html").read_text(encoding="utf-8")
    for name in (
        "foredraft.simulate",
        "foredraft.session.Session.generate",
        "foredraft.core.scheduler.engine.Engine.plan",
    ):
        assert f'id="{name}"' in api
    text = re.sub(r"<[^>]+>", "", api)
    assert "Return whether at least this share of the requests" in text
