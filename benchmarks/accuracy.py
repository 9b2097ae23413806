"""Simulates every published point and writes the tables of docs/evidence/accuracy.md: `make accuracy`.

    python benchmarks/accuracy.py [--every N] [--rounds] [--workers N]

Each point of `benchmarks/published/` is a scenario that the library simulates, once with every column: the roofline,
measured kernels, and measured kernels with a profile fitted without the point's model or draft shape
(`published/left_out.csv`). A fourth column is what `foredraft calibrate` adds: the fit to all other points of the same
data set. Results are kept in the cache folder until the sources change, so a run that was stopped goes on. `--every N`
takes each N-th point of plain.csv and leaves the page alone, unless `--write` is given, and then the page says so.
`--rounds` makes the tables of speculation alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from accuracy_runs import (
    MEASURED,
    OTHERS,
    ROOFLINE,
    ROOFLINE_OTHERS,
    AccuracyJob,
    PointOutcome,
    arms_table,
    batches_table,
    failure_text,
    mean_size,
    outcomes,
    percent,
    resting_table,
    simulate_all,
    speedups_table,
    summary_lines,
    tails_table,
)
from fit_expert_independence import distinct_experts, published_counts
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ForedraftError
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.deployments.evidence import Place, place_of
from foredraft.sim.cost.hardware import Parallelism
from foredraft.sim.cost.passes.tokens import EXPERT_INDEPENDENCE
from foredraft.sim.scenario_file import scenario_from_dict
from pages import write_block, write_row
from points import Point, plain_points, read_rows, round_points

DRAFTED = Path(__file__).parent / "published" / "drafted.csv"
QUEUED_MS = 5_000
"""Where the first token takes longer on average, requests wait for memory, or for what settings that were not
published allow."""
VERIFIED_MODEL, VERIFIED_NODES = "deepseek-v4-flash", 4  # 256 requests had 1,024 tokens
GRAPHS = (1, 2, 4, *range(8, 1025, 8))
BEYOND_GRAPHS = 2048


def error_table(table: Mapping[str, list[PointOutcome]], group_of: Callable[[Point], str], head: str) -> Iterator[str]:
    """Yield a Markdown table: of each group the points, by column the mean absolute error and the bias, and the last
    column's worst row."""
    names = " | ".join(f"{column}: mean | bias" for column in table)
    yield f"| {head} | points | {names} | worst row ({list(table)[-1]}) |"
    yield f"| --- | --- |{' --- | --- |' * len(table)} --- |"
    groups = list(dict.fromkeys(group_of(outcome.point) for outcome in next(iter(table.values()))))
    for group in [*groups, None]:
        cells, worst = [], ""
        for rows in table.values():
            chosen = [row for row in rows if group in (None, group_of(row.point))]
            priced = [row for row in chosen if row.ms is not None]
            found = [row.error for row in priced]
            cells += [percent(found, mean_size), percent(found, statistics.fmean)]
            if priced:
                row = max(priced, key=lambda item: abs(item.error))
                worst = f"{100 * row.error:+.0f} %: {place(row.point)}"
            elif chosen:
                worst = f"not simulated: {chosen[0].failure}"
        yield f"| {group or '**all**'} | {len(chosen)} | {' | '.join(cells)} | {worst} |"


def place(point: Point) -> str:
    """Return what tells a point from the others of its data set."""
    rest = f"{point.shape}, {point.text}" if point.text else f"{point.prompt}/{point.output}"
    return f"TP {point.tensor_parallel}, {point.concurrency} clients, {rest}"


def counted(plain: Mapping[str, list[PointOutcome]], rounds: Mapping[str, list[PointOutcome]]) -> str:
    """Return the numbers of points of the summary's lines as a sentence."""
    speculative = [row.point.steps > 0 for row in next(iter(rounds.values()))]
    queued = [row.point.ttft_ms >= QUEUED_MS for row in next(iter(plain.values()))]
    others = len(queued) - sum(queued) + len(speculative) - sum(speculative)
    return (
        f"{len(queued) + len(speculative)} points: {others} plain ones whose requests do not queue, "
        f"{sum(queued)} whose requests queue, and {sum(speculative)} with speculation"
    )


