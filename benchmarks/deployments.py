"""Makes sim/cost/deployments.json, the table of published deployments, with the intervals that rest on them.

    python benchmarks/deployments.py [--write]    (seconds; --write also writes tables of docs/evidence/accuracy.md)

After prices have changed, `python benchmarks/serving_runs.py` and `python benchmarks/accuracy.py --rounds --write` come
first: they simulate the points of published/serving.csv and published/drafted.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from foredraft.sim.cost.deployments.evidence import DRAFTS, NOTHING, OTHERS, REQUEST, TABLE, TPOT, TTFT, Place
from intervals import ErrorRow, apart, classes, ends_of, error_table, own_rows, speed_ups
from pages import write_block
from points import read_rows

KERNELS = ("measured", "roofline")
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
        place = Place(**{name: line[name] for name in Place._fields[:-1]}, release=release.group() if release else "")
        group = place.model, place.gpu, place.server
        clients = 0 if int(line["engines"]) > 1 else int(line["clients"])
        is_fitted = (place.model, place.server) in fitted
        found.append(ErrorRow(place, line["run"], line["kernels"], group, is_fitted, logs(line), clients))
    for line in read_rows("drafted.csv"):
        if line["algorithm"] != "NONE":
            place = Place(**{name: line[name] for name in Place._fields[:-1]})
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


def deployments(rows: Sequence[ErrorRow]) -> Iterator[list[Any]]:
    """Yield the rows of the table: each run counts alike."""
    members: dict[tuple[Place, str, bool], list[ErrorRow]] = {}
    for row in rows:
        members.setdefault((row.place, row.kernels, DRAFTS in row.logs), []).append(row)
    for (place, kernels, drafts), own in sorted(members.items()):
        token, runs = DRAFTS if drafts else TPOT, list(dict.fromkeys(row.run for row in own))
        of = [
            [[row.logs[time] for row in own if row.run == run and time in row.logs] for run in runs]
            for time in (token, TTFT)
        ]
        mean, first = (
            np.mean([np.mean(each) for each in by_run if each]) if any(by_run) else math.nan for by_run in of
        )
        deviation = np.std([row.logs[token] for row in own])
        yield [
            *place,
            kernels,
            int(drafts),
            len(own),
            len(runs),
            *(None if np.isnan(x) else round(float(x), 3) for x in (mean, deviation, first)),
        ]


def judged(rows: Sequence[ErrorRow], kernels: str, surer: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the intervals of one source of kernels, and the lines of the page. `surer`: of the source that is never
    less sure where there is no benchmark. Rounds with drafts are never surer than plain ones."""
    own, times, lines = [row for row in rows if row.kernels == kernels], {}, []
    for time in WORDS:
        found, times[time] = classes(own, time), {}
        floors = [times[TPOT]] if time == DRAFTS else []
        if time == REQUEST:  # few runs tell both times
            floors = [{NOTHING: times[TPOT][NOTHING]}]
        if surer:
            floors.append({NOTHING: surer["times"][time][NOTHING]})
        for name, ends, covered in ends_of(found, floors):
            times[time][name] = ends
            count = f"{len(found[name].values):,} | {len(set(found[name].units))}"
            shown = f"{math.exp(ends[0]):.2f} to {math.exp(ends[1]):.2f}"
            lines.append(f"| {WORDS[time]}, {kernels} | {name} | {count} | {shown} | {100 * covered:.0f} % |")
    ratio = speed_ups(kernels)
    widths = {OTHERS: max(map(abs, ratio.ends())), NOTHING: ratio.worst()[1]}
    between = {time: apart(own, time) for time in (TPOT, TTFT, REQUEST)}
    if surer:
        widths = {name: max(width, surer["speed_ups"][name]) for name, width in widths.items()}
        between = {time: list(np.maximum(each, surer["apart"][time])) for time, each in between.items()}
    return {"times": times, "speed_ups": widths, "apart": between}, lines


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else round(float(value), 3)


def document(rows: Sequence[ErrorRow]) -> tuple[str, list[str]]:
    """Return the file, and the table of the page."""
    found: dict[str, Any] = {}
    lines = ["| time, kernels | known | points | units | 80 % of published / simulated | of left-out units |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for kernels in KERNELS:
        found[kernels], more = judged(rows, kernels, found.get(KERNELS[0], {}))
        lines += more
    data = {"format": "foredraft-deployments", "version": 1, "intervals": rounded(found)}
    text = json.dumps(data | {"deployments": list(deployments(rows))}, separators=(",", ":"))
    return text.replace('],["', '],\n["').replace('":{', '":\n{') + "\n", lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file and the table of the page")
    rows = rows_of_points()
    text, lines = document(rows)
    blocks = {"intervals": lines, "own rows": list(own_rows(rows, KERNELS[0]))}
    for kernels in KERNELS:
        blocks[f"{kernels}, errors"] = list(error_table([row for row in rows if row.kernels == kernels], WORDS))
    for name, block in blocks.items():
        print(f"\n{name}\n", *block, sep="\n")
    if parser.parse_args().write:
        TABLE.write_text(text, encoding="utf-8")
        for name, block in blocks.items():
            write_block("evidence/accuracy.md", f"published: {name}", block)


if __name__ == "__main__":
    main()
