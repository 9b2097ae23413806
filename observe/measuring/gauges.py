"""Numbers of one engine as it is now, by the names that a server's metrics use."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...core.contract.events import Committed
from ...core.scheduler.engine import Engine


def gauges_of(engine: Engine) -> dict[str, float]:
    """Return how full an engine is, and the counters of its prefix cache if it has one."""
    store, cache, config = engine.store, engine.store.cache, engine.config
    slots, free = store.allocator.num_total_slots, store.allocator.num_free_slots
    found: dict[str, float] = {
        "running": len(engine.requests.running),
        "waiting": engine.num_waiting,
        "kv_use": 1 - store.available_slots / slots if slots else 0.0,
        "kv_used": slots - store.available_slots,
        "kv_free": free,
        "kv_evictable": store.available_slots - free,
        "kv_slots": slots,
        "page_size": config.page_size,
        "pages": config.num_pages,
        "context_len": config.context_len,
    }
    if cache.keeps_prefixes:
        found |= {"prefix_queries": cache.queries, "prefix_hits": cache.hits}
    if config.host_pages and cache.keeps_prefixes:
        found |= {"host_used": store.host.num_held, "host_slots": config.host_pages * config.page_size}
    return found


def count_drafts(totals: Counter[tuple[str, str]], event: Committed) -> None:
    """Add the drafts that a step verified to `totals`, by what is counted and a label ("": none)."""
    if event.kept is None:
        return
    decode, result = event.step.decode, event.result.decode
    assert decode is not None and result is not None, "only a decode keeps tokens"
    if not decode.shape.steps:
        return
    accepted = (result.accept_lens[event.kept > 0] - 1).clip(min=0)
    drafted = decode.shape.nodes - 1
    totals["rounds", ""] += len(accepted)
    totals["drafted", ""] += drafted * len(accepted)
    nodes = result.nodes_of(decode)
    if nodes is not None:
        totals["drafted", ""] -= int(((decode.shape.nodes - nodes) * (event.kept > 0)).sum())
    totals["accepted", ""] += int(accepted.sum())
    exactly = np.bincount(accepted, minlength=drafted + 1)
    at_least = (np.cumsum(exactly[::-1])[::-1])[1:].tolist()
    for position, count in enumerate(at_least):
        totals["accepted_at", str(position)] += count
