"""Simulates every published point, judges the simulations and writes docs/evidence/accuracy.md: `make accuracy`.

    python benchmarks/accuracy.py [--kept] [--by FIELD] [--workers N]   (the extra measured; minutes)

`simulated.py` simulates the points of `published/`; with `--kept` the times that stand there are judged. Written are
the tables of the page and sim/cost/deployments/deployments.json, which has by model, format, GPU, server, parallelism,
release and kind of round the mean and deviation of log(published / simulated), and 80 % intervals by what is known of a
deployment. After prices have changed, all of it is made anew. `--by model` prints the errors of each model instead, as
they are kept; other fields are gpu, server, number_format, parallel, release, run and clients.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.calibration.fit import LEAST_POINTS, NOISE, SPREADS, LinearFit
from foredraft.sim.cost.calibration import DRAFTS_FACTOR, DRAFTS_SLOPE, ROUND_FACTOR, ROUND_SLOPE
from foredraft.sim.cost.deployments.evidence import DRAFTS, NOTHING, OTHERS, OWN, REQUEST, TABLE, TPOT, TTFT, Place
from intervals import Ends, ErrorRow, Errors, apart, classes, own_rows, speed_ups, wider
from pages import write_block
from points import read_rows
from silicon import served_points, silicon_file
from simulated import KERNELS, PLACE, specbundle_points, write_drafted, write_serving, write_speedups, write_unseen

PAGE = "evidence/accuracy.md"
WARM_UP_MS, WARM_UP_RATIO = 3000.0, 4.0
"""A first token that was later than this and than so many simulated times has the server's warm-up in it."""
WORDS = {TPOT: "per output token", TTFT: "to the first token", REQUEST: "of a whole request", DRAFTS: "with drafts"}


def rows_of_points() -> list[ErrorRow]:
    plain = {(row["server"], float(row["tpot_ms"]), float(row["ttft_ms"])) for row in read_rows("plain.csv")}
    lines, found = read_rows("serving.csv"), []
    fitted = {(line["model"], line["server"]) for line in lines if line["ttft_ms"]
              and (line["server"], float(line["tpot_ms"]), float(line["ttft_ms"])) in plain}  # fmt: skip
    for line in lines:
        release = re.match(r"\d{1,3}\.\d+\.\d+", line["run"])
        place = Place(**{name: line[name] for name in PLACE}, release=release.group() if release else "")
        group = place.model, place.gpu, place.server
        clients = 0 if int(line["engines"]) > 1 else int(line["clients"])
        is_fitted = (place.model, place.server) in fitted
        found.append(ErrorRow(place, line["run"], line["kernels"], group, is_fitted, logs(line), clients))
    for line in read_rows("drafted.csv"):
        if line["algorithm"] != "NONE":
            place = Place(**{name: line[name] for name in PLACE})
            log = {DRAFTS: math.log(float(line["published_ms"]) / float(line["simulated_ms"]))}
            found.append(ErrorRow(place, line["text"], line["kernels"], line["dataset"], False, log))
    return found


def logs(line: Mapping[str, str]) -> dict[str, float]:
    first, token, simulated, simulated_token = (
        float(line[name] or "nan") for name in ("ttft_ms", "tpot_ms", "simulated_ttft_ms", "simulated_tpot_ms")
    )
    found = {TPOT: math.log(token / simulated_token)}
    if first <= max(WARM_UP_MS, WARM_UP_RATIO * simulated):
        decoding = int(line["output"]) - 1
        whole = (first + decoding * token) / (simulated + decoding * simulated_token)
        found |= {TTFT: math.log(first / simulated), REQUEST: math.log(whole)}
    return found


# -- what the package ships --------------------------------------------------------------------------------------------


def deployments(rows: Sequence[ErrorRow]) -> Iterator[list[Any]]:
    """Yield the rows of the table: each run counts alike."""
    members: dict[tuple[Place, str, bool], list[ErrorRow]] = {}
    for row in rows:
        members.setdefault((row.place, row.kernels, DRAFTS in row.logs), []).append(row)
    for (place, kernels, drafts), own in sorted(members.items()):
        token, runs = DRAFTS if drafts else TPOT, dict.fromkeys(row.run for row in own)
        mean = np.mean([np.mean([row.logs[token] for row in own if row.run == run]) for run in runs])
        deviation = np.std([row.logs[token] for row in own])
        counts = int(drafts), len(own), len(runs)
        yield [*place, kernels, *counts, round(float(mean), 3), round(float(deviation), 3)]


