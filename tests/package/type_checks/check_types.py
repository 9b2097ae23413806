"""`make types`: mypy finds no error in the packages that are checked.

`properties/`, `checks/` and the tests are not: pyproject.toml ignores what mypy says of the two. With versions of
Python it reads the code once for each, as if it ran there.

    python tests/package/type_checks/check_types.py [VERSION …]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LINKS = "build/editable"
"""Where the package is found under its own name: `make setup` makes it."""


def run_mypy(options: Sequence[str] = (), root: Path = ROOT) -> int:
    """Run mypy over the package; it prints the errors. Returns its exit code, 0 without errors."""
    environment = {**os.environ, "PYTHONPATH": str(root / LINKS)}
    return subprocess.run(
        [sys.executable, "-m", "mypy", "-p", "foredraft", *options], cwd=root, env=environment
    ).returncode


def main(versions: Sequence[str]) -> int:
    if unknown := [one for one in versions if not re.fullmatch(r"3\.\d+", one)]:
        sys.exit(f"{', '.join(unknown)}: expected versions such as 3.12\n{__doc__}")
    return max(run_mypy(options) for options in [["--python-version", one] for one in versions] or [[]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
