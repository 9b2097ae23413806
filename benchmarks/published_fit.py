"""Says how far simulated times are from published ones, by what is known of a deployment, and writes the table of
published deployments that intervals rest on.

    python benchmarks/published_fit.py            prints the tables (seconds)
    python benchmarks/published_fit.py --write    and writes them into docs/evidence/accuracy.md, with
                                                  sim/cost/published/deployments.json

After prices have changed, `python benchmarks/serving_runs.py` and `python benchmarks/accuracy.py --rounds --write` come
first: they simulate the points of published/serving.csv and published/drafted.csv.

Errors are logarithms of published / simulated. None is of a point that a number was fitted to: points of models that
a server profile was fitted to are left out, and with drafts the profile was fitted without the point's model or draft
shape. What is known decides which points are one unit, and units count by the root of their size:

* own deployment: a release or a day was left out, and the others of its deployment tell the mean;
* same server and GPU: a unit has one model, GPU and server;
* same server: a unit has one server and GPU;
* nothing: the pair of a server and a GPU with the largest errors; for drafts, the data set with the largest.

Who knows less is never surer, and the roofline is never surer than measured kernels: the wider ends are taken.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from foredraft.sim.cost.published.evidence import DEPLOYMENTS, GPU, NOTHING, OWN, REQUEST, SERVER, SHARED, TPOT, TTFT
from foredraft.sim.cost.published.places import SharedPlace
from pages import write_block
from points import read_csv

PUBLISHED = Path(__file__).parent / "published"
WARM_UP_MS, WARM_UP_RATIO = 3000.0, 4.0
"""A first token that was later than this and than so many simulated times has the server's warm-up in it."""
LEVEL = 0.8
SOURCES = ("measured", "roofline")
Ends = tuple[float, float]


class Row(NamedTuple):
    """One published point and its simulation."""

    place: SharedPlace
    kernels: str  # "measured" or "roofline"
    output: int
    ttft_ms: float | None  # None: of a disaggregated run, whose simulation has no router and no transfers
    tpot_ms: float
    simulated_ttft_ms: float
    simulated_tpot_ms: float

    @property
    def deployment(self) -> SharedPlace:
        return self.place._replace(run="")

    @property
    def group(self) -> tuple[str, str, str]:
        """The model, GPU and server, which are left out at once."""
        return self.place.model, self.place.gpu, self.place.server

    @property
    def pair(self) -> tuple[str, str]:
        return self.place.server, self.place.gpu

    @property
    def first_token_ms(self) -> float | None:
        """The published time to the first token; None where it does not tell that of serving."""
        if self.ttft_ms is None or self.ttft_ms > max(WARM_UP_MS, WARM_UP_RATIO * self.simulated_ttft_ms):
            return None
        return self.ttft_ms


def _request_log(row: Row) -> float | None:
    if row.first_token_ms is None:
        return None
    decoding = row.output - 1
    published = row.first_token_ms + decoding * row.tpot_ms
    return math.log(published / (row.simulated_ttft_ms + decoding * row.simulated_tpot_ms))


TIMES: Mapping[str, Callable[[Row], float | None]] = {
    TPOT: lambda row: math.log(row.tpot_ms / row.simulated_tpot_ms),
    TTFT: lambda row: None if row.first_token_ms is None else math.log(row.first_token_ms / row.simulated_ttft_ms),
    REQUEST: _request_log,
}
"""The logarithm of published / simulated, by the name of the time; None for a point that does not tell it."""
WORDS = {TPOT: "per output token", TTFT: "to the first token", REQUEST: "of a whole request"}


def read_rows() -> list[Row]:
    """Return the rows of serving.csv."""
    return [
        Row(
            SharedPlace(**{name: line[name] for name in SharedPlace._fields}),
            line["kernels"],
            int(line["output"]),
            float(line["ttft_ms"]) if line["ttft_ms"] else None,
            *(float(line[name]) for name in ("tpot_ms", "simulated_ttft_ms", "simulated_tpot_ms")),
        )
        for line in read_csv(PUBLISHED / "serving.csv")
    ]


