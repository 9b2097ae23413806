"""Fits what published serving points say of simulated times, and prints how well it holds for what was left out.

    python benchmarks/published_fit.py            fits published/serving.csv and prints the errors (a minute)
    python benchmarks/published_fit.py --write    and writes sim/cost/published/effects.json, and the tables of
                                                  docs/accuracy.md

After prices have changed, `python benchmarks/serving_runs.py` comes first.

Three logarithms of published / simulated are fitted, each by itself: of the time per output token, of the time to the
first token, and of the time of a whole request per token. The model is `sim/cost/published/hierarchy.py`. Points whose
residual is large count less, as under Student's distribution with four degrees of freedom.

Errors are those of points whose whole group (model, GPU and server) was left out, and of points that were left out
alone, in ten random parts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from foredraft.sim.cost.published.evidence import REQUEST, TPOT, TTFT
from foredraft.sim.cost.published.hierarchy import SLOPES, TERMS, Observation, Place, Posterior, Term, fit
from foredraft.sim.cost.published.places import slopes_of
from foredraft.sim.cost.published.spread import FREEDOM, Spread, fit_spread
from pages import write_block
from points import read_csv

SERVING = Path(__file__).parent / "published" / "serving.csv"
EFFECTS = Path(__file__).parents[1] / "sim" / "cost" / "published" / "effects.json"
BANDS = (6, 48)
"""Numbers of clients per attention group between which points of one run are one observation."""
WARM_UP_MS, WARM_UP_RATIO = 3000.0, 4.0
"""A first token that was later than this and than so many simulated times has the server's warm-up in it."""
PARTS = 10
LEVEL = 0.8


class Row(NamedTuple):
    """One published point and its simulation."""

    place: Place
    kernels: str  # "measured" or "roofline"
    clients: float  # of an attention group
    output: int
    ttft_ms: float | None  # None: of a disaggregated run, whose simulation has no router and no transfers
    tpot_ms: float
    simulated_ttft_ms: float
    simulated_tpot_ms: float
    equal_lengths: bool

    @property
    def group(self) -> tuple[str, str, str]:
        """The model, GPU and server, which are left out at once."""
        return self.place.model, self.place.gpu, self.place.server

    @property
    def slopes(self) -> dict[str, float]:
        share = self.simulated_ttft_ms / (self.output * self.simulated_tpot_ms)
        return slopes_of(self.clients, self.simulated_ttft_ms, share, self.equal_lengths)

    @property
    def has_warm_up(self) -> bool:
        return self.ttft_ms is not None and self.ttft_ms > max(WARM_UP_MS, WARM_UP_RATIO * self.simulated_ttft_ms)

    @property
    def first_token_ms(self) -> float | None:
        """The published time to the first token; None where it does not tell that of serving."""
        return None if self.has_warm_up else self.ttft_ms


def _request_log(row: Row) -> float | None:
    if row.first_token_ms is None:
        return None
    decoding = row.output - 1
    published = row.first_token_ms + decoding * row.tpot_ms
    return math.log(published / (row.simulated_ttft_ms + decoding * row.simulated_tpot_ms))


def _first_token_log(row: Row) -> float | None:
    return None if row.first_token_ms is None else math.log(row.first_token_ms / row.simulated_ttft_ms)


TIMES: Mapping[str, Callable[[Row], float | None]] = {
    TPOT: lambda row: math.log(row.tpot_ms / row.simulated_tpot_ms),
    TTFT: _first_token_log,
    REQUEST: _request_log,
}
"""What is fitted, by name: the logarithm of published / simulated; None for a point that does not tell it."""


def read_rows(path: Path = SERVING) -> list[Row]:
    """Return the rows of serving.csv."""
    rows = []
    for line in read_csv(path):
        place = Place(**{name: line[name] for name in Place._fields})
        data = int(place.parallel.split(" x ")[1].split(",")[0])
        rows.append(
            Row(
                place,
                line["kernels"],
                int(line["clients"]) / data / int(line["engines"]),
                int(line["output"]),
                float(line["ttft_ms"]) if line["ttft_ms"] else None,
                float(line["tpot_ms"]),
                float(line["simulated_ttft_ms"]),
                float(line["simulated_tpot_ms"]),
                line["source"] == "aiconfigurator",
            )
        )
    return rows


