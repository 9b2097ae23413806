"""The outcomes: a file that a second call goes on with, and the report on it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from math import sqrt
from pathlib import Path

from changes import ROOT


def source_of(module: str) -> str:
    """Return a short hash of a module's text, to know an outcome that belongs to another one."""
    return sha256((ROOT / module).read_bytes()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, list[dict]]:
    """Return the outcomes so far that still belong to the source, oldest first, by the key of their change."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results: dict[str, list[dict]] = {}
    for result in (json.loads(line) for line in lines if line):
        if (ROOT / result["module"]).exists() and result["source"] == source_of(result["module"]):
            results.setdefault(result["key"], []).append(result)
    return results


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, JASA 22, 1927, p. 209)."""
    z = 1.959964
    middle, width = successes + z * z / 2, z * sqrt(successes * (trials - successes) / trials + z * z / 4)
    return (middle - width) / (trials + z * z), (middle + width) / (trials + z * z)


def report(results: Sequence[Sequence[dict]], equivalent: dict[str, str]) -> str:
    """Return killed, survived and equivalent by package, with the share at first and now, and every survivor."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for outcomes in sorted(results, key=lambda outcomes: (outcomes[0]["module"], outcomes[0]["line"])):
        first, last = outcomes[0], outcomes[-1]
        count = counts.setdefault(first["module"].split("/")[0], Counter())
        if last["outcome"] == "survived" and f"{first['module']}: {first['before']} -> {first['after']}" in equivalent:
            count["equivalent"] += 1
            continue
        count[last["outcome"]] += 1
        count["at first"] += first["outcome"] == "killed"
        if last["outcome"] == "survived":
            survivors.append(f"{first['module']}:{first['line']}\n    - {first['before']}\n    + {first['after']}")
    heads = ("package", "killed", "survived", "equivalent", "at first", "now", "95 % interval")
    rows = [("{:<10}" + "{:>11}" * 5 + "{:>16}").format(*heads)]
    for package, count in sorted(counts.items()):
        if told := count["killed"] + count["survived"]:
            low, high = interval(count["killed"], told)
            shares = f"{count['at first'] / told:>11.0%}{count['killed'] / told:>11.0%}{f'{low:.0%} to {high:.0%}':>16}"
            rows.append(f"{package:<10}{count['killed']:>11}{count['survived']:>11}{count['equivalent']:>11}{shares}")
    return "\n".join([*survivors, "", *rows])
