"""Says how to install an extra of Foredraft, from the record that pip keeps of where the installed Foredraft came from.

The record is `direct_url.json` among the metadata of the distribution (PEP 610). It is missing for a distribution from
an index or a folder of wheels.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

from ...core.parsing import ParseError, parse_json

DISTRIBUTION = "foredraft"


def install_command(extra: str) -> str:
    """Return the shell command that installs the extra, or a sentence with one where the origin is gone or unknown."""
    try:
        record = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return _in_a_clone(extra)
    if record is None:  # from a list of packages: PyPI has none of ours, and the name may be another's there
        return _in_a_clone(extra)
    try:
        return _from_origin(extra, parse_json(record))
    except (
        ParseError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
    ):  # a record in another form than that of PEP 610
        return _in_a_clone(extra)


def _from_origin(extra: str, origin: dict[str, Any]) -> str:
    url = str(origin["url"])
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        revision = vcs.get("requested_revision")
        url = f"{vcs['vcs']}+{url}" + (f"@{revision}" if revision else "")
    elif urlsplit(url).scheme == "file":
        return _from_path(extra, url, origin.get("dir_info", {}).get("editable", False))
    if subdirectory := origin.get("subdirectory"):
        url += f"#subdirectory={subdirectory}"
    # pip's record of a repository has spaces, which a requirement must not have
    return _pip_install(f"{DISTRIBUTION}[{extra}] @ {url.replace(' ', '%20')}")


def _from_path(extra: str, url: str, is_editable: bool) -> str:
    path = unquote(urlsplit(url).path)
    if os.name == "nt":
        path = re.sub(r"^/(?=[A-Za-z]:)", "", path)  # file:///C:/clone
    if not os.path.exists(path):
        return _in_a_clone(extra)
    return _pip_install(f"{path}[{extra}]", is_editable)


def _in_a_clone(extra: str) -> str:
    return f"in a clone of Foredraft: {_pip_install(f'.[{extra}]')}"


def _pip_install(requirement: str, is_editable: bool = False) -> str:
    return f"pip install {'--editable ' if is_editable else ''}{shlex.quote(requirement)}"
