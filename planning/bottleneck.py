"""What limits a deployment at its greatest load, and what would move the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sim.assembly import Assembly

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


def bottleneck(run: Assembly, summary: Mapping[str, Any]) -> str:
    """Return which of `REMEDIES` limits a run, from its summary and the round that its mean batch took.

    In this order: the KV pool was full while requests waited or were retracted; the host takes longer than the device; prompts take the
    larger part of the device's time; collectives, attention or the weights take most of a round; else the arithmetic does.
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
