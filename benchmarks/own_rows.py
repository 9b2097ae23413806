"""Judges what three benchmark rows of one's own give: `foredraft calibrate` fits them, and other rows of the same
deployment are predicted.

    python benchmarks/own_rows.py [--write]    (needs the extra measured; seconds)

A deployment is one model, GPU, server, format and parallelism. Of each with enough published points (serving.csv),
three are fitted as `sim/calibration` fits a profile: one of few, one of more and one of many clients. The others are
predicted. `--write` writes the table into docs/evidence/accuracy.md.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from accuracy_runs import MEASURED, Calibrated, Outcome
from foredraft.observe.distribution.install_hint import install_command
from pages import write_block
from points import read_csv
from serving_runs import SERVING
from silicon import served_points, silicon_file

OWN, PREDICTED = 3, 6
"""The rows of a deployment that are fitted, and the most that are predicted."""


class Judged(NamedTuple):
    """Errors (simulated / published − 1) of the predicted rows of one deployment, before and after the calibration."""

    server: str
    before: np.ndarray
    after: np.ndarray


def simulated_points(path: os.PathLike[str]) -> dict[tuple[str, ...], list[Outcome]]:
    """Return the points that were simulated with measured kernels, by deployment."""
    times = {
        (row["ttft_ms"], row["tpot_ms"]): float(row["simulated_tpot_ms"])
        for row in read_csv(SERVING)
        if row["kernels"] == MEASURED
    }
    found: dict[tuple[str, ...], list[Outcome]] = {}
    for item in served_points(path)[0]:
        ms = times.get((f"{item.point.ttft_ms:.5g}", f"{item.point.tpot_ms:.5g}"))
        if ms is not None and not item.engines:
            found.setdefault(item.deployment, []).append(Outcome(item.point, item.point.published_ms, ms))
    return found


def judged(rows: Sequence[Outcome]) -> Judged:
    """Calibrate with three rows, and predict some of the others."""
    by_clients = sorted(rows, key=lambda row: row.point.concurrency)
    own = [by_clients[place] for place in (0, len(rows) // 2, len(rows) - 1)]
    others = [row for row in by_clients if row not in own]
    others = random.Random(0).sample(others, min(PREDICTED, len(others)))
    ms = Calibrated.of(own)(others)
    published = np.array([row.published_ms for row in others])
    before = np.array([row.error for row in others])
    return Judged(rows[0].point.server, before, ms / published - 1)


def table(found: Sequence[Judged]) -> Iterator[str]:
    """Yield a Markdown table of the errors before and after, by server."""
    yield "| server | deployments | rows | as simulated: mean | bias | three rows of its own: mean | bias |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for server in [*dict.fromkeys(item.server for item in found), ""]:
        chosen = [item for item in found if server in ("", item.server)]
        columns = [np.concatenate([getattr(item, name) for item in chosen]) for name in ("before", "after")]
        cells = " | ".join(f"{100 * abs(values).mean():.1f} | {100 * values.mean():.1f}" for values in columns)
        yield f"| {server or '**all**'} | {len(chosen)} | {len(columns[0])} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/evidence/accuracy.md")
    arguments = parser.parse_args()
    path = silicon_file()
    if path is None:
        raise SystemExit(f"needs measured kernels: {install_command('measured')}")
    enough = [rows for rows in simulated_points(path).values() if len(rows) >= OWN + PREDICTED]
    lines = list(table([judged(rows) for rows in enough]))
    print(*lines, sep="\n")
    if arguments.write:
        write_block("evidence/accuracy.md", "published: own rows", lines)


if __name__ == "__main__":
    main()
