"""How far simulated times are from published ones by what is known of a deployment: intervals, and how many of the
points that were left out they hold. `deployments.py` prints and writes them.

Errors are logarithms of published / simulated, and none is of a point that something was fitted to. A unit is left out
at once, and units count by the root of their size:

* own deployment and release: a day of a deployment and release, around the mean of the others (with drafts: a text);
* own deployment: a run of a deployment, around the mean of the others;
* other deployments: one model, GPU and server; with drafts, one data set;
* no benchmark: a server on a GPU (with drafts: a data set), by the one with the largest errors.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from foredraft.sim.calibration.fit import NOISE, SPREADS, LinearFit
from foredraft.sim.cost.calibration import ROUND_FACTOR, ROUND_SLOPE
from foredraft.sim.cost.deployments.evidence import DRAFTS, NOTHING, OTHERS, OWN, RELEASE, REQUEST, SHARED, TPOT, Place
from points import read_rows

LEVEL = 0.8
FEWEST = 10
"""Units of which the ends of a class are taken; releases with fewer are no surer than deployments."""
Ends = tuple[float, float]


class ErrorRow(NamedTuple):
    """A published point: its deployment, its run, and the logarithms of published / simulated by time."""

    place: Place
    run: str
    kernels: str
    group: Hashable
    is_fitted: bool
    logs: Mapping[str, float]
    clients: int = 0  # 0: of several engines together


class Errors(NamedTuple):
    values: np.ndarray
    units: list[Hashable]

    def without(self, unit: Hashable | None) -> Errors:
        kept = [i for i, one in enumerate(self.units) if unit is None or one != unit]
        return Errors(self.values[kept], [self.units[i] for i in kept])

    def ends(self, unit: Hashable | None = None) -> Ends:
        """Return the quantiles between which LEVEL of the values lie, without a unit; 0 is between them."""
        kept = self.without(unit)
        weights = np.array([kept.units.count(one) ** -0.5 for one in kept.units])
        order = np.argsort(kept.values)
        shares, values = np.cumsum(weights[order]) / weights.sum(), kept.values[order]
        low, high = (values[min(np.searchsorted(shares, (1 + s * LEVEL) / 2), len(order) - 1)] for s in (-1, 1))
        return min(float(low), 0.0), max(float(high), 0.0)

    def worst(self, unit: Hashable | None = None) -> Ends:
        kept = self.without(unit)
        parts = {one: [v for v, u in zip(kept.values, kept.units, strict=True) if u == one] for one in kept.units}
        most = max(float(np.quantile(np.abs(values), LEVEL)) for values in parts.values())
        return -most, most

    def covered(self, ends: Callable[[Hashable], Ends]) -> float:
        """Return the share of values inside of ends that are found without their unit."""
        of = {unit: ends(unit) for unit in dict.fromkeys(self.units)}
        return float(np.mean([of[u][0] <= v <= of[u][1] for v, u in zip(self.values, self.units, strict=True)]))


def errors(rows: Sequence[ErrorRow], time: str, unit: Callable[[ErrorRow], Hashable]) -> Errors:
    known = [row for row in rows if time in row.logs and not row.is_fitted]
    return Errors(np.array([row.logs[time] for row in known]), [unit(row) for row in known])


def own_errors(rows: Sequence[ErrorRow], time: str, place_of: Callable[[ErrorRow], Place]) -> Errors:
    """Return the errors of runs that are left out, around the mean of the others of their deployment."""
    centre, by = TPOT if time == REQUEST else time, {}
    for row in (row for row in rows if time in row.logs and centre in row.logs):
        by.setdefault(place_of(row), {}).setdefault(row.run, []).append(row)
    found = []
    for place, runs in by.items():
        means = {run: np.mean([row.logs[centre] for row in own]) for run, own in runs.items()}
        for run, own in runs.items():
            if others := [mean for other, mean in means.items() if other != run]:
                found += [(row.logs[time] - np.mean(others), place) for row in own]
    return Errors(np.array([value for value, _ in found]), [place for _, place in found])


def classes(rows: Sequence[ErrorRow], time: str) -> dict[str, Errors]:
    released = own_errors([row for row in rows if row.place.release], time, lambda row: row.place)
    own = own_errors(rows, time, lambda row: row.place._replace(release=""))
    return {
        RELEASE: released if len(set(released.units)) >= FEWEST else own,
        OWN: own,
        OTHERS: errors(rows, time, lambda row: row.group),
        NOTHING: errors(rows, time, lambda row: row.group if time == DRAFTS else (row.place.server, row.place.gpu)),
    }


def ends_of(found: Mapping[str, Errors], floors: Sequence[Mapping[str, Ends]]) -> Iterator[tuple[str, Ends, float]]:
    """Yield the classes, wider with each step down, with the share of left-out points that each covers. `floors`: ends
    of others that are never surer."""
    least: Ends = (0.0, 0.0)
    for name, each in found.items():
        others = [least, *(floor[name] for floor in floors if name in floor)]
        own = each.worst if name == NOTHING else each.ends
        yield name, (least := _wider(own(), *others)), each.covered(lambda unit: _wider(own(unit), *others))  # noqa: B023


def _wider(*ends: Ends) -> Ends:
    return min(low for low, _ in ends), max(high for _, high in ends)


def speed_ups(kernels: str) -> Errors:
    lines = [line for line in read_rows("drafted.csv") if line["kernels"] == kernels]
    ratio = [math.log(float(line["published_ms"]) / float(line["simulated_ms"])) for line in lines]
    plain = {(a["dataset"], a["text"]): log for a, log in zip(lines, ratio, strict=True) if a["algorithm"] == "NONE"}
    drafted = [(a, log) for a, log in zip(lines, ratio, strict=True) if a["algorithm"] != "NONE"]
    return Errors(
        np.array([plain[a["dataset"], a["text"]] - log for a, log in drafted]), [a["dataset"] for a, _ in drafted]
    )


def apart(rows: Sequence[ErrorRow], time: str) -> list[float]:
    """Return by what two deployments share how far apart their means are, each pair of deployments alike."""
    means: dict[Place, list[float]] = {}
    for row in (row for row in rows if time in row.logs):
        means.setdefault(row.place._replace(release=""), []).append(row.logs[time])
    found: list[list[float]] = [[] for _ in SHARED]
    for (one, mine), (other, others) in combinations(means.items(), 2):
        level = next(i for i, names in enumerate(SHARED) if all(getattr(one, n) == getattr(other, n) for n in names))
        found[level].append(abs(float(np.mean(mine) - np.mean(others))))
    return list(np.maximum.accumulate([np.quantile(each, LEVEL) if each else 0.0 for each in found]))


def error_table(rows: Sequence[ErrorRow], words: Mapping[str, str]) -> Iterator[str]:
    """Yield a Markdown table of errors (simulated / published − 1) by time and server."""
    yield "| time, server | points | mean | bias |"
    yield "| --- | --- | --- | --- |"
    servers = dict.fromkeys(row.place.server for row in rows if TPOT in row.logs)
    for time, word in words.items():
        for server in [*servers, ""]:
            known = [row.logs[time] for row in rows if time in row.logs and server in ("", row.place.server)]
            found = 100 * np.expm1(-np.array(known))
            cells = f"{len(known):,} | {abs(found).mean():.1f} | {found.mean():.1f}" if known else "– | – | –"
            yield f"| {word}, {server or '**all**'} | {cells} |"


GIVEN, PREDICTED = 3, 6
"""The rows of a deployment that are one's own, and the most that are predicted."""


