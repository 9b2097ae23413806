"""Simulates every published point and writes the tables of docs/accuracy.md: `make accuracy`.

    python benchmarks/accuracy.py [--every N] [--workers N]

Each point of `benchmarks/published/` is a scenario that the library simulates, once with every column: the roofline,
measured kernels, and measured kernels with a profile fitted without the point's model or draft shape
(`published/left_out.csv`). A fourth column is what `foredraft calibrate` adds: the fit to all other points of the same
data set. Results are kept in the cache folder until the sources change, so a run that was stopped goes on. `--every N`
takes each N-th point of plain.csv and leaves the page alone, unless `--write` is given, and then the page says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from accuracy_runs import MEASURED, OTHERS, ROOFLINE, Outcome, failure_text, simulate_all
from fit_expert_independence import distinct_experts, published_counts
from foredraft.core.errors import ForedraftError
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.forward import EXPERT_INDEPENDENCE
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.simulation import run_scenario
from pages import write_block
from points import Point, plain_points, read_rows, round_points

QUEUED_MS = 5_000
"""Where the first token takes longer on average, requests wait for memory, or for what settings that were not
published allow."""
VERIFIED_MODEL, VERIFIED_NODES = "deepseek-v4-flash", 4  # 256 requests had 1,024 tokens
GRAPHS = (1, 2, 4, *range(8, 1025, 8))
BEYOND_GRAPHS = 2048
SMALL = 0.02  # speed-ups nearer to 1 have no sign that a benchmark could tell


def percent(values: Iterable[float], of: Callable[[Iterable[float]], float]) -> str:
    values = list(values)
    return f"{100 * of(values):.1f}" if values else ""


def mean_size(values: Sequence[float]) -> float:
    return statistics.fmean(map(abs, values))


def error_table(table: Mapping[str, list[Outcome]], group_of: Callable[[Point], str], head: str) -> Iterator[str]:
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


@dataclass(frozen=True, slots=True)
class Arms:
    """The settings of one text and one draft that were measured side by side:
    rates in tokens per second of a client."""

    name: str
    published: Mapping[str, float]  # shape -> rate
    simulated: Mapping[str, float]

    @property
    def speedup_errors(self) -> list[float]:
        """Of each speculative setting: simulated / published speed-up over plain − 1."""
        return [
            self._speedup(self.simulated, shape) / self._speedup(self.published, shape) - 1 for shape in self.shapes
        ]

    @property
    def signs_right(self) -> list[bool]:
        """Whether each setting that is clearly faster or slower than plain is so in the simulation."""
        found = [(self._speedup(self.published, shape), self._speedup(self.simulated, shape)) for shape in self.shapes]
        return [(real > 1) == (ours > 1) for real, ours in found if abs(real - 1) > SMALL]

    @property
    def regret(self) -> float:
        """How much slower the setting that is simulated as the fastest really is than the fastest."""
        chosen = max(self.simulated, key=self.simulated.__getitem__)
        return 1 - self.published[chosen] / max(self.published.values())

    @property
    def shapes(self) -> list[str]:
        return [shape for shape in self.published if shape != "plain"]

    @staticmethod
    def _speedup(rates: Mapping[str, float], shape: str) -> float:
        return rates[shape] / rates["plain"]


def arms(rows: Sequence[Outcome]) -> list[Arms]:
    """Group speculative rows by data set, text, algorithm and draft, each with the plain row of its text."""
    found = []
    keys = dict.fromkeys(
        (r.point.dataset, r.point.text, r.point.algorithm, r.point.draft) for r in rows if r.point.steps
    )
    for dataset, text, algorithm, draft in keys:
        ours = [
            row
            for row in rows
            if (row.point.dataset, row.point.text) == (dataset, text)
            and (not row.point.steps or (row.point.algorithm, row.point.draft) == (algorithm, draft))
        ]
        if all(row.ms for row in ours):
            name = f"{dataset}, {text}, {algorithm}, {draft}"
            found.append(
                Arms(name, *({r.point.shape: 1 / getattr(r, time) for r in ours} for time in ("published_ms", "ms")))
            )
    return found


def arms_table(table: Mapping[str, list[Outcome]]) -> Iterator[str]:
    """Yield a Markdown table of speed-ups and choices by data set and column."""
    yield "| data set | times of passes | arms | speed-up: mean error | bias | sign right | regret: mean | worst |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    by_column = {column: arms(rows) for column, rows in table.items()}
    datasets = dict.fromkeys(row.point.dataset for row in next(iter(table.values())))
    for dataset in [*datasets, ""]:
        for column, every in by_column.items():
            chosen = [item for item in every if item.name.startswith(dataset)]
            errors = [error for item in chosen for error in item.speedup_errors]
            signs = [sign for item in chosen for sign in item.signs_right]
            regrets = [item.regret for item in chosen]
            cells = (
                percent(errors, mean_size),
                percent(errors, statistics.fmean),
                f"{sum(signs)} of {len(signs)}",
                percent(regrets, statistics.fmean),
                percent(regrets, max),
            )
            yield f"| {dataset or '**all**'} | {column} | {len(errors)} | {' | '.join(cells)} |"


def counted(plain: Mapping[str, list[Outcome]], rounds: Mapping[str, list[Outcome]]) -> str:
    """Return the numbers of points of the summary's lines as a sentence."""
    speculative = [row.point.steps > 0 for row in next(iter(rounds.values()))]
    queued = [row.point.ttft_ms >= QUEUED_MS for row in next(iter(plain.values()))]
    others = len(queued) - sum(queued) + len(speculative) - sum(speculative)
    return (
        f"{len(queued) + len(speculative)} points: {others} plain ones whose requests do not queue, "
        f"{sum(queued)} whose requests queue, and {sum(speculative)} with speculation"
    )


