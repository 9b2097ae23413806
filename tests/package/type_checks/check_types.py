"""`make types`: the errors of mypy, and the public names whose types pyright does not know, per package.

Where `type_errors.toml` gives no number, 0 is demanded; a number there may only become lower (`--lower` writes that).
For other versions of Python than this one's mypy alone reads the code, as if it ran there.

    python tests/package/type_checks/check_types.py [--lower] [VERSION …]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("type_errors.toml")
PACKAGES = ("api", "core", "observe", "sim", "planning", "serve", "ui", "gpu", "properties", "checks", "twin", "cli")
LINKS = "build/editable"
"""Where the package is found under its own name: `make setup` makes it."""
SHOWN = 40
"""Errors of a package that are printed."""

Errors = dict[str, list[str]]
"""By package: a line for each error."""


def run(*arguments: str) -> str:
    """Return what a checker of this environment prints. It asks the `python` of its path where libraries are.
    Exits if it cannot work."""
    path = {
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT / LINKS),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env={**os.environ, **path}, capture_output=True, text=True
    )
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{done.stdout}{done.stderr}\n{arguments[0]} ended with exit code {done.returncode}")
    return done.stdout


def run_mypy(version: str = "") -> str:
    return run("mypy", "-p", "foredraft", "--output", "json", *(["--python-version", version] if version else []))


def run_pyright() -> str:
    """Ask for the public names. What types of libraries leave open is no fault of ours."""
    return run("pyright", "--verifytypes", "foredraft", "--ignoreexternal", "--outputjson")


def mypy_errors(text: str) -> Errors:
    """Return the errors in mypy's lines of JSON, with the names that the files have here."""
    errors: Errors = defaultdict(list)
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        if found["severity"] == "error":
            inside = re.sub(rf"^.*{LINKS}/foredraft/", "", Path(found["file"]).as_posix())
            place = inside if "/" in inside else f"api/{inside}"
            errors[place.split("/")[0]].append(f"{place}:{found['line']}: {found['message']}  [{found['code']}]")
    return errors


def package_of(symbol: str) -> str:
    """Return the package of a name such as foredraft.core.errors.ConfigError."""
    parts = symbol.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "api"


def incomplete_names(symbols: Sequence[Mapping[str, Any]]) -> Errors:
    """Return the public names whose type is not known in all parts, by themselves: not those that only refer to such
    names.

    When there are none, nothing is left to refer to; names that are still incomplete then are returned.
    """
    own: Errors = defaultdict(list)
    referring: Errors = defaultdict(list)
    for symbol in symbols:
        if not symbol["isExported"] or symbol["isTypeKnown"]:
            continue
        messages = [" ".join(one["message"].split()) for one in symbol["diagnostics"] if one["severity"] == "error"]
        why = [
            one for one in messages if "partially unknown" not in one or re.search(r"Type argument|\bUnknown\b", one)
        ]
        line = f"{symbol['name']}: {'; '.join(why or messages)}"
        (own if why else referring)[package_of(symbol["name"])].append(line)
    return own or referring


def pyright_errors(text: str) -> Errors:
    symbols = json.loads(text[text.index("{") :])["typeCompleteness"]["symbols"]
    public = [symbol["isTypeKnown"] for symbol in symbols if symbol["isExported"]]
    if not public:
        sys.exit(f"pyright found no public name: is {LINKS} there? `make setup` makes it")
    print(
        f"pyright: {len(public):,} public names; the types of {public.count(True) / len(public):.1%} are known in all parts"
    )
    return incomplete_names(symbols)


def judge(checker: str, errors: Errors, allowed: Mapping[str, int], *, may_fall: bool = False) -> list[str]:
    """Print the numbers, and the errors of packages that have too many;
    return what is wrong, a line for each package."""
    wrong = []
    counts = {package: len(errors.get(package, ())) for package in sorted({*PACKAGES, *errors}, key=_order)}
    print(f"{checker}: " + ", ".join(f"{package} {count:,}" for package, count in counts.items()))
    for package, count in counts.items():
        limit = allowed.get(package, 0)
        if count > limit:
            wrong.append(f"{checker}: {package} has {count:,} errors; {limit:,} are allowed")
            print("\n".join(f"  {line}" for line in errors[package][:SHOWN]))
            if count > SHOWN:
                print(f"  … and {count - SHOWN:,} more")
        elif count < limit and not may_fall:
            name = LIST.relative_to(ROOT).as_posix()
            wrong.append(f"{checker}: {package} has {count:,} errors: lower the number in {name} from {limit:,}")
    return wrong


def _order(package: str) -> tuple[int, str]:
    return (PACKAGES.index(package) if package in PACKAGES else len(PACKAGES), package)


def lower(allowed: Mapping[str, Mapping[str, int]], found: Mapping[str, Errors]) -> None:
    """Write the list anew with the numbers that became lower; none is raised."""
    text = LIST.read_text(encoding="utf-8").split("[", 1)[0]
    for checker, limits in allowed.items():
        numbers = {package: min(limit, len(found[checker].get(package, ()))) for package, limit in limits.items()}
        lines = [f"{package} = {number}" for package, number in numbers.items() if number]
        text += "\n".join([f"[{checker}]", *lines, "", ""])
    LIST.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    versions = [one for one in arguments if re.fullmatch(r"3\.\d+", one)]
    if unknown := set(arguments) - {*versions, "--lower"}:
        sys.exit(f"{', '.join(sorted(unknown))}: expected --lower or versions such as 3.12\n{__doc__}")
    begin = time.monotonic()
    allowed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    with ThreadPoolExecutor() as pool:  # beside each other
        names, lines = pool.submit(run_pyright), pool.submit(run_mypy)
        found = {"mypy": mypy_errors(lines.result()), "pyright": pyright_errors(names.result())}
    if "--lower" in arguments:
        lower(allowed, found)
        allowed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    wrong = [line for checker, errors in found.items() for line in judge(checker, errors, allowed[checker])]
    for version in versions:
        name = f"mypy for {version}"
        wrong += judge(name, mypy_errors(run_mypy(version)), allowed["mypy"], may_fall=True)
    print(*wrong, f"{len(wrong)} problems after {time.monotonic() - begin:.0f} s", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
