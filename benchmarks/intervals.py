"""How far simulated times are from published ones by what is known of a deployment: intervals, and how many of the
points that were left out they hold. `accuracy.py` prints and writes them.

Errors are logarithms of published / simulated, and none is of a point that something was fitted to. A unit is left out
at once, and units count by the root of their size:

* own deployment and release: a day of a deployment and release, around the mean of the others;
* own deployment: a run of a deployment, around the mean of the others (with drafts: a text);
* other deployments: one model, GPU and server; with drafts, one data set;
* no benchmark: a server on a GPU, by the one with the largest errors.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from foredraft.sim.calibration.fit import NOISE, SPREADS, LinearFit
from foredraft.sim.cost.calibration import ROUND_FACTOR, ROUND_SLOPE
from foredraft.sim.cost.deployments.evidence import (
    DRAFTS,
    NOTHING,
    OTHERS,
    OWN,
    RELEASE,
    REQUEST,
    SHARED,
    TPOT,
    TTFT,
    Place,
)

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


class ErrorItem(NamedTuple):
    """A point of a class: its error around what is known of its deployment, what is left out with it, its error as
    simulated, and its group of the class of other deployments."""

    value: float
    unit: Hashable
    log: float
    group: Hashable


@dataclass(frozen=True)
class Errors:
    """The points of a class."""

    items: Sequence[ErrorItem]

    @cached_property
    def values(self) -> np.ndarray:
        return np.array([item.value for item in self.items])

    def quantiles(self, without: Hashable | None = None) -> Ends:
        """Return the quantiles between which LEVEL of the values lie, without a unit; 0 is between them."""
        sizes = Counter(item.unit for item in self.items)
        kept = [i for i, item in enumerate(self.items) if without is None or item.unit != without]
        weights, values = np.array([sizes[self.items[i].unit] ** -0.5 for i in kept]), self.values[kept]
        order = np.argsort(values)
        shares = np.cumsum(weights[order]) / weights.sum()
        places = (min(np.searchsorted(shares, (1 + side * LEVEL) / 2), len(order) - 1) for side in (-1, 1))
        low, high = (float(values[order][place]) for place in places)
        return min(low, 0.0), max(high, 0.0)

    def without(self, units: Sequence[Hashable]) -> np.ndarray:
        """Return the quantiles without each of these units [units, 2]."""
        found = {unit: self.quantiles(unit) for unit in dict.fromkeys(units)}
        return np.array([found[unit] for unit in units])

    @cached_property
    def left_out(self) -> np.ndarray:
        """The quantiles that were found without the unit of each value [values, 2]."""
        return self.without([item.unit for item in self.items])

    def stretch(self, floors: Sequence[Ends] = ()) -> float:
        """Return the least factor on quantiles, not below 1, with which LEVEL of the values lie inside of those that
        were found without their unit, or of `floors`: quantiles of few units are too narrow for another one."""
        ends = np.where(self.values < 0, self.left_out[:, 0], self.left_out[:, 1])
        needed = np.divide(self.values, ends, out=np.full(len(ends), np.inf), where=ends != 0)
        for low, high in floors:
            needed[(low <= self.values) & (self.values <= high)] = 0.0
        return max(1.0, float(np.quantile(needed, LEVEL, method="inverted_cdf")))

    def ends(self, floors: Sequence[Ends] = ()) -> Ends:
        """Return the ends of the class, no narrower than `floors`."""
        low, high = self.quantiles()
        stretch = self.stretch(floors)
        return wider((stretch * low, stretch * high), *floors)

    def worst(self) -> Ends:
        """Return the width of the unit with the largest errors, to both sides."""
        parts: dict[Hashable, list[float]] = {}
        for item in self.items:
            parts.setdefault(item.unit, []).append(abs(item.value))
        most = max(float(np.quantile(sizes, LEVEL)) for sizes in parts.values())
        return -most, most

    def judge(self, floors: Sequence[Ends]) -> tuple[float, float]:
        """Return the share of values inside of ends that are found without their unit and no narrower than `floors`,
        and the mean score of these ends: their width, and 2 / (1 - LEVEL) times what lies outside."""
        low, high = self.stretch(floors) * self.left_out.T
        for floor in floors:
            low, high = np.minimum(low, floor[0]), np.maximum(high, floor[1])
        return _judge(self.values, low, high)

    def score_with(self, every: Errors) -> float:
        """Return the mean score that these points have as simulated with the ends of all points, found without the
        group of each."""
        logs, ends = np.array([item.log for item in self.items]), every.without([item.group for item in self.items])
        return _judge(logs, *(every.stretch() * ends.T))[1]


def _judge(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    beyond = np.maximum(np.maximum(low - values, values - high), 0.0)
    return float(np.mean(beyond == 0)), float(np.mean(high - low + 2 / (1 - LEVEL) * beyond))


def errors(rows: Sequence[ErrorRow], time: str, unit: Callable[[ErrorRow], Hashable]) -> Errors:
    """Return the errors of points as simulated, of models that nothing was fitted to."""
    known = [row for row in rows if time in row.logs and not row.is_fitted]
    return Errors([ErrorItem(row.logs[time], unit(row), row.logs[time], row.group) for row in known])


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
                of_others = float(np.mean(others))
                found += [ErrorItem(row.logs[time] - of_others, place, row.logs[time], row.group) for row in own]
    return Errors(found)


def classes(rows: Sequence[ErrorRow], time: str) -> dict[str, Errors]:
    """Return the errors by what is known, the most first. Published runs with drafts name no release. What is known of
    a deployment's first tokens says nothing of those of its other runs."""
    own = own_errors(rows, time, lambda row: row.place._replace(release=""))
    others = errors(rows, time, lambda row: row.group)
    nothing = errors(rows, time, lambda row: (row.place.server, row.place.gpu))
    if time == DRAFTS:
        return {OWN: own, OTHERS: others}
    if time == TTFT:
        return {OTHERS: others, NOTHING: nothing}
    released = own_errors([row for row in rows if row.place.release], time, lambda row: row.place)
    enough = len({item.unit for item in released.items}) >= FEWEST
    return ({RELEASE: released} if enough else {}) | {OWN: own, OTHERS: others, NOTHING: nothing}