def summary_table(plain: Mapping[str, list[PointOutcome]], rounds: Mapping[str, list[PointOutcome]]) -> Iterator[str]:
    """Yield a Markdown table of the mean absolute errors over all points that could be simulated."""
    yield f"| mean absolute error, % | {' | '.join(plain)} |"
    yield f"| --- |{' --- |' * len(plain)}"
    alone = {column: [row for row in rows if not row.point.steps] for column, rows in rounds.items()}
    served = {column: [row for row in rows if row.point.ttft_ms < QUEUED_MS] for column, rows in plain.items()}
    queued = {column: [row for row in rows if row.point.ttft_ms >= QUEUED_MS] for column, rows in plain.items()}
    lines: dict[str, Callable[[str], str]] = {
        "plain: time per output token": lambda c: percent(_errors([*served[c], *alone[c]]), mean_size),
        "plain: time to first token": lambda c: percent(_ttft_errors(served[c]), mean_size),
        "plain, requests that queue: time per output token": lambda c: percent(_errors(queued[c]), mean_size),
        "plain, requests that queue: time to first token": lambda c: percent(_ttft_errors(queued[c]), mean_size),
        "plain, requests that queue: time of a request": lambda c: percent(_request_errors(queued[c]), mean_size),
    }
    for name, cell in lines.items():
        yield f"| {name} | {' | '.join(cell(column) or '–' for column in plain)} |"
    yield from summary_lines(rounds)


def write_drafted(workers: int) -> None:
    """Write published/drafted.csv, which deployments.py reads: the points of rounds.csv with and without drafts, as
    simulated with profiles that were fitted without their models and draft shapes."""
    columns = {ROOFLINE: ROOFLINE_OTHERS, MEASURED: OTHERS}
    found = outcomes([AccuracyJob(point, column) for point in round_points() for column in columns.values()], workers)
    with DRAFTED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("kernels", "dataset", "text", "algorithm", "draft", "shape", "published_ms", "simulated_ms")
        writer.writerow([*Place._fields[:-1], "run", *names])
        for kernels, column in columns.items():
            for point in round_points():
                result = found[AccuracyJob(point, column)]
                if "failure" in result:
                    continue
                run = assemble(scenario_from_dict(point.scenario(ROOFLINE), point.dataset))
                parallel = Parallelism(point.tensor_parallel)
                where = place_of(run.target, point.gpu, point.server, parallel)
                cells = (point.dataset, point.text, point.algorithm, point.draft, point.shape)
                writer.writerow([*where, kernels, *cells, f"{point.published_ms:.5g}", f"{result['ms']:.5g}"])


def experts_table() -> Iterator[str]:
    """Yield a Markdown table of the experts that several tokens of a request reach."""
    yield "| tokens of a request | experts | distinct: published | simulated | error |"
    yield "| --- | --- | --- | --- | --- |"
    for count in published_counts():
        ours = distinct_experts(*count[:3], EXPERT_INDEPENDENCE)
        cells = f"{count.distinct:.1f} | {ours:.1f} | {100 * (ours / count.distinct - 1):+.1f} %"
        yield f"| {count.tokens} | {count.per_token} of {count.experts} | {cells} |"


def passes_table() -> Iterator[str]:
    """Yield a Markdown table of verify passes by their tokens, with the time of their launch."""
    yield "| model, GPU | tokens | published, ms | roofline | measured |"
    yield "| --- | --- | --- | --- | --- |"
    for row in read_rows("verify_times.csv"):
        name = f"{row['model']}, {row['gpu']}, TP {row['tensor_parallel']}"
        if row["model"] != VERIFIED_MODEL:
            yield f"| {name} | {row['tokens']} | {row['verify_ms']} | not in the catalogue | |"
            continue
        cells = []
        for kernels in (ROOFLINE, MEASURED):
            try:
                ours = _verify_ms(int(row["tokens"] or BEYOND_GRAPHS), row["gpu"], int(row["tensor_parallel"]), kernels)
                cells.append(f"{ours:.1f} ({100 * (ours / float(row['verify_ms']) - 1):+.0f} %)")
            except ForedraftError as error:
                cells.append(failure_text(error))
        tokens = row["tokens"] or f"{BEYOND_GRAPHS:,} (assumption), not captured"
        yield f"| {name} | {tokens} | {row['verify_ms']} | {' | '.join(cells)} |"


