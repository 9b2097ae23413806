"""The table of `foretoken bench`, with lines above and below it for the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...gpu.bench.plan import BenchPlan
    from ...gpu.bench.run import ArmResult, Machine

MIB = 1 << 20
TABLE_WIDTH = 160  # no table is wider; a narrow terminal wraps the lines instead of cutting them


def show(plan: BenchPlan, machine: Machine | None, results: Sequence[ArmResult]) -> None:
    """Print the table on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    if machine is None or not results:
        console.print("no cell is finished", markup=False)
        return
    for line in heading(plan, machine):
        console.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    titles, rows = table_cells(results)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    previous = None
    for result, row in zip(results, rows, strict=True):
        cell = (result.batch_size, result.context_len)
        if previous not in (None, cell):
            table.add_section()
        previous = cell
        table.add_row(*row)
    console.print(table)
    for line in footing(plan, results):
        console.print(line, markup=False)


def table_cells(results: Sequence[ArmResult]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and a row per result, without columns that no result has."""
    has_graphs = any("graph" in result.shares for result in results)
    has_idle = any(result.idle_share is not None for result in results)
    phases = ["draft", "verify"] + ["graph"] * has_graphs + ["host", "other"]
    titles = [
        "batch",
        "context",
        "steps",
        "nodes",
        "tokens/s",
        "per req.",
        "accept",
        "speed-up",
        "range",
        "ms/round",
        *phases,
    ]
    titles += ["floor", *(["idle"] * has_idle), "prefill/s"]
    rows = []
    for result in results:
        shares = {**result.shares, "other": result.shares["other"] + result.shares.get("relay", 0.0)}
        row = [
            f"{result.batch_size}",
            f"{result.context_len}",
            f"{result.steps}" if result.steps else "plain",
            f"{result.num_nodes}",
            f"{result.tokens_per_s:,.1f}",
            f"{result.tokens_per_s_request:,.1f}",
            f"{result.accept_length:.2f}",
            f"{result.speedup:.2f}×",
            f"{min(result.speedups):.2f}–{max(result.speedups):.2f}" if result.steps else "",
            f"{result.round_ms:.3f}",
            *(_percent(shares.get(phase)) for phase in phases),
            _percent(result.floor_share),
        ]
        row += [_percent(result.idle_share)] if has_idle else []
        rows.append([*row, f"{result.prefill_tokens_per_s:,.0f}"])
    return titles, rows


def heading(plan: BenchPlan, machine: Machine) -> list[str]:
    """Return the lines that name model, device and mode."""
    from ...gpu.bench.plan import in_units

    weights = f"{in_units(machine.target_bytes)} of weights"
    draft = f", draft {in_units(machine.draft_bytes)}" if machine.draft_bytes else ""
    random = " with random weights" if plan.options.model is None else ""
    threads = f", {machine.num_threads} threads" if plan.device == "cpu" else ""
    dtype = str(plan.dtype).removeprefix("torch.")
    return [
        f"{plan.name}{random}, {plan.algorithm.name}, {dtype}: {weights}{draft}",
        f"{machine.device_name}{threads}, {plan.spec.config.mode}: memory copies at {machine.copy_bytes_per_s / 1e9:,.1f} GB/s",
    ]


def footing(plan: BenchPlan, results: Sequence[ArmResult]) -> list[str]:
    """Return the lines about all cells: simulated acceptance, equal outputs, CUDA graphs."""
    from ...gpu.bench.report import graph_costs, plan_sizes

    lines = []
    if plan.acceptance is not None:
        lines.append(
            f"acceptance is simulated ({plan.acceptance_name}): the kernels do all the work, the texts mean nothing"
        )
    plain_ms = {(r.batch_size, r.context_len): r.round_ms for r in results if not r.steps}
    for result in results:
        cell = (result.batch_size, result.context_len)
        if result.steps and result.speedup > result.accept_length:
            lines.append(
                f"batch {cell[0]}, context {cell[1]}, {result.steps} steps: {result.speedup:.2f}× is more than the accept length "
                f"{result.accept_length:.2f} gives: a round takes {result.round_ms:.3f} ms, less than the {plain_ms[cell]:.3f} ms of a "
                "plain step, though it reads the same weights for more rows. The plain step is slow, or other work disturbed it"
            )
    compared = [result for result in results if result.equal_outputs is not None and result.steps]
    if compared:
        equal = sum(result.equal_outputs for result in compared)
        total = sum(plan.num_prompts(result.batch_size) for result in compared)
        lines.append(f"outputs equal to plain decoding's: {equal:,} of {total:,}")
    costs = graph_costs([capture for result in results for capture in result.captures], plan_sizes(plan))
    if costs is not None:
        lines.append(
            f"CUDA graphs: {costs.num_captured} captured in {costs.seconds:.2f} s, {costs.num_bytes / MIB:.1f} MiB; a server "
            f"with adaptive steps would capture {costs.adaptive_num} of {costs.adaptive_num_unpruned} at these batch sizes: "
            f"{costs.adaptive_seconds:.2f} of {costs.adaptive_seconds_unpruned:.2f} s, "
            f"{costs.adaptive_bytes / MIB:.1f} of {costs.adaptive_bytes_unpruned / MIB:.1f} MiB"
        )
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"
