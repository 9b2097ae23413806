"""Service-level objectives: `ttft_p99<1s,tpot_p99<50ms`, or `attainment>95%,ttft<1s`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError, Problem, nearest
from ..sim.scenario import Scenario
from ..sim.scenario_file import scenario_with

OPTION = "--slo"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = {"mean": "mean", "p50": "median", "median": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}

USUAL = "ttft_p99<1s,tpot_p99<50ms"
"""The limits where neither the option nor the scenario has any."""
OF_A_REQUEST = ("ttft", "tpot", "e2el")
"""Latencies that a request has one of, so that a share of the requests can be within its limit."""
TAKEN = "slo_taken"  # of the summary

_TERM = re.compile(r"(?P<name>\w+)\s*(?:<=?|≤)\s*(?P<number>[0-9.]+(?:e-?\d+)?)\s*(?P<unit>[a-zµ]*)")
_ATTAINMENT = re.compile(r"attainment\s*(?:>=?|≥)\s*(?P<number>[0-9.]+)\s*(?P<unit>%?)", re.IGNORECASE)
_ORDER = ("p50", "median", "p90", "p95", "p99")  # of percentiles; a higher one is never less


@dataclass(frozen=True)
class Limit:
    """A limit of a plan, as its answer has it.

    Attributes:
        name: Such as "ttft_p99", or "attainment".
        key: The number of a run's summary that is limited.
        limit_ms: What a latency stays below; None for an attainment.
        share: Of the requests that are within the limits of `text` at least; None for a latency.
        text: The limit in words.
    """

    name: str
    key: str
    limit_ms: float | None
    share: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Objective:
    """One limit: a statistic of a latency stays below `limit_ms`."""

    name: str
    key: str  # of the summary
    limit_ms: float

    @property
    def latencies(self) -> tuple[str, ...]:
        """The latencies that are limited, of `LATENCIES`."""
        return (self.name.rpartition("_")[0],)

    def described(self) -> Limit:
        """Return the limit for the answer of a plan."""
        return Limit(self.name, self.key, self.limit_ms, None, str(self))

    def __str__(self) -> str:
        return f"{self.name} < {self.limit_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Attainment(Objective):
    """A share of the requests stays within all limits of the scenario's `[slo]`.

    What a run takes of it (the summary's `slo_taken`) is the factor by which all limits would have to change so that
    exactly this share is within them. So it follows times as a latency does, and its own limit is 1.
    """

    share: float
    limits: tuple[tuple[str, float], ...]  # latency, ms

    @property
    def latencies(self) -> tuple[str, ...]:
        return tuple(latency for latency, _ in self.limits)

    def described(self) -> Limit:
        """Return the limit for the answer of a plan: its number is the attainment itself."""
        return Limit(self.name, "slo_attainment", None, self.share, str(self))

    def __str__(self) -> str:
        within = " and ".join(f"{latency} < {limit_ms:g} ms" for latency, limit_ms in self.limits)
        return f"{self.share * 100:g} % of requests with {within}"


def objectives_of(text: str | None, scenario: Scenario) -> tuple[tuple[Objective, ...], Scenario]:
    """Return the objectives of a plan, and the scenario whose `[slo]` has the limits of each request.

    `text` is the option's; None takes `[slo]`, and without limits there `USUAL`. Raises ConfigError as `parse_slo`
    does, and for a limit that contradicts one of `[slo]`.
    """
    table = scenario.slo.model_dump()
    own = {one: table[f"{one}_ms"] for one in OF_A_REQUEST if table[f"{one}_ms"] is not None}
    if text is None and own:
        text = f"attainment>{table['attainment'] * 100:g}%"
    statistics, given, share = _parsed(text or USUAL)
    if share is None and not given:
        return statistics, scenario
    differ = [one for one in given if one in own and own[one] != given[one]]
    if differ:
        problems = [
            Problem(f"{one}<{given[one]:g}ms", f"contradicts slo.{one}_ms = {own[one]:g}: give one") for one in differ
        ]
        raise ConfigError(OPTION, problems)
    limits = {**own, **given}
    share = table["attainment"] if share is None else share
    if not limits:
        message = "has no limit of a request; add one such as ttft<1s, or give slo.ttft_ms"
        raise ConfigError.of(OPTION, "attainment", message)
    _check_share(share, OPTION)
    settings = {"slo": {f"{one}_ms": limit_ms for one, limit_ms in limits.items()} | {"attainment": share}}
    whole = Attainment("attainment", TAKEN, 1.0, share, tuple(limits.items()))
    return (*statistics, whole), scenario_with(scenario.model_dump(mode="json"), settings)


def _check_share(share: float, option: str) -> None:
    if share >= 1:
        message = (
            "100 % cannot be planned for: one slow request breaks it, and a longer run has a slower one; expected less, "
            "such as attainment>99.9%"
        )
        raise ConfigError.of(option, "attainment", message)


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Return the limits of statistics in `text`, with commas between them, each with its unit.

    Raises ConfigError for an unknown latency or statistic, a limit without a unit or not above 0, the same one twice,
    and limits of which one can never be reached because of another.
    """
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[tuple[Objective, ...], dict[str, float], float | None]:
    """Return the limits of statistics, those of each request (ms by latency), and the share of requests to be within
    these."""
    found: dict[str, Objective] = {}
    given: dict[str, float] = {}
    share: float | None = None
    problems = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        try:
            if term.lower().startswith("attainment"):
                if share is not None:
                    raise ValueError("attainment is given twice")
                share = _share(term)
                continue
            name, key, limit_ms = _limit(term)
            if (key is None and name in given) or key in found:
                raise ValueError(f"{name} is limited twice")
            if key is None:
                given[name] = limit_ms
            else:
                found[key] = Objective(name, key, limit_ms)
        except ValueError as error:
            problems.append(Problem(term, str(error)))
    if not found and not given and share is None and not problems:
        problems.append(Problem("", f"has no limit; expected one such as {USUAL}"))
    problems = problems or [*_never_reached(tuple(found.values()))]
    if problems:
        raise ConfigError(OPTION, problems)
    return tuple(found.values()), given, share


def _share(term: str) -> float:
    matched = _ATTAINMENT.fullmatch(term)
    if matched is None:
        raise ValueError("is no attainment; expected the share of requests within all limits, such as attainment>95%")
    if not matched["unit"]:
        raise ValueError(f"{matched['number']} has no unit; write attainment>95% for 95 of 100 requests")
    try:
        share = float(matched["number"]) / 100
    except ValueError:
        raise ValueError(f"{matched['number']!r} is no number") from None
    if not 0 < share <= 1:
        raise ValueError("expected more than 0 % and less than 100 %")
    return share


def _limit(term: str) -> tuple[str, str | None, float]:
    """Return the name of a limit, the key of its statistic in a summary (None: it limits each request), and ms."""
    matched = _TERM.fullmatch(term)
    if matched is None:
        raise ValueError(f"is no limit; expected one such as {USUAL}")
    name = matched["name"].lower()
    latency, _, statistic = name.rpartition("_")
    is_of_each = name in OF_A_REQUEST
    if not is_of_each and (latency not in LATENCIES or statistic not in STATISTICS):
        names = [f"{one}_{other}" for one in LATENCIES for other in STATISTICS]
        known = f"{', '.join(LATENCIES)} with _{', _'.join(STATISTICS)}, or {', '.join(OF_A_REQUEST)} of each request"
        raise ValueError(f"{matched['name']!r} is not measured{nearest(name, names)}; expected {known}")
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
    return name, None if is_of_each else f"{STATISTICS[statistic]}_{latency}_ms", limit_ms


def _never_reached(objectives: tuple[Objective, ...]) -> Iterator[Problem]:
    """Yield a problem for each limit that another one makes impossible to reach, so that one of them is a mistake."""
    for one in objectives:
        latency, _, statistic = one.name.rpartition("_")
        for other in objectives:
            other_latency, _, other_statistic = other.name.rpartition("_")
            is_higher = latency == other_latency and statistic in _ORDER and other_statistic in _ORDER
            is_higher = is_higher and _ORDER.index(statistic) < _ORDER.index(other_statistic)
            is_whole = (latency, other_latency) == ("ttft", "e2el") and statistic == other_statistic
            if (is_higher or is_whole) and one.limit_ms >= other.limit_ms:
                why = "is never more than" if is_higher else "is a part of"
                yield Problem(
                    str(one), f"contradicts {other}: {one.name} {why} {other.name}, so this limit cannot be reached"
                )


def shares(objectives: tuple[Objective, ...], summary: Mapping[str, Any]) -> list[float]:
    """Return how much of its limit each objective takes (1.0: just held); infinite where a latency has no value, and
    everywhere if the run is not in balance.

    A run that is not in balance would only be worse if it were longer: requests were refused, aborted, failed or
    unfinished, or more was asked than can be served (`overloaded`).
    """
    lost = any(summary[key] for key in ("refused", "aborted", "failed", "unfinished"))
    if lost or summary["overloaded"]:
        return [math.inf] * len(objectives)
    return [math.inf if (value := summary[one.key]) is None else value / one.limit_ms for one in objectives]


def excess(objectives: tuple[Objective, ...], summary: Mapping[str, Any]) -> tuple[float, Objective]:
    """Return how much of its limit the tightest objective takes (`shares`), and that objective, which of a run that is
    not in balance is the one of the greatest latency."""
    latencies = [math.inf if (value := summary[one.key]) is None else value / one.limit_ms for one in objectives]
    tightest = max(range(len(objectives)), key=latencies.__getitem__)
    return shares(objectives, summary)[tightest], objectives[tightest]
