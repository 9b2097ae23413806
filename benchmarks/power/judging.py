"""Whether `foredraft check` finds a defect, and what share of a draw it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from .copies import in_fork, planted
from .defects import DrawnDefect
from .sites import AREAS

ACCEPT, STEPS = "accept", "step-controller"
COMPONENTS: dict[str, tuple[str, ...]] = {
    "kv": ("allocator", "prefix-cache", "engine", "transport", "executor", "simulator"),
    "rounds": ("engine", "transport", "executor", "simulator"),
    "admission": ("engine", "transport", "simulator"),
    "adaptive": (STEPS, "engine", "simulator"),
    "trees": (ACCEPT, "executor"),
    "acceptance": ("executor", "simulator"),
    "handoff": ("transport", "simulator"),
    "simulator": ("executor", "simulator"),
    "executor": (ACCEPT, "executor"),
}
"""Area -> the contracts whose components of ours run its code; their checks judge a defect, in this order."""

LIMIT_S = 600.0
"""Processor time of the checks of one defect."""


def judge_one(defect: DrawnDefect, folder: Path, seed: int) -> dict[str, Any]:
    """Check the components that reach a defect, until one finds it. Returns the outcome of the defect as JSON.

    A defect whose place in the source is another one by now has the key `gone`, and is not counted.
    """
    outcome = {"id": defect.id, "area": defect.area, "group": defect.group, "found_by": "", "ids": []}
    if gone := defect.gone():
        return outcome | {"gone": gone}
    with planted(folder / defect.id, defect) as place:
        found = in_fork(place, partial(_check, COMPONENTS[defect.area], seed), LIMIT_S)
    if isinstance(found, dict):  # which names no invariant
        return outcome | {"noted": f"a check breaks: {found['error'][:200]}"}
    return outcome | {"found_by": ": ".join((found[0], ", ".join(found[1]))), "ids": found[1]} if found else outcome


def _check(contracts: Sequence[str], seed: int) -> tuple[str, list[str]] | None:
    """Do what `foredraft check CONTRACT --seed SEED` does, without shrinking, up to the first component that fails.

    Returns the component and what is broken; None if all hold.
    """
    # A failure is judged here, and not made small.
    import_module("foredraft.properties.harness.shrink").MAX_ATTEMPTS = 4
    registry = import_module("foredraft.checks.registry")
    swarm = import_module("foredraft.properties.harness.swarm")
    load_make = import_module("foredraft.properties.harness.importing").load_make
    check = import_module("foredraft.properties.conformance").check
    for contract in contracts:
        for name in registry.SUBJECTS[contract]:
            if ".plain:" in name:  # written without the code that has the defect
                continue
            budget = swarm.Budget(operations=registry.OPERATIONS[name], is_extended=True)
            report = check(registry.suite_of(contract), load_make(name), budget=budget, subject=name, seed=seed)
            if report.failures:  # one that did not come to everything names no invariant, and finds nothing
                return name, [failure.id for failure in report.failures]
    return None


def report(outcomes: list[dict[str, Any]]) -> list[str]:
    """Return a table: per area and group how many defects were judged and found, with the interval of the share."""
    rows = ["| area | judged | found | share (95 %) | missed |", "| --- | --- | --- | --- | --- |"]
    for group, areas in AREAS.items():
        for label, of in (*((area, (area,)) for area in areas), (f"**{group}**", tuple(areas))):
            judged = [one for one in outcomes if one["area"] in of]
            found = sum(bool(one["found_by"]) for one in judged)
            if not judged:
                continue
            low, high = wilson(found, len(judged))
            share = f"{found / len(judged):.0%} ({low:.0%} to {high:.0%})"
            missed = "" if len(of) > 1 else ", ".join(one["id"] for one in judged if not one["found_by"])
            rows.append(f"| {label} | {len(judged)} | {found} | {share} | {missed} |")
    return rows


def wilson(found: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share of `trials`, after Wilson."""
    share, spread = found / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
