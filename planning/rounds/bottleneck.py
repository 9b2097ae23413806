"""What limits a run, by its summary and the round of its mean batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...sim.assembly import Assembly
from ...sim.assembly.rounds import mean_round

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

    Returns the first that applies: the KV pool was full while requests waited or were retracted. The host takes longer
    than the device. Prompts take the larger part of the device's time. Collectives, attention or the weights take most
    of a round. Else the arithmetic.
    """
    if summary["kv_occupancy_max"] >= FULL_POOL and (summary["retractions"] or summary["max_queue_length"]):
        return "KV memory"
    found = mean_round(run, summary)
    parts, device_ns, host_ns = found.parts_ns, found.device_ns, found.host_ns
    if host_ns > (device_ns if found.is_overlapped else LARGE_SHARE * device_ns):
        return "host"
    decode_ns = summary["decode_rounds"] * device_ns / summary["replicas"]
    if decode_ns < (1 - LARGE_SHARE) * summary["device_busy_share"] * summary["duration"] * 1e9:
        return "prefill"
    if parts.get("comm", 0) > LARGE_SHARE * device_ns:
        return "link"
    if parts.get("attention", 0) > LARGE_SHARE * device_ns:
        return "KV bandwidth"
    one_row = sum(run.cost.decode_parts(1, found.shape, found.context_len).values())
    return "weights' bandwidth" if one_row > 0.6 * (device_ns - parts.get("attention", 0)) else "compute"
