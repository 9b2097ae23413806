"""The answer of a plan as plain data, and the limits of a run. The answer is stored beside its runs and printed, and
`foredraft report` draws it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..observe.output_files import write_text
from ..sim.assembly import Assembly
from .confidence.bounds import SHARE
from .confidence.comparison import source_of_comparisons
from .confidence.ranked import Ranked
from .demand.bill import Bill, energy
from .plan import Plan

ANSWER = "answer.json"
FULL_POOL = 0.97  # of the KV slots, in use at some time
LARGE_SHARE = 0.35  # of a round
REMEDIES = {
    "KV memory": "more KV: fp8 KV cache, more tensor parallelism, fewer captured graphs",
    "host": "overlap scheduling, larger batches per step, fewer requests per engine",
    "prefill": "smaller prompt chunks, more prefix reuse, prefill apart from decode",
    "link": "less tensor parallelism, a faster interconnect",
    "weights' bandwidth": "fewer bits per weight, more tensor parallelism",
    "KV bandwidth": "fp8 KV cache, more tensor parallelism",
    "compute": "fewer draft tokens, fp8 weights, more GPUs",
}


def answer_of(
    whole: Plan,
    ranked: Sequence[Ranked],
    prices: Mapping[str, float],
    sentences: Sequence[str],
    watts: Mapping[str, float] = MappingProxyType({}),
    hours: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of a plan. `sentences`: about the best candidate, for readers. `watts`: of a GPU under load, by
    its name. `hours`: the replicas by the hour (`demand.hours.hours_to_json`)."""
    asked = whole.question
    first = next((item for item in ranked if item.holds and not item.dropped), None)
    return {
        "sentences": list(sentences),
        "limits": [
            {"name": one.name, "key": one.key, "limit_ms": one.limit_ms, "text": str(one)} for one in asked.objectives
        ],
        "load": asked.load,
        "load_key": whole.load_key,
        "load_unit": load_unit(whole),
        "share_of_runs": SHARE,
        "hours": hours,
        "model_error": asked.model_error,
        "model_error_source": source_of_comparisons(asked.model_error),
        "candidates": [_candidate(whole, item, item is first, prices, watts) for item in ranked],
        "refused": [{"name": candidate.name, "reason": reason} for candidate, reason in whole.refused()],
    }


def _candidate(
    whole: Plan, item: Ranked, is_first: bool, prices: Mapping[str, float], watts: Mapping[str, float]
) -> dict[str, Any]:
    found, holds = item.finding, item.holds
    if is_first:
        status = "best"
    elif not holds:
        status = "hopeless"
    else:
        status = "dropped" if item.dropped else "equal" if item.equal else "behind"
    price = prices.get(whole.gpu_of(item.candidate))
    bill = Bill.of(whole, item, price) if holds and price is not None else None
    interval, seeds = found.interval, len(found.crossings)
    half_width = None if interval is None else interval.half_width
    return {
        "name": item.candidate.name,
        "settings": dict(item.candidate.settings),
        "status": status,
        "load": item.load if holds else None,
        "half_load": None if interval is None else interval.mean,
        "half_width": half_width if half_width is not None and math.isfinite(half_width) else None,
        "load_interval": item.load_range,
        "gpus": item.gpus if holds else None,
        "gpus_interval": item.gpu_range,
        "of_best_interval": item.of_best_range,
        "tokens_per_s": tokens_per_s(whole, item) if holds else None,
        "per_million": None if bill is None else bill.planned.output,
        "bill": None if bill is None else bill.to_json(),
        "energy": energy(whole, item, watts) if holds else None,
        "run": {key: found.summary.get(key) for key in ("submitted", "duration")} | {"seeds": seeds} if holds else None,
        "tightest": None if found.tightest is None else found.tightest.name,
        "taken": found.excess if math.isfinite(found.excess) else None,
        "taken_interval": item.taken_range,
        "intervals_rest_on": item.rests_on or None,
    }


def load_unit(plan: Plan) -> str:
    """Return what a load is counted in."""
    return "requests/s" if plan.scenario.workload.trace is None else "× the trace"


def tokens_per_s(plan: Plan, item: Ranked) -> float:
    """Return the output tokens per second of a candidate at the load found. (A run's own throughput counts its ramp and
    its drain, too.)"""
    return plan.requests_per_s(item.load) * float(item.finding.summary["mean_output_tokens"])


def limit_of(whole: Plan, item: Ranked) -> tuple[str, str]:
    """Return sentences about what limits a candidate at its load, what would raise this limit, and whose timing is
    simulated."""
    run = whole.errors.assembly(item.candidate, item.candidate.unit)
    limit = bottleneck(run, item.finding.summary)
    return f"{item.candidate.name} is limited by {limit}; what would move it: {REMEDIES[limit]}.", run.timing


def bottleneck(run: Assembly, summary: Mapping[str, Any]) -> str:
    """Return which of `REMEDIES` limits a run, from its summary and the round that its mean batch took.

    Returns the first that applies: the KV pool was full while requests waited or were retracted. The host takes longer
    than the device. Prompts take the larger part of the device's time. Collectives, attention or the weights take most
    of a round. Else the arithmetic.
    """
    if summary["kv_occupancy_max"] >= FULL_POOL and (summary["retractions"] or summary["max_queue_length"]):
        return "KV memory"
    spec = run.spec
    batch = max(1, min(round(summary["mean_running"]), spec.config.max_running))
    steps = max(spec.adaptive.candidate_steps, key=lambda count: summary.get(f"rounds_at_steps_{count}") or 0.0)
    topk = spec.topk if steps else 1
    nodes = spec.draft_shape.num_draft_tokens(steps, batch) if steps else 1
    context = summary["mean_input_tokens"] + summary["mean_output_tokens"] / 2
    parts = run.cost.decode_parts(batch, steps, topk, nodes, round(batch * context))
    device_ns, host_ns = sum(parts.values()), run.host.round_ns(batch, batch)
    if host_ns > (device_ns if spec.config.overlap else LARGE_SHARE * device_ns):
        return "host"
    decode_ns = summary["decode_rounds"] * device_ns / summary["replicas"]
    if decode_ns < (1 - LARGE_SHARE) * summary["device_busy_share"] * summary["duration"] * 1e9:
        return "prefill"
    if parts.get("comm", 0) > LARGE_SHARE * device_ns:
        return "link"
    if parts.get("attention", 0) > LARGE_SHARE * device_ns:
        return "KV bandwidth"
    one_row = sum(run.cost.decode_parts(1, steps, topk, nodes, round(context)).values())
    return "weights' bandwidth" if one_row > 0.6 * (device_ns - parts.get("attention", 0)) else "compute"


def write_answer(place: Path, answer: Mapping[str, Any]) -> None:
    """Write the answer into the directory of a plan. Raises ForedraftError if it cannot be written."""
    write_text(place / ANSWER, json.dumps(answer, indent=1, allow_nan=False) + "\n", replace=True)
