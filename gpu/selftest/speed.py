"""How fast decoding is: a model of 8B with random weights and simulated acceptance, plain, with
chains and with trees."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..measure.arm import BatchArm
from ..measure.plan import BenchOptions, plan_bench
from ..measure.report import result_rows
from ..measure.run import ArmResult, Bench
from .sessions import shape_of
from .steps import Context, SelftestStep, StepFinding, UnavailableHere

MODEL = "llama-3.1-8b"
CHAIN_ACCEPT_LENGTH = "2.93"  # of an EAGLE-3 chain of three on chats: what docs/evidence/benchmarks.md compares with
GPU_CELLS: Mapping[str, Any] = {
    "batch_sizes": "1,8,32",
    "context_lengths": "1024",
    "output_tokens": 96,
    "repeat": 3,
    "prompts": 1,
}
CPU_CELLS: Mapping[str, Any] = {
    "batch_sizes": "1,2",
    "context_lengths": "16",
    "output_tokens": 6,
    "repeat": 1,
    "prompts": 1,
}
CHAINS = {"steps": "3,5", "acceptance": CHAIN_ACCEPT_LENGTH}
TREES = {"steps": "4", "topk": 4, "num_draft_tokens": 16}
STEP_LIMIT_S = 300.0


def speed_steps(context: Context) -> Iterator[SelftestStep]:
    """Yield the tables, then the launches of a round."""
    yield SelftestStep("speed", "plain and chains", partial(table, context, CHAINS), limit_s=STEP_LIMIT_S)
    yield SelftestStep("speed", "trees", partial(table, context, TREES), limit_s=STEP_LIMIT_S)
    run = partial(launches, context)
    yield SelftestStep("speed", "launches per round", run, needs_gpu=True, limit_s=STEP_LIMIT_S)


def table(context: Context, way: dict[str, Any]) -> StepFinding:
    bench = _bench(context, way)
    results = [result for cell in bench.cells() for result in cell]
    rows = [row | _graphs(result) for row, result in zip(result_rows(results), results, strict=True)]
    plan, machine = bench.plan, bench.machine
    text = (
        f"{plan.name} with random weights, {machine.target_bytes / 1e9:.1f} GB, {plan.algorithm.name}, acceptance {plan.acceptance_name}, "
        f"{plan.spec.config.mode}; memory copies at {machine.copy_bytes_per_s / 1e9:,.0f} GB/s"
    )
    return StepFinding(text, tuple(rows))


def _bench(context: Context, way: dict[str, Any]) -> Bench:
    """Return the benchmark of a way; the weights are made once and serve all of them."""
    model = MODEL
    if not context.on_gpu:
        path = context.directory / "speed.json"
        path.write_text(json.dumps(shape_of(context).to_dict()), encoding="utf-8")
        model = str(path)
    cells = GPU_CELLS if context.on_gpu else CPU_CELLS
    options = BenchOptions(
        random_weights=model, algorithm="EAGLE3", device=context.device, ops=context.ops_choice, **cells, **way
    )
    known = context.made.get("bench")
    plan = plan_bench(options, weights_are_there=known is not None)
    bench = Bench(plan) if known is None else Bench(plan, models=known.models)
    context.made["bench"] = bench
    return bench


def _graphs(result: ArmResult) -> dict[str, str]:
    seconds = sum(capture.seconds for capture in result.captures)
    mib = sum(capture.num_bytes for capture in result.captures) / 2**20
    return {"graphs, s": f"{seconds:.2f}", "graphs, MiB": f"{mib:.1f}"}


def launches(context: Context) -> StepFinding:
    """Count what the host asks of the GPU in a round of batch 1, by the profiler's record of the driver's calls."""
    rows = []
    for way in (CHAINS, TREES):
        bench = _bench(context, way)
        cell = bench.plan.cells[0]
        for arm in bench.arms(replace(cell, arms=cell.arms if way is CHAINS else cell.arms[-1:])):
            counts = launches_per_round(arm)
            rows.append(
                {"steps": arm.arm.spec.max_steps or "plain", "nodes": arm.arm.spec.max_num_draft_tokens, **counts}
            )
    return StepFinding("calls of the driver per round, batch 1", tuple(rows))


CALLS = {  # how CUPTI names calls of the runtime and the driver -> how we do
    "cudaLaunchKernel": "kernels",
    "cuLaunchKernel": "kernels",
    "cudaGraphLaunch": "graphs",
    "cudaMemcpyAsync": "copies",
    "cudaMemsetAsync": "fills",
}
SHORT, LONG = 16, 48  # output tokens of two runs, whose difference holds whole rounds and nothing else


def launches_per_round(arm: BatchArm) -> dict[str, float]:
    """Return calls per round by kind. Raises UnavailableHere where the profiler records nothing: a driver may forbid
    it to all but administrators."""
    arm.run(SHORT)
    short, long = (_counted(arm, tokens) for tokens in (SHORT, LONG))
    rounds = long["rounds"] - short["rounds"]
    found = {kind: (long[kind] - short[kind]) / rounds for kind in dict.fromkeys(CALLS.values())}
    if not any(found.values()):
        raise UnavailableHere("the profiler recorded no call of the driver; it may need more rights")
    return {**{kind: round(count, 1) for kind, count in found.items()}, "all": round(sum(found.values()), 1)}


def _counted(arm: BatchArm, max_tokens: int) -> Counter[str]:
    executor = arm.own_executor
    before = executor.counters.rounds
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        arm.run(max_tokens)
        torch.cuda.synchronize(executor.device)
    counts = Counter(rounds=executor.counters.rounds - before)
    for event in profile.key_averages():
        # Variants have letters behind them: cuLaunchKernelEx, cudaLaunchKernelExC.
        name = next((name for name in CALLS if event.key.startswith(name)), None)
        if name is not None:
            counts[CALLS[name]] += event.count
    return counts