def summary_table(plain: Mapping[str, list[Outcome]], rounds: Mapping[str, list[Outcome]]) -> Iterator[str]:
    """Yield a Markdown table of the mean absolute errors over all points that could be simulated."""
    yield f"| mean absolute error, % | {' | '.join(plain)} |"
    yield f"| --- |{' --- |' * len(plain)}"
    spec = {column: [row for row in rows if row.point.steps] for column, rows in rounds.items()}
    alone = {column: [row for row in rows if not row.point.steps] for column, rows in rounds.items()}
    served = {column: [row for row in rows if row.point.ttft_ms < QUEUED_MS] for column, rows in plain.items()}
    queued = {column: [row for row in rows if row.point.ttft_ms >= QUEUED_MS] for column, rows in plain.items()}
    lines: dict[str, Callable[[str], str]] = {
        "plain: time per output token": lambda c: percent(_errors([*served[c], *alone[c]]), mean_size),
        "plain: time to first token": lambda c: percent(_ttft_errors(served[c]), mean_size),
        "plain, requests that queue: time per output token": lambda c: percent(_errors(queued[c]), mean_size),
        "plain, requests that queue: time to first token": lambda c: percent(_ttft_errors(queued[c]), mean_size),
        "plain, requests that queue: time of a request": lambda c: percent(_request_errors(queued[c]), mean_size),
        "speculation: tokens per second": lambda c: percent([1 / (1 + e) - 1 for e in _errors(spec[c])], mean_size),
        "speculation: speed-up over plain": lambda c: percent(
            [e for item in arms(rounds[c]) for e in item.speedup_errors], mean_size
        ),
        "regret of the chosen setting": lambda c: percent([item.regret for item in arms(rounds[c])], statistics.fmean),
    }
    for name, cell in lines.items():
        yield f"| {name} | {' | '.join(cell(column) or '–' for column in plain)} |"


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
    parts = cost.decode_parts(rows, nodes - 1, 1, nodes, rows * 1024)
    return sum(ns for name, ns in parts.items() if not name.startswith("draft")) / 1e6


