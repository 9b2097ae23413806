"""The record of a benchmark as plain data: options, machine, every cell, and what captured graphs
would cost a server."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import mean
from typing import Any

import torch

from ...core.adaptive.config import load_adaptive_config
from ...core.adaptive.graphs import graph_plan
from ...core.errors import count_of
from ..executor.graphs import CaptureReport
from ..types.session_options import INT8
from .plan import BenchPlan
from .run import ArmResult, Machine


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """The graphs that were captured, and those of a server with adaptive steps (the default table) and these batch
    sizes.

    A pair of steps and batch size that was captured has its own cost there, any other the mean.
    """

    num_captured: int
    seconds: float
    num_bytes: int
    adaptive_num: int  # pairs that routing can reach
    adaptive_num_unpruned: int
    adaptive_seconds: float
    adaptive_seconds_unpruned: float
    adaptive_bytes: int
    adaptive_bytes_unpruned: int


def graph_costs(captures: Sequence[CaptureReport], batch_sizes: Sequence[int]) -> GraphCosts | None:
    """Return the cost of the captured graphs, and of a server's; None if nothing was captured."""
    if not captures:
        return None
    by_pair: dict[tuple[int, int], list[CaptureReport]] = {}
    for capture in captures:
        by_pair.setdefault((capture.steps, capture.batch_size), []).append(capture)

    def cost(steps: int, size: int, name: str) -> float:
        return mean([float(getattr(capture, name)) for capture in by_pair.get((steps, size), captures)])

    def plan(name: str, scale: int):
        # The plan adds up whole numbers.
        return graph_plan(
            load_adaptive_config("default"),
            sorted(set(batch_sizes)),
            lambda steps, size: round(scale * cost(steps, size, name)),
        )

    sizes, times = plan("num_bytes", 1), plan("seconds", 10**9)
    return GraphCosts(
        num_captured=len(captures),
        seconds=sum(capture.seconds for capture in captures),
        num_bytes=sum(capture.num_bytes for capture in captures),
        adaptive_num=sizes.num_graphs,
        adaptive_num_unpruned=sizes.num_graphs_unpruned,
        adaptive_seconds=times.num_bytes / 1e9,
        adaptive_seconds_unpruned=times.num_bytes_unpruned / 1e9,
        adaptive_bytes=sizes.num_bytes,
        adaptive_bytes_unpruned=sizes.num_bytes_unpruned,
    )


def report(
    plan: BenchPlan, machine: Machine | None, results: Sequence[ArmResult], command: Sequence[str]
) -> dict[str, Any]:
    """Return everything, ready for JSON. `complete` is False while cells are missing."""
    costs = graph_costs([capture for result in results for capture in result.captures], plan_sizes(plan))
    return {
        "complete": len(results) == sum(len(cell.arms) for cell in plan.cells),
        "command": list(command),
        "versions": versions(),
        "machine": None if machine is None else asdict(machine),
        "parameters": parameters(plan),
        "cells": [asdict(result) for result in results],
        "graphs": None if costs is None else asdict(costs),
    }


def result_rows(results: Sequence[ArmResult]) -> list[dict[str, str]]:
    """Return a table row per result, by title, without the columns that no result has."""
    has_graphs = any("graph" in result.shares for result in results)
    has_idle = any(result.idle_share is not None for result in results)
    return [_result_row(result, has_graphs, has_idle) for result in results]


def _result_row(result: ArmResult, has_graphs: bool, has_idle: bool) -> dict[str, str]:
    shares = {**result.shares, "other": result.shares["other"] + result.shares.get("relay", 0.0)}
    phases = ("draft", "verify", *(["graph"] * has_graphs), "host", "other")
    return {
        "batch": f"{result.batch_size}",
        "context": f"{result.context_len}",
        "steps": f"{result.steps}" if result.steps else "plain",
        "nodes": f"{result.num_nodes}",
        "tokens/s": f"{result.tokens_per_s:,.1f}",
        "per req.": f"{result.tokens_per_s_request:,.1f}",
        "accept": f"{result.accept_length:.2f}",
        "speed-up": f"{result.speedup:.2f}×",
        "range": f"{min(result.speedups):.2f}–{max(result.speedups):.2f}" if result.steps else "",
        "ms/round": f"{result.round_ms:.3f}",
        **{phase: _percent(shares.get(phase)) for phase in phases},
        "floor": _percent(result.floor_share),
        **({"idle": _percent(result.idle_share)} if has_idle else {}),
        "prefill/s": f"{result.prefill_tokens_per_s:,.0f}",
    }


def other_rows(plan: BenchPlan, results: Sequence[ArmResult]) -> list[dict[str, str]]:
    """Return a table row for each arm and each other engine of the cells that were compared with others, by title."""
    rows = []
    for plain in results:
        if not plain.others:
            continue
        cell = {"batch": f"{plain.batch_size}", "context": f"{plain.context_len}"}
        arms = [one for one in results if (one.batch_size, one.context_len) == (plain.batch_size, plain.context_len)]
        numbers = INT8 if plan.options.quantized == INT8 else str(plan.dtype).removeprefix("torch.")
        for arm in arms:
            name = f"foredraft, {count_of(arm.steps, 'step')}" if arm.steps else "foredraft, plain"
            rows.append(
                {**cell, "engine": name, "numbers": numbers, **_speeds(arm.tokens_per_s, arm.tokens_per_cpu_s),
                 "plain over it": f"{1 / arm.speedup:.2f}×", "in CPU time": "", "equal": ""}
            )  # fmt: skip
        for one in plain.others:
            if not one.problem:
                equal = f"{one.equal_outputs} of {plan.num_prompts(plain.batch_size)}"
                rows.append(
                    {**cell, "engine": one.name, "numbers": one.computes,
                     **_speeds(one.tokens_per_s, one.tokens_per_cpu_s), "plain over it": f"{one.ratio:.2f}×",
                     "in CPU time": f"{one.cpu_ratio:.2f}×", "equal": equal}
                )  # fmt: skip
    return rows


def _speeds(tokens_per_s: float, tokens_per_cpu_s: float) -> dict[str, str]:
    return {"tokens/s": f"{tokens_per_s:,.1f}", "per CPU s": f"{tokens_per_cpu_s:,.1f}"}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def plan_sizes(plan: BenchPlan) -> tuple[int, ...]:
    return tuple(sorted({cell.batch_size for cell in plan.cells}))


def parameters(plan: BenchPlan) -> dict[str, Any]:
    """Return the benchmark's options and its results."""
    options = plan.options
    return {
        "model": plan.name,
        "random_weights": options.model is None,
        "draft": options.draft,
        "against": list(plan.against),
        "algorithm": plan.algorithm.name,
        "acceptance": plan.acceptance_name,
        "topk": options.topk,
        "batch_sizes": list(plan_sizes(plan)),
        "context_lengths": sorted({cell.context_len for cell in plan.cells}),
        "steps": sorted({arm.steps for cell in plan.cells for arm in cell.arms}),
        "output_tokens": plan.options.output_tokens,
        "prompts": options.prompts,
        "repeat": plan.options.repeat,
        "mode": plan.spec.config.mode,
        "mode_reason": plan.spec.config.mode_reason,
        "graphs": plan.graphs,
        "device": plan.device,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "page_size": options.page_size,
        "seed": options.seed,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that decides how fast it is."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("foredraft", "triton", "numpy", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # Triton has wheels for Linux only
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