def fitted_models(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Return the models and servers of points that a server's profile was fitted to: those that plain.csv has, too."""
    fitted = {
        (line["server"], float(line["tpot_ms"]), float(line["ttft_ms"])) for line in read_csv(PUBLISHED / "plain.csv")
    }
    return {
        (row.place.model, row.place.server) for row in rows if (row.place.server, row.tpot_ms, row.ttft_ms) in fitted
    }


class Errors(NamedTuple):
    """Logarithms of published / simulated, and the unit of each: units count by the root of their size."""

    values: np.ndarray
    units: list[Hashable]

    @classmethod
    def of(cls, found: Iterable[tuple[float, Hashable]]) -> Errors:
        pairs = list(found)
        return cls(np.array([value for value, _ in pairs]), [unit for _, unit in pairs])

    def quantile(self, share: float, *, absolute: bool = False) -> float:
        """Return a quantile of the values, or of their size."""
        values = abs(self.values) if absolute else self.values
        sizes: dict[Hashable, int] = {}
        for unit in self.units:
            sizes[unit] = sizes.get(unit, 0) + 1
        weights, order = np.array([sizes[unit] ** -0.5 for unit in self.units]), np.argsort(values)
        place = np.searchsorted(np.cumsum(weights[order]) / weights.sum(), share)
        return float(values[order][min(place, len(order) - 1)])

    @property
    def ends(self) -> Ends:
        """The quantiles between which LEVEL of the values lie."""
        return self.quantile((1 - LEVEL) / 2), self.quantile((1 + LEVEL) / 2)

    @property
    def worst(self) -> float:
        """The LEVEL quantile of the sizes in the unit where it is largest."""
        parts = {unit: [v for v, of in zip(self.values, self.units, strict=True) if of == unit] for unit in self.units}
        return max(float(np.quantile(np.abs(values), LEVEL)) for values in parts.values())


def wider(*ends: Ends) -> Ends:
    return min(low for low, _ in ends), max(high for _, high in ends)


def own_errors(known: Sequence[tuple[Row, float]]) -> Errors:
    """Return the errors of runs that were left out, around the mean of the others of their deployment."""
    runs: dict[SharedPlace, dict[str, list[float]]] = {}
    for row, value in known:
        runs.setdefault(row.deployment, {}).setdefault(row.place.run, []).append(value)
    found = []
    for deployment, by_run in runs.items():
        means = {run: float(np.mean(values)) for run, values in by_run.items()}
        for run, values in by_run.items():
            if others := [mean for other, mean in means.items() if other != run]:
                found += [(value - float(np.mean(others)), deployment) for value in values]
    return Errors.of(found)


def classes_of(rows: Sequence[Row], time: str, fitted: set[tuple[str, str]]) -> dict[str, Errors]:
    """Return the errors of a time by what is known."""
    known = [(row, value) for row in rows if (value := TIMES[time](row)) is not None]
    unseen = [(row, value) for row, value in known if (row.place.model, row.place.server) not in fitted]
    return {
        OWN: own_errors(known),
        GPU: Errors.of((value, row.group) for row, value in unseen),
        SERVER: Errors.of((value, row.pair) for row, value in unseen),
    }


def ends_of(classes: Mapping[str, Errors]) -> dict[str, Ends]:
    """Return the ends by what is known, wider with each step down."""
    found: dict[str, Ends] = {}
    least: Ends = (0.0, 0.0)
    for name, errors in classes.items():
        found[name] = least = wider(least, errors.ends)
    worst = classes[SERVER].worst
    return found | {NOTHING: wider(least, (-worst, worst))}


def means_of(rows: Sequence[Row]) -> Iterator[tuple[SharedPlace, int, list[str], dict[str, float]]]:
    """Yield each deployment with its number of points, its first and last release, and its mean errors by time: every
    run counts alike."""
    members: dict[SharedPlace, list[Row]] = {}
    for row in rows:
        members.setdefault(row.deployment, []).append(row)
    for deployment, own in members.items():
        means = {}
        for time, log in TIMES.items():
            by_run: dict[str, list[float]] = {}
            for row in own:
                if (value := log(row)) is not None:
                    by_run.setdefault(row.place.run, []).append(value)
            if by_run:
                means[time] = float(np.mean([np.mean(values) for values in by_run.values()]))
        named = {run.split(" ")[0] for row in own if re.match(r"\d{1,3}\.\d", run := row.place.run)}
        order = sorted(named, key=lambda run: tuple(map(int, re.findall(r"\d+", run))))
        yield deployment, len(own), [*dict.fromkeys((*order[:1], *order[-1:]))], means


def apart_of(known: Sequence[tuple[SharedPlace, Mapping[str, float]]], time: str) -> list[float]:
    """Return by what two deployments share how far apart their mean errors are, each pair of deployments alike."""
    found: dict[int, list[float]] = {}
    for (one, means), (other, others) in combinations([item for item in known if time in item[1]], 2):
        level = next(
            i for i, names in enumerate(SHARED) if all(getattr(one, name) == getattr(other, name) for name in names)
        )
        found.setdefault(level, []).append(abs(means[time] - others[time]))
    widths = [float(np.quantile(found[level], LEVEL)) if level in found else 0.0 for level in range(len(SHARED))]
    return list(np.maximum.accumulate(widths))


# -- speculation -------------------------------------------------------------------------------------------------------


def drafted_errors(kernels: str) -> tuple[Errors, Errors, list[tuple[SharedPlace, int]]]:
    """Return the errors of times per output token with drafts and of speed-ups, each with its data set, and the number
    of points of each deployment."""
    lines = [line for line in read_csv(PUBLISHED / "drafted.csv") if line["kernels"] == kernels]
    plain = {(line["dataset"], line["text"]): _log(line) for line in lines if line["algorithm"] == "NONE"}
    drafted = [line for line in lines if line["algorithm"] != "NONE"]
    counts: dict[SharedPlace, int] = {}
    for line in drafted:
        place = SharedPlace(**{name: line[name] for name in SharedPlace._fields})
        counts[place] = counts.get(place, 0) + 1
    times = Errors.of((_log(line), line["dataset"]) for line in drafted)
    speed_ups = ((plain[line["dataset"], line["text"]] - _log(line), line["dataset"]) for line in drafted)
    return times, Errors.of(speed_ups), list(counts.items())


def _log(line: Mapping[str, str]) -> float:
    return math.log(float(line["published_ms"]) / float(line["simulated_ms"]))


# -- what is printed and written ---------------------------------------------------------------------------------------


def error_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table of errors (simulated / published − 1) by time and server: as simulated, and with the
    factor of the other runs of the deployment."""
    yield "| time, server | points | as simulated: mean | bias | with other runs | corrected by these: mean | bias |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for time in TIMES:
        for server in [*dict.fromkeys(row.place.server for row in rows), ""]:
            known = [
                (row, value)
                for row in rows
                if server in ("", row.place.server) and (value := TIMES[time](row)) is not None
            ]
            own = own_errors(known)
            plain, corrected = (np.expm1(-values) for values in (np.array([v for _, v in known]), own.values))
            cells = [
                f"{100 * abs(each).mean():.1f} | {100 * each.mean():.1f}" if len(each) else "– | –"
                for each in (plain, corrected)
            ]
            yield f"| {WORDS[time]}, {server or '**all**'} | {len(known):,} | {cells[0]} | {len(own.values):,} | {cells[1]} |"


def interval_table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the 80 % intervals, and how many of the points that were left out they have."""
    yield "| time, kernels | known | points | units | 80 % of published / simulated | covered |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kernels, each in found.items():
        for time, classes in each["classes"].items():
            for name, ends in each["times"][time].items():
                yield f"| {WORDS[time]}, {kernels} | {name} | {_cells(classes.get(name), ends)} |"
        for name, ends in each["drafts"].items():
            errors = each["drafted"] if name == GPU else None
            yield f"| per output token with drafts, {kernels} | {name} | {_cells(errors, ends)} |"
        for name, width in each["speed_ups"].items():
            errors = each["speed_up_errors"] if name == GPU else None
            yield f"| speed-up, {kernels} | {name} | {_cells(errors, (-width, width))} |"


def _cells(errors: Errors | None, ends: Ends) -> str:
    """Return the cells of a row. An interval always contains what was simulated."""
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    interval = f"{math.exp(low):.2f} to {math.exp(high):.2f}"
    if errors is None:
        return f"– | – | {interval} | –"
    covered = np.mean((errors.values >= low) & (errors.values <= high))
    return f"{len(errors.values):,} | {len(set(errors.units))} | {interval} | {100 * covered:.0f} %"


def release_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table of the errors of times per output token by release, the oldest first."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        release = ".".join(row.place.run.split(" ")[0].split(".")[:3]) if row.place.run[:1].isdigit() else ""
        is_day = not release or release[:2] == "20"
        found.setdefault((row.place.server, "not given" if is_day else release), []).append(TIMES[TPOT](row) or 0.0)
    yield "| profile | release | points | as simulated: mean | bias |"
    yield "| --- | --- | --- | --- | --- |"
    for (server, release), values in sorted(found.items(), key=lambda item: (item[0][0], _order(item[0][1]))):
        errors = np.expm1(-np.array(values))
        yield f"| {server} | {release} | {len(values):,} | {100 * abs(errors).mean():.1f} | {100 * errors.mean():.1f} |"


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


def judged(
    rows: Sequence[Row], kernels: str, fitted: set[tuple[str, str]], surer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return all that is known of simulations with one source of kernels. `surer`: the same of the source that is never
    less sure."""
    classes = {time: classes_of(rows, time, fitted) for time in TIMES}
    times = {time: ends_of(each) for time, each in classes.items()}
    times[REQUEST][NOTHING] = wider(times[REQUEST][NOTHING], times[TPOT][NOTHING])  # few runs tell both
    drafted, speed_ups, counts = drafted_errors(kernels)
    worst = drafted.worst
    drafts = {GPU: drafted.ends, NOTHING: wider(drafted.ends, (-worst, worst))}
    widths = {GPU: speed_ups.quantile(LEVEL, absolute=True), NOTHING: speed_ups.worst}
    known = list(means_of(rows))
    apart = {time: apart_of([(place, means) for place, _, _, means in known], time) for time in TIMES}
    if surer is not None:
        times = {
            time: {name: wider(ends, surer["times"][time][name]) for name, ends in times[time].items()}
            for time in times
        }
        drafts = {name: wider(ends, surer["drafts"][name]) for name, ends in drafts.items()}
        widths = {name: max(width, surer["speed_ups"][name]) for name, width in widths.items()}
        apart = {time: list(np.maximum(each, surer["apart"][time])) for time, each in apart.items()}
    deployments = [[[*place[:-1]], 0, points, releases, _rounded(means)] for place, points, releases, means in known]
    deployments += [[[*place[:-1]], 1, points, [], {}] for place, points in counts]
    return {
        "classes": classes, "drafted": drafted, "speed_up_errors": speed_ups,
        "deployments": deployments, "times": times, "drafts": drafts, "speed_ups": widths, "apart": apart,
    }  # fmt: skip


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(float(value), 3)


def text_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the package ships, with one line for each deployment."""
    names = ("times", "drafts", "speed_ups", "apart")
    kernels = {
        source: {"deployments": each["deployments"]} | {name: _rounded(each[name]) for name in names}
        for source, each in found.items()
    }
    data = {"format": "foredraft-published-errors", "version": 1, "kernels": kernels}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("],[[", "],\n[[").replace('":{', '":\n{') + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write deployments.json and the tables of docs/evidence/accuracy.md"
    )
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    tables = {}
    rows = read_rows()
    fitted = fitted_models(rows)
    for source in SOURCES:
        own = [row for row in rows if row.kernels == source]
        found[source] = judged(own, source, fitted, found.get(SOURCES[0]))
        tables[f"published: {source}, errors"] = list(error_table(own))
        if source == SOURCES[0]:
            tables["published: releases"] = list(release_table(own))
    tables["published: intervals"] = list(interval_table(found))
    for name, lines in tables.items():
        print(f"\n{name}\n", *lines, sep="\n")
    if arguments.write:
        DEPLOYMENTS.write_text(text_of(found), encoding="utf-8")
        for name, lines in tables.items():
            write_block("evidence/accuracy.md", name, lines)


if __name__ == "__main__":
    main()
