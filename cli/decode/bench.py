"""`foredraft bench`: time decoding with and without a draft, for each batch size."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import ConfigError, count_of
from ..options import in_panel, mode_of, option, print_document
from ..terminal import EXIT_INTERRUPTED
from .options import (
    OPTIONAL_MODEL,
    SESSION,
    AsJson,
    Quiet,
    engine_option,
    model_option,
    problems_name_options,
    session_parameter,
    speculation_option,
    tree_nodes,
    with_session_options,
)
from .twin import compare_with_simulation, with_twin_options

if TYPE_CHECKING:
    from rich.console import Console

    from ...gpu.measure.plan import BenchOptions, BenchPlan
    from ...gpu.measure.run import ArmResult, Machine
    from ..progress import StatusLine


MIB = 1 << 20
TABLE_WIDTH = 160  # no table is wider; a narrow terminal wraps the lines instead of cutting them


def show(plan: BenchPlan, machine: Machine | None, results: Sequence[ArmResult]) -> None:
    """Print the table on standard output."""
    from rich.console import Console

    from ...gpu.measure.report import other_rows, result_rows

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    if machine is None or not results:
        console.print("no cell is finished", markup=False)
        return
    for line in heading(plan, machine):
        console.print(line, markup=False)
    print_rows(console, result_rows(results))
    if others := other_rows(plan, results):
        print_rows(console, others)
    for line in footing(plan, results):
        console.print(line, markup=False)


def print_rows(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table whose columns are the keys of the rows, with a line between two cells."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in rows[0]:
        table.add_column(title, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        cell = (row["batch"], row["context"])
        if previous not in (None, cell):
            table.add_section()
        previous = cell
        table.add_row(*row.values())
    console.print(table)


def heading(plan: BenchPlan, machine: Machine) -> list[str]:
    """Return the lines that name model, device and mode."""
    from ...gpu.measure.plan import in_units

    weights = f"{in_units(machine.target_bytes)} of weights"
    draft = f", draft {in_units(machine.draft_bytes)}" if machine.draft_bytes else ""
    random = " with random weights" if plan.options.model is None else ""
    threads = f", {machine.num_threads} threads" if plan.device == "cpu" else ""
    dtype = str(plan.dtype).removeprefix("torch.")
    ops = "" if plan.options.ops == "auto" else f", operations {plan.options.ops}"
    return [
        f"{plan.name}{random}, {plan.algorithm.name}, {dtype}: {weights}{draft}",
        f"{machine.device_name}{threads}{ops}, {plan.spec.config.mode}: memory copies at {machine.copy_bytes_per_s / 1e9:,.1f} GB/s",
    ]


def footing(plan: BenchPlan, results: Sequence[ArmResult]) -> list[str]:
    """Return the lines about all cells: simulated acceptance, equal outputs, CUDA graphs."""
    from ...gpu.measure.report import graph_costs, plan_sizes

    lines = []
    if plan.acceptance is not None:
        lines.append(
            f"acceptance is simulated ({plan.acceptance_name}): the kernels do all the work, the texts are meaningless"
        )
    plain_ms = {(r.batch_size, r.context_len): r.round_ms for r in results if not r.steps}
    for result in results:
        cell = (result.batch_size, result.context_len)
        if result.steps and result.speedup > result.accept_length:
            lines.append(
                f"batch {cell[0]}, context {cell[1]}, {count_of(result.steps, 'step')}: the speed-up {result.speedup:.2f}× is more than "
                f"the accept length {result.accept_length:.2f} allows. A round takes {result.round_ms:.3f} ms, less than the "
                f"{plain_ms[cell]:.3f} ms of a plain step, though it reads the same weights for more rows. Either the "
                "plain step is slow, or other work disturbed it"
            )
    compared = [result for result in results if result.equal_outputs is not None and result.steps]
    if compared:
        equal = sum(result.equal_outputs or 0 for result in compared)
        total = sum(plan.num_prompts(result.batch_size) for result in compared)
        lines.append(f"outputs equal to those of plain decoding: {equal:,} of {total:,}")
    problems = {one.name: one.problem for result in results for one in result.others if one.problem}
    lines += [f"{name} is not compared with: {problem}" for name, problem in problems.items()]
    costs = graph_costs([capture for result in results for capture in result.captures], plan_sizes(plan))
    if costs is not None:
        lines.append(
            f"CUDA graphs: {costs.num_captured} captured in {costs.seconds:.2f} s, {costs.num_bytes / MIB:.1f} MiB; a server "
            f"with adaptive steps would capture {costs.adaptive_num} of {costs.adaptive_num_unpruned} at these batch sizes: "
            f"{costs.adaptive_seconds:.2f} of {costs.adaptive_seconds_unpruned:.2f} s, "
            f"{costs.adaptive_bytes / MIB:.1f} of {costs.adaptive_bytes_unpruned / MIB:.1f} MiB"
        )
    return lines


def _refuse_policy(given: str | None) -> None:
    if given is not None:
        message = (
            "a cell has one batch, which is over long before a policy has learned, and each row of the table has one "
            "number of steps; `foredraft generate --policy` decodes with a policy, and benchmarks/timing/hybrid.py "
            "times confidence"
        )
        raise ConfigError.of("--policy", "", message)


cells_option = in_panel("Cells")

# fmt: off
RandomWeights = Annotated[str | None, model_option("--random-weights",
    "Time a model's shape without its checkpoint: llama-3.1-8b, qwen3-8b, … or a config.json. Acceptance is simulated.",
    "NAME|CONFIG")]
Acceptance = Annotated[str | None, speculation_option("--acceptance",
    "Simulate acceptance by a mean length (3.0), a kind of text (chat, code, math, edit), a preset, or probabilities "
    "by position (0.7,0.65).",
    "MEAN|PRESET|P,P,…")]
BatchSizes = Annotated[str, cells_option("--batch-sizes", "Requests decoded together.", "N,N,…")]
ContextLengths = Annotated[str, cells_option("--context-lengths", "Tokens of each prompt.", "N,N,…")]
OutputTokens = Annotated[int, cells_option("--output-tokens",
    "Tokens of each output; end-of-text tokens do not end it.")]
Prompts = Annotated[int, cells_option("--prompts",
    "Prompts of each cell, decoded batch by batch; a cell has at least one batch.")]
Repeat = Annotated[int, cells_option("--repeat", "Runs of each cell; the table has their median.")]
Processes = Annotated[int, cells_option("--processes",
    "Repeat everything in this number of processes, one after another; print medians and ranges over them.", min=1)]
Against = Annotated[str | None, cells_option("--against",
    "Other engines that decode the same requests plainly, in turns with these: transformers, ctranslate2; one that is "
    "not installed is named.",
    "ENGINE,…")]
Graphs = Annotated[bool | None, engine_option("--graphs/--no-graphs",
    "Run whole rounds as CUDA graphs. Default: on a GPU only.")]
Seed = Annotated[int, engine_option("--seed", "Seed of prompts, random weights and simulated acceptance.")]
Estimate = Annotated[str | None, option("--estimate",
    "Time nothing: print launches, bytes and expected times of a round on this GPU, part by part.", "GPU")]
Twin = Annotated[bool, option("--twin",
    "Run a workload on the executor, and the same one in the simulator; print both side by side.")]
NoPolicy = Annotated[str | None, option("--policy", "Refused, with the reason.", hidden=True, callback=_refuse_policy)]
Warm = Annotated[bool, option("--warm",
    "Time nothing: compile the kernels of the cells on this GPU, so that the next run of them begins at once.")]
# fmt: on
OWN = {  # options of a session of which a benchmark says more
    "model": OPTIONAL_MODEL,
    "draft": session_parameter(
        "draft", " With --random-weights: the shape of a STANDALONE draft, a name or a config.json."
    ),
    "algorithm": session_parameter("algorithm", " With random weights: EAGLE3."),
    "steps": session_parameter(
        "steps",
        kind=str | None,
        text="Draft steps to compare; the command always adds 0. Default: 1,3,5.",
        metavar="S,S,…",
    ),
}
# What cells decide, and what a benchmark keeps as it is, is no option of it.
SHARED = SESSION.keys() - {
    *("adaptive", "policy", "round_times", "confidence_temperatures"),
    *("accept_rule", "max_running", "context_len", "kv_tokens", "window_kv", "debug"),
}

_MODELS = {"model", "draft", "dtype", "seed", "as_json", "quiet"}
_ROUNDS = {"random_weights", "quantized", "kv_dtype", "algorithm", "steps", "topk", "num_draft_tokens", "acceptance"}
_CELLS = {"batch_sizes", "context_lengths", "output_tokens", "page_size", "tensor_parallel"}
_DEVICE = {"device", "threads"}
MODES = {
    "--estimate": _MODELS | _ROUNDS | _CELLS,
    "--twin": _MODELS | _DEVICE | {"repeat"},
    "--warm": _MODELS | _ROUNDS | _CELLS | _DEVICE | {"graphs", "overlap", "ops"},
}


@problems_name_options
@with_twin_options
@with_session_options(*SHARED, **OWN)
def bench(
    ctx: typer.Context, twin: Mapping[str, Any], session: Mapping[str, Any], random_weights: RandomWeights = None,
    acceptance: Acceptance = None, batch_sizes: BatchSizes = "1,8,32", context_lengths: ContextLengths = "128,1024",
    output_tokens: OutputTokens = 128, prompts: Prompts = 4, repeat: Repeat = 3, processes: Processes = 1,
    against: Against = None, graphs: Graphs = None, seed: Seed = 0, estimate: Estimate = None, is_twin: Twin = False, is_warm: Warm = False,
    as_json: AsJson = False, quiet: Quiet = False, no_policy: NoPolicy = None,
) -> None:  # fmt: skip
    """Time decoding: batch sizes × context lengths × draft steps, each against plain decoding.

    In each cell all step counts take turns with plain decoding in this process.
    The command measures decoding while the batch is full: from the last prefill
    to the end of the first request. Prefill has its own column.

        foredraft bench --model models/target --draft models/eagle3
        foredraft bench --model models/target --draft models/eagle3 --topk 4 \\
            --num-draft-tokens 16 --steps 2,3,5 --json > bench.json
        foredraft bench --random-weights llama-3.1-8b --acceptance 3.0 --steps 4
        foredraft bench --random-weights llama-3.1-8b --algorithm STANDALONE \\
            --draft llama-3.2-1b --acceptance code
        foredraft bench --random-weights smollm2-135m --algorithm NGRAM --steps 3 \\
            --device cpu --threads 1 --against transformers,ctranslate2
        foredraft bench --twin --model models/target --draft models/eagle3 \\
            --loads knee
        foredraft bench --warm --model models/target --draft models/eagle3

    Columns: speed-up is the median over the runs of a cell, range their smallest
    and largest value. accept is the mean number of tokens per round and request.
    floor is the time needed to read all weights and KV of the rounds at the copy
    bandwidth of the same run, as a share of the decode time; above 100 % caches
    serve some of the reads. draft, verify and host are shares of the decode time.
    On a GPU the host works at the same time, and idle is the share in which the
    GPU waited.

    --against loads the same weights in other engines and has them decode the same
    requests, greedily and without drafts. Its table has tokens per second of wall
    time and of the process's processor time (several threads add up), plain
    decoding over each engine as the median of the turns' own ratios, and the
    requests with equal outputs. With --quantized int8 CTranslate2 has int8, too.

    --estimate needs no GPU. It writes down the launches of the rounds that the
    executor would run, with the bytes that they must move, and gives each the
    simulator's price.

    --twin serves a workload on the executor, and simulates it with the times of
    single steps, measured now or by `foredraft calibrate --model`. Below each
    measured number the table shows the errors of two simulations, with the accept
    lengths of the measured runs and with those of other prompts, and ± half the
    range of the measured runs (docs/calibration.md).

    Ctrl-C keeps the finished cells; the exit code is 130. On bad input or too
    little memory the command prints one message before it reads any weight, and
    exits with code 2.
    """
    mode = mode_of(ctx, MODES)
    if mode == "--twin":
        compare_with_simulation(
            **twin, **{name: session[name] for name in ("model", "draft", "dtype", "device", "threads")},
            repeat=repeat, seed=seed, as_json=as_json, quiet=quiet,
        )  # fmt: skip
        return
    from ...gpu.measure.plan import BenchOptions

    draft, nodes = session["draft"], tree_nodes(session["num_draft_tokens"])
    options = BenchOptions(
        **{**session, "draft": None if draft is None else str(draft), "num_draft_tokens": nodes},
        random_weights=random_weights, batch_sizes=batch_sizes, context_lengths=context_lengths,
        output_tokens=output_tokens, acceptance=acceptance, graphs=graphs, prompts=prompts, repeat=repeat, seed=seed,
        against=against,
    )  # fmt: skip
    _run(options, mode, estimate, processes, as_json, quiet)


def _run(
    options: BenchOptions, mode: str | None, estimate: str | None, processes: int, as_json: bool, quiet: bool
) -> None:
    """Time the cells, or do what `mode` asks for instead."""
    if estimate is not None:
        _estimate(estimate, options, as_json)
    elif mode == "--warm":
        _warm(options, as_json, quiet)
    else:
        _time(options, processes, as_json, quiet)


def _time(options: BenchOptions, processes: int, as_json: bool, quiet: bool) -> None:
    """Time the cells, and print those that are finished."""
    from ...gpu.measure.plan import plan_bench
    from ..progress import StatusLine

    plan = plan_bench(options)
    progress = StatusLine(quiet)
    progress.show(f"{plan.name} on {plan.device}: {plan.memory}")
    measure = _measure if processes == 1 else partial(_measure_in_processes, processes)
    machine, results, finished = measure(options, plan, progress)
    if as_json:
        from ...gpu.measure.report import report
        from ..documents.decoding import BenchDocument

        print_document(BenchDocument(**report(plan, machine, results, sys.argv[1:])))
    else:
        show(plan, machine, results)
    if not finished:
        cells = len({(result.batch_size, result.context_len) for result in results})
        print(f"foredraft: interrupted; {cells} of {len(plan.cells)} cells are finished", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)


def _warm(options: BenchOptions, as_json: bool, quiet: bool) -> None:
    """Compile the kernels of all cells, and print how many CUDA graphs fit."""
    from ...gpu.measure.plan import plan_bench
    from ...gpu.measure.report import plan_sizes
    from ...gpu.measure.run import Bench
    from ..progress import StatusLine
    from .display import print_warm

    plan = plan_bench(options)
    if plan.device == "cpu":
        print_warm(plan.device, plan.algorithm.name, plan_sizes(plan), as_json)
        return
    progress = StatusLine(quiet)
    try:
        with closing(Bench(plan, progress.show)) as bench:
            num_graphs = bench.warm()
    finally:
        progress.clear()
    print_warm(plan.device, plan.algorithm.name, (), as_json, num_graphs)


def _estimate(gpu: str, options: BenchOptions, as_json: bool) -> None:
    """Print what rounds should take on a GPU."""
    from dataclasses import asdict

    from ...gpu.measure.plan import plan_bench
    from ...gpu.measure.report import parameters
    from ...sim.cost.deployments.evidence import TPOT
    from ...twin.estimate import estimates, evidence_of, lines
    from ..documents.decoding import EstimateDocument

    plan = plan_bench(options, on_meta=True)
    found = estimates(plan, gpu)
    if as_json:
        parts = [asdict(estimate) for estimate in found]
        known = evidence_of(found)
        ends = known.interval(TPOT)
        print_document(EstimateDocument(parameters(plan), parts, (ends.low, ends.high), known.about))
        return
    for line in lines(plan, found):
        print(line)


def _measure(
    options: BenchOptions, plan: BenchPlan, progress: StatusLine
) -> tuple[Machine | None, list[ArmResult], bool]:
    """Return the results of the finished cells, and whether all are finished."""
    from ...gpu.measure.run import Bench

    machine: Machine | None = None
    results: list[ArmResult] = []
    try:
        with closing(Bench(plan, progress.show)) as bench:
            machine = bench.machine
            for cell in bench.cells():
                results += cell
    except KeyboardInterrupt:
        return machine, results, False
    finally:
        progress.clear()
    return machine, results, True


def _measure_in_processes(
    count: int, options: BenchOptions, plan: BenchPlan, progress: StatusLine
) -> tuple[Machine | None, list[ArmResult], bool]:
    """Return the medians over the processes that have finished, and whether all have."""
    from ...gpu.measure.processes import run_process, summarised

    runs: list[list[ArmResult]] = []
    machine: Machine | None = None
    try:
        for number in range(1, count + 1):
            progress.show(f"process {number} of {count}")
            machine, results = run_process(options)
            runs.append(results)
    except KeyboardInterrupt:
        pass
    finally:
        progress.clear()
    return machine, summarised(runs), len(runs) == count
