"""`foretoken bench`: time decoding with and without a draft, for each batch size."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..options import in_panel, output_option
from ..terminal import EXIT_INTERRUPTED
from .options import (
    Device,
    Dtype,
    Nodes,
    Overlap,
    PageSize,
    Quiet,
    Threads,
    Topk,
    engine_option,
    model_option,
    problems_name_options,
    speculation_option,
    tree_nodes,
)

if TYPE_CHECKING:
    from ...gpu.bench.plan import BenchOptions, BenchPlan
    from ...gpu.bench.run import ArmResult, Machine
    from ..files import JsonRecord
    from ..progress import StatusLine

cells_option = in_panel("Cells")

# fmt: off
Model = model_option(Path | None, "--model", "Hugging Face checkpoint: a directory, or its name on the hub.", "DIR|ORG/NAME")
RandomWeights = model_option(str | None, "--random-weights",
    "Time a shape without a checkpoint: llama-3.1-8b, qwen3-8b, … or a config.json. Acceptance is simulated.", "NAME|CONFIG")
Draft = model_option(str | None, "--draft",
    "Draft checkpoint. With --random-weights: the shape of a STANDALONE draft, a name or a config.json.", "DIR|NAME")
Algorithm = speculation_option(str, "--algorithm",
    "STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, NONE or a plugin. auto: by the draft; without one NGRAM on a CPU; EAGLE3 for "
    "random weights.", "NAME")
Steps = speculation_option(str | None, "--steps", "Draft steps to compare; 1,3,5 by default. 0 is always run.", "S,S,…")
Acceptance = speculation_option(str | None, "--acceptance",
    "Simulate acceptance: a mean length (3.0), chat, code, math, edit, a preset, or probabilities by position (0.7,0.65).",
    "MEAN|PRESET|P,P,…")
BatchSizes = cells_option(str, "--batch-sizes", "Requests decoded together.", "N,N,…")
ContextLengths = cells_option(str, "--context-lengths", "Tokens of each prompt.", "N,N,…")
OutputTokens = cells_option(int, "--output-tokens", "Tokens of each output; ends of text are ignored.")
Prompts = cells_option(int, "--prompts", "Prompts of each cell, decoded batch by batch; at least a batch.")
Repeat = cells_option(int, "--repeat", "Runs of each cell; the median is reported.")
Processes = cells_option(int, "--processes",
    "Run everything in that many processes, one after another; medians and range over them.", min=1)
Graphs = engine_option(bool | None, "--graphs/--no-graphs", "Run whole rounds as CUDA graphs; the default on a GPU.")
Seed = engine_option(int, "--seed", "Seed of prompts, random weights and simulated acceptance.")
Json = output_option(Path | None, "--json", "Write every number to this file, after each cell.", "FILE")
# fmt: on


@problems_name_options
def bench(
    model: Model = None, random_weights: RandomWeights = None, draft: Draft = None, dtype: Dtype = "auto",
    algorithm: Algorithm = "auto", steps: Steps = None, topk: Topk = 1, num_draft_tokens: Nodes = None,
    acceptance: Acceptance = None, batch_sizes: BatchSizes = "1,8,32", context_lengths: ContextLengths = "128,1024",
    output_tokens: OutputTokens = 128, prompts: Prompts = 4, repeat: Repeat = 3, processes: Processes = 1,
    device: Device = "auto", threads: Threads = None, overlap: Overlap = None, graphs: Graphs = None,
    page_size: PageSize = 1, seed: Seed = 0, json_file: Json = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Time decoding: batch sizes × context lengths × draft steps, each against plain decoding.

    All step counts of a cell take turns with plain decoding in this process.
    The time is that of decoding, from the last prefill to the end of the first
    request, while the batch is full; prefill has its own column.

        foretoken bench --model models/target --draft models/eagle3
        foretoken bench --model models/target --draft models/eagle3 --topk 4 \\
            --num-draft-tokens 16 --steps 2,3,5 --json bench.json
        foretoken bench --random-weights llama-3.1-8b --acceptance 3.0 --steps 4
        foretoken bench --random-weights llama-3.1-8b --algorithm STANDALONE \\
            --draft llama-3.2-1b --acceptance code

    speed-up is the median over the runs of each cell, range their least and
    greatest. accept is the mean number of tokens per round and request. floor
    is the time to read all weights and KV of the rounds, at the copy bandwidth
    measured in the same run, as a share of the decode time; above 100 % they are
    read from caches. draft, verify and host are shares of the decode time; on a
    GPU the host works at the same time, and idle is the share in which the GPU
    waited.

    Ctrl-C keeps the finished cells; the exit code is 130. Bad input or too
    little memory is one message before any weight is read, and exit code 2.
    """
    from ...gpu.bench.plan import BenchOptions, plan_bench
    from ..files import JsonRecord
    from ..progress import StatusLine
    from .bench_display import show

    options = BenchOptions(
        model=model, random_weights=random_weights, draft=draft, algorithm=algorithm, steps=steps, topk=topk,
        num_draft_tokens=tree_nodes(num_draft_tokens), batch_sizes=batch_sizes, context_lengths=context_lengths,
        output_tokens=output_tokens, acceptance=acceptance, overlap=overlap, graphs=graphs, device=device,
        dtype=dtype, threads=threads, page_size=page_size, prompts=prompts, repeat=repeat, seed=seed,
    )  # fmt: skip
    plan = plan_bench(options)
    record = JsonRecord(json_file)
    progress = StatusLine(quiet)
    progress.show(f"{plan.name} on {plan.device}: {plan.memory}")
    measure = _measure if processes == 1 else partial(_measure_in_processes, processes)
    machine, results, finished = measure(options, plan, record, progress)
    show(plan, machine, results)
    if not finished:
        cells = len({(result.batch_size, result.context_len) for result in results})
        print(f"foretoken: interrupted; {cells} of {len(plan.cells)} cells are finished", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)


def _measure(
    options: BenchOptions, plan: BenchPlan, record: JsonRecord, progress: StatusLine
) -> tuple[Machine | None, list[ArmResult], bool]:
    """Return the results of the finished cells, and whether all are finished."""
    from ...gpu.bench.report import report
    from ...gpu.bench.run import Bench

    machine: Machine | None = None
    results: list[ArmResult] = []
    try:
        bench = Bench(plan, progress.show)
        machine = bench.machine
        for cell in bench.cells():
            results += cell
            record.write(report(plan, machine, results, sys.argv[1:]))
    except KeyboardInterrupt:
        record.write(report(plan, machine, results, sys.argv[1:]))
        return machine, results, False
    finally:
        progress.clear()
    return machine, results, True


def _measure_in_processes(
    count: int, options: BenchOptions, plan: BenchPlan, record: JsonRecord, progress: StatusLine
) -> tuple[Machine | None, list[ArmResult], bool]:
    """Return the medians over the processes that have finished, and whether all have."""
    from ...gpu.bench.processes import run_process, summarised
    from ...gpu.bench.report import report

    runs: list[list[ArmResult]] = []
    machine: Machine | None = None
    try:
        for number in range(1, count + 1):
            progress.show(f"process {number} of {count}")
            machine, results = run_process(options)
            runs.append(results)
            record.write(report(plan, machine, summarised(runs), sys.argv[1:]))
    except KeyboardInterrupt:
        pass
    finally:
        progress.clear()
    return machine, summarised(runs), len(runs) == count