def _verify_ms(tokens: int, gpu: str, tensor_parallel: int, kernels: str) -> float:
    """Return what the target takes of a round, for requests of VERIFIED_NODES tokens each."""
    scenario = {
        "model": {"target": f"deepseek-ai/{VERIFIED_MODEL}"},
        "hardware": {
            "gpu": gpu,
            "tensor_parallel": tensor_parallel,
            "server": "vllm-0.18",
            "kernels": kernels,
            "graph_sizes": [*GRAPHS],
        },
        "engine": {"kv_slots": 1 << 20, "max_running": 1024},
        "speculation": {"algorithm": "EAGLE3", "policy": "fixed", "steps": VERIFIED_NODES - 1},
    }
    rows, nodes = (tokens // VERIFIED_NODES, VERIFIED_NODES) if tokens >= VERIFIED_NODES else (tokens, 1)
    cost = assemble(scenario_from_dict(scenario, "verify")).cost
    parts = cost.decode_parts(rows, RoundShape.chain(nodes - 1), rows * 1024)
    return sum(ns for name, ns in parts.items() if not name.startswith("draft")) / 1e6


def _errors(rows: Iterable[PointOutcome]) -> list[float]:
    return [row.error for row in rows if row.ms is not None]


def _ttft_errors(rows: Iterable[PointOutcome]) -> list[float]:
    return [row.ttft_ms / row.point.ttft_ms - 1 for row in rows if row.ttft_ms is not None]


def _request_errors(rows: Iterable[PointOutcome]) -> list[float]:
    def whole(point: Point, first_ms: float, token_ms: float) -> float:
        return first_ms + (point.mean(point.output) - 1) * token_ms

    priced = [row for row in rows if row.ttft_ms is not None]
    return [
        whole(row.point, row.ttft_ms, row.ms) / whole(row.point, row.point.ttft_ms, row.published_ms) - 1
        for row in priced
    ]


def not_simulated(table: Mapping[str, list[PointOutcome]]) -> Iterator[str]:
    """Yield a line for each reason for which points could not be simulated."""
    for column, rows in table.items():
        reasons: dict[str, int] = {}
        for row in rows:
            if row.failure:
                reason = f"{row.point.dataset}: {row.failure}"
                reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in reasons.items():
            yield f"* {column}, {count} points. {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="take each N-th point of plain.csv, and only print")
    parser.add_argument("--rounds", action="store_true", help="make the tables of speculation alone")
    parser.add_argument("--write", action="store_true", help="write the page from these points")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one per CPU")
    arguments = parser.parse_args()
    columns = [ROOFLINE, MEASURED, OTHERS]
    if find_spec("aiconfigurator_core") is None:
        print(
            f"The columns 'measured' and 'left out' need measured kernels: {install_command('measured')}",
            file=sys.stderr,
        )
        columns = [ROOFLINE]
    rounds = simulate_all(round_points(), columns, arguments.workers)
    blocks = {
        "batches": list(batches_table(rounds)),
        "rounds": list(error_table(rounds, _round_group, "data set, draft")),
        "arms": list(arms_table(rounds)),
        "speedups": list(speedups_table(columns)),
        "resting": list(resting_table()),
        "tails": list(tails_table()),
    }
    if not arguments.rounds:
        plain = simulate_all(plain_points()[:: arguments.every], columns, arguments.workers)
        part = "" if arguments.every == 1 else f"; of plain.csv every {arguments.every}th point alone"
        blocks |= {
            "summary": [f"{counted(plain, rounds)}{part}.", "", *summary_table(plain, rounds)],
            "plain": list(error_table(plain, _plain_group, "model, GPU, server, tensor parallelism")),
            "clients": list(error_table(plain, _clients_group, "clients")),
            "experts": list(experts_table()),
            "passes": list(passes_table()),
            "not simulated": list(not_simulated(plain)) + list(not_simulated(rounds)),
        }
    for name, lines in blocks.items():
        print(f"\n{name}\n", *lines, sep="\n")
    if (arguments.every == 1 or arguments.write) and len(columns) > 1:
        for name, lines in blocks.items():
            write_block("evidence/accuracy.md", f"accuracy: {name}", lines)
        write_drafted(arguments.workers)
        if arguments.rounds:
            for row in summary_lines(rounds):
                write_row("evidence/accuracy.md", row)


def _plain_group(point: Point) -> str:
    return f"{point.dataset}, TP {point.tensor_parallel}"


def _clients_group(point: Point) -> str:
    low = 1 << (point.concurrency.bit_length() - 1)
    return f"{low} … {2 * low - 1}"


def _round_group(point: Point) -> str:
    return f"{point.dataset}, {point.algorithm} {point.shape}" if point.steps else f"{point.dataset}, plain"


if __name__ == "__main__":
    main()