def judged(rows: Sequence[ErrorRow], kernels: str, surer: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the intervals of one source of kernels, and the lines of the page. `surer`: of the source that is never
    less sure where there is no benchmark. Each class is as wide as those before it, and one of a deployment's own
    points that earns nothing against one width is left out."""
    own, times, lines = [row for row in rows if row.kernels == kernels], {}, []
    for time in WORDS:
        found, least = classes(own, time), (0.0, 0.0)
        nothing, times[time] = found.pop(NOTHING, None), {}
        for name, each in found.items():
            held, score = each.judge([least])
            one_width = each.score_with(found[OTHERS])
            if name == OTHERS or score < one_width:
                times[time][name] = least = each.ends([least])
            ends = times[time].get(name)
            counts = f"{len(each.items):,} | {len({item.unit for item in each.items})}"
            cells = f"{_shown(ends)} | {100 * held:.0f} %" if ends else "earns nothing | "
            scores = f"{score:.2f} | {'' if name == OTHERS else f'{one_width:.2f}'}"
            lines.append(f"| {WORDS[time]}, {kernels} | {name} | {counts} | {cells} | {scores} |")
        if nothing is not None:  # few runs tell both times
            floors = [least, *([times[TPOT][NOTHING]] if time == REQUEST else [])]
            floors += [surer["times"][time][NOTHING]] if surer else []
            times[time][NOTHING] = wider(nothing.worst(), *floors)
    ratio = speed_ups([row for row in read_rows("drafted.csv") if row["kernels"] == kernels])
    both = Errors([item._replace(value=side * item.value) for item in ratio.items for side in (-1, 1)])
    widths = {OTHERS: both.ends()[1], NOTHING: both.worst()[1]}
    between = {time: apart(own, time) for time in (TPOT, TTFT, REQUEST)}
    if surer:
        widths = {name: max(width, surer["speed_ups"][name]) for name, width in widths.items()}
        between = {time: list(np.maximum(each, surer["apart"][time])) for time, each in between.items()}
    width, held = widths[OTHERS], both.judge([])[0]
    counts = f"{len(ratio.items)} | {len({item.unit for item in ratio.items})}"
    lines.append(
        f"| speed-up by drafts, {kernels} | {OTHERS} | {counts} | {_shown((-width, width))} | {100 * held:.0f} % | | |"
    )
    return {"times": times, "speed_ups": widths, "apart": between}, lines


def _shown(ends: Ends) -> str:
    return f"{math.exp(ends[0]):.2f} to {math.exp(ends[1]):.2f}"


def magnitudes(rows: Sequence[ErrorRow]) -> Iterator[str]:
    """Yield what the page says of scenarios without a benchmark, and how many points of servers on a GPU that were left
    out their intervals hold."""
    for kernels, found in json.loads(TABLE.read_text(encoding="utf-8"))["intervals"].items():
        own = [row for row in rows if row.kernels == kernels]
        for time in (TPOT, TTFT, REQUEST):
            low, high = found["times"][time][NOTHING]
            held = np.mean([low <= value <= high for value in classes(own, time)[NOTHING].values])
            yield f"* {WORDS[time]}, {kernels}: {_shown((low, high))}, {100 * held:.0f} % of points"


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else round(float(value), 3)


def document(rows: Sequence[ErrorRow]) -> tuple[str, list[str]]:
    """Return the file, and the page's table of intervals."""
    found: dict[str, Any] = {}
    lines = ["| time, kernels | known | points | units | 80 % of published / simulated | of left-out units | score "
             "| score of one width |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for kernels in KERNELS:
        found[kernels], more = judged(rows, kernels, found.get(KERNELS[0], {}))
        lines += more
    data = {"format": "foredraft-deployments", "version": 1, "intervals": rounded(found)}
    text = json.dumps(data | {"deployments": list(deployments(rows))}, separators=(",", ":"))
    return text.replace('],["', '],\n["').replace('":{', '":\n{') + "\n", lines


# -- errors ------------------------------------------------------------------------------------------------------------


def _of(found: Sequence[float] | np.ndarray) -> str:
    """Return cells of errors (simulated / published − 1): their number, mean size and mean, in percent."""
    values = 100 * np.asarray(found)
    return f"{len(values):,} | {abs(values).mean():.1f} | {values.mean():+.1f}" if len(values) else "– | – | –"


def error_table(rows: Sequence[ErrorRow]) -> Iterator[str]:
    """Yield the page's table: errors by time and by what was left out."""
    yield f"| time | left out |{''.join(f' {kernels}: points | mean | bias |' for kernels in KERNELS)}"
    yield f"| --- | --- |{' --- | --- | --- |' * len(KERNELS)}"
    by = [[row for row in rows if row.kernels == kernels] for kernels in KERNELS]

    def line(time: str, what: str, cells: Sequence[Sequence[float] | np.ndarray]) -> str:
        return f"| {time} | {what} | {' | '.join(map(_of, cells))} |"

    for time in (TPOT, TTFT, REQUEST):
        for what, is_fitted in (("nothing: a model of the fit", True), ("the model and its GPU", False)):
            known = [[row.logs[time] for row in own if time in row.logs and row.is_fitted == is_fitted] for own in by]
            yield line(WORDS[time], what, [np.expm1(-np.array(values)) for values in known])
        if time == TPOT:
            corrected = [[item.value for item in classes(own, time)[OWN].items] for own in by]
            yield line(WORDS[time], "its run, `--correct` by the others", [np.expm1(-np.array(x)) for x in corrected])
            yield line(WORDS[time], "all but three, `calibrate`", [own_rows(own)[1] for own in by])
    drafted = [[row.logs[DRAFTS] for row in own if DRAFTS in row.logs] for own in by]
    yield line(WORDS[DRAFTS], "the model or draft shape", [np.expm1(-np.array(values)) for values in drafted])
    lines = read_rows("drafted.csv")
    of = [speed_ups([row for row in lines if row["kernels"] == kernels]).values for kernels in KERNELS]
    yield line("speed-up by drafts", "the model or draft shape", [np.expm1(-values) for values in of])
    late = read_rows("speedups.csv")
    clients = f"{late[0]['concurrency']} to {late[-1]['concurrency']} clients"
    ratios = [[float(row[kernels]) / float(row["speedup"]) - 1 for row in late] for kernels in KERNELS]
    yield line(f"speed-up by drafts, {clients}", "nothing", ratios)
    unseen = read_rows("unseen.csv")
    for dataset in dict.fromkeys(row["dataset"] for row in unseen):
        own = [row for row in unseen if row["dataset"] == dataset]
        by_source = [np.array([unseen_log(row, kernels) for row in own]) for kernels in KERNELS]
        yield line(f"with drafts, {dataset}", "the whole set", [np.expm1(values) for values in by_source])
        if len(own) > LEAST_POINTS:
            fitted = [np.expm1(_without_own(own, values)) for values in by_source]
            yield line(f"with drafts, {dataset}", "the point, `calibrate` by the others", fitted)


def unseen_log(row: Mapping[str, str], kernels: str) -> float:
    """Return the logarithm of simulated over published time per output token of a row of unseen.csv."""
    published = float(row["tpot_ms"] or 1e3 * int(row["concurrency"]) / float(row["tokens_per_s"]))
    return math.log(float(row[kernels]) / published)


def _without_own(rows: Sequence[Mapping[str, str]], values: np.ndarray) -> np.ndarray:
    """Return what is left of logarithms by factors and slopes that were fitted without each row, as `calibrate` has
    them."""
    power = np.log([int(row["concurrency"]) for row in rows])
    power -= power.mean()
    drafts = np.array([float(row["algorithm"] != "NONE") for row in rows])
    slopes = np.c_[np.ones(len(rows)), power, drafts, drafts * power]
    spreads = np.array([SPREADS[name] for name in (ROUND_FACTOR, ROUND_SLOPE, DRAFTS_FACTOR, DRAFTS_SLOPE)])
    noise = np.full(len(rows), NOISE["mean_tpot_ms"])
    return LinearFit(values, slopes, noise, np.zeros(4), spreads).left_out(range(len(rows)))


def print_errors(rows: Sequence[ErrorRow], field: str) -> None:
    """Print the errors of each value of a field of the points."""
    for kernels in KERNELS:
        for time in WORDS:
            found: dict[str, list[float]] = {}
            for row in (row for row in rows if row.kernels == kernels and time in row.logs):
                value = getattr(row.place, field) if field in Place._fields else getattr(row, field)
                found.setdefault(f"{value}", []).append(math.expm1(-row.logs[time]))
            print(f"\n| {field} | {WORDS[time]}, {kernels}: points | mean | bias |\n| --- | --- | --- | --- |")
            for value, errors in sorted(found.items(), key=lambda each: -len(each[1])):
                print(f"| {value} | {_of(errors)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="simulate nothing: judge the times of published/")
    parser.add_argument("--by", choices=[*Place._fields, "run", "clients"], help="print errors by this, write nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one per CPU")
    arguments = parser.parse_args()
    if arguments.by:
        print_errors(rows_of_points(), arguments.by)
        return
    if not arguments.kept:
        path = silicon_file()
        if path is None:
            raise SystemExit(f"needs measured kernels: {install_command('measured')}")
        write_serving([*served_points(path)[0], *specbundle_points()], arguments.workers)
        write_drafted(arguments.workers)
        write_speedups()
        write_unseen(arguments.workers)
        print(f"{sum(os.times()[:4]):,.0f} CPU seconds", file=sys.stderr)
    rows = rows_of_points()
    text, lines = document(rows)
    TABLE.write_text(text, encoding="utf-8")
    blocks = {"errors": list(error_table(rows)), "intervals": lines, "order of magnitude": list(magnitudes(rows))}
    for name, block in blocks.items():
        print(f"\n{name}\n", *block, sep="\n")
        write_block(PAGE, f"accuracy: {name}", block)


if __name__ == "__main__":
    main()