def wider(*ends: Ends) -> Ends:
    return min(low for low, _ in ends), max(high for _, high in ends)


def speed_ups(rows: Sequence[Mapping[str, str]]) -> Errors:
    """Return the errors of speed-ups over plain decoding, of rows of drafted.csv."""
    ratio = [math.log(float(row["published_ms"]) / float(row["simulated_ms"])) for row in rows]
    plain = {(a["dataset"], a["text"]): log for a, log in zip(rows, ratio, strict=True) if a["algorithm"] == "NONE"}
    drafted = [(a["dataset"], plain[a["dataset"], a["text"]] - log) for a, log in zip(rows, ratio, strict=True)
               if a["algorithm"] != "NONE" and (a["dataset"], a["text"]) in plain]  # fmt: skip
    return Errors([ErrorItem(log, dataset, log, dataset) for dataset, log in drafted])


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


GIVEN, PREDICTED = 3, 6
"""The rows of a deployment that are one's own, and the most that are predicted."""


def own_rows(rows: Sequence[ErrorRow]) -> np.ndarray:
    """Return simulated / published − 1 of points per output token, before and after `foredraft calibrate` has fitted
    three others of their deployment: one of few, one of more and one of many clients [2, points]."""
    members: dict[Place, list[ErrorRow]] = {}
    for row in (row for row in rows if row.clients and TPOT in row.logs):
        members.setdefault(row.place._replace(release=""), []).append(row)
    found = [_before_and_after(own) for own in members.values() if len(own) >= GIVEN + PREDICTED]
    return np.concatenate([np.empty((2, 0)), *found], axis=1)


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
