"""Service-level objectives: `ttft_p99<1s,tpot_p99<50ms`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError, Problem, nearest

OPTION = "--slo"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = {"mean": "mean", "p50": "median", "median": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}

_TERM = re.compile(r"(?P<name>\w+)\s*(?:<=?|≤)\s*(?P<number>[0-9.]+(?:e-?\d+)?)\s*(?P<unit>[a-zµ]*)")
_EXAMPLE = "ttft_p99<1s,tpot_p99<50ms"


@dataclass(frozen=True, slots=True)
class Objective:
    """One limit: a statistic of a latency stays below `limit_ms`."""

    name: str
    key: str  # of the summary
    limit_ms: float

    @property
    def latency(self) -> str:
        """The latency that is limited, one of `LATENCIES`."""
        return self.name.rpartition("_")[0]

    def __str__(self) -> str:
        return f"{self.name} < {self.limit_ms:g} ms"


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Return the objectives in `text`, limits with commas between them, each with its unit.

    Raises ConfigError for an unknown latency or statistic, a limit without a unit or not above 0, and for the same one
    twice.
    """
    found: dict[str, Objective] = {}
    problems = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        try:
            objective = _objective(term)
        except ValueError as error:
            problems.append(Problem(term, str(error)))
            continue
        if objective.key in found:
            problems.append(Problem(term, f"{objective.name} is limited twice"))
        found[objective.key] = objective
    if not found and not problems:
        problems.append(Problem("", f"has no limit; expected one such as {_EXAMPLE}"))
    if problems:
        raise ConfigError(OPTION, problems)
    return tuple(found.values())


def _objective(term: str) -> Objective:
    matched = _TERM.fullmatch(term)
    if matched is None:
        raise ValueError(f"is no limit; expected one such as {_EXAMPLE}")
    latency, _, statistic = matched["name"].lower().rpartition("_")
    if latency not in LATENCIES or statistic not in STATISTICS:
        names = [f"{one}_{other}" for one in LATENCIES for other in STATISTICS]
        known = f"{', '.join(LATENCIES)} with _{', _'.join(STATISTICS)}"
        raise ValueError(f"{matched['name']!r} is not measured{nearest(matched['name'], names)}; expected {known}")
    number, unit = matched["number"], matched["unit"].replace("µ", "u")
    if not unit:
        raise ValueError(f"{number} has no unit; write {number}ms or {number}s")
    if unit not in UNITS_MS:
        raise ValueError(f"{unit!r} is no unit of time; expected {', '.join(UNITS_MS)}")
    try:
        limit_ms = float(number) * UNITS_MS[unit]
    except ValueError:
        raise ValueError(f"{number!r} is no number") from None
    if not 0 < limit_ms < math.inf:
        raise ValueError("is no limit: expected a time above 0")
    return Objective(matched["name"].lower(), f"{STATISTICS[statistic]}_{latency}_ms", limit_ms)


def shares(objectives: tuple[Objective, ...], summary: Mapping[str, Any]) -> list[float]:
    """Return how much of its limit each objective takes (1.0: just held); infinite where a latency has no value, and
    everywhere if the run is not in balance.

    A run that is not in balance would only be worse if it were longer: requests were refused, aborted, failed or
    unfinished, the queue only grew, or more was offered than full batches would serve (`saturation` above 1).
    """
    lost = any(summary[key] for key in ("refused", "aborted", "failed", "unfinished"))
    if lost or summary["overloaded"] or (summary["saturation"] or 0.0) > 1.0:
        return [math.inf] * len(objectives)
    return [math.inf if (value := summary[one.key]) is None else value / one.limit_ms for one in objectives]


def excess(objectives: tuple[Objective, ...], summary: Mapping[str, Any]) -> tuple[float, Objective]:
    """Return how much of its limit the tightest objective takes (`shares`), and that objective, which of a run that is
    not in balance is the one of the greatest latency."""
    latencies = [math.inf if (value := summary[one.key]) is None else value / one.limit_ms for one in objectives]
    tightest = max(range(len(objectives)), key=latencies.__getitem__)
    return shares(objectives, summary)[tightest], objectives[tightest]