def tails_table() -> Iterator[str]:
    """Yield a Markdown table of how far the slowest requests are from the mean, for acceptance as drafts have it and
    for independent draws.

    What was served where was not published: ours is Llama-3.1-8B on one H100, and the ratios are to be compared.
    """
    yield "| acceptance | TPOT, p99 / mean: published | simulated | TTFT, p99 / mean: published | simulated |"
    yield "| --- | --- | --- | --- | --- |"
    for row, correlation in zip(
        read_rows("acceptance_tails.csv"), ({}, {"request_share": 0.0, "field_share": 0.0}), strict=True
    ):
        clients, requests = int(row["clients"]), int(row["requests"])
        prompt, output = (round(int(row[name]) / requests) for name in ("prompt_tokens", "output_tokens"))
        scenario = {
            "hardware": {"server": "vllm-0.18", "kernels": ROOFLINE},
            "acceptance": correlation,
            "workload": {
                "concurrency": clients,
                "num_requests": requests,
                "prompt": {"kind": "uniform", "low": 1, "high": 2 * prompt},
                "output": {"kind": "fixed", "value": output},
            },
        }
        summary = run_scenario(scenario, {}).summary
        cells = [row["acceptance"]]
        for name in ("tpot", "ttft"):
            published, ours = (
                float(row[f"p99_{name}_ms"]) / float(row[f"mean_{name}_ms"]),
                summary[f"p99_{name}_ms"] / summary[f"mean_{name}_ms"],
            )
            cells += [f"{published:.2f}", f"{ours:.2f}"]
        yield f"| {' | '.join(cells)} |"


def _errors(rows: Iterable[Outcome]) -> list[float]:
    return [row.error for row in rows if row.ms is not None]


def _ttft_errors(rows: Iterable[Outcome]) -> list[float]:
    return [row.ttft_ms / row.point.ttft_ms - 1 for row in rows if row.ttft_ms is not None]


def _request_errors(rows: Iterable[Outcome]) -> list[float]:
    def whole(point: Point, first_ms: float, token_ms: float) -> float:
        return first_ms + (point.mean(point.output) - 1) * token_ms

    priced = [row for row in rows if row.ttft_ms is not None]
    return [
        whole(row.point, row.ttft_ms, row.ms) / whole(row.point, row.point.ttft_ms, row.published_ms) - 1
        for row in priced
    ]


def not_simulated(table: Mapping[str, list[Outcome]]) -> Iterator[str]:
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
    plain = simulate_all(plain_points()[:: arguments.every], columns, arguments.workers)
    rounds = simulate_all(round_points(), columns, arguments.workers)
    part = "" if arguments.every == 1 else f"; of plain.csv every {arguments.every}th point alone"
    blocks = {
        "summary": [f"{counted(plain, rounds)}{part}.", "", *summary_table(plain, rounds)],
        "plain": list(error_table(plain, _plain_group, "model, GPU, server, tensor parallelism")),
        "clients": list(error_table(plain, _clients_group, "clients")),
        "rounds": list(error_table(rounds, _round_group, "data set, draft")),
        "arms": list(arms_table(rounds)),
        "experts": list(experts_table()),
        "passes": list(passes_table()),
        "tails": list(tails_table()),
        "not simulated": list(not_simulated(plain)) + list(not_simulated(rounds)),
    }
    for name, lines in blocks.items():
        print(f"\n{name}\n", *lines, sep="\n")
    if (arguments.every == 1 or arguments.write) and len(columns) > 1:
        for name, lines in blocks.items():
            write_block("accuracy.md", f"accuracy: {name}", lines)


def _plain_group(point: Point) -> str:
    return f"{point.dataset}, TP {point.tensor_parallel}"


def _clients_group(point: Point) -> str:
    low = 1 << (point.concurrency.bit_length() - 1)
    return f"{low} … {2 * low - 1}"


def _round_group(point: Point) -> str:
    return f"{point.dataset}, {point.algorithm} {point.shape}" if point.steps else f"{point.dataset}, plain"


if __name__ == "__main__":
    main()