@dataclass(slots=True)
class Points:
    """The points of one fitted time, with their weights."""

    rows: list[Row]
    values: np.ndarray
    weights: np.ndarray
    cells: list[tuple[Place, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [(row.place, sum(row.clients > bound for bound in BANDS)) for row in self.rows]

    def observations(self, without: frozenset[int] = frozenset()) -> list[Observation]:
        """Return the observations of all points but those `without`: one per run and band of clients."""
        members: dict[tuple[Place, int], list[int]] = {}
        for i, cell in enumerate(self.cells):
            if i not in without:
                members.setdefault(cell, []).append(i)
        found = []
        for (place, _), inside in members.items():
            weights = self.weights[inside]
            slopes = {
                name: float(np.average([self.rows[i].slopes[name] for i in inside], weights=weights))
                for name in self.rows[0].slopes
            }
            found.append(
                Observation(
                    place, float(np.average(self.values[inside], weights=weights)), float(weights.sum()), slopes
                )
            )
        return found


class Fitted(NamedTuple):
    """The model of one time: its points, and the deviations of effects and noise."""

    points: Points
    deviations: dict[Term, float]
    noise: float


def terms_of(time: str) -> list[Term]:
    """Return the levels of a time's effects."""
    return [term for term in TERMS if term.slope in SLOPES[time]]


def points_of(rows: Sequence[Row], time: str) -> Points:
    """Return the points that tell a time, each with the weight 1."""
    values = [(row, TIMES[time](row)) for row in rows]
    told = [(row, value) for row, value in values if value is not None]
    return Points([row for row, _ in told], np.array([value for _, value in told]), np.ones(len(told)))


def fitted(points: Points, terms: Sequence[Term], rounds: int = 2) -> Fitted:
    """Fit the deviations, and the weights of points with a large residual."""
    for _ in range(rounds):
        observations = points.observations()
        deviations, noise = fit(observations, terms)
        posterior = Posterior(observations, deviations, noise)
        found = posterior.predict_all([(row.place, row.slopes) for row in points.rows])
        residuals = points.values - [each.mean for each in found]
        points.weights = (FREEDOM + 1) / (FREEDOM + (residuals / noise) ** 2)
    return Fitted(points, deviations, noise)


def left_out(model: Fitted, parts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted mean, and the deviation of its effects, of each point from all points that are not in its
    part."""
    points = model.points
    means, deviations = np.empty(len(points.rows)), np.empty(len(points.rows))
    for part in parts:
        posterior = Posterior(points.observations(frozenset(part)), model.deviations, model.noise)
        rows = [points.rows[i] for i in part]
        found = posterior.predict_all([(row.place._replace(run=""), row.slopes) for row in rows])  # of another run
        means[part], deviations[part] = [each.mean for each in found], [each.deviation for each in found]
    return means, deviations


def groups(points: Points) -> list[list[int]]:
    """Return the points of each whole group."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for i, row in enumerate(points.rows):
        members.setdefault(row.group, []).append(i)
    return list(members.values())


def random_parts(points: Points) -> list[list[int]]:
    """Return the points in ten random parts."""
    order = list(range(len(points.rows)))
    random.Random(0).shuffle(order)
    return [order[i::PARTS] for i in range(PARTS)]


# -- what is printed ---------------------------------------------------------------------------------------------------


def errors(model: Fitted, means: np.ndarray, chosen: np.ndarray) -> tuple[float, float]:
    """Return the mean absolute error and the bias of simulated / published − 1 of the chosen points."""
    relative = np.exp(means - model.points.values)[chosen] - 1
    return float(abs(relative).mean()), float(relative.mean())


def quantile_of(model: Fitted, means: np.ndarray, deviations: np.ndarray) -> float:
    """Return how many deviations cover LEVEL of the left out points on both sides, each group counted alike."""
    found = abs(model.points.values - means) / deviations
    weights = np.empty(len(found))
    for group in groups(model.points):
        weights[group] = 1 / math.sqrt(len(group))
    order = np.argsort(found)
    return float(found[order][np.searchsorted(np.cumsum(weights[order]) / weights.sum(), LEVEL)])


def interval_score(residuals: np.ndarray, half_widths: np.ndarray) -> float:
    """Return the mean interval score of intervals at LEVEL (Gneiting and Raftery 2007, in logarithms): their width, and
    2 / (1 − LEVEL) times what a point is outside."""
    return float((2 * half_widths + 2 / (1 - LEVEL) * np.maximum(0.0, abs(residuals) - half_widths)).mean())


@dataclass(frozen=True)
class Judged:
    """A model and its predictions of points that were left out: whole groups at once, and row by row."""

    model: Fitted
    whole: tuple[np.ndarray, np.ndarray]
    rows: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, model: Fitted) -> Judged:
        points = model.points
        return cls(model, left_out(model, groups(points)), left_out(model, random_parts(points)))

    @cached_property
    def spread(self) -> Spread:
        """The deviation of points around their predictions."""
        points = self.model.points
        places, slopes = [row.place for row in points.rows] * 2, [row.slopes for row in points.rows] * 2
        residuals = np.concatenate([points.values - means for means, _ in (self.whole, self.rows)])
        effects = np.concatenate([deviations for _, deviations in (self.whole, self.rows)])
        return fit_spread(places, slopes, effects, residuals, ("load", "equal"))

    def deviations(self, found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the deviation of each point."""
        rows = self.model.points.rows
        pairs = zip(rows, found[1], strict=True)
        return np.array([self.spread.deviation(row.place, row.slopes, effects) for row, effects in pairs])

    @cached_property
    def quantiles(self) -> list[float]:
        """How many deviations an interval has, for places without and with own points."""
        both = (self.whole, self.rows)
        return [round(quantile_of(self.model, found[0], self.deviations(found)), 3) for found in both]


def error_table(judged: Mapping[str, Judged]) -> Iterator[str]:
    """Yield a Markdown table of errors by time and server: as simulated, and corrected from what was left in."""
    yield "| time, server | points | as simulated: mean | bias | whole groups left out: mean | bias | rows left out: mean | bias |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, each in judged.items():
        servers = np.array([row.place.server for row in each.model.points.rows])
        for server in [*dict.fromkeys(servers), ""]:
            chosen = servers == server if server else np.ones(len(servers), bool)
            cells = [
                errors(each.model, means, chosen) for means in (np.zeros(len(servers)), each.whole[0], each.rows[0])
            ]
            text = " | ".join(f"{100 * value:.1f}" for cell in cells for value in cell)
            yield f"| {WORDS[name]}, {server or '**all**'} | {chosen.sum():,} | {text} |"


WORDS = {TPOT: "per output token", TTFT: "to the first token", REQUEST: "of a whole request"}


def interval_table(judged: Mapping[str, Judged]) -> Iterator[str]:
    """Yield a Markdown table of the 80 % intervals: coverage, width, and score against one constant width."""
    yield "| time | left out | covered | median half-width | score | constant width: around the prediction | the simulation |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, each in judged.items():
        values = each.model.points.values
        found = {"whole groups": each.whole, "rows": each.rows}
        parts = {
            words: (values, values - means[0], quantile * each.deviations(means))
            for (words, means), quantile in zip(found.items(), each.quantiles, strict=True)
        }
        parts["both"] = tuple(np.concatenate(column) for column in zip(*parts.values(), strict=True))
        for words, (simulated, residuals, half) in parts.items():
            score = interval_score(residuals, half)
            constant = [constant_score(around) for around in (residuals, simulated)]
            cells = " | ".join(f"{value:.3f} ({100 * (1 - score / value):+.0f} %)" for value in constant)
            covered, width = 100 * np.mean(abs(residuals) <= half), 100 * math.expm1(float(np.median(half)))
            yield f"| {WORDS[name]} | {words} | {covered:.0f} % | {width:.0f} % | {score:.3f} | {cells} |"


def constant_score(residuals: np.ndarray) -> float:
    """Return the score of the best interval of one width."""
    return min(interval_score(residuals, np.full(len(residuals), width)) for width in np.geomspace(0.02, 2, 200))


def release_table(judged: Judged) -> Iterator[str]:
    """Yield a Markdown table of the errors of times per output token by release, the oldest first."""
    points, found = judged.model.points, {}
    for i, row in enumerate(points.rows):
        release = ".".join(row.place.run.split(" ")[0].split(".")[:3]) if row.place.run[:1].isdigit() else ""
        is_day = not release or release[:2] == "20"
        found.setdefault((row.place.server, "not given" if is_day else release), []).append(i)
    yield "| profile | release | points | as simulated: mean | bias | corrected, rows left out: mean | bias |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for (server, release), places in sorted(found.items(), key=lambda item: (item[0][0], _order(item[0][1]))):
        chosen = np.zeros(len(points.rows), bool)
        chosen[places] = True
        cells = (errors(judged.model, means, chosen) for means in (np.zeros(len(chosen)), judged.rows[0]))
        text = " | ".join(f"{100 * value:.1f}" for cell in cells for value in cell)
        yield f"| {server} | {release} | {len(places):,} | {text} |"


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


# -- what is written ---------------------------------------------------------------------------------------------------


def effects_of(rows: Sequence[Row], judged: Mapping[str, Judged]) -> dict[str, object]:
    """Return the effects of one source of kernels as effects.json has them."""
    places = list(dict.fromkeys(row.place for row in rows))
    numbers = {place: i for i, place in enumerate(places)}
    times = {}
    for name, each in judged.items():
        model = each.model
        times[name] = {
            "noise": round(model.noise, 4),
            "spread": _rounded(asdict(each.spread)),
            "quantiles": each.quantiles,
            "deviations": [
                [list(term.fields), term.slope, round(deviation, 4)] for term, deviation in model.deviations.items()
            ],
            "observations": [
                [
                    numbers[item.place],
                    round(item.mean, 4),
                    round(item.count, 2),
                    *(round(v, 3) for v in item.slopes.values()),
                ]
                for item in model.points.observations()
            ],
        }
    return {"places": places, "counts": [sum(row.place == place for row in rows) for place in places], "times": times}


def _rounded(spread: dict[str, Any]) -> dict[str, Any]:
    changes = {name: round(value, 3) for name, value in spread["changes"].items()}
    return {"noise": round(spread["noise"], 4), "effects": round(spread["effects"], 3), "changes": changes}


def text_of(data: Mapping[str, object]) -> str:
    """Return the effects as JSON with one line for each list of the innermost lists."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("],[", "],\n[").replace('":{', '":\n{') + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write sim/cost/published/effects.json and the tables of docs/accuracy.md"
    )
    arguments = parser.parse_args()
    rows, kernels, tables = read_rows(), {}, {}
    for source in ("measured", "roofline"):
        own = [row for row in rows if row.kernels == source]
        judged = {name: Judged.of(fitted(points_of(own, name), terms_of(name))) for name in TIMES}
        for words, lines in (("errors", error_table(judged)), ("intervals", interval_table(judged))):
            tables[f"published: {source}, {words}"] = list(lines)
            print(
                f"\n{source} kernels, {len(own):,} points, {words}\n",
                *tables[f"published: {source}, {words}"],
                sep="\n",
            )
        if source == "measured":
            tables["published: releases"] = list(release_table(judged[TPOT]))
            print("", *tables["published: releases"], sep="\n")
        kernels[source] = effects_of(own, judged)
    if arguments.write:
        data = {"format": "foredraft-published-effects", "version": 1, "kernels": kernels}
        EFFECTS.write_text(text_of(data), encoding="utf-8")
        for name, lines in tables.items():
            write_block("accuracy.md", name, lines)


if __name__ == "__main__":
    main()