def own_rows(rows: Sequence[ErrorRow], kernels: str) -> Iterator[str]:
    """Yield a Markdown table of what three rows of one's own give: `foredraft calibrate` fits one of few, one of more
    and one of many clients, and others of the same deployment are predicted."""
    members: dict[Place, list[ErrorRow]] = {}
    for row in (row for row in rows if row.kernels == kernels and row.clients):
        members.setdefault(row.place._replace(release=""), []).append(row)
    found: dict[str, list[np.ndarray]] = {}
    for place, own in members.items():
        if len(own) >= GIVEN + PREDICTED:
            found.setdefault(place.server, []).append(_before_and_after(own))
    yield "| server | deployments | rows | as simulated: mean | bias | three rows of its own: mean | bias |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for server in [*found, ""]:
        chosen = [each for name, every in found.items() if server in ("", name) for each in every]
        before, after = np.concatenate(chosen, axis=1)
        cells = " | ".join(f"{100 * abs(values).mean():.1f} | {100 * values.mean():.1f}" for values in (before, after))
        yield f"| {server or '**all**'} | {len(chosen)} | {len(before)} | {cells} |"


def _before_and_after(rows: Sequence[ErrorRow]) -> np.ndarray:
    """Return simulated / published − 1 of rows that were not fitted, before and after the fit [2, rows]."""
    rows = sorted(rows, key=lambda row: row.clients)
    own = [rows[place] for place in (0, len(rows) // 2, len(rows) - 1)]
    others = [row for row in rows if row not in own]
    others = random.Random(0).sample(others, min(PREDICTED, len(others)))
    fitted, predicted = (np.log([row.clients for row in chosen]) for chosen in (own, others))
    columns, usual = np.ones((len(own), 2)), fitted.mean()
    columns[:, 1] = fitted - usual
    rest, spreads = -np.array([row.logs[TPOT] for row in own]), np.array([SPREADS[ROUND_FACTOR], SPREADS[ROUND_SLOPE]])
    factor, slope = LinearFit(rest, columns, np.full(len(own), NOISE["mean_tpot_ms"]), np.zeros(2), spreads).step()
    before = -np.array([row.logs[TPOT] for row in others])
    after = before + factor + slope * (np.clip(predicted, fitted[0], fitted[-1]) - usual)
    return np.expm1([before, after])
