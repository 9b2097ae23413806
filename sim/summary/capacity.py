"""Compares a run with the capacity of its deployment: a saturation figure, and whether the queue only grew."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...core.scheduler.config import EngineRole
from ..assembly import Assembly

GROUPS = 4  # of the second half of the arrivals, at most: in an overload the queue grows from each to the next
CHANCE = 2.0  # standard deviations of the arrivals in that half, which a queue in balance hardly grows by
MOST_SHED = 0.05  # of the requests, refused by a full queue: beyond that it is bounded by refusals alone


def saturation(assembly: Assembly, summary: Mapping[str, Any], arrivals_per_s: float | None) -> float | None:
    """Return the offered requests per second (in a closed loop: the served ones) divided by those of full batches; None
    if there are none.

    An estimate: the cost model's time of full batches with the mean lengths and the acceptance of the run. A batch is
    full at `engine.max_running` requests, or where their KV fills the pool.
    """
    offered = arrivals_per_s if arrivals_per_s is not None else summary["request_throughput"]
    prompt, output = summary["mean_input_tokens"], summary["mean_output_tokens"]
    if not offered or not prompt or not output:
        return None
    computed = max(1, round(prompt * (1 - (summary["prefix_cache_hit_rate"] or 0.0))))
    seconds = _seconds_per_request(assembly, prompt, computed, output, summary["correct_drafts_histogram"])
    if seconds is None:
        return None
    prefill_s, decode_s = seconds
    pools = assembly.pools
    if pools.is_disaggregated:
        return offered * max(prefill_s / pools.num_prefill, decode_s / pools.num_decode)
    return offered * (prefill_s + decode_s) / pools.num_engines


def _seconds_per_request(
    assembly: Assembly, prompt: float, computed: int, output: float, drafts: Sequence[int]
) -> tuple[float, float] | None:
    """Return the time that a request takes of an engine with full batches: for its prompt, and for its output, each of
    the engine that computes it. None if no batch has room."""
    config, spec, cost, host = assembly.spec.config, assembly.spec, assembly.cost, assembly.host
    held = prompt + output / 2 + spec.resolve_sizes().reserve
    batch = min(config.max_running, config.num_fitting(held))
    if batch < 1:
        return None
    kv_tokens = round(batch * (prompt + output / 2))
    slot = spec.adaptive.slots[max(0, bisect_right(spec.adaptive.bounds, batch) - 1)]
    decode_s, work = float("inf"), None
    for steps in slot.candidate_steps:
        topk = spec.topk if steps else 1
        round_work = (batch, steps, topk, spec.draft_shape.num_draft_tokens(steps, batch), kv_tokens)
        verified = batch if steps and not config.overlap else 0
        device_ns, host_ns = cost.decode_ns(*round_work), host.round_ns(batch, batch, verified)
        round_ns = max(device_ns, host_ns) if config.overlap else device_ns + host_ns
        per_request = (output - 1) / _accept_length(drafts, steps) * round_ns / batch / 1e9
        if per_request < decode_s:
            decode_s, work = per_request, round_work
    assert work is not None, "a range of batch sizes has candidates"
    on = assembly.of_role(EngineRole.PREFILL)
    chunk = min(on.spec.config.chunk_size, computed)
    rides = config.mixed and not assembly.pools.is_disaggregated
    chunk_ns = cost.step_ns([(chunk, 0)], work) - cost.decode_ns(*work) if rides else on.cost.step_ns([(chunk, 0)])
    return computed / chunk * chunk_ns / 1e9, decode_s


def _accept_length(drafts: Sequence[int], steps: int) -> float:
    """Return the mean accept length of rounds with `steps` steps, estimated from the rounds of the run, which may have
    had other steps."""
    rows = sum(drafts)
    return 1 + sum(min(correct, steps) * count for correct, count in enumerate(drafts)) / rows if rows else 1.0


def is_overloaded(
    waiting: Sequence[float | None], bucket_s: float, last_arrival_s: float, num_arrivals: int, num_shed: int
) -> bool:
    """Return whether the queue only grew in the second half of the arrivals, beyond chance, or a bounded one shed
    requests.

    `waiting`: mean length of the queue in each bucket of `bucket_s` seconds from the start of the run on. `num_shed`:
    requests refused because the queue was full. Where at most two buckets end before the last arrival, the queue at
    that arrival is compared with chance.
    """
    if num_shed > MOST_SHED * num_arrivals:
        return True
    if not bucket_s or not waiting:
        return False
    last = int(last_arrival_s / bucket_s)  # buckets that end before the last arrival
    lengths = [length or 0.0 for length in waiting[:last]]
    half = lengths[len(lengths) // 2 :]
    if len(half) < 2:
        at_last = waiting[min(last, len(waiting) - 1)] or 0.0
        return bool(at_last > CHANCE * num_arrivals**0.5)
    groups = min(GROUPS, len(half))
    bounds = [len(half) * i // groups for i in range(groups + 1)]
    means = [sum(half[low:high]) / (high - low) for low, high in pairwise(bounds)]
    grows = all(before <= after for before, after in pairwise(means))
    return grows and means[-1] - means[0] > CHANCE * (num_arrivals / 2) ** 0.5
